"""What GitHub has said of an issue, put together from events that come late, twice and in any order.

Each event says what was so at its own time. Of every kind of fact the newest counts, so that it does not matter in
which order they are heard, or how often.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from handlers.issues import PRIORITIES, Priority


@dataclass(frozen=True, slots=True)
class Word:
    """Who is to work on an issue, and at what, as it was at `told_at`."""

    told_at: datetime
    agent: str
    title: str
    body: str
    priority: Priority

    @property
    def rank(self) -> tuple[object, ...]:
        """What decides between two words: the time, then the higher priority, then whatever differs."""
        return self.told_at, -PRIORITIES.index(self.priority), self.agent, self.title, self.body


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known of one issue, or all that one event says of it.

    Args:
        word: who is to work on it; None where nobody was named.
        closed_at: when it was last closed.
        reopened_at: when it was last opened again.
        gone_at: when it was deleted, or given to another repository.
    """

    word: Word | None = None
    closed_at: datetime | None = None
    reopened_at: datetime | None = None
    gone_at: datetime | None = None

    def and_(self, other: Facts) -> Facts:
        """Put two together; which of them was heard first makes no difference."""
        words = [word for word in (self.word, other.word) if word is not None]
        return Facts(
            word=max(words, key=lambda word: word.rank, default=None),
            closed_at=_later(self.closed_at, other.closed_at),
            reopened_at=_later(self.reopened_at, other.reopened_at),
            gone_at=_later(self.gone_at, other.gone_at),
        )

    @property
    def ended(self) -> bool:
        """Whether nothing is to be done about it: it is gone, or closed and not opened again later."""
        if self.gone_at is not None:
            return True
        return self.closed_at is not None and (self.reopened_at is None or self.reopened_at <= self.closed_at)


def _later(one: datetime | None, other: datetime | None) -> datetime | None:
    return max((time for time in (one, other) if time is not None), default=None)
