"""What our commands have in common: they run to their end, or are stopped in order."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import click
import structlog
from psycopg.errors import UndefinedTable

T = TypeVar("T")

STOPPED = 128 + signal.SIGTERM


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run the asynchronous part of a command; SIGTERM and SIGHUP, like Ctrl-C, cancel it, so that it can leave things
    in order; a SIGHUP that is ignored (`nohup`) stays so.

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
    if task is not None and sys.platform != "win32":
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, task.cancel)
    return await work
