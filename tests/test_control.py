"""The control plane: who may ask, and what it answers about a process and its database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import shop
from consumers import Stack, arrival, arrived, from_shortcut, quick, stack, stories
from gates import until
from prometheus_client.parser import text_string_to_metric_families
from wire import wired

from webhooks import Consumer, Escalate, Event, Gate, Ignore, Park, Pool, Shortcut, Transaction
from webhooks.control import Control
from webhooks.control.ask import Asker
from webhooks.control.checks import refusal
from webhooks.control.health import Process

HERE = ("127.0.0.1", 40_000)
ELSEWHERE = ("192.0.2.7", 40_000)
HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
Lines = list[tuple[bytes, bytes]]


@asynccontextmanager
async def asking(
    running: Stack, consumer: Consumer, *, peer: tuple[str, int] = HERE, **settings: Any
) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of the control plane of a process."""
    asker = Asker(running.pool)
    process = Process(asker, quick(**settings), running.worker, running.accepter)
    control = Control(process, consumer)
    transport = httpx.ASGITransport(control.app(), client=peer)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:3100") as client:
            yield client
    finally:
        await control.close()
        await asker.close()


# ---- who may ask


def lines(*extra: tuple[str, str], host: str = "localhost:3100") -> Lines:
    return [(name.encode(), value.encode("latin-1")) for name, value in (("host", host), *extra)]


@pytest.mark.parametrize(
    ("given", "peer", "token", "status"),
    [
        (lines(), "127.0.0.1", None, None),
        (lines(), "127.8.9.1", None, None),
        (lines(), "::1", None, None),
        (lines(), "::ffff:127.0.0.1", None, None),
        (lines(host="127.0.0.1:3100"), "127.0.0.1", None, None),
        (lines(host="[::1]:3100"), "::1", None, None),
        (lines(host="LOCALHOST"), "127.0.0.1", None, None),
        # from elsewhere, or nobody knows from where
        (lines(), "192.0.2.7", None, 403),
        (lines(), "::ffff:192.0.2.7", None, 403),
        (lines(), None, None, 403),
        (lines(), "unix", None, 403),
        # somebody speaks for somebody else
        (lines(("x-forwarded-for", "192.0.2.7")), "127.0.0.1", None, 403),
        (lines(("x-forwarded-host", "localhost")), "127.0.0.1", None, 403),
        (lines(("forwarded", "for=192.0.2.7")), "127.0.0.1", None, 403),
        (lines(("x-real-ip", "127.0.0.1")), "127.0.0.1", None, 403),
        (lines(("via", "1.1 proxy")), "127.0.0.1", None, 403),
        (lines(("cf-connecting-ip", "192.0.2.7")), "127.0.0.1", None, 403),
        (lines(("true-client-ip", "192.0.2.7")), "127.0.0.1", None, 403),
        (lines(("cdn-loop", "cloudflare")), "127.0.0.1", None, 403),
        (lines(("x-amzn-trace-id", "Root=1-67891233-abcdef012345678912345678")), "127.0.0.1", None, 403),
        (lines(("fly-client-ip", "192.0.2.7")), "127.0.0.1", None, 403),
        # a name that a page elsewhere has pointed at this machine
        (lines(host="evil.example:3100"), "127.0.0.1", None, 421),
        (lines(host="localhost.evil.example"), "127.0.0.1", None, 421),
        (lines(host="evil.example@localhost"), "127.0.0.1", None, 421),
        (lines(host=""), "127.0.0.1", None, 421),
        (lines(host="[::1"), "127.0.0.1", None, 421),
        (lines(("host", "evil.example")), "127.0.0.1", None, 421),
        ([], "127.0.0.1", None, 421),
        (lines(host="evil.example"), "127.0.0.1", "right", 421),
        # a page elsewhere that posts to this machine
        (lines(("origin", "http://evil.example")), "127.0.0.1", None, 403),
        (lines(("origin", "null")), "127.0.0.1", None, 403),
        (lines(("origin", "http://localhost:3100")), "127.0.0.1", None, None),
        # with a token, it alone decides
        (lines(), "127.0.0.1", "right", 401),
        (lines(("authorization", "Bearer right")), "127.0.0.1", "right", None),
        (lines(("authorization", "Bearer right"), host="10.0.0.7:3100"), "192.0.2.7", "right", None),
        (lines(("authorization", "Bearer wrong"), host="10.0.0.7:3100"), "192.0.2.7", "right", 421),
        (lines(("authorization", "Bearer right")), "192.0.2.7", "right", None),
        (lines(("authorization", "bearer right")), "192.0.2.7", "right", None),
        (lines(("authorization", "Bearer right"), ("x-forwarded-for", "x")), "192.0.2.7", "right", None),
        (lines(("authorization", "Bearer wrong")), "127.0.0.1", "right", 401),
        (lines(("authorization", "Bearer righ")), "127.0.0.1", "right", 401),
        (lines(("authorization", "Bearer ")), "127.0.0.1", "right", 401),
        (lines(("authorization", "Basic right")), "127.0.0.1", "right", 401),
        (lines(("authorization", "right")), "127.0.0.1", "right", 401),
        (lines(("authorization", "Bearer é")), "127.0.0.1", "right", 401),
        (lines(("authorization", "Bearer x"), ("authorization", "Bearer right")), "127.0.0.1", "right", 401),
    ],
)
def test_who_may_ask(given: Lines, peer: str | None, token: str | None, status: int | None) -> None:
    refused = refusal(given, peer, token, HOSTS)

    assert (None if refused is None else refused.status) == status


