"""HTTP servers of one process: sockets bound by us, and several uvicorn servers beside each other."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from webhooks.errors import ConfigurationError
from webhooks.serve.http import Connections, Limits

BACKLOG = 2048
# A request has its answer within three seconds of its last byte; whoever is still sending then is cut off.
LEAVE_WITHIN_S = 5


def listen(host: str, port: int, option: str) -> socket.socket:
    """Return a socket that listens already, so that a port that is taken is known before anything else is started.

    Args:
        host: an address or name of this machine.
        port: 0 for any free one.
        option: the option that chooses another port, for the message.

    Raises:
        ConfigurationError: the port is taken, or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
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


def url_of(sock: socket.socket) -> str:
    """Return where a socket is reached, with the port it really has."""
    bound: tuple[str, int] = sock.getsockname()[:2]
    host, port = bound
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """One of several servers: the signals belong to the process."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@asynccontextmanager
async def serving(
    app: ASGIApp, sock: socket.socket, name: str, limits: Limits | None = None
) -> AsyncGenerator[asyncio.Task[None]]:
    """Answer on a socket while the block runs; then take no more connections, and let running requests end.

    Args:
        app: what answers.
        sock: listens already.
        name: of the server's task.
        limits: what its connections may take.

    Yields:
        The server's task: it ends before the block does only when something is wrong.
    """
    config = uvicorn.Config(
        app,
        loop="none",
        http=cast("Any", Connections(limits or Limits()).protocol),
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
    task = asyncio.create_task(server.serve(sockets=[sock]), name=name)
    try:
        yield task
    finally:
        server.should_exit = True
        await asyncio.wait({task})
        if cancelled := server.server_state.tasks:
            # Requests that outlasted the time to leave were cancelled, not waited for: they give back what they hold.
            await asyncio.wait(cancelled, timeout=LEAVE_WITHIN_S)
        sock.close()
