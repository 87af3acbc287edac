"""SIGTERM, SIGINT and SIGHUP of one process: the first one ends it in order, the second one cuts that short."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import structlog

log = structlog.get_logger(__name__)


def ending() -> tuple[signal.Signals, ...]:
    """Return the signals that end this process in order.

    SIGHUP, which says that the terminal or the session is gone, is one of them unless it is ignored: `nohup` asks for
    that, so that a process outlives its terminal.
    """
    if sys.platform == "win32" or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGTERM, signal.SIGINT
    return signal.SIGTERM, signal.SIGINT, signal.SIGHUP


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
            self.hurry.set()
            log.info("stopping at once", signal=name)
            return
        self.stop.set()
        log.info("stopping; a second signal cuts it short", signal=name)
        if self._starting is not None:
            self._starting.cancel()


@asynccontextmanager
async def signals() -> AsyncGenerator[Signals]:
    """Own the process's signals for the block; a start that a signal cancelled ends the block without an error."""
    heard = Signals()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    handled = ending()
    for number in handled:
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
        for number in handled:
            if sys.platform == "win32":
                signal.signal(number, signal.SIG_DFL)
            else:
                loop.remove_signal_handler(number)