async def test_every_path_but_health_is_checked_the_consumers_own_included(database_url: str) -> None:
    paths = ["/metrics", "/api/status", "/api/deliveries", "/api/deliveries/1", "/hello", "/nothing"]
    async with (
        stack(database_url, shop.consumer, work=False) as running,
        asking(running, shop.consumer, peer=ELSEWHERE) as client,
    ):
        assert {(await client.get(path)).status_code for path in paths} == {403}
        assert (await client.get("/healthz", headers={"host": "any"})).json() == {"status": "ok"}
        assert (await client.post("/healthz")).status_code == 403


async def test_with_a_token_it_is_asked_from_anywhere_and_only_with_it(database_url: str) -> None:
    async with (
        stack(database_url, shop.consumer, work=False) as running,
        asking(running, shop.consumer, peer=ELSEWHERE, control_token="right") as client,
    ):
        refused = await client.get("/hello")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert (await client.get("/hello", headers={"Authorization": "Bearer right"})).text == "hello"


async def test_further_hosts_are_named_by_a_setting(database_url: str) -> None:
    async with (
        stack(database_url, shop.consumer, work=False) as running,
        asking(running, shop.consumer, control_hosts="hooks.internal") as client,
    ):
        assert (await client.get("/hello", headers={"host": "hooks.internal:3100"})).status_code == 200
        assert (await client.get("/hello", headers={"host": "other.internal"})).status_code == 421


# ---- whether it is ready


async def test_a_process_that_works_is_ready(database_url: str) -> None:
    async with stack(database_url, shop.consumer) as running, asking(running, shop.consumer) as client:
        await until(lambda: running.worker is not None and running.worker.alive)
        answer = await client.get("/readyz")

    assert answer.status_code == 200
    assert answer.json() == {
        "ready": True,
        "checks": {"database": "ok", "schema": "ok", "worker": "ok", "inbox": "ok"},
    }


async def test_a_process_without_a_worker_is_ready_without_one(database_url: str) -> None:
    async with stack(database_url, shop.consumer, work=False) as running, asking(running, shop.consumer) as client:
        answer = await client.get("/readyz")

    assert answer.status_code == 200
    assert "worker" not in answer.json()["checks"]


async def test_a_schema_that_is_behind_makes_it_unready(database_url: str) -> None:
    async with stack(database_url, shop.consumer, work=False) as running, asking(running, shop.consumer) as client:
        await running.sql("DELETE FROM webhooks_schema WHERE section > 1")
        answer = await client.get("/readyz")

    assert answer.status_code == 503
    assert "2 (patch sessions)" in answer.json()["checks"]["schema"]
    assert answer.json()["checks"]["database"] == "ok"


async def test_a_database_that_freezes_makes_it_unready_within_three_seconds_and_ready_when_it_is_back(
    database_url: str,
) -> None:
    async with wired(database_url) as wire, Pool.open(wire.url, settings=quick()) as pool:
        asker = Asker(pool)
        process = Process(asker, quick(), None, None)
        transport = httpx.ASGITransport(Control(process, shop.consumer).app(), client=HERE)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/readyz")).status_code == 200
            wire.at("BEGIN", "hold", times=2)
            started = time.monotonic()
            # Asked twice at once: neither waits for the other's two seconds first.
            frozen, metrics = await asyncio.gather(client.get("/readyz"), client.get("/metrics"))
            assert time.monotonic() - started < 3
            assert frozen.status_code == 503
            assert frozen.json()["checks"]["schema"] == "unknown"
            assert "webhooks_database_up 0.0" in metrics.text
            wire.freed.set()

            async def ready() -> bool:
                return (await client.get("/readyz")).status_code == 200

            await until(ready)
        await asker.close()


async def test_a_connection_that_died_unnoticed_is_replaced_within_one_question(database_url: str) -> None:
    async with stack(database_url, shop.consumer, work=False) as running, asking(running, shop.consumer) as client:
        assert (await client.get("/readyz")).status_code == 200
        await running.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert (await client.get("/readyz")).json()["checks"]["database"] == "ok"


