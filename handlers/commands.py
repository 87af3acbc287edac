"""What our commands have in common: they run to their end, or are stopped in order."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import click
import structlog
from psycopg.errors import UndefinedTable

T = TypeVar("T")

STOPPED = 128 + signal.SIGTERM


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run the asynchronous part of a command; SIGTERM, like Ctrl-C, cancels it, so that it can leave things in order.

    Raises:
        click.ClickException: the database lacks our tables.
        click.exceptions.Exit: it was stopped.
    """
    if not structlog.is_configured():
        # What a command says goes to standard output, what happens meanwhile does not.
        structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    try:
        # psycopg does not work on Windows' own event loop.
        factory = asyncio.SelectorEventLoop if sys.platform == "win32" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(_stoppable(work))
    except UndefinedTable as error:
        raise click.ClickException(f"{error.diag.message_primary}: run webhooks migrate") from None
    except asyncio.CancelledError:
        raise click.exceptions.Exit(STOPPED) from None


async def _stoppable(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    if task is not None:
        with suppress(NotImplementedError):  # Windows has no such signal
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work
