"""Runs one command: no shell, a time limit, capped output, and nothing of it left behind.

The command is the leader of a process group of its own. However it ends (by itself, too late, too loud, or because
our task is cancelled), the whole group is killed: SIGTERM first, SIGKILL two seconds later. What it cannot
survive is the worker's own SIGKILL: then the command runs on by itself until it ends.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import cast

MAX_OUTPUT_BYTES = 10 * 1024 * 1024
STDERR_TAIL_BYTES = 4096
GRACE = timedelta(seconds=2)

_OURS = re.compile(
    r"WEBHOOKS_.*|PATCH_REPOSITORY|DATABASE_URL|PG[A-Z]+"
    r"|(.*_)?(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_.*)?",
    re.IGNORECASE,
)
# Set while a git hook runs us, and then every git below would work on that repository instead of its own checkout.
_ANOTHER_REPOSITORY = re.compile(
    r"GIT_(DIR|WORK_TREE|COMMON_DIR|INDEX_FILE|OBJECT_DIRECTORY|ALTERNATE_OBJECT_DIRECTORIES|PREFIX|NAMESPACE"
    r"|CONFIG_PARAMETERS|CONFIG_COUNT|CONFIG_KEY_.*|CONFIG_VALUE_.*)"
)


class CommandFailed(Exception):
    """The command did not do what was asked; the message ends with the last lines of its standard error."""


async def run(
    command: Sequence[str],
    *,
    timeout: timedelta,  # noqa: ASYNC109 - the limit has to kill, not just to stop waiting
    stdin: bytes = b"",
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    max_output_bytes: int = MAX_OUTPUT_BYTES,
) -> bytes:
    """Run `command` and return what it wrote to standard output.

    Args:
        command: the program and its arguments; no shell sees them.
        timeout: how long it may take.
        stdin: what it may read, of any size.
        cwd: where it runs.
        environment: variables on top of those it inherits (`inherited`).
        max_output_bytes: how much it may write to standard output.

    Raises:
        CommandFailed: it could not be started, took too long, wrote too much or exited with another code than 0.
    """
    loop = asyncio.get_running_loop()
    variables = {**inherited(os.environ), **(environment or {})}
    try:
        transport, output = await loop.subprocess_exec(
            lambda: _Output(max_output_bytes),
            *command,
            cwd=cwd,
            env=variables,
            start_new_session=True,
        )
    except OSError as error:
        raise CommandFailed(f"{command[0]} could not be started: {error.strerror}") from error
    try:
        _feed(transport, stdin)
        async with asyncio.timeout(timeout.total_seconds()):
            await output.over.wait()
    except TimeoutError:
        raise CommandFailed(f"{command[0]} took longer than {timeout} and was killed{output.complaint()}") from None
    finally:
        await _end(transport, output)
    if output.too_much:
        raise CommandFailed(f"{command[0]} wrote more than {max_output_bytes} bytes and was killed")
    if code := transport.get_returncode():
        raise CommandFailed(f"{command[0]} {_ended_with(code)}{output.complaint()}")
    return bytes(output.stdout)


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what no command has any business with: our settings, the database, tokens and passwords.

    A model's ``..._API_KEY`` stays, because calling the model is what a drafter is for. A command that needs a token
    reads it from a file of its own.
    """
    return {
        name: value
        for name, value in environment.items()
        if not _OURS.fullmatch(name) and not _ANOTHER_REPOSITORY.fullmatch(name)
    }


class _Output(asyncio.SubprocessProtocol):
    """Collects what the command writes, and says when it is over.

    A protocol, not streams, because it hears of the exit even while a grandchild still holds the pipes open.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.too_much = False
        self.over = asyncio.Event()
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self.stderr += data
            del self.stderr[:-STDERR_TAIL_BYTES]
        elif len(self.stdout) + len(data) <= self.max_bytes:
            self.stdout += data
        else:
            self.too_much = True
            self.over.set()

    def process_exited(self) -> None:
        self.exited.set()
        self.over.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def complaint(self) -> str:
        text = self.stderr.decode(errors="replace").strip()
        return f":\n{text}" if text else ""


def _feed(transport: asyncio.SubprocessTransport, stdin: bytes) -> None:
    # The transport keeps what the pipe does not take yet, so neither side can wait for the other. A command that
    # wants no input may be gone by now.
    pipe = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
    if not pipe.is_closing():
        pipe.write(stdin)
    if not pipe.is_closing():
        pipe.write_eof()


async def _end(transport: asyncio.SubprocessTransport, output: _Output) -> None:
    group = transport.get_pid()
    try:
        if not output.exited.is_set():
            _signal(group, signal.SIGTERM)
            await _within(GRACE, output.exited)
    finally:  # a second cancellation must not spare the group
        _signal(group, signal.SIGKILL)
        try:
            await _within(
                GRACE, output.closed
            )  # what is still in the pipes; a process that left the group may hold them
        finally:
            transport.close()


async def _within(limit: timedelta, event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(limit.total_seconds()):
            await event.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _ended_with(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
