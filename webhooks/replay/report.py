"""What a replay did so far, and the limits it keeps to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import psycopg

Result = Literal[
    "again",
    "due",
    "new",
    "accepted",
    "rearmed",
    "duplicate",
    "answered",
    "refused",
    "failed",
    "left_alone",
    "pruned",
]
"""What became of one delivery.

`again`: it runs again. `due`: it had not ended yet, and is due now. `new`: repeated as a new delivery. `accepted`,
`rearmed`, `duplicate`, `answered`: what the inbox or the receiver said of an arrival. `refused`: it did not want it.
`failed`: it could not be read or sent. `left_alone`: it is being applied, or run again by somebody else, at this
moment. `pruned`: its body is gone.
"""
NOT_DONE: frozenset[Result] = frozenset({"refused", "failed", "left_alone", "pruned"})
MOST_CAUSES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a replay stands, or ended.

    Args:
        counts: how many deliveries came to which result.
        causes: why some were refused or failed, and how many for each.
        after: everything up to here was dealt with: an id, or a place in a file; the next run goes on after it.
        upto: the last id that was meant; None for files.
        signed: how many were signed anew, because they had no signature or that was asked for.
        stopped: why it ended before its end; None where it did not.
        broken: whether it ended at what cannot be read: the last place that is counted.
    """

    counts: Mapping[Result, int] = field(default_factory=dict[Result, int])
    causes: Mapping[str, int] = field(default_factory=dict[str, int])
    after: int = 0
    upto: int | None = None
    signed: int = 0
    stopped: str | None = None
    broken: bool = False

    @property
    def total(self) -> int:
        """How many deliveries were dealt with."""
        return sum(self.counts.values())

    @property
    def well(self) -> bool:
        """Whether it went to its end, and did what was asked with every delivery."""
        return self.stopped is None and not any(self.counts.get(result) for result in NOT_DONE)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "total": self.total,
            "counts": dict(self.counts),
            "causes": dict(self.causes),
            "signed": self.signed,
            "after": self.after,
            "upto": self.upto,
            "stopped": self.stopped,
        }


Progress: TypeAlias = Callable[[Report], None]
"""Told how it stands, after every batch or delivery."""


def unheard(report: Report) -> None:
    """Tell nobody."""


def unanswered(error: psycopg.Error) -> str:
    """Say on one line that the database is away."""
    return f"the database does not answer: {' '.join(str(error).split())}"


class Tally:
    """Counts while a replay runs."""

    def __init__(self, after: int = 0, upto: int | None = None) -> None:
        self.after = after
        self.upto = upto
        self.signed = 0
        self.stopped: str | None = None
        self.broken = False
        self._counts: Counter[Result] = Counter()
        self._causes: Counter[str] = Counter()

    def count(self, result: Result, number: int = 1, *, cause: str | None = None) -> None:
        """Count deliveries that came to a result."""
        self._counts[result] += number
        if cause is not None:
            known = cause in self._causes or len(self._causes) < MOST_CAUSES
            self._causes[cause if known else "other causes"] += number

    def report(self) -> Report:
        """Return how it stands."""
        counts: dict[Result, int] = {result: number for result, number in self._counts.items() if number}
        return Report(
            counts=counts,
            causes=dict(self._causes.most_common()),
            after=self.after,
            upto=self.upto,
            signed=self.signed,
            stopped=self.stopped,
            broken=self.broken,
        )


INTERRUPTED = "interrupted"


@dataclass(slots=True, kw_only=True)
class Limits:
    """What a replay keeps to.

    Args:
        rate: deliveries a second at most; None: as fast as it goes.
        at_once: how many are sent at a time.
        stop: set by whoever wants it to end early; what is under way is finished.
    """

    rate: float | None = None
    at_once: int = 1
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    _next_at: float = 0.0

    async def turn(self, count: int = 1) -> bool:
        """Wait until so many more may go; False: it was asked to stop."""
        now = asyncio.get_running_loop().time()
        due = max(self._next_at, now)
        if self.rate is not None:
            self._next_at = due + count / self.rate
        return not await self.stopped(due - now)

    async def stopped(self, within_s: float) -> bool:
        """Wait for so many seconds, or until it is asked to stop; say whether it was."""
        if within_s > 0 and not self.stop.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self.stop.wait()
        return self.stop.is_set()
