"""SIGTERM and SIGINT of one process: the first one ends it in order, the second one cuts that short."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import structlog

log = structlog.get_logger(__name__)

HANDLED = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """What the process was asked for.

    Until `ready()`, the first signal cancels the task that starts everything; from then on it only sets `stop`.

    Attributes:
        stop: set by the first signal.
        hurry: set by the second.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._starting = asyncio.current_task()

    def ready(self) -> None:
        """Say that everything runs, so that a signal is waited for from now on."""
        self._starting = None

    def received(self, name: str) -> None:
        if self.stop.is_set():
            log.info("stopping at once", signal=name)
            self.hurry.set()
            return
        log.info("stopping; a second signal cuts it short", signal=name)
        self.stop.set()
        if self._starting is not None:
            self._starting.cancel()


@asynccontextmanager
async def signals() -> AsyncGenerator[Signals]:
    """Own the process's signals for the block; a start that a signal cancelled ends the block without an error."""
    heard = Signals()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    for number in HANDLED:
        if sys.platform == "win32":
            signal.signal(number, lambda got, _: loop.call_soon_threadsafe(heard.received, signal.Signals(got).name))
        else:
            loop.add_signal_handler(number, heard.received, number.name)
    try:
        yield heard
    except asyncio.CancelledError:
        if not heard.stop.is_set() or (task is not None and task.uncancel() > 0):
            raise
    finally:
        for number in HANDLED:
            if sys.platform == "win32":
                signal.signal(number, signal.SIG_DFL)
            else:
                loop.remove_signal_handler(number)
