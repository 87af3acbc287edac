"""Serves the stand-in's app beside everything else in the process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import click
import uvicorn
from starlette.types import ASGIApp


class _Server(uvicorn.Server):
    """One server of several in the process: the signals are not its own to take."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def listen(port: int) -> socket.socket:
    """A socket on 127.0.0.1, at `port` where that is free, else at any other."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        other = socket.create_server(("127.0.0.1", 0))
        told = f"stand-in: port {port} cannot be had ({error.strerror}), so it is {other.getsockname()[1]}"
        click.echo(f"{told}; agents of `webhooks demo` point to the old one", err=True)
        return other


@asynccontextmanager
async def served(app: ASGIApp, sock: socket.socket) -> AsyncGenerator[None]:
    """Answer on `sock` (which is closed at the end) until the block is left."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
