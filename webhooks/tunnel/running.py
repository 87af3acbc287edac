"""A program that gives the receiver an address, for as long as a block runs.

It runs in a session of its own, so that Ctrl-C reaches us alone and its whole process group is stopped at the end; a
guard beside it does that where we are killed. What it says is read as long as it runs, or a full pipe would stop it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from webhooks.errors import ConfigurationError, WebhooksError
from webhooks.tunnel.programs import Program
from webhooks.tunnel.relay import Tell

WITHIN_S = 45.0
END_WITHIN_S = 5.0
READ_ON_S = 1.0
LOOK_EVERY_S = 0.05
TELL_EVERY_S = 5.0
LINES_KEPT = 8
LONGEST_LINE = 64 * 1024

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class End:
    """How a program ended.

    Args:
        status: its exit status; the negative number of the signal that killed it.
        said: its last lines.
    """

    status: int
    said: tuple[str, ...]


class ProgramFailed(WebhooksError):
    """A tunnel's program did not do its work; notes hold what it said last, and what may be the matter.

    Args:
        program: which.
        what: what is known, such as "gave no address within 45 s".
        said: its last lines.
        hint: whether what is often the matter at its start may be it.
    """

    def __init__(self, program: Program, what: str, said: Sequence[str], *, hint: bool = True) -> None:
        super().__init__(f"{program.name} {what}")
        self.add_note("it said last:" if said else "it said nothing")
        for line in said:
            self.add_note(f"  {line}")
        if hint:
            self.add_note(f"should that not tell why: {program.hint}")


@dataclass(frozen=True, slots=True)
class Running:
    """A program that runs.

    Args:
        program: which.
        url: the public address that leads to the receiver.
        ended: done when the program ends.
    """

    program: Program
    url: str
    ended: asyncio.Task[End]

    def failed(self, when: str, *, hint: bool = True) -> ProgramFailed:
        """Return the failure that the program has ended by itself."""
        return _ended_by_itself(self.program, self.ended.result(), when, hint=hint)


def _ended_by_itself(program: Program, end: End, when: str, *, hint: bool = True) -> ProgramFailed:
    how = f"with exit status {end.status}" if end.status >= 0 else f"killed by signal {-end.status}"
    return ProgramFailed(program, f"ended by itself {when}, {how}", end.said, hint=hint and end.status >= 0)


@asynccontextmanager
async def running(program: Program, tell: Tell, *, within_s: float = WITHIN_S) -> AsyncGenerator[Running]:
    """Run a program for the block, once it has said which address it gave.

    Args:
        program: which.
        tell: called with how far it is.
        within_s: how long it may take to say one.

    Raises:
        ConfigurationError: it is not installed.
        ProgramFailed: it ended by itself, or said no address in time.
    """
    executable = shutil.which(program.name)
    if executable is None:
        raise ConfigurationError(f"{program.name} is not installed, or not on the PATH: {program.get_it}")
    if sys.platform == "win32":
        raise ConfigurationError(f"{program.name} can be started from here on Linux and macOS only")
    async with _guard() as guarded:
        process = await asyncio.create_subprocess_exec(
            executable,
            *program.arguments,
            stdin=asyncio.subprocess.PIPE,  # kept open: at its end a session would end
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=LONGEST_LINE,
        )
        guarded(process.pid)
        said: deque[str] = deque(maxlen=LINES_KEPT)
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(_read(process, program, said, address, tell), name=f"{program.name} output")
        ended = asyncio.create_task(_end(process, reading, said), name=program.name)
        try:
            tell(f"started {program.name}, process {process.pid}")
            await _addressed(program, address, ended, said, tell, within_s)
            yield Running(program, address.result(), ended)
        finally:
            url = address.result() if address.done() else None
            address.cancel()
            if not ended.done():
                await _stop(process)
                tell(f"ended {program.name}" + (f": {url} leads here no more" if url else ""))
            await ended
            guarded(None)


@asynccontextmanager
async def _guard() -> AsyncGenerator[Callable[[int | None], None]]:
    """Have a guard beside us that ends the group it is told of, should we be killed or not wait for its end.

    It is there before the program is: nobody else would end that then. What is yielded tells it of the group, and that
    there is none any more.
    """
    guard = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        Path(__file__).with_name("guard.py"),
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert guard.stdin is not None
    hears = guard.stdin
    guarding = False

    def tell(group: int | None) -> None:
        nonlocal guarding
        guarding = group is not None
        if guarding:
            hears.write(f"{group}\n".encode())

    try:
        yield tell
    finally:
        if guarding:
            hears.close()
        else:
            with suppress(ProcessLookupError):
                guard.kill()
            await _over(guard)


async def _addressed(
    program: Program,
    address: asyncio.Future[str],
    ended: asyncio.Task[End],
    said: Sequence[str],
    tell: Tell,
    within_s: float,
) -> None:
    """Wait until a program has said its address, and tell how that goes.

    Raises:
        ProgramFailed: it ended by itself, or said none in time.
    """
    begun = time.monotonic()
    while not (address.done() or ended.done()) and (left_s := begun + within_s - time.monotonic()) > 0:
        wait_s = min(TELL_EVERY_S, left_s)
        await asyncio.wait((address, ended), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if not (address.done() or ended.done()) and left_s > wait_s:
            last = f"its last line: {said[-1]}" if said else "it has said nothing"
            tell(f"{program.name} gave no address yet, after {time.monotonic() - begun:.0f} s; {last}")
    if ended.done():
        raise _ended_by_itself(program, ended.result(), "at its start")
    if not address.done():
        raise ProgramFailed(program, f"gave no address within {within_s:.0f} s", said)


async def _read(
    process: asyncio.subprocess.Process,
    program: Program,
    said: deque[str],
    address: asyncio.Future[str],
    tell: Tell,
) -> None:
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:
            continue  # a line past reading; what was read of it is gone
        if not line:
            return
        text = _COLOURS.sub("", line.decode("utf-8", "replace")).strip()
        if text and not (program.aside and text.startswith(program.aside)):
            said.append(text)
        found = program.address(text)
        if found and not address.done():
            address.set_result(found)
        elif found and not address.cancelled() and found != address.result():
            tell(f"{program.name} says another address now, {found}: start again if {address.result()} does not work")


async def _end(process: asyncio.subprocess.Process, reading: asyncio.Task[None], said: deque[str]) -> End:
    """Wait until a program has ended, end what it started, and return how it ended."""
    status = await _over(process)
    # At once: the group's number is its own only while something of it lives.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.wait({reading}, timeout=READ_ON_S)
    reading.cancel()
    return End(status, tuple(said))


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a program's whole group: asked first, killed if that does not help."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_WITHIN_S):
                await _over(process)


async def _over(process: asyncio.subprocess.Process) -> int:
    """Wait for the end of a process; before Python 3.13 its own `wait` waits for whoever holds its output as well."""
    while process.returncode is None:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(LOOK_EVERY_S)
    return process.returncode
