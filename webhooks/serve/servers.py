"""HTTP servers of one process: sockets bound by us, and several uvicorn servers beside each other."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from webhooks.errors import ConfigurationError
from webhooks.serve.http import Connections, Limits

BACKLOG = 2048
# A request has its answer within three seconds of its last byte; whoever is still sending then is cut off.
LEAVE_WITHIN_S = 5


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens.

    Attributes:
        sock: the socket.
        address: what is bound, as it is shown to a person: `http://0.0.0.0:8000`, `unix:/run/webhooks.sock`.
        url: where a program of this machine reaches it; None for a unix socket.
    """

    sock: socket.socket
    address: str
    url: str | None


@contextmanager
def listening(hosts: Sequence[str], port: int, option: str, uds: Path | None = None) -> Generator[list[Listener]]:
    """Listen while the block runs, so that a port that is taken is known before anything else is started.

    Args:
        hosts: addresses or names of this machine; `::` takes IPv4 as well.
        port: the same for all of them; 0 for any free one.
        option: the option that chooses another port, for the message.
        uds: a path for a unix socket besides. Whoever may enter its directory may connect.

    Raises:
        ConfigurationError: the port or the path is taken, or the address is not ours.
    """
    with ExitStack() as stack:
        listeners: list[Listener] = []
        for host in hosts:
            sock = stack.enter_context(listen(host, port, option))
            bound: tuple[str, int] = sock.getsockname()[:2]
            port = bound[1]
            here = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(bound[0], bound[0])  # noqa: S104 - compared only
            listeners.append(Listener(sock, _url(*bound), _url(here, port)))
        if uds is not None:
            sock = stack.enter_context(_listen_on_path(uds))
            stack.callback(_remove, uds, os.stat(uds).st_ino)
            listeners.append(Listener(sock, f"unix:{uds}", None))
        yield listeners


def listen(host: str, port: int, option: str) -> socket.socket:
    """Return a socket that listens already; the arguments are those of `listening`.

    Raises:
        ConfigurationError: the port is taken, or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    dual = host == "::" and socket.has_dualstack_ipv6()
    try:
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
        # Connections inherit it. Only uvloop sets it by itself; without it an answer in two parts waits for 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} on {host} is taken: stop what listens there, or choose another with {option}"
            ) from None
        reason = error.strerror or str(error)
        raise ConfigurationError(f"cannot listen on {host}, port {port}: {reason}") from None


def _listen_on_path(path: Path) -> socket.socket:
    """Listen on a path; what a process that was killed left there is replaced."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        sock.bind(str(path))
        path.chmod(0o666)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(f"{path} is taken: stop what listens there, or choose another --uds") from None
        raise ConfigurationError(f"cannot listen on {path}: {error.strerror or error}") from None
    return sock


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1)
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True


def _remove(path: Path, inode: int) -> None:
    """Remove a socket of ours, unless another process has put its own in its place."""
    with suppress(OSError):
        if os.stat(path).st_ino == inode:
            path.unlink()


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """One of several servers: the signals belong to the process."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@asynccontextmanager
async def serving(
    app: ASGIApp, sockets: Sequence[socket.socket], name: str, connections: Connections | None = None
) -> AsyncGenerator[asyncio.Task[None]]:
    """Answer on sockets while the block runs; then take no more connections, and let running requests end.

    Args:
        app: what answers.
        sockets: listen already.
        name: of the server's task.
        connections: what they may take, and where they are counted.

    Yields:
        The server's task: it ends before the block does only when something is wrong.
    """
    config = uvicorn.Config(
        app,
        loop="none",
        http=cast("Any", (connections or Connections(Limits())).protocol),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # The peer's own address decides who may use the control plane, whatever a header says.
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LEAVE_WITHIN_S,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=list(sockets)), name=name)
    try:
        yield task
    finally:
        server.should_exit = True
        await asyncio.wait({task})
        if cancelled := server.server_state.tasks:
            # Requests that outlasted the time to leave were cancelled, not waited for: they give back what they hold.
            await asyncio.wait(cancelled, timeout=LEAVE_WITHIN_S)
        for sock in sockets:
            sock.close()
