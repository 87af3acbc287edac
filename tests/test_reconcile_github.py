"""GitHub's delivery log beside our inbox: what is missing here is delivered again, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx
from consumers import arrival, arrived, from_github, patching, stack
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from github_standin import API, HOOK, PATH, DeliveryLog, StillClock

from webhooks import Consumer, GitHub, Pool, Shortcut
from webhooks.errors import ConfigurationError, ProviderError
from webhooks.inbox import Copy
from webhooks.provider_api import Clock, ProviderClient, github_client
from webhooks.reconcile import asking, github_log, turns
from webhooks.reconcile.app_auth import AppAuth, app_auth
from webhooks.reconcile.common import source_of
from webhooks.reconcile.comparing import Verdict, compared
from webhooks.reconcile.github import Comparison, compare
from webhooks.reconcile.github_log import Attempt, Hook, found
from webhooks.reconcile.redelivering import Outcome, redeliver
from webhooks.reconcile.scheduled import Plan, plan, round_of
from webhooks.reconcile.targets import Scheduled, Target, organization, repository, scheduled
from webhooks.settings import Settings

BODY = b'{"ref":"refs/heads/main"}'
FAILED = "failed to connect"
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
SETTINGS = Settings(github_token="ghp_invented", github_api=API)
TARGET = repository("acme/app", HOOK)
THE_HOOK = Hook(TARGET, PATH, HOOK)
GITHUB = GitHub()


@pytest.fixture
def log() -> DeliveryLog:
    return DeliveryLog()


@pytest.fixture
def time(log: DeliveryLog) -> StillClock:
    return StillClock(log.now)


@pytest.fixture
async def github() -> AsyncIterator[ProviderClient]:
    async with github_client(SETTINGS) as client:
        yield client


async def store(pool: Pool, guid: str, *, hook: int | None = HOOK) -> int:
    key = guid if hook is None else f"{hook}:{guid}"
    return (await arrived(pool, arrival(BODY, source="github", key=key)))[0]


async def nothing(guid: str) -> None:
    """GitHub agrees, and nothing arrives."""


def by_guid(comparison: Comparison) -> dict[str, Verdict]:
    return {line.guid: line.verdict for line in comparison.lines}


# Comparing


def attempt(id: int, guid: str, status: str | None, *, ago: timedelta = HOUR) -> Attempt:
    now = datetime(2026, 6, 12, tzinfo=UTC)
    return Attempt(id=id, guid=guid, delivered_at=now - ago, status=status, event="issues", action="opened")


@pytest.mark.parametrize(
    ("statuses", "here", "ago", "verdict"),
    [
        ((FAILED, "OK"), True, HOUR, "here"),
        (("OK",), True, HOUR, "here"),
        ((FAILED,), True, 9 * DAY, "here"),
        ((FAILED, FAILED), False, HOUR, "failed"),
        (("timed out",), False, HOUR, "failed"),
        ((None,), False, HOUR, "failed"),
        (("OK",), False, HOUR, "missing"),
        (("OK", FAILED), False, HOUR, "missing"),
        (("OK",), False, 3 * DAY + HOUR, "expired"),
        ((FAILED,), False, 3 * DAY + HOUR, "expired"),
        ((FAILED,), False, 3 * DAY - HOUR, "failed"),
    ],
)
def test_our_inbox_decides_and_github_s_opinion_only_names_it(
    statuses: tuple[str | None, ...], here: bool, ago: timedelta, verdict: Verdict
) -> None:
    attempts = [attempt(number, "g", status, ago=ago) for number, status in enumerate(statuses)]
    copies = {"g": Copy(7, "processed", None)} if here else {}

    [line] = compared(attempts, copies, datetime(2026, 6, 12, tzinfo=UTC) - 3 * DAY)

    assert line.verdict == verdict
    assert line.wanted == (verdict in ("missing", "failed"))
    assert line.event == "issues.opened"
    assert (line.delivery, line.status) == ((7, "processed") if here else (None, None))


def test_attempts_are_grouped_by_guid_and_the_newest_is_asked_for_again() -> None:
    attempts = [
        attempt(4, "b", "OK", ago=1 * HOUR),
        attempt(3, "a", "timed out", ago=2 * HOUR),
        attempt(2, "b", FAILED, ago=3 * HOUR),
        attempt(1, "a", FAILED, ago=4 * HOUR),
        attempt(2, "b", FAILED, ago=3 * HOUR),
    ]

    lines = compared(attempts, {}, datetime(2026, 6, 1, tzinfo=UTC))

    assert [(line.guid, line.attempt, line.statuses) for line in lines] == [
        ("a", 3, (FAILED, "timed out")),
        ("b", 4, (FAILED, "OK")),
    ]


# The proof


async def test_what_is_not_here_is_delivered_again_and_what_is_here_is_left_alone(
    database_url: str, log: DeliveryLog, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    a = log.add(FAILED, "OK", ago=HOUR)
    b = log.add(FAILED, FAILED, ago=2 * HOUR)
    c = log.add("OK", ago=3 * HOUR)
    d = log.add("OK", ago=4 * HOUR)
    expired = log.add(FAILED, ago=4 * DAY)
    others = [log.add("OK", ago=timedelta(minutes=number)) for number in range(10, 250)]
    async with stack(database_url, patching(), work=False) as here:
        for guid in (a, c, *others):
            assert (await here.send(from_github(BODY, guid=guid, hook=str(HOOK)))).status_code == 202

        async def redelivered(guid: str) -> None:
            """As GitHub does it: the same guid, the same hook, signed again."""
            assert (await here.send(from_github(BODY, guid=guid, hook=str(HOOK)))).status_code == 202

        log.answer(respx_mock, redelivered)
        time = StillClock(log.now)
        begin = here.pool.transaction
        comparison = await compare(begin, github, THE_HOOK, GITHUB, 5 * DAY, clock=time.clock)
        verdicts = by_guid(comparison)
        assert {guid: verdicts[guid] for guid in (a, b, c, d, expired)} == {
            a: "here",
            b: "failed",
            c: "here",
            d: "missing",
            expired: "expired",
        }
        assert {verdicts[guid] for guid in others} == {"here"}
        assert log.pages == 3
        assert not log.asked

        outcomes = await redeliver(begin, github, comparison, clock=time.clock)

        # The oldest first, each once, by its newest attempt.
        assert log.asked == [log.newest(d), log.newest(b)]
        stored = {row["dedup_key"]: row["id"] for row in await here.deliveries()}
        assert outcomes == {guid: Outcome("arrived", asked=True, delivery=stored[f"{HOOK}:{guid}"]) for guid in (b, d)}
        assert [line.guid for line in comparison.expired] == [expired]
        assert len(stored) == len(others) + 4
        again = await compare(begin, github, THE_HOOK, GITHUB, 5 * DAY, clock=time.clock)
        assert not again.wanted


# Reading the log


async def test_the_log_is_read_no_further_than_asked(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    recent = [log.add("OK", ago=timedelta(minutes=number)) for number in range(150)]
    old = [log.add("OK", ago=6 * HOUR + timedelta(minutes=number)) for number in range(450)]
    log.answer(respx_mock, nothing)

    comparison = await compare(pool.transaction, github, THE_HOOK, GITHUB, 6 * HOUR, clock=time.clock)

    assert set(by_guid(comparison)) == {*recent, old[0]}  # exactly six hours ago counts
    assert log.pages == 3
    assert comparison.begins_at is None


async def test_a_log_that_begins_later_than_asked_says_so(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    log.add("OK", ago=2 * DAY)
    log.answer(respx_mock, nothing)

    longer = await compare(pool.transaction, github, THE_HOOK, GITHUB, 6 * DAY, clock=time.clock)
    shorter = await compare(pool.transaction, github, THE_HOOK, GITHUB, log.now - HOUR, clock=time.clock)

    assert longer.begins_at is not None
    assert abs(longer.begins_at - (log.now - 2 * DAY)) < timedelta(seconds=1)
    assert shorter.begins_at is None
    assert not shorter.lines


async def test_our_token_is_not_sent_where_a_link_leads_and_a_loop_is_an_error(
    pool: Pool, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    link = '<https://elsewhere.test/steal?per_page=100&cursor=again>; rel="next"'
    route = respx_mock.get(url__startswith=f"{API}{PATH}/deliveries").respond(json=[], headers={"link": link})

    with pytest.raises(ProviderError, match="leads back"):
        await compare(pool.transaction, github, THE_HOOK, GITHUB, HOUR, clock=time.clock)

    assert [call.request.url.host for call in route.calls] == ["github.test", "github.test"]
    assert route.calls.last.request.url.params["cursor"] == "again"


async def test_a_link_that_cannot_be_read_is_an_error(
    pool: Pool, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    respx_mock.get(f"{API}{PATH}/deliveries").respond(json=[], headers={"link": '<http://[::1>; rel="next"'})

    with pytest.raises(ProviderError, match="an address that cannot be read"):
        await compare(pool.transaction, github, THE_HOOK, GITHUB, HOUR, clock=time.clock)


async def test_a_log_that_always_goes_on_is_read_to_a_limit(
    pool: Pool,
    time: StillClock,
    github: ProviderClient,
    respx_mock: respx.MockRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(github_log, "MOST_PAGES", 7)

    def page(request: httpx.Request) -> httpx.Response:
        assert route.call_count < 20, "it is read for ever"
        cursor = int(request.url.params.get("cursor", "0")) + 1
        return httpx.Response(200, json=[], headers={"link": f'<{request.url.path}?cursor={cursor}>; rel="next"'})

    route = respx_mock.get(url__startswith=f"{API}{PATH}/deliveries").mock(side_effect=page)

    with pytest.raises(ProviderError, match="does not end: 7 pages"):
        await compare(pool.transaction, github, THE_HOOK, GITHUB, HOUR, clock=time.clock)
    assert route.call_count == 7


async def test_what_the_log_has_only_redeliveries_of_is_named_and_not_asked_for(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    guid = log.add("OK", "OK", ago=2 * DAY)
    log.forget_first(guid)  # and its key was pruned here
    log.answer(respx_mock, nothing)

    comparison = await compare(pool.transaction, github, THE_HOOK, GITHUB, 3 * DAY, clock=time.clock)

    assert by_guid(comparison) == {guid: "beyond"}
    assert [line.guid for line in comparison.left_alone] == [guid]
    assert await redeliver(pool.transaction, github, comparison, clock=time.clock) == {}
    assert not log.asked


async def test_the_first_attempt_is_looked_for_past_where_reading_would_end(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    begun = log.add(FAILED, ago=30 * HOUR)
    log.add_again(begun, FAILED, ago=HOUR)
    others = [log.add("OK", ago=2 * HOUR + timedelta(minutes=number)) for number in range(350)]
    log.answer(respx_mock, nothing)

    comparison = await compare(pool.transaction, github, THE_HOOK, GITHUB, timedelta(minutes=90), clock=time.clock)

    assert by_guid(comparison) == {begun: "failed"}
    assert log.pages == 4
    await store(pool, begun)
    again = await compare(pool.transaction, github, THE_HOOK, GITHUB, timedelta(minutes=90), clock=time.clock)
    assert by_guid(again) == {begun: "here"}
    assert log.pages == 4 + 2  # nothing further is read for what is here
    assert len(others) == 350


@pytest.mark.parametrize("guid", ["nul\x00here", "x" * 5000, "grün"])
async def test_a_guid_that_nothing_can_arrive_under_is_named_and_the_others_go_on(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter, guid: str
) -> None:
    log.add(FAILED, ago=2 * HOUR, guid=guid)
    fine = log.add(FAILED, ago=HOUR)

    async def delivered(guid: str) -> None:
        await store(pool, guid)

    log.answer(respx_mock, delivered)
    comparison = await compare(pool.transaction, github, THE_HOOK, GITHUB, DAY, clock=time.clock)

    assert by_guid(comparison) == {guid: "unusable", fine: "failed"}
    assert [line.guid for line in comparison.left_alone] == [guid]
    outcomes = await redeliver(pool.transaction, github, comparison, clock=time.clock)
    assert {guid: outcome.result for guid, outcome in outcomes.items()} == {fine: "arrived"}


@pytest.mark.parametrize(
    "answer", [{"message": "odd"}, [{"id": 1}], [{"id": 1, "guid": "g", "delivered_at": "2026-06-12T10:00:00"}]]
)
async def test_a_log_that_cannot_be_read_is_an_error_that_says_where(
    pool: Pool, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter, answer: Any
) -> None:
    respx_mock.get(f"{API}{PATH}/deliveries").respond(json=answer)

    with pytest.raises(ProviderError, match="GitHub's delivery log cannot be read"):
        await compare(pool.transaction, github, THE_HOOK, GITHUB, HOUR, clock=time.clock)


async def test_a_delivery_counts_as_here_under_the_key_of_its_hook_or_none_but_not_of_another(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    ours, bare, others = (log.add("OK", ago=HOUR) for _ in range(3))
    await store(pool, ours)
    await store(pool, bare, hook=None)
    await store(pool, others, hook=HOOK + 1)
    log.answer(respx_mock, nothing)

    comparison = await compare(pool.transaction, github, THE_HOOK, GITHUB, DAY, clock=time.clock)
    elsewhere = await compare(pool.transaction, github, THE_HOOK, GitHub("github2"), DAY, clock=time.clock)

    assert by_guid(comparison) == {ours: "here", bare: "here", others: "missing"}
    assert set(by_guid(elsewhere).values()) == {"missing"}


# Asking again


async def missing(pool: Pool, github: ProviderClient, time: StillClock) -> Comparison:
    return await compare(pool.transaction, github, THE_HOOK, GITHUB, DAY, clock=time.clock)


async def age(pool: Pool, by: timedelta) -> None:
    async with pool.transaction() as tx:
        await tx.execute("UPDATE redeliveries SET asked_at = asked_at - %(by)s", {"by": by})


async def test_what_did_not_arrive_is_said_and_not_asked_for_again_within_minutes(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    guid = log.add(FAILED, ago=HOUR)
    log.answer(respx_mock, nothing)
    comparison = await missing(pool, github, time)

    first = await redeliver(pool.transaction, github, comparison, wait=timedelta(minutes=1), clock=time.clock)
    second = await redeliver(pool.transaction, github, comparison, wait=timedelta(minutes=1), clock=time.clock)

    assert (first[guid].result, first[guid].asked) == ("not arrived", True)
    assert (second[guid].result, second[guid].asked) == ("not arrived", False)
    assert len(log.asked) == 1
    assert 60 <= sum(time.waits) / 2 <= 70

    await age(pool, timedelta(minutes=5))
    third = await redeliver(pool.transaction, github, comparison, wait=timedelta(minutes=1), clock=time.clock)
    assert third[guid].asked
    assert len(log.asked) == 2


async def test_what_another_run_asked_for_is_waited_for(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    guid = log.add(FAILED, ago=HOUR)
    log.answer(respx_mock, nothing)
    comparison = await missing(pool, github, time)
    async with pool.transaction() as tx:
        assert await asking.claim(tx, THE_HOOK.scope, guid)
        await asking.answered(tx, THE_HOOK.scope, guid)

    async def it_arrives() -> None:
        if len(time.waits) == 3:
            await store(pool, guid)

    time.meanwhile = it_arrives
    outcomes = await redeliver(pool.transaction, github, comparison, clock=time.clock)

    assert (outcomes[guid].result, outcomes[guid].asked) == ("arrived", False)
    assert not log.asked


async def test_a_claim_whose_run_died_before_it_asked_is_taken_over_within_the_same_wait(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    guid = log.add(FAILED, ago=HOUR)

    async def delivered(guid: str) -> None:
        await store(pool, guid)

    log.answer(respx_mock, delivered)
    comparison = await missing(pool, github, time)
    async with pool.transaction() as tx:
        assert await asking.claim(tx, THE_HOOK.scope, guid)

    async def the_database_s_clock_goes_on() -> None:
        await age(pool, timedelta(seconds=time.waits[-1]))

    time.meanwhile = the_database_s_clock_goes_on
    outcomes = await redeliver(pool.transaction, github, comparison, clock=time.clock)

    assert (outcomes[guid].result, outcomes[guid].asked) == ("arrived", True)
    assert len(log.asked) == 1
    assert 60 <= sum(time.waits) <= 75


async def test_a_run_that_died_when_it_asked_for_the_second_time_is_taken_over_as_soon(pool: Pool) -> None:
    async def claimed() -> bool:
        async with pool.transaction() as tx:
            return await asking.claim(tx, "scope", "guid")

    assert await claimed()
    async with pool.transaction() as tx:
        await asking.answered(tx, "scope", "guid")
    await age(pool, timedelta(minutes=5))
    assert await claimed()
    assert not await claimed()
    await age(pool, timedelta(minutes=1))
    assert await claimed()


async def test_the_wait_is_counted_from_the_last_one_asked_for(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    guids = [log.add(FAILED, ago=timedelta(minutes=number)) for number in range(6)]
    log.answer(respx_mock, nothing)

    async def they_arrive_late() -> None:
        if len(time.waits) == 8:
            for guid in guids:
                await store(pool, guid)

    time.meanwhile = they_arrive_late
    comparison = await missing(pool, github, time)
    outcomes = await redeliver(pool.transaction, github, comparison, wait=timedelta(seconds=4), clock=time.clock)

    assert [outcome.result for outcome in outcomes.values()] == ["arrived"] * 6


async def test_one_run_asks_for_a_delivery_once_however_long_it_waits(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    log.add(FAILED, ago=HOUR)
    log.answer(respx_mock, nothing)

    async def the_database_s_clock_goes_on() -> None:
        await age(pool, timedelta(seconds=time.waits[-1]))

    time.meanwhile = the_database_s_clock_goes_on
    comparison = await missing(pool, github, time)
    await redeliver(pool.transaction, github, comparison, wait=timedelta(minutes=7), clock=time.clock)

    assert len(log.asked) == 1


async def test_many_runs_at_once_ask_for_each_once(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    guids = [log.add(FAILED, ago=timedelta(minutes=number)) for number in range(8)]

    async def delivered(guid: str) -> None:
        await asyncio.sleep(0)
        await store(pool, guid)

    log.answer(respx_mock, delivered)
    comparison = await missing(pool, github, time)

    runs = [redeliver(pool.transaction, github, comparison, clock=StillClock(log.now).clock) for _ in range(5)]
    results = await asyncio.gather(*runs)

    assert sorted(log.asked) == sorted(log.newest(guid) for guid in guids)
    assert all(outcome.result == "arrived" for outcomes in results for outcome in outcomes.values())


async def test_what_arrives_before_its_turn_is_not_asked_for(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    guid = log.add(FAILED, ago=HOUR)
    log.answer(respx_mock, nothing)
    comparison = await missing(pool, github, time)
    id = await store(pool, guid)

    outcomes = await redeliver(pool.transaction, github, comparison, clock=time.clock)

    assert outcomes == {guid: Outcome("arrived", asked=False, delivery=id)}
    assert not log.asked


async def test_what_github_cannot_deliver_again_is_named_and_the_others_go_on(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    gone, fine = log.add(FAILED, ago=2 * HOUR), log.add(FAILED, ago=HOUR)

    async def answer(guid: str) -> httpx.Response | None:
        if guid == gone:
            return httpx.Response(422, json={"message": "too old to redeliver"})
        await store(pool, guid)
        return None

    log.answer(respx_mock, answer)
    outcomes = await redeliver(pool.transaction, github, await missing(pool, github, time), clock=time.clock)

    assert outcomes[fine].result == "arrived"
    assert outcomes[gone].result == "refused"
    assert "too old to redeliver" in str(outcomes[gone].reason)


@pytest.mark.parametrize(
    "refusal",
    [
        httpx.Response(500, json={"message": "Server Error"}),
        httpx.Response(503, headers={"retry-after": "3600"}),
        httpx.Response(409, json={"message": "Conflict"}),
        httpx.ReadTimeout("no answer"),
    ],
    ids=["500", "503 with a time", "409", "no answer"],
)
async def test_one_that_github_cannot_take_just_now_keeps_no_other_from_being_asked_for(
    pool: Pool,
    log: DeliveryLog,
    time: StillClock,
    github: ProviderClient,
    respx_mock: respx.MockRouter,
    refusal: httpx.Response | httpx.ReadTimeout,
) -> None:
    poison, fine = log.add(FAILED, ago=2 * HOUR), log.add(FAILED, ago=HOUR)

    async def answer(guid: str) -> httpx.Response | None:
        if guid == poison:
            if isinstance(refusal, Exception):
                raise refusal
            return refusal
        await store(pool, guid)
        return None

    log.answer(respx_mock, answer)
    outcomes = await redeliver(pool.transaction, github, await missing(pool, github, time), clock=time.clock)

    assert outcomes[fine].result == "arrived"
    assert (outcomes[poison].result, outcomes[poison].asked) == ("failed", False)


@pytest.mark.parametrize("status", [401, 403])
async def test_where_github_does_not_let_us_nothing_more_is_asked(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter, status: int
) -> None:
    for number in range(3):
        log.add(FAILED, ago=number * HOUR)

    async def answer(guid: str) -> httpx.Response:
        return httpx.Response(status, json={"message": "no"})

    log.answer(respx_mock, answer)
    comparison = await missing(pool, github, time)
    with pytest.raises(ProviderError, match=str(status)):
        await redeliver(pool.transaction, github, comparison, clock=time.clock)
    assert len(log.asked) == 1


async def test_a_limited_rate_is_waited_for_without_holding_a_claim(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    guid = log.add(FAILED, ago=HOUR)
    claimable: list[bool] = []

    async def answer(guid: str) -> httpx.Response | None:
        if len(log.asked) == 1:
            return httpx.Response(403, headers={"retry-after": "90"}, json={"message": "secondary rate limit"})
        await store(pool, guid)
        return None

    async def somebody_else_looks() -> None:
        if time.waits[-1] == 90:
            async with pool.transaction() as tx:
                claimable.append(await asking.claim(tx, THE_HOOK.scope, guid))
                await asking.give_back(tx, THE_HOOK.scope, guid)

    log.answer(respx_mock, answer)
    time.meanwhile = somebody_else_looks
    outcomes = await redeliver(pool.transaction, github, await missing(pool, github, time), clock=time.clock)

    assert outcomes[guid].result == "arrived"
    assert claimable == [True]
    assert 90 in time.waits


async def test_a_rate_limited_for_too_long_ends_the_run_and_the_next_one_goes_on(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    guid = log.add(FAILED, ago=HOUR)

    async def answer(guid: str) -> httpx.Response | None:
        if len(log.asked) == 1:
            return httpx.Response(403, headers={"retry-after": "3000"}, json={"message": "secondary rate limit"})
        await store(pool, guid)
        return None

    log.answer(respx_mock, answer)
    comparison = await missing(pool, github, time)
    with pytest.raises(ProviderError, match="run it again in 0:50:00"):
        await redeliver(pool.transaction, github, comparison, clock=time.clock)

    assert (await redeliver(pool.transaction, github, comparison, clock=time.clock))[guid].result == "arrived"


async def test_a_call_that_broke_is_made_again_because_a_copy_does_no_harm(
    pool: Pool, log: DeliveryLog, time: StillClock, github: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    guid = log.add(FAILED, ago=HOUR)

    async def answer(guid: str) -> httpx.Response | None:
        if len(log.asked) == 1:
            raise httpx.ReadTimeout("no answer")
        await store(pool, guid)
        return None

    log.answer(respx_mock, answer)
    outcomes = await redeliver(pool.transaction, github, await missing(pool, github, time), clock=time.clock)

    assert outcomes[guid].result == "arrived"
    assert len(log.asked) == 2


async def test_a_schedule_asks_more_and_more_seldom_a_person_does_not(pool: Pool) -> None:
    async def claimed(*, growing: bool) -> bool:
        async with pool.transaction() as tx:
            won = await asking.claim(tx, "scope", "guid", growing=growing)
            await asking.answered(tx, "scope", "guid")
        return won

    assert await claimed(growing=True)
    for minutes in (5, 10, 20, 40):
        await age(pool, timedelta(minutes=minutes - 0.5))
        assert not await claimed(growing=True)
        await age(pool, timedelta(minutes=0.5))
        assert await claimed(growing=True)
    await age(pool, timedelta(minutes=5))
    assert not await claimed(growing=True)
    assert await claimed(growing=False)


async def test_what_was_asked_for_long_ago_is_forgotten(pool: Pool) -> None:
    async with pool.transaction() as tx:
        for guid in ("old", "new"):
            await asking.claim(tx, "scope", guid)
        await asking.claim(tx, "another scope", "old")
        await tx.execute("UPDATE redeliveries SET asked_at = now() - interval '31 days' WHERE guid = 'old'")
        await asking.forget(tx, "scope")
        rows = await (await tx.execute("SELECT scope, guid FROM redeliveries ORDER BY 1")).fetchall()

    assert [(row["scope"], row["guid"]) for row in rows] == [("another scope", "old"), ("scope", "new")]


# Which hook


def hook(id: int, url: str) -> dict[str, Any]:
    return {"id": id, "name": "web", "active": True, "config": {"url": url, "content_type": "json"}}


@pytest.mark.parametrize(
    "hooks",
    [
        [hook(5, "https://ours.test/webhooks/github"), hook(6, "https://ci.test/notify")],
        [hook(5, "https://ours.test/webhooks/github/"), hook(6, "https://ours.test/webhooks/other")],
        [hook(5, "https://ours.test/webhooks/renamed"), hook(6, "https://ci.test/notify")],
    ],
)
async def test_the_only_hook_that_points_to_a_receiver_is_meant(
    github: ProviderClient, respx_mock: respx.MockRouter, hooks: list[dict[str, Any]]
) -> None:
    respx_mock.get(f"{API}/repos/acme/app/hooks").respond(json=hooks)

    assert await found(github, repository("acme/app"), "github", clock=Clock()) == Hook(
        repository("acme/app"), "/repos/acme/app/hooks/5", 5
    )


@pytest.mark.parametrize(
    ("hooks", "told"),
    [
        (
            [hook(5, "https://u:secret@a.test/webhooks/github?key=secret"), hook(6, "https://b.test/webhooks/github")],
            r"acme: several hooks point .* --hook, there are: "
            r"5 \(https://a.test/webhooks/github\), 6 \(https://b.test/webhooks/github\)",
        ),
        ([hook(6, "https://ci.test/notify")], r"no hook points .* there are: 6 \(https://ci.test/notify\)"),
        ([], "no hook points .* there are: none"),
        ([{"id": 7}, {"id": "x"}, "odd"], "no hook points"),
    ],
)
async def test_where_it_is_not_certain_which_hook_is_meant_they_are_listed_without_secrets(
    github: ProviderClient, respx_mock: respx.MockRouter, hooks: list[Any], told: str
) -> None:
    respx_mock.get(f"{API}/orgs/acme/hooks").respond(json=hooks)

    with pytest.raises(ConfigurationError, match=told) as raised:
        await found(github, organization("acme"), "github", clock=Clock())
    assert "secret" not in str(raised.value)


# A GitHub App


@pytest.fixture(scope="module")
def app_key() -> RSAPrivateKey:
    return generate_private_key(public_exponent=65537, key_size=2048)


def decode(part: str) -> Any:
    return json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))


async def test_an_app_signs_who_it_is_anew_every_few_minutes(
    app_key: RSAPrivateKey, respx_mock: respx.MockRouter
) -> None:
    route = respx_mock.get(f"{API}/app/hook/deliveries").respond(json=[])
    now = 1_780_000_000.0
    async with github_client(Settings(github_api=API), auth=AppAuth("Iv1.app", app_key, now=lambda: now)) as client:
        for later in (0, 200, 101):
            now += later
            await found(client, Target("app"), "github", clock=Clock())

    tokens = [call.request.headers["authorization"].removeprefix("Bearer ") for call in route.calls]
    assert tokens[0] == tokens[1] != tokens[2]
    head, claims, signature = tokens[0].split(".")
    assert decode(head) == {"alg": "RS256", "typ": "JWT"}
    assert decode(claims) == {"iat": 1_780_000_000 - 60, "exp": 1_780_000_000 + 540, "iss": "Iv1.app"}
    signed = base64.urlsafe_b64decode(signature + "=" * (-len(signature) % 4))
    app_key.public_key().verify(signed, f"{head}.{claims}".encode(), PKCS1v15(), hashes.SHA256())


async def test_an_app_s_log_is_compared_by_the_number_that_its_deliveries_carry(
    pool: Pool, log: DeliveryLog, time: StillClock, app_key: RSAPrivateKey, respx_mock: respx.MockRouter
) -> None:
    here, not_here = log.add("OK", ago=HOUR), log.add("OK", ago=2 * HOUR)
    await store(pool, here, hook=777)
    await store(pool, not_here, hook=HOOK)  # the same event, for a repository's hook
    items, _ = log.page("", 100, None)
    whole = {**items[0], "request": {"headers": {"X-GitHub-Hook-ID": "777"}, "payload": {}}}
    respx_mock.get(f"{API}/app/hook/deliveries/{items[0]['id']}").respond(json=whole)
    respx_mock.get(f"{API}/app/hook/deliveries").respond(json=items)
    asked = respx_mock.post(f"{API}/app/hook/deliveries/{log.newest(not_here)}/attempts").respond(202, json={})

    async with github_client(Settings(github_api=API), auth=AppAuth("1", app_key)) as client:
        hook = await found(client, Target("app"), "github", clock=time.clock)
        comparison = await compare(pool.transaction, client, hook, GITHUB, DAY, clock=time.clock)
        await redeliver(pool.transaction, client, comparison, wait=timedelta(seconds=1), clock=time.clock)

    assert hook.id == 777
    assert by_guid(comparison) == {here: "here", not_here: "missing"}
    assert asked.call_count == 1


async def test_an_app_whose_hook_has_no_number_is_not_guessed_at(
    log: DeliveryLog, app_key: RSAPrivateKey, respx_mock: respx.MockRouter
) -> None:
    log.add("OK", ago=HOUR)
    items, _ = log.page("", 1, None)
    respx_mock.get(f"{API}/app/hook/deliveries/{items[0]['id']}").respond(json={"request": {"headers": {}}})
    respx_mock.get(f"{API}/app/hook/deliveries").respond(json=items)

    async with github_client(Settings(github_api=API), auth=AppAuth("1", app_key)) as client:
        with pytest.raises(ProviderError, match="does not say the number"):
            await found(client, Target("app"), "github", clock=Clock())


def pem(key: RSAPrivateKey | Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def test_an_app_s_key_is_read_from_its_file(tmp_path: Path, app_key: RSAPrivateKey) -> None:
    (tmp_path / "app.pem").write_bytes(pem(app_key))

    app_auth(Settings(github_app_id="1", github_app_key_file=tmp_path / "app.pem"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot read .*app.pem: No such file"),
        (b"-----BEGIN RSA PRIVATE KEY-----\nsecret\n", "holds no private key in PEM form"),
        (b"", "holds no private key in PEM form"),
        (pem(Ed25519PrivateKey.generate()), "holds no RSA key"),
    ],
)
def test_an_app_s_key_that_cannot_be_used_is_told_by_its_variable(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    path = tmp_path / "app.pem"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigurationError, match=f"WEBHOOKS_GITHUB_APP_KEY_FILE: .*{told}") as raised:
        app_auth(Settings(github_app_id="1", github_app_key_file=path))
    assert "secret" not in str(raised.value)


def test_an_app_without_settings_names_them() -> None:
    with pytest.raises(ConfigurationError, match="set WEBHOOKS_GITHUB_APP_ID and WEBHOOKS_GITHUB_APP_KEY_FILE"):
        app_auth(Settings())


# On a schedule


def test_what_to_look_after_is_read_from_one_setting() -> None:
    assert scheduled(None) == scheduled(" , ") == ()
    assert scheduled("acme/app:12, acme/other, org:acme:7, app, acme/app:12, acme/x=second") == (
        Scheduled(repository("acme/app", 12), None),
        Scheduled(repository("acme/other"), None),
        Scheduled(organization("acme", 7), None),
        Scheduled(Target("app"), None),
        Scheduled(repository("acme/x"), "second"),
    )


@pytest.mark.parametrize(
    "setting", ["acme", "acme/app:x", "acme/app:0", "../..", "acme/..", "org:", "org:a/b", "a/b/c", "acme/app:1:2"]
)
def test_what_cannot_be_looked_after_is_told_with_the_forms_there_are(setting: str) -> None:
    with pytest.raises(ConfigurationError, match=r"WEBHOOKS_RECONCILE_GITHUB: .*; write OWNER/NAME:HOOK"):
        scheduled(setting)


@pytest.mark.parametrize(
    ("settings", "sources", "told"),
    [
        (Settings(), [GitHub()], "set WEBHOOKS_RECONCILE_GITHUB=OWNER/NAME:HOOK, or WEBHOOKS_RECONCILE_SHORTCUT=on"),
        (Settings(reconcile_shortcut="off"), [GitHub()], "set WEBHOOKS_RECONCILE_GITHUB"),
        (Settings(reconcile_github="a/b"), [Shortcut()], "WEBHOOKS_RECONCILE_GITHUB: .* there are: none"),
        (Settings(reconcile_github="a/b"), [GitHub(), GitHub("two")], "Say it with =SOURCE .* there are: github, two"),
        (Settings(reconcile_github="a/b=x"), [GitHub()], "there is no source 'x' of GitHub; there are: github"),
        (Settings(reconcile_shortcut="on"), [GitHub()], "WEBHOOKS_RECONCILE_SHORTCUT: .* there are: none"),
    ],
)
def test_a_schedule_without_anything_to_do_is_refused_at_the_start(
    settings: Settings, sources: list[Any], told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        plan(settings, Consumer(gates=[], sources=sources))


def test_a_schedule_finds_the_sources() -> None:
    github, second, shortcut = GitHub(), GitHub("second"), Shortcut()
    settings = Settings(reconcile_github="a/b=second,c/d=github", reconcile_shortcut="shortcut")

    found = plan(settings, Consumer(gates=[], sources=[github, second, shortcut]))

    assert found == Plan([(repository("a/b"), second), (repository("c/d"), github)], shortcut)
    assert source_of(Consumer(gates=[], sources=[github, shortcut]), GitHub) is github


async def test_of_many_processes_one_reconciles_and_the_next_round_begins_where_nothing_was_missing(
    pool: Pool, database_url: str, log: DeliveryLog, respx_mock: respx.MockRouter
) -> None:
    old, new = log.add(FAILED, ago=2 * DAY), log.add(FAILED, ago=HOUR)

    async def delivered(guid: str) -> None:
        await store(pool, guid)

    log.answer(respx_mock, delivered)
    to_do = Plan([(TARGET, GITHUB)], None)
    async with Pool.open(database_url, settings=Settings()) as other:
        rounds = [round_of(one, SETTINGS, to_do, HOUR, lambda _: None) for one in (pool, other, pool, other)]
        await asyncio.gather(*rounds)

        assert log.pages == 1
        assert log.asked == [log.newest(old), log.newest(new)]
        await round_of(other, SETTINGS, to_do, HOUR, lambda _: None)
        assert log.pages == 1  # its turn is in an hour

        async with pool.transaction() as tx:
            await tx.execute("UPDATE reconcile_turns SET next_at = now()")
            row = await (await tx.execute("SELECT whole_until, taken_at FROM reconcile_turns")).fetchone()
        assert row is not None
        assert row["whole_until"] == row["taken_at"]
        for number in range(150):
            log.add("OK", ago=HOUR + timedelta(minutes=number))
        await round_of(other, SETTINGS, to_do, HOUR, lambda _: None)
        assert log.pages == 2  # only back to the last round


async def test_a_round_after_which_something_is_missing_is_looked_at_again(
    pool: Pool, log: DeliveryLog, respx_mock: respx.MockRouter
) -> None:
    guid = log.add(FAILED, ago=2 * DAY)
    log.answer(respx_mock, nothing)
    async with pool.transaction() as tx:  # an earlier round asked for it, and it has not arrived
        assert await asking.claim(tx, THE_HOOK.scope, guid)
        await asking.answered(tx, THE_HOOK.scope, guid)

    await round_of(pool, SETTINGS, Plan([(TARGET, GITHUB)], None), HOUR, lambda _: None)

    async with pool.transaction() as tx:
        row = await (await tx.execute("SELECT whole_until FROM reconcile_turns")).fetchone()
    assert row == {"whole_until": None}
    assert not log.asked


async def test_a_round_in_which_one_could_not_be_asked_for_is_looked_at_again_and_the_others_arrive(
    pool: Pool, log: DeliveryLog, respx_mock: respx.MockRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhooks.provider_api.calling.FIRST_RETRY_S", 0)
    poison, fine = log.add(FAILED, ago=2 * HOUR), log.add(FAILED, ago=HOUR)
    answered: list[str] = []

    async def answer(guid: str) -> httpx.Response | None:
        answered.append(guid)
        if guid == poison:
            return httpx.Response(500)
        await store(pool, guid)
        return None

    log.answer(respx_mock, answer)
    await round_of(pool, SETTINGS, Plan([(TARGET, GITHUB)], None), HOUR, lambda _: None)

    assert answered[-1] == fine
    async with pool.transaction() as tx:
        row = await (await tx.execute("SELECT whole_until FROM reconcile_turns")).fetchone()
    assert row == {"whole_until": None}


async def test_a_log_that_cannot_be_read_keeps_no_other_from_being_read(
    pool: Pool, log: DeliveryLog, respx_mock: respx.MockRouter
) -> None:
    guid = log.add(FAILED, ago=HOUR)

    async def delivered(guid: str) -> None:
        await store(pool, guid)

    log.answer(respx_mock, delivered)
    respx_mock.get(url__startswith=f"{API}/repos/acme/gone/").respond(404)
    to_do = Plan([(repository("acme/gone", 1), GITHUB), (Target("app"), GITHUB), (TARGET, GITHUB)], None)

    await round_of(pool, SETTINGS, to_do, HOUR, lambda _: None)

    assert log.asked == [log.newest(guid)]


async def test_a_turn_is_given_to_one_and_again_only_when_it_is_due(pool: Pool) -> None:
    async def take() -> turns.Turn | None:
        async with pool.transaction() as tx:
            return await turns.take(tx, "scope", "somebody", HOUR)

    won = [turn for turn in await asyncio.gather(*(take() for _ in range(8))) if turn is not None]
    assert len(won) == 1
    assert won[0].whole_until is None
    async with pool.transaction() as tx:
        await turns.whole(tx, "scope", won[0].began_at)
        await turns.whole(tx, "scope", won[0].began_at - HOUR)
        await tx.execute("UPDATE reconcile_turns SET next_at = now()")
    assert (again := await take()) is not None
    assert again.whole_until == won[0].began_at
