"""Somebody is told of each escalation once: signed, again as the same until they take it, and never of itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import respx
from consumers import arrival, arrived, quick
from gates import a_gate, opened, sql, until

from webhooks import Consumer, Escalate, GitHub, Pool
from webhooks.decision import retry
from webhooks.errors import ConfigurationError
from webhooks.escalation import escalated
from webhooks.notify import RECIPE, check_settings, notifications
from webhooks.settings import Settings
from webhooks.signatures import verify
from webhooks.status import status
from webhooks.verify import verify as proof
from webhooks.worker import Worker

URL = "https://pager.example/hook"
SECRET = "whsec_YW4gaW52ZW50ZWQgc2VjcmV0"
GATE = a_gate()
CONSUMER = Consumer(gates=[GATE], sources=[GitHub()])


def telling(**settings: Any) -> Settings:
    return quick(**{"notify_url": URL, "notify_secret": SECRET, **settings})


@pytest.fixture
async def telling_pool(database_url: str) -> AsyncIterator[Pool]:
    """The connections of a process that tells of escalations."""
    async with Pool.open(database_url, settings=telling()) as opened:
        yield opened


@pytest.fixture
def outside() -> Iterator[respx.MockRouter]:
    """The outside world."""
    with respx.mock(assert_all_called=False) as router:
        yield router


@pytest.fixture
def pager(outside: respx.MockRouter) -> respx.Route:
    """Whoever is told."""
    return outside.post(URL)


async def escalate(pool: Pool, key: int = 1) -> None:
    await opened(pool, GATE, key)
    async with GATE.claim(pool, "drafting", key) as claim:
        assert claim is not None
        raise Escalate("no token")


async def lines(pool: Pool) -> list[dict[str, Any]]:
    return await sql(pool, "SELECT * FROM notifications ORDER BY id")


async def outcomes(pool: Pool) -> list[str]:
    rows = await sql(pool, "SELECT outcome FROM attempts WHERE table_name = 'notifications' ORDER BY claimed_at")
    return [row["outcome"] for row in rows]


async def worked_until(pool: Pool, status: str) -> None:
    """Let a worker run until every notification is in a status."""
    worker = Worker(pool, CONSUMER)
    worker.start()
    try:

        async def there() -> bool:
            found = await lines(pool)
            return bool(found) and all(line["status"] == status for line in found)

        await until(there)
    finally:
        await worker.stop()


async def test_an_escalation_is_told_by_a_signed_request(telling_pool: Pool, pager: respx.Route) -> None:
    pager.respond(204)
    await escalate(telling_pool)
    await worked_until(telling_pool, "notified")
    [call] = pager.calls
    headers = tuple((name.lower(), value) for name, value in call.request.headers.items())
    [line] = await lines(telling_pool)
    verify(RECIPE, headers, call.request.content, [SECRET], now=float(call.request.headers["webhook-timestamp"]))
    assert call.request.headers["webhook-id"] == f"notifications:{line['id']}:notifying:{line['visit']}:post"
    assert call.request.headers["content-type"] == "application/json"
    assert json.loads(call.request.content) == {
        "type": "row.escalated",
        "timestamp": line["escalated_at"].isoformat(),
        "data": {
            "row": "patch_sessions:1",
            "table": "patch_sessions",
            "key": "1",
            "phase": "drafting",
            "attempts": 1,
            "reason": "no token",
            "look": "webhooks why patch_sessions:1",
        },
    }


async def test_a_dead_delivery_is_told_of_too(telling_pool: Pool, pager: respx.Route) -> None:
    pager.respond(200)
    [delivery] = await arrived(telling_pool, arrival(b"not json", source="github"))
    await worked_until(telling_pool, "notified")
    told = json.loads(pager.calls[0].request.content)["data"]
    assert (told["row"], told["phase"]) == (f"deliveries:{delivery}", "applying")
    assert "not JSON" in told["reason"]


@pytest.mark.invariant(9)
@pytest.mark.parametrize(
    "first",
    [httpx.Response(500), httpx.Response(404), httpx.ReadTimeout("slow"), httpx.ConnectError("nobody there")],
    ids=lambda first: str(getattr(first, "status_code", type(first).__name__)),
)
async def test_what_was_not_taken_is_sent_again_as_the_same(
    telling_pool: Pool, pager: respx.Route, first: httpx.Response | httpx.HTTPError
) -> None:
    pager.side_effect = [first, httpx.Response(200)]
    await escalate(telling_pool)
    await worked_until(telling_pool, "notified")
    one, other = [call.request for call in pager.calls]
    assert one.headers["webhook-id"] == other.headers["webhook-id"]
    assert one.content == other.content
    assert await outcomes(telling_pool) == ["error", "done"]
    async with telling_pool.transaction() as tx:
        assert [check.name for check in await proof(tx, CONSUMER, telling_pool.settings) if not check.holds] == []


async def test_a_receiver_that_asks_to_wait_is_waited_for_uncharged(telling_pool: Pool, pager: respx.Route) -> None:
    pager.side_effect = [httpx.Response(429, headers={"retry-after": "1"}), httpx.Response(200)]
    await escalate(telling_pool)
    await worked_until(telling_pool, "notified")
    assert await outcomes(telling_pool) == ["snoozed", "done"]
    [line] = await lines(telling_pool)
    assert line["attempt_count"] == 1


async def test_another_address_or_secret_is_used_for_what_was_not_taken_yet(
    telling_pool: Pool, database_url: str, outside: respx.MockRouter, pager: respx.Route
) -> None:
    pager.respond(500)
    await escalate(telling_pool)
    worker = Worker(telling_pool, CONSUMER)
    worker.start()
    await until(lambda: pager.called)
    await worker.stop()
    elsewhere = outside.post("https://other.example/").respond(200)
    moved = telling(notify_url="https://other.example/", notify_secret="whsec_YW5vdGhlciBvbmU=")
    async with Pool.open(database_url, settings=moved) as pool:
        await worked_until(pool, "notified")
    assert elsewhere.call_count == 1


async def test_without_the_setting_nothing_is_written(pool: Pool) -> None:
    await escalate(pool)
    assert await lines(pool) == []


async def test_a_worker_without_the_setting_leaves_it_to_one_that_has_it(
    telling_pool: Pool, database_url: str, pager: respx.Route
) -> None:
    pager.respond(200)
    await escalate(telling_pool)
    async with Pool.open(database_url, settings=quick()) as pool:
        [delivery] = await arrived(pool, arrival(b"not json", source="github"))
        worker = Worker(pool, CONSUMER)
        worker.start()

        async def dead() -> bool:
            return bool(await sql(pool, "SELECT id FROM deliveries WHERE id = %(id)s AND status = 'dead'", id=delivery))

        await until(dead)
        await worker.stop()
    assert [line["status"] for line in await lines(telling_pool)] == ["pending"]
    await worked_until(telling_pool, "notified")


async def test_what_is_no_news_any_more_is_dropped(telling_pool: Pool, pager: respx.Route) -> None:
    await escalate(telling_pool)
    await sql(telling_pool, "UPDATE notifications SET escalated_at = now() - interval '25 hours'")
    await worked_until(telling_pool, "dropped")
    assert not pager.called


@pytest.mark.invariant(7)
async def test_a_notification_that_escalates_is_not_told_of_but_listed_and_can_be_retried(
    telling_pool: Pool, pager: respx.Route
) -> None:
    pager.respond(500)
    await escalate(telling_pool)
    await sql(telling_pool, "UPDATE notifications SET max_attempts = 2")
    await worked_until(telling_pool, "escalated")
    assert len(await lines(telling_pool)) == 1
    async with telling_pool.transaction() as tx:
        packets = {packet.row: packet for packet in await escalated(tx, CONSUMER)}
        [line] = [line for line in await status(tx, CONSUMER) if line.table == "notifications"]
    assert line.escalated == 1
    [name] = [name for name in packets if name.startswith("notifications:")]
    assert "answered 500" in (packets[name].last_error or "")
    async with telling_pool.transaction() as tx:
        assert await retry(tx, CONSUMER, name, decided_by="Ann", reason="it is up again") == "pending"
    pager.respond(200)
    await worked_until(telling_pool, "notified")
    assert len({call.request.headers["webhook-id"] for call in pager.calls}) == 1


async def test_a_row_that_escalates_again_is_told_of_again(telling_pool: Pool, pager: respx.Route) -> None:
    pager.respond(200)
    await escalate(telling_pool)
    async with telling_pool.transaction() as tx:
        await GATE.retry(tx, 1, decided_by="Ann", reason="again")
    async with GATE.claim(telling_pool, "drafting", 1) as claim:
        assert claim is not None
        raise Escalate("still no token")
    await worked_until(telling_pool, "notified")
    assert [line["reason"] for line in await lines(telling_pool)] == ["no token", "still no token"]
    assert pager.call_count == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"notify_secret": None}, "set WEBHOOKS_NOTIFY_SECRET"),
        ({"notify_secret": "whsec_"}, "WEBHOOKS_NOTIFY_SECRET: "),
        ({"notify_secret": "no base64 !"}, "WEBHOOKS_NOTIFY_SECRET: "),
        ({"notify_secret": "whpk_11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="}, "WEBHOOKS_NOTIFY_SECRET: "),
    ],
)
async def test_a_worker_does_not_start_without_something_to_sign_with(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as raised:
        Worker(Pool("postgresql://nowhere.example/", telling(**settings)), CONSUMER)
    assert "no base64" not in str(raised.value)


def test_nobody_to_tell_needs_no_secret() -> None:
    check_settings(Settings())
    check_settings(Settings(notify_secret="whatever"))


@pytest.mark.parametrize("url", ["pager.example", "ftp://pager.example", "https://", "http:// x"])
def test_an_address_that_is_none_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("WEBHOOKS_NOTIFY_URL", url)
    with pytest.raises(ConfigurationError, match="WEBHOOKS_NOTIFY_URL") as raised:
        Settings.load()
    assert f"not '{url}'" not in str(raised.value)


def test_the_table_of_notifications_cannot_be_somebody_elses() -> None:
    with pytest.raises(ConfigurationError, match="the library's own"):
        Consumer(gates=[notifications], sources=[])


class Endless(httpx.AsyncByteStream):
    """An answer that never ends."""

    def __init__(self) -> None:
        self.taken = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.taken < 1 << 24:
            self.taken += 4096
            yield b"no" * 2048


@pytest.mark.parametrize("status", [200, 500])
async def test_of_an_answer_only_the_beginning_is_read(telling_pool: Pool, pager: respx.Route, status: int) -> None:
    stream = Endless()
    pager.mock(side_effect=[httpx.Response(status, stream=stream), httpx.Response(200)])
    await escalate(telling_pool)
    await worked_until(telling_pool, "notified")
    assert stream.taken <= 16_384
