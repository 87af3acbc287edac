"""One batch: what it looked at, what it removed, and where the next one begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias, TypeVar

import psycopg
import structlog

from webhooks.db import Transaction
from webhooks.db.batch import each, savepoint
from webhooks.retention.ages import Kind
from webhooks.text import message_of

T = TypeVar("T")
R = TypeVar("R")

log = structlog.get_logger(__name__)

LOOK = 2000
"""How many lines one transaction looks at."""
MOST = 1000
"""How many it removes at most."""
MOST_BYTES = 32 * 1024 * 1024
"""How much, unless one line alone is more: bodies are stored in pieces, each of which is a row to be removed."""


@dataclass(frozen=True, slots=True)
class Line:
    """How much of a kind.

    Args:
        count: how many.
        bytes: what their values took, without indexes; the space is free for new ones once autovacuum has been there.
        oldest: the time of the oldest.
    """

    count: int = 0
    bytes: int = 0
    oldest: datetime | None = None

    def plus(self, other: Line) -> Line:
        times = [time for time in (self.oldest, other.oldest) if time is not None]
        return Line(self.count + other.count, self.bytes + other.bytes, min(times, default=None))


@dataclass(frozen=True, slots=True)
class Step:
    """What one transaction did.

    Args:
        cursor: where it stopped looking.
        more: whether there is anything behind that.
        removed: by kind.
        left: old lines that nobody here can judge, or that refuse to go: why, and how many.
    """

    cursor: Any
    more: bool
    removed: Mapping[Kind, Line] = field(default_factory=dict["Kind", "Line"])
    left: Mapping[str, int] = field(default_factory=dict[str, int])


Walk: TypeAlias = Callable[[Transaction, Any], Awaitable[Step]]
"""Looks at the next lines after a cursor, None for the first, and removes what is due among them."""


async def removed(
    tx: Transaction, lines: Sequence[T], remove: Callable[[Sequence[T]], Awaitable[list[R]]], left: Counter[str]
) -> list[R]:
    """Remove lines, one by one where one of them refuses, and return what was removed.

    Args:
        tx: where.
        lines: which.
        remove: removes some of them, and returns those that are gone.
        left: counts by their reasons those that refuse.
    """

    async def run(some: Sequence[T]) -> list[R]:
        async with savepoint(tx):
            return await remove(some)
        return []

    def refused(line: T, error: psycopg.Error) -> None:
        left[f"that cannot be removed: {message_of(error)}"] += 1
        log.warning("this line cannot be removed", line=str(line)[:200], error=message_of(error))

    return [gone for answer in await each(lines, run, refused) for gone in answer]


def counted(lines: Sequence[tuple[datetime, int]]) -> Line:
    """Count lines of a time and so many bytes."""
    return Line(len(lines), sum(size for _, size in lines), min((time for time, _ in lines), default=None))


def batch(sizes: Sequence[int | None]) -> int:
    """Return how many lines from the front a transaction takes on, given each one's bytes, None for one that stays."""
    count = total = 0
    for place, size in enumerate(sizes):
        if size is None:
            continue
        if count == MOST or (count and total + size > MOST_BYTES):
            return place
        count, total = count + 1, total + size
    return len(sizes)
