"""Threads that work for claims: a row is not free while one of them does, though its function has ended.

A thread cannot be stopped. A function that is cancelled, or that stops waiting, leaves behind what it runs by
`asyncio.to_thread`; were its row released then, the next attempt would run beside it. So the claim is renewed until its
threads have ended, or until the process, and they with it, is about to be gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import structlog

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger(__name__)


class Running:
    """The calls in threads that were begun under one claim."""

    def __init__(self) -> None:
        self._calls: set[Future[Any]] = set()

    def add(self, call: Future[Any]) -> None:
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    @property
    def calls(self) -> list[Future[Any]]:
        """Those that have not ended."""
        return [call for call in tuple(self._calls) if not call.done()]

    @contextmanager
    def noted(self) -> Generator[None]:
        """Note the calls begun in the block, and in the tasks it starts; the claims around it note them, too."""
        before = _RUNNING.get()
        _RUNNING.set((*before, self))
        try:
            yield
        finally:
            _RUNNING.set(before)


# `asyncio.to_thread` hands its call to the executor in the context of whoever asks for it.
_RUNNING: ContextVar[tuple[Running, ...]] = ContextVar("webhooks_threads", default=())


class Executor(ThreadPoolExecutor):
    """The default executor of a loop, which knows for which claims its threads work."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        call = super().submit(fn, *args, **kwargs)
        for running in _RUNNING.get():
            running.add(call)
        return call


class Threads:
    """The claims of one process that wait for their threads.

    Attributes:
        executor: the default executor of the loop in which claims are worked on.
        waiting: their rows, as `table:key`, until their ends are written.
    """

    def __init__(self) -> None:
        self.executor = Executor(thread_name_prefix="webhooks")
        self.waiting: set[str] = set()
        self._leaving = False
        self._changed = asyncio.Event()

    @contextmanager
    def kept(self, row: str) -> Generator[None]:
        """Count a row among those that wait, for the block."""
        log.warning("a thread goes on though its function has ended: the row stays claimed until then", row=row)
        self.waiting.add(row)
        try:
            yield
        finally:
            self.waiting.discard(row)
            self._tell()

    async def ended(self, running: Running) -> bool:
        """Wait until the threads of a claim have ended; False when they are left behind."""
        loop = asyncio.get_running_loop()

        def tell(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop is gone before the thread is
                loop.call_soon_threadsafe(self._tell)

        while (calls := running.calls) and not self._leaving:
            changed = self._changed
            calls[0].add_done_callback(tell)
            await changed.wait()
        return not calls

    async def all_ended(self) -> None:
        """Wait until no claim waits for its threads."""
        while self.waiting:
            await self._changed.wait()

    def leave(self) -> set[str]:
        """Have no claim wait any more, because the process is about to be gone; return the rows of those that did."""
        self._leaving = True
        self._tell()
        return set(self.waiting)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
