"""The retry policy, as a table: how an attempt ended, and what is written for it."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from psycopg.errors import LockNotAvailable, ReadOnlySqlTransaction, UniqueViolation
from psycopg_pool import PoolTimeout

from webhooks.errors import ConfigurationError, Escalate, Ignore, LostClaim, NotDone, Snooze
from webhooks.outcome import Backoff, Outcome, Release, Stop, release_for

BACKOFF = Backoff()
NOW = timedelta(0)
SECOND = timedelta(seconds=1)
SEVEN = timedelta(seconds=7)
FIRST_WAIT = timedelta(seconds=5)


EVER = timedelta(days=3650)
LATE = "it ran longer than its phase's timeout"


def group(*errors: Exception) -> ExceptionGroup[Exception]:
    """What `asyncio.TaskGroup` raises."""
    return ExceptionGroup("unhandled errors in a TaskGroup", errors)


def rests(outcome: Outcome, delay: timedelta, error: str | None) -> Release:
    """Released without charge."""
    return Release(outcome, charged=False, escalate=False, delay=delay, error=error)


def failed(error: str) -> Release:
    """Released, the attempt charged, after the first wait."""
    return Release("error", charged=True, escalate=False, delay=FIRST_WAIT, error=error)


def asks(reason: str) -> Release:
    """Escalated."""
    return Release("escalated", charged=True, escalate=True, delay=NOW, error=reason)


ENDINGS: list[tuple[str, BaseException | None, Stop | None, Release | None]] = [
    ("left without complete()", None, None, rests("interrupted", SECOND, "the block was left without complete()")),
    ("an exception", ValueError("no"), None, failed("ValueError: no")),
    ("an exception without words", KeyError(), None, failed("KeyError")),
    ("a refused statement", UniqueViolation("twice"), None, failed("UniqueViolation: twice")),
    ("sys.exit", SystemExit(1), None, failed("SystemExit: 1")),
    ("snoozed", Snooze(timedelta(minutes=3)), None, rests("snoozed", timedelta(minutes=3), None)),
    ("snoozed for less than a second", Snooze(NOW), None, rests("snoozed", SECOND, None)),
    ("told to wait", NotDone("429", retry_after=SEVEN), None, rests("snoozed", SEVEN, "NotDone: 429")),
    ("told to wait a moment", NotDone("429", retry_after=NOW), None, rests("snoozed", SECOND, "NotDone: 429")),
    ("not done", NotDone("404"), None, failed("NotDone: 404")),
    ("a row locked too long", LockNotAvailable("busy"), None, rests("snoozed", SECOND, "LockNotAvailable: busy")),
    ("no connection was free", PoolTimeout("3 s"), None, rests("snoozed", SECOND, "PoolTimeout: 3 s")),
    ("escalated", Escalate("ask them"), None, asks("ask them")),
    ("a mistake of the code", ConfigurationError("no such column"), None, asks("no such column")),
    ("lost", LostClaim("gone"), None, None),
    ("told to wait for ever", NotDone("429", retry_after=timedelta.max), None, rests("snoozed", EVER, "NotDone: 429")),
    ("a group of one", group(Escalate("ask")), None, asks("ask")),
    ("a group in a group", group(group(Snooze(SEVEN))), None, rests("snoozed", SEVEN, None)),
    ("a group of equals", group(ValueError("a"), ValueError("a")), None, failed("ValueError: a")),
    ("two that have to wait", group(Snooze(SECOND), Snooze(SEVEN)), None, rests("snoozed", SEVEN, None)),
    ("two that ask", group(Escalate("who?"), Escalate("what?")), None, asks("who?; what?")),
    ("lost among others", group(Escalate("ask"), group(LostClaim("gone"), ValueError())), None, None),
    ("an error, and one who asks", group(ValueError("no"), Escalate("ask")), None, asks("ask; ValueError: no")),
    ("an error among calls not made", group(NotDone("429", retry_after=SEVEN), ValueError("no")), None,
        failed("ValueError: no; NotDone: 429")),
    ("an error and a busy row", group(LockNotAvailable("busy"), ValueError("no")), None,
        failed("ValueError: no; LockNotAvailable: busy")),
    ("a call not made, and a snooze", group(Snooze(SECOND), NotDone("429", retry_after=SEVEN)), None,
        rests("snoozed", SEVEN, "NotDone: 429; Snooze: snoozed for 0:00:01")),
    ("two calls not made", group(NotDone("429", retry_after=SECOND), NotDone("503", retry_after=SEVEN)), None,
        rests("snoozed", SEVEN, "NotDone: 503; NotDone: 429")),
    ("two calls not made, one for no known time", group(NotDone("429", retry_after=SECOND), NotDone("404")), None,
        failed("NotDone: 404; NotDone: 429")),
    ("a snooze among events of no business", group(Ignore("no"), Snooze(SEVEN)), None,
        rests("snoozed", SEVEN, None)),
    ("interrupted in a group", BaseExceptionGroup("g", [KeyboardInterrupt()]), None, failed("KeyboardInterrupt")),
    ("cancelled by nobody we know", asyncio.CancelledError(), None, failed("CancelledError")),
    ("drained", asyncio.CancelledError(), Stop.DRAIN, rests("interrupted", NOW, "the worker is stopping")),
    ("drained, but it failed by itself", ValueError("no"), Stop.DRAIN, failed("ValueError: no")),
    ("drained, and snoozed", Snooze(SECOND), Stop.DRAIN, rests("snoozed", SECOND, None)),
    ("timed out", asyncio.CancelledError(), Stop.TIMEOUT, failed(LATE)),
    ("timed out, and raised on the way", ValueError("no"), Stop.TIMEOUT, failed(LATE)),
    ("its lease was lost", asyncio.CancelledError(), Stop.LOST, None),
    ("its lease was lost, and it failed", ValueError("no"), Stop.LOST, None),
    ("its lease was lost, and it was left", None, Stop.LOST, None),
    ("its lease was lost, and it escalated", Escalate("ask"), Stop.LOST, None),
]  # fmt: skip


@pytest.mark.invariant(7)
@pytest.mark.parametrize(
    ("error", "stop", "written"), [case[1:] for case in ENDINGS], ids=[case[0] for case in ENDINGS]
)
def test_an_ending_means_one_thing(error: BaseException | None, stop: Stop | None, written: Release | None) -> None:
    assert release_for(error, stop, 1, BACKOFF, 0.5) == written


@pytest.mark.parametrize(
    ("attempt", "chance", "seconds"),
    [
        (1, 0.5, 5),
        (2, 0.5, 10),
        (3, 0.5, 20),
        (7, 0.5, 320),
        (8, 0.5, 600),
        (30, 0.5, 600),
        (10_000, 0.5, 600),
        (1, 0.0, 4),
        (3, 0.0, 16),
        (3, 0.999_999_999, 24),
        (50, 0.999_999_999, 720),
    ],
)
def test_the_wait_doubles_up_to_ten_minutes_and_is_spread_by_a_fifth(
    attempt: int, chance: float, seconds: float
) -> None:
    assert BACKOFF.after(attempt, chance).total_seconds() == pytest.approx(seconds)


def test_the_wait_follows_the_attempt() -> None:
    release = release_for(ValueError(), None, 3, BACKOFF, 0.5)
    assert release is not None
    assert release.delay == timedelta(seconds=20)


@pytest.mark.parametrize(("put_back", "seconds"), [(0, 1), (1, 2), (4, 16), (30, 600)])
def test_what_lies_with_the_database_is_not_charged_and_waits_longer_each_time(put_back: int, seconds: int) -> None:
    error = ReadOnlySqlTransaction("standby")
    released = release_for(error, None, 1, BACKOFF, 0.5, put_back=put_back)
    assert released == rests("snoozed", timedelta(seconds=seconds), "ReadOnlySqlTransaction: standby")
