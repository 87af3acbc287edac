"""Calls to the outside are made once, remembered, and never silently repeated."""

from __future__ import annotations

import asyncio
import functools
import math
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from gates import ENVIRONMENT, a_gate, due, expire, opened, outcomes_of, row_of, sql, status_of
from pydantic import BaseModel, ConfigDict
from wire import COMMIT, pool_over_a_wire

from webhooks.claim import Claim
from webhooks.errors import ConfigurationError, Escalate, LostClaim, NotDone, Snooze
from webhooks.outcome import Stop
from webhooks.pool import Pool


class Comment(BaseModel):
    id: int
    text: str
    at: datetime | None = None


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    at: datetime
    parts: tuple[int, ...]


@dataclass
class Patch:
    diff: str
    files: frozenset[str]


class Provider:
    """The other side: it counts its calls, and does with each what it was told."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[object, ...]] = []

    async def post(self, *args: object) -> Comment:
        self.calls.append(args)
        answer = self.answers.pop(0) if self.answers else Comment(id=len(self.calls), text="posted")
        if isinstance(answer, BaseException):
            raise answer
        if callable(answer):
            return await answer()  # type: ignore[no-any-return]
        return answer  # type: ignore[return-value]


async def effects_of(pool: Pool) -> list[dict[str, Any]]:
    return await sql(pool, "SELECT * FROM effects ORDER BY intended_at")


async def state_of(pool: Pool) -> str:
    [effect] = await effects_of(pool)
    return str(effect["state"])


async def attempt(pool: Pool, work: Callable[[Claim[Any]], Awaitable[object]]) -> Claim[Any]:
    """One attempt at row 1, which is released however it ends."""
    gate = a_gate()
    await due(pool, 1)
    claim = await gate.take(pool, "drafting", 1)
    assert claim is not None
    with suppress(Exception):
        async with claim.held():
            await work(claim)
    return claim


async def call_until_is_over(pool: Pool) -> None:
    await sql(pool, "UPDATE effects SET call_until = now() - interval '1 second'")


@pytest.fixture
async def row(pool: Pool) -> int:
    await opened(pool, a_gate(), 1)
    return 1


# ---- once


@pytest.mark.invariant(9)
async def test_a_retry_gets_the_recorded_result_instead_of_a_second_call(pool: Pool, row: int) -> None:
    provider = Provider()
    results: list[Comment] = []

    async def work(claim: Claim[Any]) -> None:
        results.append(await claim.once("comment", provider.post, "hello", 3))
        if len(results) < 3:
            raise ValueError("later")
        await claim.complete()

    first = await attempt(pool, work)
    await attempt(pool, work)
    last = await attempt(pool, work)
    assert provider.calls == [("hello", 3)]
    assert results == [Comment(id=1, text="posted")] * 3
    assert await status_of(pool, row) == "drafted"
    [effect] = await effects_of(pool)
    assert effect["idempotency_key"] == first.idempotency_key("comment") == last.idempotency_key("comment")
    assert effect["idempotency_key"] == f"patch_sessions:1:drafting:{first.visit}:comment"
    assert (effect["state"], effect["claim_seq"]) == ("done", first.claim_seq)
    assert effect["ended_at"] >= effect["intended_at"]


async def test_the_intention_is_committed_before_the_call_and_under_the_claim(pool: Pool, row: int) -> None:
    seen: list[tuple[str, int]] = []

    async def look() -> Comment:
        [effect] = await effects_of(pool)
        seen.append((effect["state"], effect["claim_seq"]))
        assert timedelta(minutes=9) < effect["call_until"] - datetime.now(UTC) <= timedelta(minutes=10)
        return Comment(id=1, text="")

    claim = await attempt(pool, lambda claim: claim.once("look", look, timeout=timedelta(minutes=10)))
    assert seen == [("intended", claim.claim_seq)]
    assert await state_of(pool) == "done"


async def test_another_visit_calls_again(pool: Pool, row: int) -> None:
    provider = Provider()
    await attempt(pool, lambda claim: claim.once("comment", provider.post, "hello"))
    async with pool.transaction() as tx:
        assert await a_gate().advance(tx, 1, "clarified", "clarified")
    await attempt(pool, lambda claim: claim.once("comment", provider.post, "hello"))
    assert len(provider.calls) == 2


async def test_effects_of_other_names_are_calls_of_their_own_also_at_once(pool: Pool, row: int) -> None:
    provider = Provider()

    async def work(claim: Claim[Any]) -> None:
        await asyncio.gather(*(claim.once(f"comment {n}", provider.post, n) for n in range(8)))
        await claim.complete()

    await attempt(pool, work)
    assert sorted(provider.calls) == [(n,) for n in range(8)]
    assert await status_of(pool, row) == "drafted"


@pytest.mark.invariant(5)
@pytest.mark.invariant(9)
async def test_a_lost_claim_makes_no_further_call(pool: Pool, row: int) -> None:
    """Case 34: the lease is lost between two calls."""
    provider = Provider()

    async def work(claim: Claim[Any]) -> None:
        await claim.once("first", provider.post, 1)
        await expire(pool, 1)
        await a_gate().sweep(pool, "drafting")
        with pytest.raises(LostClaim):
            await claim.once("second", provider.post, 2)
        raise LostClaim("gone")

    await attempt(pool, work)
    assert provider.calls == [(1,)]
    assert len(await effects_of(pool)) == 1


# ---- nobody knows


@pytest.mark.invariant(9)
async def test_a_call_that_certainly_did_not_happen_is_made_again(pool: Pool, row: int) -> None:
    provider = Provider(NotDone("no connection"))
    await attempt(pool, lambda claim: claim.once("comment", provider.post, "hello"))
    [effect] = await effects_of(pool)
    assert (effect["state"], effect["error"], effect["result"]) == ("failed", "NotDone: no connection", None)
    await attempt(pool, lambda claim: claim.once("comment", provider.post, "mended"))  # with whatever it takes
    assert provider.calls == [("hello",), ("mended",)]
    [effect] = await effects_of(pool)
    assert (effect["state"], effect["error"]) == ("done", None)
    await attempt(pool, lambda claim: claim.once("comment", provider.post, "mended"))
    assert len(provider.calls) == 2


@pytest.mark.invariant(9)
@pytest.mark.parametrize("failure", ["raises", "is cancelled", "takes too long"])
async def test_a_call_of_unknown_outcome_snoozes_and_then_escalates_and_is_not_repeated(
    pool: Pool, row: int, failure: str
) -> None:
    async def hang() -> Comment:
        await asyncio.Event().wait()
        raise AssertionError

    provider = Provider(ValueError("reset by peer") if failure == "raises" else hang)

    async def work(claim: Claim[Any]) -> None:
        if failure == "is cancelled":
            asyncio.get_running_loop().call_later(0.1, claim.stop, Stop.TIMEOUT)
        timeout = timedelta(milliseconds=100) if failure == "takes too long" else timedelta(seconds=30)
        await claim.once("comment", provider.post, "hello", timeout=timeout)

    first = await attempt(pool, work)
    assert (await state_of(pool), first.outcome) == ("intended", "error")
    await sql(pool, "UPDATE effects SET call_until = now() + interval '20 seconds'")
    assert (await attempt(pool, work)).outcome == "snoozed"
    [rests] = await sql(pool, "SELECT extract(epoch FROM not_before - now())::float AS s FROM patch_sessions")
    assert 15 < rests["s"] <= 20
    await call_until_is_over(pool)
    assert (await attempt(pool, work)).outcome == "escalated"
    assert len(provider.calls) == 1
    session = await row_of(pool, row)
    assert session["status"] == "escalated"
    assert "is ambiguous" in session["last_error"]
    assert first.idempotency_key("comment") in session["last_error"]
    # Nor does a person's retry call it silently.
    async with pool.transaction() as tx:
        assert await a_gate().retry(tx, 1, decided_by="Ann", reason="let us see")
    assert (await attempt(pool, work)).outcome == "escalated"
    assert len(provider.calls) == 1


@pytest.mark.invariant(9)
async def test_a_call_that_may_be_repeated_is_repeated_at_once_after_a_crash(pool: Pool, row: int) -> None:
    provider = Provider(ValueError("killed"))
    await attempt(pool, lambda claim: claim.once("draft", provider.post, 1, retry_safe=True))
    assert await state_of(pool) == "intended"
    second = await attempt(pool, lambda claim: claim.once("draft", provider.post, 1, retry_safe=True))
    assert len(provider.calls) == 2
    [effect] = await effects_of(pool)
    assert (effect["state"], effect["claim_seq"]) == ("done", second.claim_seq)
    await attempt(pool, lambda claim: claim.once("draft", provider.post, 1, retry_safe=True))
    assert len(provider.calls) == 2


# ---- reconcile


class OtherSide:
    """What the other side says of a call whose answer nobody knows."""

    def __init__(self, *answers: Comment | BaseException | None) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def look(self) -> Comment | None:
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.mark.invariant(9)
async def test_a_call_that_the_other_side_says_happened_is_recorded_and_not_made_again(pool: Pool, row: int) -> None:
    provider, other = Provider(ValueError("killed")), OtherSide(Comment(id=7, text="found"))
    results: list[Comment] = []

    async def work(claim: Claim[Any]) -> None:
        results.append(await claim.once("comment", provider.post, 1, reconcile=other.look))
        if len(results) < 2:
            raise ValueError("later")
        await claim.complete()

    await attempt(pool, work)
    await call_until_is_over(pool)
    second = await attempt(pool, work)
    [effect] = await effects_of(pool)
    assert (effect["state"], effect["claim_seq"], effect["calls"]) == ("done", second.claim_seq, 1)
    await attempt(pool, work)
    assert (len(provider.calls), other.asked) == (1, 1)
    assert results == [Comment(id=7, text="found")] * 2
    assert await status_of(pool, row) == "drafted"


@pytest.mark.invariant(9)
async def test_a_call_that_the_other_side_knows_nothing_of_is_made_again(pool: Pool, row: int) -> None:
    provider, other = Provider(ValueError("killed")), OtherSide(None)
    await attempt(pool, lambda claim: claim.once("comment", provider.post, 1, reconcile=other.look))
    await call_until_is_over(pool)
    await attempt(pool, lambda claim: claim.once("comment", provider.post, 1, reconcile=other.look))
    assert (len(provider.calls), other.asked) == (2, 1)
    [effect] = await effects_of(pool)
    # One of the two certainly did not happen: nothing was called twice.
    assert (effect["state"], effect["calls"], effect["not_done"]) == ("done", 2, 1)


async def test_the_other_side_is_asked_again_when_it_does_not_answer_and_not_before_the_call_is_over(
    pool: Pool, row: int
) -> None:
    provider, other = Provider(ValueError("killed")), OtherSide(ValueError("away"), Comment(id=7, text="found"))
    work: Callable[[Claim[Any]], Awaitable[object]]
    work = lambda claim: claim.once("comment", provider.post, 1, reconcile=other.look)  # noqa: E731
    await attempt(pool, work)
    assert (await attempt(pool, work)).outcome == "snoozed"
    assert other.asked == 0
    await call_until_is_over(pool)
    assert (await attempt(pool, work)).outcome == "error"
    assert await state_of(pool) == "intended"
    await attempt(pool, work)
    assert (await state_of(pool), len(provider.calls), other.asked) == ("done", 1, 2)


async def test_the_other_side_is_not_asked_about_a_call_that_is_safe_to_repeat_or_did_not_happen(
    pool: Pool, row: int
) -> None:
    provider, other = Provider(NotDone("refused"), ValueError("killed")), OtherSide()
    for _ in range(3):
        await attempt(pool, lambda claim: claim.once("call", provider.post, 1, reconcile=other.look, retry_safe=True))
    assert (await state_of(pool), len(provider.calls), other.asked) == ("done", 3, 0)


async def test_a_call_takes_no_longer_than_it_may(pool: Pool, row: int) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    async def work(claim: Claim[Any]) -> None:
        with pytest.raises(TimeoutError):
            await claim.once("hang", hang, timeout=timedelta(milliseconds=50))
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await claim.complete()

    await attempt(pool, work)
    assert await status_of(pool, row) == "drafted"


@pytest.mark.invariant(9)
@pytest.mark.parametrize("state", ["done", "intended"])
async def test_the_same_name_with_another_input_asks_a_person(pool: Pool, row: int, state: str) -> None:
    provider = Provider(*([ValueError("unknown")] if state == "intended" else []))
    await attempt(pool, lambda claim: claim.once("comment", provider.post, "hello", retry_safe=True))
    assert await state_of(pool) == state

    async def work(claim: Claim[Any]) -> None:
        with pytest.raises(Escalate, match="other arguments"):
            await claim.once("comment", provider.post, "good bye", retry_safe=True)

    await attempt(pool, work)
    assert provider.calls == [("hello",)]


# ---- the result is recorded whatever happens


@pytest.mark.invariant(9)
async def test_a_cancellation_between_the_call_and_its_record_loses_nothing(pool: Pool, row: int) -> None:
    calls = 0

    async def work(claim: Claim[Any]) -> None:
        async def post() -> int:
            nonlocal calls
            calls += 1
            # Delivered at the next await, which is that of the record.
            asyncio.get_running_loop().call_soon(claim.stop, Stop.DRAIN)
            return 7

        await claim.once("post", post)

    with suppress(asyncio.CancelledError):
        await asyncio.create_task(attempt(pool, work))
    assert await state_of(pool) == "done"
    assert await outcomes_of(pool, row) == ["interrupted"]


@pytest.mark.invariant(9)
async def test_an_owner_who_lost_the_row_during_the_call_can_still_say_what_happened(pool: Pool, row: int) -> None:
    async def work(claim: Claim[Any]) -> None:
        async def post() -> int:
            await expire(pool, 1)
            await a_gate().sweep(pool, "drafting")
            return 7

        assert await claim.once("post", post) == 7
        with pytest.raises(LostClaim):
            await claim.complete()
        raise LostClaim("gone")

    await attempt(pool, work)
    assert await state_of(pool) == "done"


@pytest.mark.invariant(9)
async def test_an_owner_whose_effect_was_taken_over_does_not_overwrite_it(pool: Pool, row: int) -> None:
    """The fence of the effect: the old result answers a call that nobody waits for any more."""
    gate = a_gate()

    async def old() -> str:
        await expire(pool, 1)
        await gate.sweep(pool, "drafting")
        await attempt(pool, lambda claim: claim.once("post", new, retry_safe=True))
        return "old"

    async def new() -> str:
        return "new"

    async def work(claim: Claim[Any]) -> None:
        with pytest.raises(LostClaim, match="taken over"):
            await claim.once("post", old, retry_safe=True)
        raise LostClaim("gone")

    await attempt(pool, work)
    [effect] = await effects_of(pool)
    assert (effect["state"], effect["result"]) == ("done", '"new"')


@pytest.mark.invariant(9)
async def test_an_owner_whose_effect_is_being_called_by_another_does_not_answer_for_it(pool: Pool, row: int) -> None:
    calling, answered = asyncio.Event(), asyncio.Event()
    second: list[asyncio.Task[Claim[Any]]] = []

    async def old() -> str:
        await expire(pool, 1)
        await a_gate().sweep(pool, "drafting")
        second.append(asyncio.create_task(attempt(pool, lambda claim: claim.once("post", new, retry_safe=True))))
        await calling.wait()
        return "old"

    async def new() -> str:
        calling.set()
        await answered.wait()
        return "new"

    async def work(claim: Claim[Any]) -> None:
        with pytest.raises(LostClaim, match="taken over"):
            await claim.once("post", old, retry_safe=True)
        raise LostClaim("gone")

    await attempt(pool, work)
    [effect] = await effects_of(pool)
    assert (effect["state"], effect["result"]) == ("intended", None)
    answered.set()
    await second[0]
    [effect] = await effects_of(pool)
    assert (effect["state"], effect["result"]) == ("done", '"new"')


@pytest.mark.invariant(9)
@pytest.mark.parametrize("how", ["cut after", "cut before"])
async def test_a_result_whose_record_was_cut_off_is_recorded(pool: Pool, row: int, database_url: str, how: Any) -> None:
    calls = 0
    async with pool_over_a_wire(database_url) as (wired_pool, wire):

        async def post() -> int:
            nonlocal calls
            calls += 1
            wire.at(COMMIT, how, times=2)
            return 7

        async with a_gate().claim(wired_pool, "drafting", 1) as claim:
            assert claim is not None
            assert await claim.once("post", post) == 7
            assert wire.cuts == 2
            await claim.complete()
    assert (calls, await state_of(pool)) == (1, "done")


@pytest.mark.invariant(9)
@pytest.mark.parametrize("how", ["cut after", "cut before"])
async def test_an_intention_whose_answer_was_lost_is_known_to_be_ours(
    pool: Pool, row: int, database_url: str, how: Any
) -> None:
    """Nothing was called yet, so it is not ambiguous: it is called, once."""
    provider = Provider()
    async with (
        pool_over_a_wire(database_url) as (wired_pool, wire),
        a_gate().claim(wired_pool, "drafting", 1) as claim,
    ):
        assert claim is not None
        wire.at(COMMIT, how, times=2)
        await claim.once("post", provider.post)
        assert wire.cuts == 2
        await claim.complete()
    assert (len(provider.calls), await state_of(pool)) == (1, "done")


@pytest.mark.invariant(9)
async def test_a_lost_answer_does_not_hide_that_this_attempt_called_before(
    pool: Pool, row: int, database_url: str
) -> None:
    provider = Provider(ValueError("unknown"))
    async with (
        pool_over_a_wire(database_url) as (wired_pool, wire),
        a_gate().claim(wired_pool, "drafting", 1) as claim,
    ):
        assert claim is not None
        with pytest.raises(ValueError, match="unknown"):
            await claim.once("post", provider.post)
        wire.at(COMMIT, "cut before")
        wire.at("ON CONFLICT", "cut before")
        with pytest.raises(Snooze):
            await claim.once("post", provider.post)
    assert len(provider.calls) == 1


@pytest.mark.invariant(9)
async def test_a_database_that_ends_the_session_of_the_record_gets_it_through_another(
    pool: Pool, row: int, database_url: str
) -> None:
    """`pg_terminate_backend` on every connection while the call is under way."""
    killed = 0

    async def post() -> int:
        nonlocal killed
        with psycopg.connect(database_url, autocommit=True) as admin:
            rows = admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'webhooks'"
            ).fetchall()
        killed = len(rows)
        return 7

    async with a_gate().claim(pool, "drafting", 1) as claim:
        assert claim is not None
        assert await claim.once("post", post) == 7
        await claim.complete()
    assert killed >= 1
    assert (await state_of(pool), await status_of(pool, row)) == ("done", "drafted")


# ---- what can be kept


VALUES: list[tuple[str, Any, Any]] = [
    ("nothing", None, None),
    ("text with what Postgres refuses", str, "a\x00b"),
    ("bytes", bytes, b"abc"),
    ("a time", datetime, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
    ("a model", Comment, Comment(id=1, text="é 😊", at=datetime(2026, 1, 2, tzinfo=UTC))),
    ("a strict model", Strict, Strict(at=datetime(2026, 1, 2, tzinfo=UTC), parts=(1, 2))),
    ("a dataclass", Patch, Patch("+ x", frozenset({"a", "b"}))),
    ("a tuple", tuple[int, str], (1, "a")),
    ("a list of models or nothing", list[Comment | None], [Comment(id=1, text=""), None]),
    ("infinity", float, math.inf),
    ("anything", Any, {"a": [1, None, "x"]}),
]


@pytest.mark.parametrize(("annotation", "value"), [case[1:] for case in VALUES], ids=[case[0] for case in VALUES])
async def test_the_first_attempt_and_a_later_one_get_the_same_value(
    pool: Pool, row: int, annotation: Any, value: Any
) -> None:
    async def get() -> Any:
        return value

    get.__annotations__["return"] = annotation
    seen: list[Any] = []

    async def work(claim: Claim[Any]) -> None:
        seen.append(await claim.once("get", get))
        raise ValueError("later")

    await attempt(pool, work)
    await attempt(pool, work)
    assert seen == [value, value]
    assert type(seen[0]) is type(seen[1]) is type(value)


async def test_a_lone_surrogate_in_a_result_is_replaced_for_the_first_attempt_too(pool: Pool, row: int) -> None:
    async def get() -> Comment:
        return Comment(id=1, text="a\ud83db")

    seen: list[Comment] = []

    async def work(claim: Claim[Any]) -> None:
        seen.append(await claim.once("get", get))

    await attempt(pool, work)
    await attempt(pool, work)
    assert seen == [Comment(id=1, text="a\ufffdb")] * 2


@pytest.mark.invariant(9)
async def test_a_result_that_cannot_be_kept_asks_a_person_and_is_not_called_again(pool: Pool, row: int) -> None:
    calls = 0

    async def get() -> int:
        nonlocal calls
        calls += 1
        return "not a number"  # type: ignore[return-value]

    async def work(claim: Claim[Any]) -> None:
        with pytest.raises(Escalate, match="was called, but its result cannot be kept"):
            await claim.once("get", get)
        raise Escalate("as it said")

    assert (await attempt(pool, work)).outcome == "escalated"
    assert (calls, await state_of(pool)) == (1, "intended")


@pytest.mark.invariant(9)
@pytest.mark.parametrize("said", ["a\x00b", "\ud83d", "x" * 30_000_000], ids=["NUL", "a surrogate", "30 MB"])
async def test_a_call_that_did_not_happen_is_not_ambiguous_whatever_was_said_of_it(
    pool: Pool, row: int, said: str
) -> None:
    provider = Provider(NotDone(said))

    async def work(claim: Claim[Any]) -> None:
        await claim.once("post", provider.post)

    await attempt(pool, work)
    assert await state_of(pool) == "failed"
    await attempt(pool, work)
    assert (len(provider.calls), await state_of(pool)) == (2, "done")


@pytest.mark.invariant(9)
@pytest.mark.parametrize(
    ("members", "state"), [([NotDone("a"), NotDone("b")], "failed"), ([NotDone("a"), ValueError("b")], "intended")]
)
async def test_a_group_of_calls_did_not_happen_only_when_none_of_them_did(
    pool: Pool, row: int, members: list[Exception], state: str
) -> None:
    provider = Provider(ExceptionGroup("g", members))

    async def work(claim: Claim[Any]) -> None:
        await claim.once("post", provider.post)

    await attempt(pool, work)
    assert await state_of(pool) == state
    assert (await row_of(pool, row))["last_error"] in ("NotDone: a; NotDone: b", "ValueError: b; NotDone: a")


async def test_a_text_that_the_database_refuses_does_not_leave_an_effect_ambiguous(pool: Pool, row: int) -> None:
    await sql(pool, "ALTER TABLE effects ADD CHECK (error !~ '429')")
    provider = Provider(NotDone("429"))

    async def work(claim: Claim[Any]) -> None:
        await claim.once("post", provider.post)

    await attempt(pool, work)
    [effect] = await effects_of(pool)
    assert (effect["state"], effect["error"]) == ("failed", "what went wrong could not be kept")
    assert await outcomes_of(pool, row) == ["error"]


async def test_a_result_that_the_database_refuses_asks_a_person(pool: Pool, row: int) -> None:
    await sql(pool, "ALTER TABLE effects ADD CHECK (result !~ 'posted')")
    provider = Provider()

    async def work(claim: Claim[Any]) -> None:
        await claim.once("post", provider.post)

    assert (await attempt(pool, work)).outcome == "escalated"
    assert "its result cannot be kept: CheckViolation" in (await row_of(pool, row))["last_error"]
    assert "posted" not in (await row_of(pool, row))["last_error"]


async def bare():  # type: ignore[no-untyped-def]
    return 1


async def misnamed() -> NoSuchName:  # type: ignore[name-defined]  # noqa: F821
    return 1


async def unkeepable() -> asyncio.Event:
    return asyncio.Event()


class Callable_:
    async def __call__(self, text: str) -> Comment:
        return Comment(id=1, text=text)


@pytest.mark.parametrize("fn", [bare, misnamed, unkeepable])
async def test_a_function_whose_result_cannot_be_kept_is_not_called(pool: Pool, row: int, fn: Any) -> None:
    async def work(claim: Claim[Any]) -> None:
        with pytest.raises(ConfigurationError):
            await claim.once("x", fn)

    await attempt(pool, work)
    assert await effects_of(pool) == []


async def test_arguments_that_cannot_be_kept_are_refused_before_the_call(pool: Pool, row: int) -> None:
    provider = Provider()

    async def work(claim: Claim[Any]) -> None:
        with pytest.raises(ConfigurationError, match="arguments of an effect"):
            await claim.once("x", provider.post, object())

    await attempt(pool, work)
    assert provider.calls == []


async def test_a_partial_is_looked_through_and_its_arguments_count(pool: Pool, row: int) -> None:
    async def post(text: str, *, mark: str, times: int = 1) -> Comment:
        return Comment(id=times, text=f"{text} {mark}")

    async def work(claim: Claim[Any]) -> None:
        marked = functools.partial(post, mark="m")
        assert (await claim.once("a", marked, "hello")).text == "hello m"
        assert (await claim.once("a", functools.partial(marked), "hello")).text == "hello m"
        assert (await claim.once("b", Callable_(), "hello")).text == "hello"
        with pytest.raises(Escalate, match="other arguments"):
            await claim.once("a", functools.partial(post, mark="n"), "hello")
        with pytest.raises(Escalate, match="other arguments"):
            await claim.once("a", functools.partial(marked, times=2), "hello")

    await attempt(pool, work)
    assert len(await effects_of(pool)) == 2


HASHES = """
from test_effects import Patch
from webhooks.effects import _input_hash
patch = Patch("d", frozenset(map(str, range(50))))
print(_input_hash(({"b", "a", "c"}, patch, b"\\xff", "x\\ud83d", 1.5, {"k": {3, 1}})))
"""


def test_the_same_arguments_are_the_same_in_another_process() -> None:
    """Sets have another order in every process."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", HASHES],
            env={**ENVIRONMENT, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64
