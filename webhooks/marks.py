"""Where the last look through a busy queue ended: for a moment, the next one starts there.

While somebody's transaction stays open, the index entries of rows claimed meanwhile cannot be removed, and pile up at
the front of the queue, where every look would read through all of them. So a queue that is looked through often is
read from its front once a second only. What lies before the mark (rows that rested, a late arrival with an earlier
place, what another process gave back) is found then, and at once by a look that finds too little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

WINDOW_S = 1.0
OFTEN = 20
MOST = 1000

Mark = tuple[str, ...]
"""The values a queue is ordered by, of the last row that was claimed, as text."""


@dataclass(slots=True)
class _Queue:
    until: float = 0.0
    looks: int = 0
    busy: bool = False
    mark: Mark | None = None


class Marks:
    """The marks of one process.

    Args:
        clock: seconds that only ever grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queues: dict[Hashable, _Queue] = {}

    def of(self, queue: Hashable) -> Mark | None:
        """Return where a look is to begin; None for the front."""
        if queue not in self._queues and len(self._queues) >= MOST:
            self._queues.clear()
        seen = self._queues.setdefault(queue, _Queue())
        now = self._clock()
        if now >= seen.until:
            busy = seen.looks >= OFTEN and now < seen.until + WINDOW_S
            seen.until, seen.looks, seen.busy, seen.mark = now + WINDOW_S, 0, busy, None
        seen.looks += 1
        return seen.mark if seen.busy else None

    def set(self, queue: Hashable, mark: Mark | None) -> None:
        """Remember where a look ended; None has the next one begin at the front."""
        if seen := self._queues.get(queue):
            seen.mark = mark
