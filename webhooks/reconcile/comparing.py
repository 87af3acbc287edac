"""GitHub's delivery log beside our inbox. Pure.

Our inbox decides. What is here is left alone, whatever the log says of it; what is not is missing, even where GitHub
counts it as delivered: something in between took it, or a database was restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from webhooks.inbox import Copy
from webhooks.reconcile.github_log import Attempt

Verdict = Literal["here", "missing", "failed", "expired", "beyond", "unusable"]
"""`here`; or not here although GitHub delivered it (`missing`), or because it could not (`failed`), or not here and too
old to be delivered again (`expired`). Not asked for either: what the log has only redeliveries of (`beyond`: the first
attempt is older than the log, so it may have been here, applied, and its key pruned since), and what carries a guid
that no delivery can arrive under (`unusable`)."""

LONGEST_GUID = 200


@dataclass(frozen=True, slots=True)
class Line:
    """One delivery of GitHub's, with all attempts at it.

    Args:
        guid: what GitHub calls it, the same for every attempt.
        event: such as `issues.opened`.
        delivered_at: when it was last tried.
        statuses: what came of each attempt, the oldest first.
        attempt: the newest attempt, which can be asked for again.
        verdict: how that compares with the inbox.
        delivery: its id here, None where it is not.
        status: what became of it here.
    """

    guid: str
    event: str
    delivered_at: datetime
    statuses: tuple[str, ...]
    attempt: int
    verdict: Verdict
    delivery: int | None = None
    status: str | None = None

    @property
    def wanted(self) -> bool:
        """Whether it is to be delivered again."""
        return self.verdict in ("missing", "failed")


def usable(guid: str) -> bool:
    """Say whether a delivery can arrive under a guid, as a header line, and be noted in a database."""
    return 0 < len(guid) <= LONGEST_GUID and guid.isascii() and guid.isprintable()


def compared(attempts: Iterable[Attempt], here: Mapping[str, Copy], expired_before: datetime) -> list[Line]:
    """Group attempts by guid, and compare with the inbox.

    Args:
        attempts: lines of the log, in any order; a line that is there twice counts once.
        here: the deliveries of ours, by guid.
        expired_before: what was last tried before that cannot be delivered again.

    Returns:
        One line a guid, the oldest first.
    """
    grouped: dict[str, dict[int, Attempt]] = {}
    for attempt in attempts:
        grouped.setdefault(attempt.guid, {})[attempt.id] = attempt
    lines = [_line(list(group.values()), here.get(guid), expired_before) for guid, group in grouped.items()]
    return sorted(lines, key=lambda line: (line.delivered_at, line.attempt))


def _line(group: list[Attempt], copy: Copy | None, expired_before: datetime) -> Line:
    ordered = sorted(group, key=lambda attempt: (attempt.delivered_at, attempt.id))
    newest = ordered[-1]
    return Line(
        guid=newest.guid,
        event=".".join(word for word in (newest.event, newest.action) if word),
        delivered_at=newest.delivered_at,
        statuses=tuple(_told(attempt) for attempt in ordered),
        attempt=newest.id,
        verdict=_verdict(ordered, copy, expired_before),
        delivery=None if copy is None else copy.id,
        status=None if copy is None else copy.status,
    )


def _verdict(ordered: list[Attempt], copy: Copy | None, expired_before: datetime) -> Verdict:
    if copy is not None:
        return "here"
    if not usable(ordered[0].guid):
        return "unusable"
    if ordered[-1].delivered_at < expired_before:
        return "expired"
    if ordered[0].redelivery:
        return "beyond"
    return "missing" if any(attempt.succeeded for attempt in ordered) else "failed"


def _told(attempt: Attempt) -> str:
    if attempt.succeeded:
        return "OK"
    status = attempt.status or "no answer"
    code = str(attempt.status_code or "")
    return status if not code or code in status else f"{status} ({code})"
