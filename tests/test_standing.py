"""Whether a claim would win a row now, and if not why: the whole table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from gates import a_gate

from webhooks.inbox import inbox
from webhooks.standing import standing

NOW = datetime(2026, 6, 12, 10, 0, 0, tzinfo=UTC)
LEASE = timedelta(seconds=60)
ROW: dict[str, Any] = {
    "status": "clarified",
    "claimed_from": None,
    "attempt_count": 0,
    "max_attempts": 3,
    "not_before": NOW,
    "claimed_by": None,
    "claimed_at": None,
    "lease_until": None,
    "last_error": None,
}
HELD: dict[str, Any] = {
    **ROW,
    "status": "drafting",
    "claimed_from": "clarified",
    "attempt_count": 2,
    "claimed_by": "box:7:ab",
    "claimed_at": NOW - timedelta(minutes=5),
    "lease_until": NOW + timedelta(seconds=50),
}
DELIVERY: dict[str, Any] = {**ROW, "status": "received", "parked_on": None, "parked_since": None}


@pytest.mark.parametrize(
    ("row", "reason", "told", "do"),
    [
        (ROW, "claimable", "it waits in clarified for drafting, with 3 of 3 attempts left", "the code that claims it"),
        ({**ROW, "attempt_count": 2}, "claimable", "1 of 3 attempts left", "the code that claims it"),
        (None, "missing", "there is no such row", "webhooks deliveries"),
        (
            HELD,
            "held",
            "box:7:ab has held it in drafting since 2026-06-12 09:55:00+00:00, attempt 2 of 3; its lease lasts until "
            "2026-06-12 10:00:50+00:00, 50 s from now, and was renewed 10 s ago: that process was alive then",
            "wait for its end",
        ),
        (
            {**HELD, "lease_until": NOW + timedelta(seconds=15)},
            "held",
            "and was renewed 45 s ago: that process may have died",
            "webhooks work",
        ),
        (
            {**HELD, "claimed_at": NOW - timedelta(seconds=10)},
            "held",
            "and was not renewed yet: it is too early to tell whether that process lives",
            "wait for its end",
        ),
        (
            {**HELD, "claimed_at": NOW - timedelta(seconds=45), "lease_until": NOW + timedelta(seconds=15)},
            "held",
            "and was not renewed yet: that process may have died",
            "webhooks work",
        ),
        # Another process's leases may last longer than ours: then nothing is known about its renewals.
        (
            {**HELD, "lease_until": NOW + timedelta(seconds=90)},
            "held",
            "90 s from now",
            "wait for its end",
        ),
        (
            {**HELD, "lease_until": NOW - timedelta(seconds=3)},
            "lease over",
            "its lease was over at 2026-06-12 09:59:57+00:00, 3.0 s ago: that process has stopped answering",
            "the next sweep frees it: webhooks work",
        ),
        ({**HELD, "lease_until": NOW}, "lease over", "0.0 s ago", "webhooks work"),
        (
            {**ROW, "status": "drafting"},
            "claimed by hand",
            "it was set to drafting by hand, without a lease",
            "the next sweep gives it a lease",
        ),
        (
            {**ROW, "attempt_count": 1, "not_before": NOW + timedelta(seconds=5), "last_error": "no luck"},
            "not due",
            "it is not due until 2026-06-12 10:00:05+00:00, 5.0 s from now, after 1 of 3 attempts (no luck)",
            "wait",
        ),
        (
            {**ROW, "attempt_count": 3, "not_before": NOW + timedelta(seconds=5)},
            "exhausted",
            "it is exhausted: 3 of 3 attempts are used up",
            "webhooks retry patch_sessions:1 --reason",
        ),
        ({**ROW, "attempt_count": 4}, "exhausted", "4 of 3", "webhooks work"),
        (
            {**ROW, "status": "escalated", "claimed_from": "clarified", "last_error": "no token"},
            "escalated",
            "it is escalated, a person has to decide: no token",
            "webhooks retry patch_sessions:1 --reason …, or webhooks resolve patch_sessions:1 --to STATUS",
        ),
        (
            {**ROW, "status": "escalated"},
            "escalated",
            "no reason is recorded",
            "webhooks resolve patch_sessions:1 --to STATUS",
        ),
        (
            {**ROW, "status": "in_review"},
            "wrong status",
            "it is in in_review, where no phase claims; phases wait in received, clarified",
            "an event has to move it",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_a_row_says_why_a_claim_would_be_refused_and_what_to_do(
    row: dict[str, Any] | None, reason: str, told: str, do: str
) -> None:
    found = standing(a_gate(), "patch_sessions:1", row, NOW, LEASE)
    assert found.reason == reason
    assert told in found.told
    assert do in found.do
    assert found.claimable == (reason == "claimable")


def test_a_row_that_was_moved_to_escalated_cannot_be_retried_only_resolved() -> None:
    row = {**ROW, "status": "escalated", "claimed_from": None}
    assert "retry" not in standing(a_gate(), "patch_sessions:1", row, NOW, LEASE).do


def test_a_phases_own_lease_says_whether_its_renewals_are_late() -> None:
    gate = a_gate(lease=timedelta(seconds=600))
    row = {**HELD, "lease_until": NOW + timedelta(seconds=570)}
    assert "renewed 30 s ago: that process was alive then" in standing(gate, "patch_sessions:1", row, NOW, LEASE).told


@pytest.mark.parametrize(
    ("row", "reason", "told", "do"),
    [
        (DELIVERY, "claimable", "it waits in received for applying", "a running worker claims it"),
        (
            {
                **DELIVERY,
                "not_before": NOW + timedelta(seconds=15),
                "parked_on": "patch_sessions:7",
                "parked_since": NOW - timedelta(hours=1),
            },
            "parked",
            "it is parked on patch_sessions:7 since 2026-06-12 09:00:00+00:00",
            "webhooks why patch_sessions:7",
        ),
        (
            {**DELIVERY, "status": "dead", "claimed_from": "received", "last_error": "not UTF-8"},
            "escalated",
            "it is dead, a person has to decide: not UTF-8",
            "once what failed is mended: webhooks replay 1; or webhooks resolve deliveries:1 --to STATUS --reason …",
        ),
        (
            {**DELIVERY, "status": "ignored", "reason": "no handler for push"},
            "wrong status",
            "it has ended: ignored: no handler for push",
            "nothing; to apply it all the same: webhooks replay 1",
        ),
        (
            {**DELIVERY, "status": "processed", "reason": None},
            "wrong status",
            "it has ended: processed",
            "nothing; to apply it once more: webhooks replay 1",
        ),
        (
            {**DELIVERY, "status": "processed", "pruned_at": NOW},
            "wrong status",
            "it has ended: processed",
            "nothing; it was pruned, and cannot be run again",
        ),
        (
            {**DELIVERY, "status": "dead", "claimed_from": "received", "headers_pruned_at": NOW},
            "escalated",
            "no reason is recorded",
            "it was pruned, and cannot be run again; or webhooks resolve deliveries:1",
        ),
    ],
)
def test_a_delivery_says_so_too(row: dict[str, Any], reason: str, told: str, do: str) -> None:
    found = standing(inbox, "deliveries:1", row, NOW, LEASE)
    assert found.reason == reason
    assert told in found.told
    assert do in found.do
