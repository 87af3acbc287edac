"""How claims of one process run beside each other, and how one of them runs alone.

An issue that was in work when its process died, and has one attempt left, may be what killed it. It runs while nothing
else does, so that it takes no neighbour with it into its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from weakref import WeakKeyDictionary

from webhooks import Pool


class Abreast:
    """Lets any number run beside each other, or one alone."""

    def __init__(self) -> None:
        self._running = 0
        self._alone: object | None = None
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def seat(self) -> AsyncGenerator[Callable[[], Awaitable[bool]]]:
        """A place beside the others; waits while somebody runs alone, or waits for that.

        Yields:
            What asks to run alone: it waits until everybody else has ended, and is True then; it is False, at once,
            where somebody else runs alone or waits for it.
        """
        await self._until(lambda: self._alone is None)
        seat = object()
        self._running += 1
        try:
            yield partial(self._run_alone, seat)
        finally:
            self._running -= 1
            if self._alone is seat:
                self._alone = None
            self._tell()

    async def _run_alone(self, seat: object) -> bool:
        if self._alone is not None:
            return False
        self._alone = seat
        await self._until(lambda: self._running == 1)
        return True

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


_OF_POOL: WeakKeyDictionary[Pool, Abreast] = WeakKeyDictionary()


def abreast_of(pool: Pool) -> Abreast:
    """The one of this process, that is of its pool."""
    return _OF_POOL.setdefault(pool, Abreast())