# ---- what waits


def counted() -> Consumer:
    """Stories that are opened, parked, ignored or refused, as their titles say."""
    shortcut, sessions = Shortcut(), Gate("patch_sessions", key="sc_id")
    sessions.phase("received", claimed="clarifying", done="clarified")
    sessions.phase("clarified", claimed="drafting", done="drafted")

    @shortcut.on("story.update")
    async def open_session(event: Event, tx: Transaction) -> None:
        title = event.data["title"]
        if title == "park":
            raise Park(sessions, 1, while_in=("received",))
        if title == "ignore":
            raise Ignore("the label was 'Patch', not 'patch'")
        if title == "refuse":
            raise Escalate("it makes no sense")
        await sessions.open(tx, sc_id=event.data["id"], title=title)

    return Consumer(gates=[sessions], sources=[shortcut])


@asynccontextmanager
async def after_some_work(url: str) -> AsyncGenerator[tuple[Stack, httpx.AsyncClient]]:
    """Deliveries with every disposition, and rows in several statuses."""
    consumer = counted()
    async with stack(url, consumer) as running, asking(running, consumer) as client:
        for title in ("open", "ignore", "refuse", "park"):
            answer = await running.send(from_shortcut(stories(1, title=title)))
            assert answer.status_code == 202

            async def applied() -> bool:
                return not await running.sql(
                    "SELECT 1 FROM deliveries WHERE status = 'applying' OR status = 'received' AND parked_on IS NULL"
                )

            await until(applied)
        assert running.worker is not None
        await running.worker.stop()
        await running.sql(
            "INSERT INTO patch_sessions (sc_id, title, status, claimed_from, not_before) VALUES"
            " (2, 'due', 'received', NULL, now() - interval '90 s'),"
            " (3, 'resting', 'received', NULL, now() + interval '1 h'),"
            " (4, 'claimed', 'clarifying', 'received', now()),"
            " (5, 'given up', 'escalated', 'clarified', now()),"
            " (6, 'put there by hand', 'escalated', NULL, now())"
        )
        yield running, client


async def test_status_counts_backlog_age_progress_and_escalated_of_every_phase(database_url: str) -> None:
    async with after_some_work(database_url) as (_, client):
        answer = (await client.get("/api/status")).json()["phases"]

    found = {(line["table"], line["phase"]): line for line in answer}
    inbox = found["deliveries", "applying"]
    assert (inbox["backlog"], inbox["parked"], inbox["in_progress"], inbox["escalated"]) == (0, 1, 0, 1)
    clarifying = found["patch_sessions", "clarifying"]
    assert (clarifying["ready"], clarifying["backlog"], clarifying["in_progress"]) == ("received", 3, 1)
    assert 90 <= clarifying["oldest_s"] < 150
    assert clarifying["escalated"] == 0
    drafting = found["patch_sessions", "drafting"]
    assert (drafting["backlog"], drafting["oldest_s"], drafting["escalated"]) == (0, None, 1)
    assert found["patch_sessions", None]["escalated"] == 1


async def test_metrics_tell_what_was_counted_and_what_waits(database_url: str) -> None:
    async with after_some_work(database_url) as (running, client):
        await running.client.post("/webhooks/shortcut", content=b"{}")
        answer = await client.get("/metrics")

    assert answer.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return samples[f"webhooks_{name}", tuple(sorted(labels.items()))]

    # Counters are the process's, and so count what other tests did.
    assert value("deliveries_total", source="shortcut", outcome="accepted") >= 4
    assert value("rejections_total", source="shortcut", cause="missing_signature") >= 1
    assert value("accept_seconds_count") >= 4
    assert value("claims_total", table="deliveries", phase="applying", result="won") >= 4
    assert value("outcomes_total", table="deliveries", phase="applying", outcome="done") >= 2
    assert value("outcomes_total", table="deliveries", phase="applying", outcome="escalated") >= 1
    assert value("backlog", table="patch_sessions", phase="clarifying") == 3
    assert value("oldest_seconds", table="patch_sessions", phase="clarifying") >= 90
    assert value("in_progress", table="patch_sessions", phase="clarifying") == 1
    assert value("escalated", table="patch_sessions", phase="drafting") == 1
    assert value("parked", table="deliveries", phase="applying") == 1
    assert value("database_up") == 1


