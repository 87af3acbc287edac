"""A consumer for the tests of the command: `--app shop:consumer`.

It tells of itself through files in the working directory, because it runs in a process of its own: `running` is there
once a phase runs, and the phase does not end while `held` is there, nor when it is cancelled while `stubborn` is. While
`threaded` is there a thread does the work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
from gates import until
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from webhooks import Claim, Consumer, Done, Event, Gate, GitHub, Ignore, Shortcut, Transaction

RUNNING, HELD, STUBBORN, THREADED = Path("running"), Path("held"), Path("stubborn"), Path("threaded")

shortcut, github = Shortcut(), GitHub()
sessions = Gate("patch_sessions", key="sc_id")


@shortcut.on("story.update")
async def open_session(event: Event, tx: Transaction) -> None:
    labels = [reference["name"] for reference in event.data["references"]]
    if "patch" not in labels:
        raise Ignore(f"label 'patch' not among those added: {', '.join(labels)}")
    await sessions.open(tx, sc_id=event.data["id"], title=event.data["name"])


def wait() -> None:
    RUNNING.touch()
    while HELD.exists():
        time.sleep(0.02)


@sessions.phase("received", claimed="clarifying", done="clarified")
async def clarify(session: dict[str, Any], claim: Claim) -> Done:
    if THREADED.exists():  # noqa: ASYNC240 - a moment, in a process that does nothing else
        await asyncio.to_thread(wait)
        return claim.done()
    RUNNING.touch()  # noqa: ASYNC240 - a moment, in a process that does nothing else
    while True:
        try:
            await until(lambda: not HELD.exists(), within_s=60)
        except asyncio.CancelledError:
            if STUBBORN.exists():  # noqa: ASYNC240
                continue
            raise
        return claim.done()


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


@click.command()
def greet() -> None:
    """Say hello."""
    click.echo("hello")


@asynccontextmanager
async def dev() -> AsyncGenerator[None]:
    click.echo("dev began")
    yield
    click.echo("dev ended")


consumer = Consumer(
    gates=[sessions], sources=[shortcut, github], routes=[Route("/hello", hello)], commands=[greet], dev=dev
)
