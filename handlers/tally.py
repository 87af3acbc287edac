"""What became of claims, counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from handlers.issues import Issue
from webhooks import Claim


@dataclass(slots=True)
class Tally:
    """What claims ended as. Whatever is neither resolved nor escalated has failed, for now: it will be tried again."""

    claimed: int = 0
    resolved: int = 0
    escalated: int = 0
    unresolved: dict[int, int] = field(default_factory=dict[int, int])
    """The issue, by the claim's number."""

    @property
    def failed(self) -> int:
        return self.claimed - self.resolved - self.escalated

    def add(self, claim: Claim[Issue]) -> None:
        self.claimed += 1
        if claim.outcome == "done":
            self.resolved += 1
        else:
            self.unresolved[claim.claim_seq] = claim.row.id

    def counts(self) -> dict[str, int]:
        return {
            "claimed": self.claimed,
            "resolved": self.resolved,
            "failed": self.failed,
            "escalated": self.escalated,
        }


def total(tallies: Iterable[Tally]) -> Tally:
    together = Tally()
    for tally in tallies:
        together.claimed += tally.claimed
        together.resolved += tally.resolved
        together.escalated += tally.escalated
    return together
