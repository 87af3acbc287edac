"""How an attempt ended, and what is written for it: the whole retry policy, as one pure function."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from math import inf
from typing import Literal

from psycopg.errors import LockNotAvailable
from psycopg_pool import PoolTimeout

from webhooks.errors import LONGEST_SNOOZE, ConfigurationError, Escalate, Ignore, LostClaim, NotDone, Park, Snooze
from webhooks.text import describe, less_and_less, members, message_of, shortened

Outcome = Literal["done", "error", "expired", "interrupted", "snoozed", "escalated", "lost"]


class Stop(Enum):
    """Why the worker itself cancelled a claim's task."""

    DRAIN = "the worker is stopping"
    TIMEOUT = "it ran longer than its phase's timeout"
    LOST = "its lease was lost"


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off: `first` times 2^(attempt - 1), at most `longest`, spread by `spread` both ways."""

    first: timedelta = timedelta(seconds=5)
    longest: timedelta = timedelta(minutes=10)
    spread: float = 0.2

    def after(self, attempt: int, chance: float) -> timedelta:
        """Return the wait after attempt number `attempt` (from 1); `chance` in [0, 1) places it within the spread."""
        wait = min(self.first.total_seconds() * 2.0 ** min(attempt - 1, 20), self.longest.total_seconds())
        return timedelta(seconds=wait * self.factor(chance))

    def factor(self, chance: float) -> float:
        return 1 + self.spread * (2 * chance - 1)


@dataclass(frozen=True, slots=True)
class Release:
    """What is written when a claim ends without being completed.

    Args:
        outcome: how its line in `attempts` is closed.
        charged: whether the attempt counts; the row escalates when a charged attempt was its last.
        escalate: whether a person has to decide, however many attempts are left.
        delay: how long the row rests before it can be claimed again.
        error: what to keep in `last_error`; None leaves it as it was.
        columns: other columns to write with it.
    """

    outcome: Outcome
    charged: bool
    escalate: bool
    delay: timedelta
    error: str | None
    columns: Mapping[str, object] = field(default_factory=dict[str, object])

    def with_less_text(self) -> Iterator[Release]:
        """Return this, then the same with less and less text: the end is written, whatever is wrong with its words."""
        yield self
        for text in (*(() if self.error is None else less_and_less(self.error)), None):
            yield replace(self, columns={}, error=text)


def release_for(
    error: BaseException | None,
    stop: Stop | None,
    attempt: int,
    backoff: Backoff,
    chance: float,
    *,
    put_back: int | None = None,
) -> Release | None:
    """Say what an attempt's ending means.

    Args:
        error: what left the claimed block; None when it was left without being completed.
        stop: why the worker cancelled the block, where it did.
        attempt: the number of this attempt, from 1.
        backoff: the wait between charged attempts.
        chance: a number in [0, 1) for the back-off's spread.
        put_back: where the error lies with the database: how often it has in this visit. Such an attempt is not
            charged; it waits longer each time, in case that the work is what ends the server.

    Returns:
        What to write, or None when nothing may be written because the claim is lost.
    """
    if stop is Stop.LOST:
        return None
    if error is None:
        reason = "the block was left without complete()"
        return Release("interrupted", charged=False, escalate=False, delay=timedelta(seconds=1), error=reason)
    counts, reason = gravest(error), _reason(error)
    if isinstance(counts, LostClaim):
        return None
    if isinstance(counts, Snooze):
        return Release("snoozed", charged=False, escalate=False, delay=counts.for_, error=None)
    if isinstance(counts, NotDone) and counts.retry_after is not None:
        wait = min(max(counts.retry_after, timedelta(seconds=1)), LONGEST_SNOOZE)
        return Release("snoozed", charged=False, escalate=False, delay=wait, error=reason)
    if _is_not_now(counts):
        return Release("snoozed", charged=False, escalate=False, delay=timedelta(seconds=1), error=reason)
    if put_back is not None:
        delay = replace(backoff, first=timedelta(seconds=1)).after(put_back + 1, chance)
        return Release("snoozed", charged=False, escalate=False, delay=delay, error=reason)
    if isinstance(counts, (Escalate, ConfigurationError)):
        return Release("escalated", charged=True, escalate=True, delay=timedelta(0), error=reason)
    if stop is Stop.DRAIN and isinstance(error, asyncio.CancelledError):
        return Release("interrupted", charged=False, escalate=False, delay=timedelta(0), error=Stop.DRAIN.value)
    if stop is Stop.TIMEOUT:
        reason = Stop.TIMEOUT.value
    return Release("error", charged=True, escalate=False, delay=backoff.after(attempt, chance), error=reason)


def gravest(error: BaseException) -> BaseException:
    """Return what an error counts as: itself, and of a group (`asyncio.TaskGroup`) its most serious member, which for a
    group of one or of equals is its member. Of two that ask for patience it is the one that asks for more of it."""
    return min(members(error), key=_gravity)


def _gravity(error: BaseException) -> tuple[int, float]:
    """Return where an error stands among others, the most serious first."""
    if isinstance(error, LostClaim):
        return 0, 0
    if isinstance(error, (Escalate, ConfigurationError)):
        return 1, 0
    if isinstance(error, NotDone):
        return 4, -inf if error.retry_after is None else -error.retry_after.total_seconds()
    if isinstance(error, Snooze):
        return 5, -error.for_.total_seconds()
    if isinstance(error, (Ignore, Park)):
        return 6, 0
    return (3 if _is_not_now(error) else 2), 0


def _is_not_now(error: BaseException) -> bool:
    """Whether it says that others are at work, and so nothing of this work."""
    return isinstance(error, (LockNotAvailable, PoolTimeout))


def _reason(error: BaseException) -> str:
    """Return what is kept: of a group each member, the most serious first."""
    ranked = sorted(members(error), key=_gravity)
    texts = [message_of(one) if isinstance(one, (Escalate, ConfigurationError)) else describe(one) for one in ranked]
    return shortened("; ".join(dict.fromkeys(texts)))
