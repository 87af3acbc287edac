"""Programs that give the receiver an address on the internet: cloudflared, ngrok, ssh.

They are used as installed, never fetched. Each runs in a session of its own, so that Ctrl-C reaches us alone and its
whole process group is stopped at the end. What it says is read as long as it runs, or a full pipe would stop it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import shutil
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from webhooks.errors import ConfigurationError, WebhooksError

WITHIN_S = 45.0
END_WITHIN_S = 5.0
READ_ON_S = 1.0
LOOK_EVERY_S = 0.05
LINES_KEPT = 12
LONGEST_LINE = 64 * 1024

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CLOUDFLARED = re.compile(r"https://(?!api\.)[a-z0-9-]+\.trycloudflare\.com(?![\w.-])")
_NGROK = re.compile(r'msg="started tunnel".* url=(https://[^\s"]+)')
# serveo.net says "Forwarding HTTP traffic from", localhost.run "tunneled with tls termination,", pinggy.io nothing.
_SSH = re.compile(r"(?:^|traffic from |tls termination, )(https://[A-Za-z0-9.-]+(?::[0-9]+)?)/?$")
_ALLOCATED = re.compile(r"Allocated port ([0-9]+) for remote forward")
_PAGES_OF_A_SERVICE = frozenset({"admin", "console", "dashboard", "docs", "www"})
_DESTINATION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+:@\[\]-]*")


@dataclass(frozen=True, slots=True)
class Program:
    """An installed program, and how it is used.

    Args:
        name: of the executable.
        arguments: what it is started with.
        address: finds the public address in a line that it says; None where the line has none.
        get_it: how to get it, for a person who has not.
        hint: what to look at when it does not work.
        settle_s: how long to leave its address alone at first. A resolver that is asked for a name too early remembers
            for minutes that there is none.
    """

    name: str
    arguments: tuple[str, ...]
    address: Callable[[str], str | None]
    get_it: str
    hint: str
    settle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Running:
    """A program that runs.

    Args:
        url: the public address that leads to the receiver.
        ended: done when the program ends, with what it said last.
    """

    url: str
    ended: asyncio.Task[str]


class ProgramFailed(WebhooksError):
    """A tunnel's program did not do its work; the message holds what it said last."""


def cloudflared(local: str) -> Program:
    """A quick tunnel of Cloudflare's: no account, a new address every time."""
    return Program(
        "cloudflared",
        # Without --config it would read a configuration of the user's, which turns quick tunnels off or opens others.
        ("tunnel", "--config", os.devnull, "--no-autoupdate", "--url", local),
        lambda line: found[0] if (found := _CLOUDFLARED.search(line)) else None,
        "get it at https://developers.cloudflare.com/cloudflare-one/connections/connect-networks/downloads/ "
        "(brew install cloudflared); it needs no account",
        "it needs an outgoing connection to port 7844",
        settle_s=3.0,
    )


def ngrok(local: str) -> Program:
    """A tunnel of ngrok's; it needs an account, whose token ngrok keeps itself."""
    return Program(
        "ngrok",
        ("http", local, "--log", "stdout", "--log-format", "logfmt"),
        lambda line: found[1] if (found := _NGROK.search(line)) else None,
        "get it at https://ngrok.com/download (brew install ngrok), then ngrok config add-authtoken with yours",
        "it needs an account's token: ngrok config add-authtoken",
    )


def ssh(local: str, host: str, *, port: int = 80, public: str | None = None) -> Program:
    """A remote forward over ssh, to a service such as localhost.run or to a server of one's own.

    Args:
        local: the receiver's base address.
        host: what ssh connects to, such as ``nokey@localhost.run`` or a name of the user's own configuration.
        port: the port to listen on there; 0 lets the server choose one, which is then reached by the server's name.
        public: the address that leads there, where the other side says none.

    Raises:
        ConfigurationError: that is no name of a server.
    """
    if not _DESTINATION.fullmatch(host):  # ssh would take -oProxyCommand=… for an option
        raise ConfigurationError(f"{host!r} is no server: write it as ssh takes it, such as nokey@localhost.run")
    parts = urlsplit(local)
    there = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    forward = f"{port}:{there}:{parts.port or 80}"
    options = ("-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=30", "-o", "ServerAliveCountMax=3")
    # The services say the address in a session; without one to say it, none is needed.
    session = ("-N",) if public is not None or port == 0 else ()
    return Program(
        "ssh",
        ("-T", *session, *options, "-R", forward, host),
        lambda line: _ssh_address(line, host),
        "install OpenSSH's client",
        f"it asks nothing here: connect by hand once (ssh {host}) to accept its key. For a server of your own say with "
        "--public which address leads to the forwarded port",
    )


def _ssh_address(line: str, host: str) -> str | None:
    name = host.rpartition("@")[2]
    if allocated := _ALLOCATED.search(line):
        return f"http://{name}:{allocated[1]}"
    found = _SSH.search(line)
    if found is None:
        return None
    said = urlsplit(found[1]).hostname or ""
    return None if said == name or said.partition(".")[0] in _PAGES_OF_A_SERVICE else found[1]


@asynccontextmanager
async def running(
    program: Program, *, public: str | None = None, within_s: float = WITHIN_S
) -> AsyncGenerator[Running]:
    """Run a program for the block, once it has said which address it gave.

    Args:
        program: which.
        public: its address, where that is known already.
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
    process = await asyncio.create_subprocess_exec(
        executable,
        *program.arguments,
        stdin=asyncio.subprocess.PIPE,  # kept open: at its end a session would end
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        limit=LONGEST_LINE,
    )
    said: deque[str] = deque(maxlen=LINES_KEPT)
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    if public is not None:
        address.set_result(public)
    reading = asyncio.create_task(_read(process, program, said, address), name=f"{program.name} output")
    ended = asyncio.create_task(_end(process, reading, said), name=program.name)
    try:
        await asyncio.wait({address, ended}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise ProgramFailed(f"{program.name} ended by itself: {ended.result()}; {program.hint}")
        if not address.done():
            raise ProgramFailed(
                f"{program.name} gave no address within {within_s:.0f} s; it {_last(said)}; {program.hint}"
            )
        yield Running(address.result(), ended)
    finally:
        address.cancel()
        await _stop(process)
        await ended


async def _read(
    process: asyncio.subprocess.Process, program: Program, said: deque[str], address: asyncio.Future[str]
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
        if text:
            said.append(text)
        if not address.done() and (found := program.address(text)):
            address.set_result(found)


async def _end(process: asyncio.subprocess.Process, reading: asyncio.Task[None], said: deque[str]) -> str:
    """Wait until a program has ended, end what it started, and return how it ended."""
    await _over(process)
    # At once: the group's number is its own only while something of it lives.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.wait({reading}, timeout=READ_ON_S)
    reading.cancel()
    return f"exit code {process.returncode}, it {_last(said)}"


def _last(said: deque[str]) -> str:
    return f"said: {' | '.join(said)}" if said else "said nothing"


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


async def _over(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process; before Python 3.13 its own `wait` waits for whoever holds its output as well."""
    while process.returncode is None:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(LOOK_EVERY_S)


def _end_with_parent() -> None:
    """Have the kernel end the program should we be killed: nobody else would close the tunnel then (Linux only)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
