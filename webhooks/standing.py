"""How a row stands: whether a claim would win it now, and if not, why not and what to do. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from webhooks.gate import Gate
from webhooks.inbox import inbox
from webhooks.notify import notifications
from webhooks.phase import Phase

Reason = Literal[
    "claimable",
    "missing",
    "escalated",
    "held",
    "lease over",
    "claimed by hand",
    "exhausted",
    "parked",
    "wanting",
    "not due",
    "wrong status",
]


@dataclass(frozen=True, slots=True)
class Standing:
    """What would become of a claim made now.

    Args:
        reason: why it would be refused; `claimable` when it would not.
        told: the same as a sentence.
        do: what to do about it, with the command where there is one.
    """

    reason: Reason
    told: str
    do: str

    @property
    def claimable(self) -> bool:
        return self.reason == "claimable"


def standing(gate: Gate[Any], label: str, row: Mapping[str, Any] | None, now: datetime, lease: timedelta) -> Standing:
    """Say what would become of a claim.

    Args:
        gate: the gate over the row's table.
        label: the row as people name it.
        row: its gate columns; None where there is no such row.
        now: the database's time.
        lease: how long a claim lasts where its phase does not say.
    """
    if row is None:
        return Standing("missing", "there is no such row", "look at what arrived: webhooks deliveries")
    status = row["status"]
    if status == gate.escalated:
        told = f"it is {status}, a person has to decide: {row['last_error'] or 'no reason is recorded'}"
        if gate is inbox:
            do = _again(label, row, "once what failed is mended")
            return Standing("escalated", told, f"{do}; or webhooks resolve {label} --to STATUS --reason …")
        if row["claimed_from"] is None:
            return Standing("escalated", told, f"webhooks resolve {label} --to STATUS --reason …")
        do = f"webhooks retry {label} --reason …, or webhooks resolve {label} --to STATUS --reason …"
        return Standing("escalated", told, do)
    if status in gate.phases:
        return _claimed(label, row, now, gate.phases[status].lease or lease)
    phase = gate.entered(status)
    if phase is None and gate is inbox:
        why = f": {row['reason']}" if row.get("reason") else ""
        when = "to apply it all the same" if status == "ignored" else "to apply it once more"
        return Standing("wrong status", f"it has ended: {status}{why}", f"nothing; {_again(label, row, when)}")
    if phase is None:
        waits = ", ".join(each.ready for each in gate.phases.values())
        told = f"it is in {status}, where no phase claims; phases wait in {waits}"
        done = any(status in each.done for each in gate.phases.values())
        do = "nothing, unless an event moves it on" if done else "an event has to move it: webhooks deliveries"
        return Standing("wrong status", told, do)
    return _ready(label, row, now, phase, worked=phase.function is not None or gate in (inbox, notifications))


def _again(label: str, row: Mapping[str, Any], when: str) -> str:
    """Say how an ended delivery is run again, if it can be."""
    if row.get("pruned_at") or row.get("headers_pruned_at"):
        return "it was pruned, and cannot be run again"
    return f"{when}: webhooks replay {label.partition(':')[2]}"


def _claimed(label: str, row: Mapping[str, Any], now: datetime, lease: timedelta) -> Standing:
    if row["lease_until"] is None:
        told = f"it was set to {row['status']} by hand, without a lease"
        return Standing("claimed by hand", told, "the next sweep gives it a lease and a way back: webhooks work")
    until, claimed_at = row["lease_until"], row["claimed_at"]
    told = (
        f"{row['claimed_by'] or 'somebody'} has held it in {row['status']} since {_at(claimed_at)}, "
        f"attempt {row['attempt_count']} of {row['max_attempts']}; its lease "
    )
    if until <= now:
        told += f"was over at {_at(until)}, {_span(now - until)} ago: that process has stopped answering"
        return Standing("lease over", told, "the next sweep frees it: webhooks work, and webhooks status")
    told += f"lasts until {_at(until)}, {_span(until - now)} from now"
    renewed = until - lease
    if claimed_at is None or renewed > now:
        return Standing("held", told, "wait for its end, or for that of its lease")
    # A lease is renewed every third of it: past two, the owner has missed one.
    late = now - renewed > lease * 2 / 3
    told += f", and was renewed {_span(now - renewed)} ago" if renewed > claimed_at else ", and was not renewed yet"
    if late:
        return Standing(
            "held", f"{told}: that process may have died", "when the lease is over a sweep frees it: webhooks work"
        )
    alive = (
        "that process was alive then" if renewed > claimed_at else "it is too early to tell whether that process lives"
    )
    return Standing("held", f"{told}: {alive}", "wait for its end, or for that of its lease")


def _ready(label: str, row: Mapping[str, Any], now: datetime, phase: Phase, *, worked: bool) -> Standing:
    count, most, due = row["attempt_count"], row["max_attempts"], row["not_before"]
    if count >= most:
        told = f"it is exhausted: {count} of {most} attempts are used up"
        do = f"the next sweep escalates it (webhooks work); then: webhooks retry {label} --reason …"
        return Standing("exhausted", told, do)
    if row.get("wants"):
        told = f"no process that claimed it handles {row['wants']}: it waits for one that does"
        return Standing("wanting", told, "start such a process; webhooks status lists those that run")
    if due > now:
        when = f"it is not due until {_at(due)}, {_span(due - now)} from now"
        if row.get("parked_on"):
            told = f"{when}: it is parked on {row['parked_on']} since {_at(row['parked_since'])}"
            do = (
                f"it is due as soon as that row moves: webhooks why {row['parked_on']}; now: webhooks retry {label} "
                f"--reason …; never: webhooks resolve {label} --to ignored --reason …"
            )
            return Standing("parked", told, do)
        why = f" ({row['last_error']})" if row["last_error"] else ""
        return Standing(
            "not due", f"{when}, after {count} of {most} attempts{why}", "wait: it is claimed when it is due"
        )
    told = f"yes: it waits in {row['status']} for {phase.claimed}, with {most - count} of {most} attempts left"
    if not worked:
        return Standing("claimable", told, "no worker runs this phase: the code that claims it has to ask")
    return Standing("claimable", told, "a running worker claims it at once: webhooks work")


def _at(moment: datetime | None) -> str:
    return "an unknown time" if moment is None else moment.isoformat(sep=" ", timespec="seconds")


def _span(span: timedelta) -> str:
    seconds = span.total_seconds()
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