async def test_deliveries_are_listed_newest_first_with_disposition_and_reason(database_url: str) -> None:
    async with after_some_work(database_url) as (_, client):
        rows = (await client.get("/api/deliveries")).json()["deliveries"]

    assert [(row["disposition"], row["reason"]) for row in rows] == [
        ("parked", "waits while patch_sessions:1 is received"),
        ("dead", "it makes no sense"),
        ("ignored", "the label was 'Patch', not 'patch'"),
        ("processed", None),
    ]
    assert {row["event"] for row in rows} == {"story.update"}


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("disposition=parked", ["park"]),
        ("disposition=dead&source=SHORTCUT", ["refuse"]),
        ("event=STORY.up", ["park", "refuse", "ignore", "open"]),
        ("event=story.create", []),
        ("event=push", []),
        ("limit=2", ["park", "refuse"]),
        ("since=1h&limit=1", ["park"]),
        ("since=2999-01-01", []),
        ("event=%00", []),
    ],
)
async def test_deliveries_are_filtered(database_url: str, query: str, found: list[str]) -> None:
    async with after_some_work(database_url) as (_, client):
        rows = (await client.get(f"/api/deliveries?{query}")).json()["deliveries"]
        bodies = [(await client.get(f"/api/deliveries/{row['id']}")).json()["body"] for row in rows]

    assert [title for body in bodies for title in ("open", "ignore", "refuse", "park") if f'"{title}"' in body] == found


async def test_the_next_page_starts_before_the_last_id(database_url: str) -> None:
    async with after_some_work(database_url) as (_, client):
        first = (await client.get("/api/deliveries?limit=3")).json()["deliveries"]
        rest = (await client.get(f"/api/deliveries?before={first[-1]['id']}")).json()["deliveries"]

    assert [row["id"] for row in first + rest] == sorted((row["id"] for row in first + rest), reverse=True)
    assert len(rest) == 1


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("limit=0", "limit"),
        ("limit=many", "limit"),
        ("limit=99999999999999999999", "limit"),
        ("before=²", "before"),
        ("since=yesterday", "yesterday"),
        ("disposition=lost", "disposition"),
        ("colour=red", "colour"),
    ],
)
async def test_a_query_that_cannot_be_read_is_refused_by_name(database_url: str, query: str, named: str) -> None:
    async with stack(database_url, shop.consumer, work=False) as running, asking(running, shop.consumer) as client:
        answer = await client.get(f"/api/deliveries?{query}")

    assert answer.status_code == 400
    assert named in answer.json()["error"]


async def test_one_delivery_is_shown_with_headers_exact_body_and_attempts(database_url: str) -> None:
    async with after_some_work(database_url) as (_, client):
        dead = (await client.get("/api/deliveries?disposition=dead")).json()["deliveries"][0]
        shown = (await client.get(f"/api/deliveries/{dead['id']}")).json()

    assert '"title": "refuse"' in shown["body"]
    assert dict(shown["headers"])["content-type"] == "application/json"
    assert [(attempt["outcome"], attempt["error"]) for attempt in shown["attempts"]] == [
        ("escalated", "it makes no sense")
    ]


async def test_a_body_that_is_not_utf8_is_shown_as_base64(database_url: str) -> None:
    async with stack(database_url, shop.consumer, work=False) as running, asking(running, shop.consumer) as client:
        [id] = await arrived(running.pool, arrival(b"\xff"))
        shown = (await client.get(f"/api/deliveries/{id}")).json()

    assert shown["body_base64"] == "/w=="
    assert "body" not in shown


@pytest.mark.parametrize("id", ["1", "99999999999999999999999"])
async def test_a_delivery_that_is_not_there_is_answered_404(database_url: str, id: str) -> None:
    async with stack(database_url, shop.consumer, work=False) as running, asking(running, shop.consumer) as client:
        answer = await client.get(f"/api/deliveries/{id}")

    assert (answer.status_code, answer.json()) == (404, {"error": f"there is no delivery {id}"})


async def test_a_lost_lease_is_counted(database_url: str) -> None:
    shortcut, sessions = Shortcut(), Gate("patch_sessions", key="sc_id")
    taken = asyncio.Event()

    @sessions.phase("received", claimed="clarifying", done="clarified")
    async def clarify(session: dict[str, Any], claim: Any) -> None:
        taken.set()
        await asyncio.sleep(60)

    consumer = Consumer(gates=[sessions], sources=[shortcut])

    async def losses(client: httpx.AsyncClient) -> float:
        name = 'webhooks_lease_losses_total{phase="clarifying",table="patch_sessions"} '
        found = [line for line in (await client.get("/metrics")).text.splitlines() if line.startswith(name)]
        return float(found[0].removeprefix(name)) if found else 0

    async with (
        stack(database_url, consumer, settings=quick(lease_s=1)) as running,
        asking(running, consumer) as client,
    ):
        before = await losses(client)
        await running.sql("INSERT INTO patch_sessions (sc_id, title, status) VALUES (1, 'x', 'received')")
        await asyncio.wait_for(taken.wait(), 10)
        await running.sql("DELETE FROM patch_sessions")

        async def counted() -> bool:
            return await losses(client) == before + 1

        await until(counted)
