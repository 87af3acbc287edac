"""Refused requests: what is kept of them, how much at most, and how they are accepted after all."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import httpx
import psycopg
import pytest
from click.testing import CliRunner, Result
from consumers import SECRET, Request, Stack, digest, from_github, from_shortcut, quick, stack, stories
from gates import until

from webhooks import Consumer, Event, GitHub, Pool, Shortcut, StandardWebhooks, Transaction, refusals
from webhooks.cli.rejections import rejections as command
from webhooks.delivery import Headers
from webhooks.errors import ConfigurationError
from webhooks.explanation import explained, known
from webhooks.observe import REGISTRY
from webhooks.receiver import Receiver
from webhooks.refusals import Refusal, Refusals
from webhooks.rejections import (
    MOST_BODY_BYTES,
    MOST_HEADER_BYTES,
    Caps,
    Filter,
    Rejection,
    keep,
    kinds,
    listed,
    one,
    trim,
)
from webhooks.rejections import store as store_rejections
from webhooks.reverify import Verdict, candidates, reverify
from webhooks.settings import Settings
from webhooks.signatures import sign
from webhooks.tunnel.probe import made

STANDARD_SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
NOW = 1_800_000_000.0
CAPS = Caps(rows=1000, bytes=64 << 20, age=timedelta(days=3650))
PREVIOUS = "the secret before"
WRONG = "0" * 64


def consumer() -> Consumer:
    return Consumer(gates=[], sources=[Shortcut(), GitHub(), StandardWebhooks()])


async def soon(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something that has to be asked for holds."""
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110 - nothing in this process says so
            await asyncio.sleep(0.02)


class Here:
    """A receiver that keeps what it refuses, on a database of the test's own."""

    def __init__(self, running: Stack, kept: Refusals, client: httpx.AsyncClient, consumer: Consumer) -> None:
        self.running = running
        self.kept = kept
        self.client = client
        self.consumer = consumer
        self.pool = running.pool

    async def send(self, request: Request, status: int = 401) -> httpx.Response:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in request.headers]
        answer = await self.client.post(request.path, headers=headers, content=request.body)
        assert answer.status_code == status, answer.text
        return answer

    async def rows(self, count: int) -> list[dict[str, Any]]:
        """The rejections, oldest first, once there are so many."""
        found: list[dict[str, Any]] = []

        async def there() -> bool:
            found[:] = await self.running.sql("SELECT * FROM rejections ORDER BY id")
            return len(found) >= count

        await soon(there)
        assert len(found) == count
        return found

    async def reverified(self, *ids: int, secret: str = SECRET, **options: bool) -> list[Verdict]:
        secrets = dict.fromkeys(self.consumer.sources, (secret,)) | {"standard_webhooks": (STANDARD_SECRET,)}
        async with self.pool.transaction() as tx:
            found = await candidates(tx, Filter(), ids or None)
            return await reverify(tx, self.consumer, secrets, found, **options)


@asynccontextmanager
async def keeping(
    url: str, consumer: Consumer, caps: Caps = CAPS, now: Callable[[], float] = time.time
) -> AsyncIterator[Here]:
    async with stack(url, consumer, work=False) as running:
        secrets: dict[str, Sequence[str]] = dict.fromkeys(consumer.sources, (SECRET,))
        secrets["standard_webhooks"] = (STANDARD_SECRET,)
        kept = Refusals(running.pool, consumer.sources, caps, lambda source: (*secrets[source], PREVIOUS))
        kept.start()
        app = Receiver(consumer.sources, secrets, running.accepter, max_body_bytes=4 << 20, refusals=kept, now=now)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as client:
            try:
                yield Here(running, kept, client, consumer)
            finally:
                await kept.stop()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "WRITE_EVERY_S", 0.02)


@pytest.fixture
async def here(database_url: str) -> AsyncIterator[Here]:
    async with keeping(database_url, consumer(), now=lambda: NOW) as found:
        yield found


def dropped(source: str, reason: str) -> float:
    labels = {"source": source, "reason": reason}
    return REGISTRY.get_sample_value("webhooks_rejections_dropped_total", labels) or 0


def rejection(
    source: str = "shortcut", body: bytes = b"{}", at: float = NOW, cause: str = "bad_signature"
) -> Rejection:
    sha256 = hashlib.sha256(body).digest()
    return Rejection(source, cause, (("payload-signature", WRONG),), body, len(body), sha256, at, at)


# What is kept


@pytest.mark.invariant(1)
async def test_every_cause_is_kept_with_bytes_headers_and_time_and_nothing_becomes_a_delivery(here: Here) -> None:
    body = b'{"a":\r\n 1.0, "a": "\xff"}'
    signature = ("X-Hub-Signature-256", f"sha256={WRONG}")
    sent = {
        "missing_signature": [("X-GitHub-Event", "push")],
        "malformed_header": [("X-Hub-Signature-256", "sha256=é")],
        "duplicate_header": [signature, signature],
        "bad_signature": [signature],
    }
    for cause, headers in sent.items():
        answer = await here.send(Request("/webhooks/github", headers, body))
        assert answer.json() == {"error": cause}
    rows = await here.rows(4)
    assert [row["cause"] for row in rows] == list(sent)
    for row in rows:
        assert (row["source"], row["body"], row["body_bytes"], row["times"]) == ("github", body, len(body), 1)
        assert row["body_sha256"] == hashlib.sha256(body).digest()
        assert row["received_at"] == datetime.fromtimestamp(NOW, UTC)
        assert row["delivery"] is None
    assert [value for name, value in rows[1]["headers"] if name == "x-hub-signature-256"] == ["sha256=\u00e9"]
    assert await here.running.deliveries() == []


@pytest.mark.invariant(1)
async def test_a_stale_signed_time_is_refused_and_kept(here: Here) -> None:
    for off, cause in ((-4 * 3600, "stale_timestamp"), (4 * 3600, "stale_timestamp")):
        signed = sign(StandardWebhooks.recipe, b"{}", STANDARD_SECRET, now=NOW + off, id=f"msg_{off}")
        answer = await here.send(Request("/webhooks/standard_webhooks", list(signed), b"{}"))
        assert answer.json() == {"error": cause}
    for timestamp in ("nan", "1700000000.9", "-1", "1_700"):
        signed = sign(StandardWebhooks.recipe, b"{}", STANDARD_SECRET, now=NOW, id=f"msg_{timestamp}".replace(".", "_"))
        headers = [(name, timestamp if name == "webhook-timestamp" else value) for name, value in signed]
        await here.send(Request("/webhooks/standard_webhooks", headers, b"{}"))
    causes = sorted(row["cause"] for row in await here.rows(6))
    assert causes == ["malformed_header"] * 4 + ["stale_timestamp"] * 2
    assert await here.running.deliveries() == []


async def test_a_body_that_is_too_long_to_keep_leaves_its_length_and_digest(here: Here) -> None:
    fits, long, refused = (b" " * size for size in (MOST_BODY_BYTES, MOST_BODY_BYTES + 1, (4 << 20) + 1))
    await here.send(from_shortcut(fits, signature=WRONG))
    await here.send(from_shortcut(long, signature=WRONG))
    await here.send(from_shortcut(refused), 413)
    kept, measured, cut = await here.rows(3)
    assert kept["body"] == fits
    assert (measured["body"], measured["body_bytes"]) == (None, len(long))
    assert measured["body_sha256"] == hashlib.sha256(long).digest()
    assert (cut["cause"], cut["body"], cut["body_sha256"]) == ("body_too_large", None, b"")


async def test_credentials_are_never_kept_and_a_token_of_another_provider_only_by_name(here: Here) -> None:
    others = [
        ("Authorization", "Bearer 123"),
        ("Cookie", "session=123"),
        ("Proxy-Authorization", "Basic 123"),
        ("X-Gitlab-Token", "123"),
        ("X-Unknown", "123"),
        ("Stripe-Signature", "t=1,v1=00"),
        ("User-Agent", "something"),
    ]
    await here.send(Request("/webhooks/shortcut", others, b"{}"))
    [row] = await here.rows(1)
    kept = dict(row["headers"])
    assert "123" not in str(row)
    assert kept == {
        "x-gitlab-token": "(not kept)",
        "stripe-signature": "t=1,v1=00",
        "user-agent": "something",
        "content-length": "2",
    }


def test_the_headers_that_are_kept_are_bounded() -> None:
    headers: Headers = tuple(("payload-signature", "x" * 10_000) for _ in range(100))
    kept = keep(Shortcut(), headers)
    assert kept[0][1] == "x" * 4096 + "…"
    assert sum(len(name) + len(value) for name, value in kept) <= MOST_HEADER_BYTES
    assert keep(Shortcut(), (("payload-signature", "a\x00b"),)) == (("payload-signature", "a\ufffdb"),)


class ByPassword(Shortcut):
    """A source whose own allow-list names a credential."""

    event_headers = frozenset({"authorization"})


def test_a_credential_is_not_kept_even_where_a_source_asks_for_it() -> None:
    assert keep(ByPassword(), (("authorization", "Basic 123"),)) == ()


# How much


async def test_the_same_request_again_within_a_minute_is_only_counted(here: Here) -> None:
    first, other = from_shortcut(b"{}", signature=WRONG), from_shortcut(b"[]", signature=WRONG)
    for _ in range(3):
        await here.send(first)
    await here.rows(1)
    for request in (first, other, from_shortcut(b"{}", signature="1" * 64)):
        await here.send(request)
    rows = await here.rows(3)
    assert [row["times"] for row in rows] == [4, 1, 1]


async def test_the_same_request_after_more_than_a_minute_is_another_rejection(pool: Pool) -> None:
    async with pool.transaction() as tx:
        for after in (0, 50, 100, 170):  # each a minute at most from the one before, but for the last
            await store_rejections(tx, [rejection(at=NOW + after)])
        assert [row["times"] for row in await listed(tx, Filter())] == [1, 3]


async def test_a_flood_thins_itself_and_displaces_no_other_source_hour_sender_or_kind(pool: Pool) -> None:
    flood = [replace(rejection("github", b"%d" % n, NOW + n), sender="192.0.2.7") for n in range(200)]
    others = [
        replace(rejection("shortcut", b"other source", NOW), sender="192.0.2.7"),
        replace(rejection("github", b"other sender", NOW), sender="192.0.2.8"),
        replace(rejection("github", b"other hour", NOW - 3600), sender="192.0.2.7"),
        replace(rejection("github", b"other kind", NOW, cause="missing_signature"), sender="192.0.2.7"),
    ]
    async with pool.transaction() as tx:
        await store_rejections(tx, [*others, *flood[:100]])
        for part in range(100, 200, 10):
            await trim(tx, replace(CAPS, rows=30))
            await store_rejections(tx, flood[part : part + 10])
        await trim(tx, replace(CAPS, rows=30))
        bodies = [bytes(row["body"]) for row in await (await tx.execute("SELECT body FROM rejections")).fetchall()]
    assert len(bodies) == 30
    assert {other.body for other in others} <= set(bodies)
    # By lot, not the newest: one that matters may be among the first.
    numbers = [int(body) for body in bodies if body.isdigit()]
    assert min(numbers) < 100 < max(numbers)


async def test_what_a_secret_of_ours_signed_has_room_that_no_flood_takes(here: Here, database_url: str) -> None:
    body = b'{"rotated": true}'
    await here.send(from_shortcut(body, signature=digest(body, PREVIOUS)))
    await here.send(Request("/webhooks/github", from_shortcut(body).headers, body))  # meant for another source
    await here.rows(2)
    for _ in range(2):  # forged ones of the same form, from the same place, in the same hour
        async with here.pool.transaction() as tx:
            await store_rejections(tx, [rejection("shortcut", b"%d" % n, NOW) for n in range(100)])
            await store_rejections(tx, [rejection("github", b"%d" % n, NOW) for n in range(100)])
            await trim(tx, replace(CAPS, rows=10))
    kept = await here.running.sql("SELECT body, proved FROM rejections ORDER BY id")
    assert len(kept) == 10
    assert [bytes(row["body"]) for row in kept if row["proved"]] == [body, body]
    verdicts = await here.reverified(secret=PREVIOUS)
    assert [verdict.outcome for verdict in verdicts if verdict.outcome != "refused"] == ["accepted"]


async def test_what_a_secret_of_ours_signed_has_its_half_and_no_more(pool: Pool) -> None:
    proved = [replace(rejection(body=b"%d" % n), proved=True) for n in range(50)]
    async with pool.transaction() as tx:
        await store_rejections(tx, [*proved, *(rejection(body=b"junk%d" % n) for n in range(50))])
        await trim(tx, replace(CAPS, rows=10))
        rows = await (await tx.execute("SELECT proved FROM rejections")).fetchall()
    assert sorted(row["proved"] for row in rows) == [False] * 5 + [True] * 5


async def test_a_flood_that_fills_the_memory_leaves_room_for_what_is_proved(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "MOST_WAITING", 10)
    kept = Refusals(pool, {"shortcut": Shortcut()}, CAPS, lambda source: (PREVIOUS,))  # nobody writes yet
    for n in range(50):
        await kept.keep(Refusal("shortcut", "missing_signature", (), b"%02d" % n, 2, NOW, "192.0.2.7"))
    signature = (("payload-signature", digest(b"{}", PREVIOUS)),)
    await kept.keep(Refusal("shortcut", "bad_signature", signature, b"{}", 2, NOW, "2001:db8::1:2"))
    kept.start()
    await kept.stop()
    async with pool.transaction() as tx:
        rows = await (await tx.execute("SELECT sender FROM rejections WHERE proved")).fetchall()
    assert [row["sender"] for row in rows] == ["2001:db8::/64"]


async def test_the_cap_on_bytes_cuts_who_takes_most(pool: Pool) -> None:
    flood = [rejection("github", b"x" * 100_000 + b"%d" % n, NOW + n) for n in range(20)]
    async with pool.transaction() as tx:
        await store_rejections(tx, [*flood, rejection("shortcut", b"y" * 50_000, NOW - 1000)])
        await trim(tx, replace(CAPS, bytes=500_000))
        left = await listed(tx, Filter(limit=100))
    assert sum(row["source"] == "shortcut" for row in left) == 1
    assert sum(row["source"] == "github" for row in left) == 4


async def test_what_is_too_old_is_forgotten_also_when_nothing_new_comes(database_url: str) -> None:
    caps = replace(CAPS, age=timedelta(days=7))
    async with Pool.open(database_url, settings=quick()) as pool:
        async with pool.transaction() as tx:
            ages = (timedelta(days=8), timedelta(days=6))
            at = [(datetime.now(UTC) - age).timestamp() for age in ages]
            await store_rejections(tx, [rejection(body=b"old", at=at[0]), rejection(body=b"young", at=at[1])])
        kept = Refusals(pool, consumer().sources, caps)
        kept.start()

        async def only_the_young_one() -> bool:
            async with pool.transaction() as tx:
                return [row["body_bytes"] for row in await listed(tx, Filter())] == [len(b"young")]

        await soon(only_the_young_one)
        await kept.stop()


async def test_a_row_that_is_being_accepted_is_not_trimmed_and_holds_up_nobody(pool: Pool) -> None:
    async with pool.transaction() as tx:
        await store_rejections(tx, [rejection(body=b"a"), rejection(body=b"b")])
    async with pool.transaction() as held:
        await held.execute("SELECT id FROM rejections WHERE body = 'a' FOR UPDATE")
        async with pool.transaction() as tx:
            # The same again would raise its count: counted anew, rather than waited for.
            await store_rejections(tx, [rejection(body=b"a")])
            assert await trim(tx, replace(CAPS, rows=0)) == 2
    async with pool.transaction() as tx:
        assert len(await listed(tx, Filter())) == 1


async def test_a_flood_on_one_source_is_dropped_and_counted_and_leaves_another_its_place(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "MOST_WAITING", 40)
    before = dropped("github", "no room")
    kept = Refusals(pool, {"github": GitHub(), "shortcut": Shortcut()}, CAPS)  # nobody writes yet
    for n in range(100):
        await kept.keep(Refusal("github", "bad_signature", (), b"%03d" % n, 3, NOW))
    await kept.keep(Refusal("shortcut", "bad_signature", (), b"{}", 2, NOW))
    assert dropped("github", "no room") == before + 80
    kept.start()
    await kept.stop()
    async with pool.transaction() as tx:
        assert {kind["source"]: kind["kept"] for kind in await kinds(tx, Filter())} == {"github": 20, "shortcut": 1}


async def test_memory_of_what_waits_is_bounded_in_bytes(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "MOST_WAITING_BYTES", 0)  # the share is never less than two bodies
    before = dropped("shortcut", "no room")
    kept = Refusals(pool, {"shortcut": Shortcut()}, CAPS)
    for n in range(10):
        await kept.keep(Refusal("shortcut", "bad_signature", (), b"%d" % n + b" " * 999_999, 1_000_000, NOW))
    assert dropped("shortcut", "no room") == before + 7
    await kept.stop()


async def test_a_flood_reaches_the_database_in_small_groups_with_pauses(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "WRITE_EVERY_S", 3600.0)
    kept = Refusals(pool, {"shortcut": Shortcut()}, CAPS)
    for n in range(500):
        await kept.keep(Refusal("shortcut", "bad_signature", (), b"%03d" % n, 3, NOW))
    kept.start()

    async def stored() -> int:
        async with pool.transaction() as tx:
            return int((await (await tx.execute("SELECT count(*) AS n FROM rejections")).fetchall())[0]["n"])

    async def some() -> bool:
        return await stored() > 0

    await soon(some)
    assert await stored() == refusals.MOST_AT_ONCE
    await kept.stop()
    assert await stored() == 500


async def test_nothing_is_kept_where_the_cap_is_no_rows(database_url: str) -> None:
    async with keeping(database_url, consumer(), replace(CAPS, rows=0)) as here:
        await here.send(from_shortcut(b"{}", signature=WRONG))
        await here.kept.stop()
        assert await here.rows(0) == []


async def test_without_a_database_what_is_refused_is_answered_at_once_dropped_and_counted(database_url: str) -> None:
    before = dropped("shortcut", "no database")
    sources = {"shortcut": Shortcut()}
    async with Pool.open(database_url, settings=quick()) as pool:
        nowhere = Pool("postgresql://127.0.0.1:1/nowhere", quick())
        kept = Refusals(nowhere, sources, CAPS)
        kept.start()
        async with stack(database_url, Consumer(gates=[], sources=list(sources.values())), work=False) as running:
            app = Receiver(sources, {"shortcut": (SECRET,)}, running.accepter, max_body_bytes=1024, refusals=kept)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                request = from_shortcut(b"{}", signature=WRONG)
                for _ in range(2):
                    answer = await client.post(request.path, headers=request.headers, content=request.body)
                    assert answer.status_code == 401
        await until(lambda: dropped("shortcut", "no database") >= before + 1)
        await kept.stop()
        async with pool.transaction() as tx:
            assert await listed(tx, Filter()) == []


async def test_a_connection_that_died_is_made_anew_without_a_loss(here: Here, database_url: str) -> None:
    await here.send(from_shortcut(b"1", signature=WRONG))
    await here.rows(1)
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid()"
        )
    await here.send(from_shortcut(b"2", signature=WRONG))

    async def both() -> bool:
        try:
            return len(await here.running.sql("SELECT 1 FROM rejections")) == 2
        except psycopg.Error:  # the pool's own connections died as well
            return False

    await soon(both)


# Accepting them after all


async def test_what_verifies_with_the_secret_of_today_becomes_a_delivery_byte_for_byte(here: Here) -> None:
    body = b'{"id": "a-1", "actions": [],\r\n "f": 1.0}'
    request = from_github(body, guid="a-guid", signature=f"sha256={digest(body, 'the right one')}")
    await here.send(request)
    [row] = await here.rows(1)
    assert [(v.outcome, v.told) for v in await here.reverified()] == [("refused", "bad_signature")]

    [dry] = await here.reverified(secret="the right one", dry=True)
    assert (dry.outcome, dry.delivery) == ("accepted", None)
    assert await here.running.deliveries() == []

    [verdict] = await here.reverified(secret="the right one")
    [stored] = await here.running.deliveries()
    assert (verdict.id, verdict.outcome, verdict.delivery) == (row["id"], "accepted", stored["id"])
    assert (stored["body"], stored["dedup_key"], stored["origin"]) == (body, "101:a-guid", "received")
    kept = {name for name, _ in stored["headers"]}
    assert kept == {
        "content-type",
        "x-github-event",
        "x-github-delivery",
        "x-hub-signature-256",
        "x-github-hook-id",
        "user-agent",
    }
    [row] = await here.rows(1)
    assert (row["delivery"], row["accepted_at"] is not None) == (stored["id"], True)
    # Accepted once; nothing is left to do.
    assert await here.reverified(secret="the right one") == []


async def test_what_is_here_already_is_a_duplicate_and_a_dead_one_is_tried_again(here: Here) -> None:
    body = stories(1, id="a-1")
    await here.send(from_shortcut(body, signature=digest(body, "new")))
    await here.send(from_shortcut(body), 202)
    await here.rows(1)
    [verdict] = await here.reverified(secret="new")
    [stored] = await here.running.deliveries()
    assert (verdict.outcome, verdict.delivery) == ("duplicate", stored["id"])

    await here.running.sql("UPDATE deliveries SET status = 'dead'")
    await here.running.sql("UPDATE rejections SET delivery = NULL, accepted_at = NULL")
    [dry] = await here.reverified(secret="new", dry=True)
    assert (dry.outcome, dry.told) == ("rearmed", "it is dead")
    [verdict] = await here.reverified(secret="new")
    assert (verdict.outcome, verdict.delivery) == ("rearmed", stored["id"])
    assert [row["status"] for row in await here.running.deliveries()] == ["received"]


async def test_two_rejections_of_one_delivery_become_one(here: Here) -> None:
    body = stories(1, id="a-1")
    for agent in ("first", "second"):
        request = from_shortcut(body, signature=digest(body, "new"))
        await here.send(replace(request, headers=[*request.headers, ("User-Agent", agent)]))
    await here.rows(2)
    verdicts = await here.reverified(secret="new")
    assert [verdict.outcome for verdict in verdicts] == ["accepted", "duplicate"]
    assert len({verdict.delivery for verdict in verdicts}) == len(await here.running.deliveries()) == 1


async def test_of_two_people_who_accept_at_once_one_does_and_the_other_does_not_wait(here: Here) -> None:
    body = stories(1)
    await here.send(from_shortcut(body, signature=digest(body, "new")))
    [row] = await here.rows(1)
    async with here.pool.transaction() as tx:
        [verdict] = await reverify(tx, here.consumer, {"shortcut": ("new",)}, [row["id"]])
        assert verdict.outcome == "accepted"
        async with asyncio.timeout(0.9):  # a lock is waited for for a second
            assert await here.reverified(secret="new") == []
    assert len(await here.running.deliveries()) == 1


async def test_age_is_judged_as_of_the_receipt_and_only_ignored_when_that_is_asked_for(database_url: str) -> None:
    # All of this was three days ago.
    then = time.time() - timedelta(days=3).total_seconds()
    async with keeping(database_url, consumer(), now=lambda: then) as here:
        wrong = "whsec_" + base64.b64encode(b"another one").decode()
        for sent, (off, secret) in enumerate(((0, wrong), (-4 * 3600, STANDARD_SECRET), (-4 * 3600, wrong)), 1):
            signed = sign(StandardWebhooks.recipe, b"{}", secret, now=then + off, id=f"msg_{off}")
            await here.send(Request("/webhooks/standard_webhooks", list(signed), b"{}"))
            await here.rows(sent)
        fresh, stale, both = [row["id"] for row in await here.rows(3)]
        secrets = {"standard_webhooks": (wrong,)}
        async with here.pool.transaction() as tx:
            found = await reverify(tx, here.consumer, secrets, [fresh, both])
        assert [(verdict.outcome, verdict.told.partition(",")[0]) for verdict in found] == [
            ("accepted", ""),
            ("refused", "stale_timestamp"),
        ]
        [kept] = await here.reverified(stale)
        assert kept.outcome == "refused"
        assert "--ignore-age" in kept.told
        [ignored] = await here.reverified(stale, ignore_age=True)
        assert (ignored.outcome, ignored.told) == ("accepted", "its age was ignored")
        # A wrong signature is not a matter of age.
        [wrongly] = await here.reverified(both, ignore_age=True)
        assert (wrongly.outcome, wrongly.told) == ("refused", "bad_signature")


class OldFirst(StandardWebhooks):
    """A source of the user's own that looks at the age before the signature."""

    def verify(self, headers: Headers, body: bytes, secrets: Sequence[str], now: float) -> None:
        from webhooks.errors import Refused

        if abs(now - int(dict(headers)["webhook-timestamp"])) > 300:
            raise Refused("stale_timestamp")
        super().verify(headers, body, secrets, now)


@pytest.mark.invariant(1)
async def test_ignoring_the_age_never_ignores_the_signature(database_url: str) -> None:
    own = Consumer(gates=[], sources=[OldFirst()])
    async with keeping(database_url, own, now=lambda: NOW) as here:
        forged = [("webhook-id", "m"), ("webhook-timestamp", "1"), ("webhook-signature", "v1,AAAA")]
        answer = await here.send(Request("/webhooks/standard_webhooks", forged, b"{}"))
        assert answer.json() == {"error": "stale_timestamp"}
        await here.rows(1)
        [verdict] = await here.reverified(ignore_age=True)
        assert verdict.outcome == "refused"
        assert await here.running.deliveries() == []


async def test_a_test_of_the_url_a_body_that_was_not_kept_and_a_source_that_is_gone_become_nothing(here: Here) -> None:
    ping = b'{"type":"validation"}'
    await here.send(from_shortcut(ping, signature=digest(ping, "new")))
    probe = made(here.consumer.sources["shortcut"], "new", NOW)
    await here.send(Request("/webhooks/shortcut", list(probe.headers), probe.body))
    long = b" " * (MOST_BODY_BYTES + 1)
    await here.send(from_shortcut(long, signature=digest(long, "new")))
    await here.rows(3)
    async with here.pool.transaction() as tx:
        await store_rejections(tx, [rejection("gone")])
    verdicts = await here.reverified(secret="new")
    assert [verdict.outcome for verdict in verdicts] == ["answered", "answered", "refused", "refused"]
    assert "not kept" in verdicts[2].told
    assert "no such source" in verdicts[3].told
    assert await here.running.deliveries() == []


async def test_an_accepted_rejection_is_applied_like_any_delivery(database_url: str) -> None:
    shortcut, seen = Shortcut(), list[int]()

    @shortcut.on("story.update")
    async def note(event: Event, tx: Transaction) -> None:
        seen.append(event.data["id"])

    own = Consumer(gates=[], sources=[shortcut])
    async with keeping(database_url, own) as here:
        body = stories(7)
        await here.send(from_shortcut(body, signature=digest(body, "new")))
        await here.rows(1)
        assert [verdict.outcome for verdict in await here.reverified(secret="new")] == ["accepted"]
    async with stack(database_url, own) as running:

        async def processed() -> bool:
            return [row["status"] for row in await running.deliveries()] == ["processed"]

        await soon(processed)
        assert seen == [7]


# Explaining


async def test_a_stored_rejection_is_explained_with_the_secrets_that_are_found_here(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_SHORTCUT", "today's")
    monkeypatch.setenv("WEBHOOKS_SECRET_SHORTCUT_PREVIOUS", "a first one, an earlier one")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "github").write_text("made by dev\n")
    for secret in ("an earlier one", "made by dev"):
        await here.send(from_shortcut(b"{}", signature=digest(b"{}", secret)))
    earlier, made_by_dev = await here.rows(2)
    secrets = known(here.consumer.sources, tmp_path)
    assert secrets.in_force == {"shortcut": ("today's",), "github": ("made by dev",), "standard_webhooks": ()}
    async with here.pool.transaction() as tx:
        rows = [await one(tx, row["id"]) for row in (earlier, made_by_dev)]
    told = [explained(row, here.consumer.sources, secrets) for row in rows if row is not None]
    assert "WEBHOOKS_SECRET_SHORTCUT_PREVIOUS" in told[0][0]
    assert "the secret of `github`" in told[1][0]
    assert "no source `gone`" in explained({"source": "gone"}, here.consumer.sources, secrets)[0]


# The command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)


async def ran(*arguments: str) -> str:
    return (await asyncio.to_thread(run, *arguments)).stdout


@pytest.fixture
def _as_serve(monkeypatch: pytest.MonkeyPatch, database_url: str, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEBHOOKS_APP", "shop:consumer")
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("WEBHOOKS_SECRET_SHORTCUT", SECRET)
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", "another")


@pytest.mark.usefixtures("_as_serve")
async def test_the_command_groups_by_source_and_cause_with_a_hint(here: Here) -> None:
    assert await ran() == "nothing was refused\n"
    for _ in range(2):
        await here.send(from_shortcut(b"{}\n", signature=digest(b"{}")))
    await here.send(Request("/webhooks/github", [("X-GitHub-Event", "push")], b"{}"))
    await here.rows(2)
    table = await ran()
    [line] = [line for line in table.splitlines() if line.startswith("shortcut")]
    assert line.split()[:3] == ["shortcut", "bad_signature", "2"]
    assert "when the trailing newline is dropped" in line
    assert "no signature came" in table
    [kind] = json.loads(await ran("--source", "Shortcut", "--json"))
    assert (kind["cause"], kind["times"], kind["kept"]) == ("bad_signature", 2, 1)
    assert "trailing newline" in kind["hints"][0]
    assert json.loads(await ran("--cause", "stale_timestamp", "--json")) == []
    assert json.loads(await ran("list", "--cause", "missing_signature", "--json"))[0]["source"] == "github"
    assert len((await ran("list", "--limit", "1")).splitlines()) == 2
    with pytest.raises(click.UsageError, match="after list"):
        await ran("--source", "github", "list")


@pytest.mark.usefixtures("_as_serve")
async def test_the_command_shows_one_with_headers_body_and_hints(here: Here) -> None:
    await here.send(from_shortcut('{"a":"\u202e é"}'.encode(), signature=digest(b"{}", "unknown")))
    [row] = await here.rows(1)
    shown = await ran("show", str(row["id"]))
    assert "bad_signature" in shown
    assert "most likely the secret here (WEBHOOKS_SECRET_SHORTCUT)" in shown
    assert "payload-signature: " in shown
    assert "é" in shown
    assert "\u202e" not in shown
    assert SECRET not in shown
    assert digest(row["body"]) not in shown
    found = json.loads(await ran("show", str(row["id"]), "--json"))
    assert (found["id"], found["body_sha256"]) == (row["id"], hashlib.sha256(row["body"]).hexdigest())
    result = await asyncio.to_thread(run, "show", str(row["id"]), "--body")
    assert result.stdout_bytes == row["body"]
    with pytest.raises(click.ClickException, match="there is no rejection 999"):
        await ran("show", "999")
    with pytest.raises(
        click.BadParameter, match="'x' is no id: write a number, as webhooks rejections list shows them"
    ):
        await ran("show", "x")


@pytest.mark.usefixtures("_as_serve")
async def test_a_body_that_indenting_would_make_many_times_as_long_is_shown_as_it_came(here: Here) -> None:
    body = b"[" * 900 + b",".join([b"1"] * 50_000) + b"]" * 900
    await here.send(from_shortcut(body, signature=WRONG))
    [row] = await here.rows(1)
    shown = await ran("show", str(row["id"]))
    assert body.decode() in shown
    assert len(shown) < 2 * len(body)


@pytest.mark.usefixtures("_as_serve")
async def test_the_command_accepts_only_with_yes_and_exits_with_1_while_some_stay_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = stories(1), stories(2)
    await here.send(from_shortcut(good, signature=digest(good, "new")))
    await here.send(from_shortcut(bad, signature=WRONG))
    first, second = [row["id"] for row in await here.rows(2)]
    monkeypatch.setenv("WEBHOOKS_SECRET_SHORTCUT", "new")
    dry = await asyncio.to_thread(run, "reverify", "--id", str(first))
    assert "1 accepted; nothing was done yet: do it with --yes" in dry.stdout
    refused = await asyncio.to_thread(run, "reverify", "--id", str(second))
    assert "1 refused; nothing was done yet, and --yes would accept none" in refused.stdout
    assert await here.running.deliveries() == []
    done = await asyncio.to_thread(run, "reverify", "--yes")
    assert (dry.return_value, done.return_value) == (None, 1)
    assert [row["body"] for row in await here.running.deliveries()] == [good]
    again = await asyncio.to_thread(run, "reverify", "--id", str(first))
    [stored] = await here.running.deliveries()
    assert f"rejection {first} was accepted already, as delivery {stored['id']}" in again.stderr
    with pytest.raises(ConfigurationError, match="there is no rejection 998, 999; the oldest ones are forgotten"):
        await ran("reverify", "--id", "999", "--id", str(second), "--id", "998", "--yes")
    assert "all accepted since" not in await ran()
    await here.running.sql("DELETE FROM rejections WHERE id = %(id)s", id=second)
    assert "all accepted since" in await ran()
    assert "nothing refused that was not accepted" in await ran("reverify", "--since", "1d")
    assert f"as delivery {(await here.running.deliveries())[0]['id']}" in await ran("show", str(first))


def test_the_caps_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Caps.of(Settings()) == Caps(rows=1000, bytes=64 << 20, age=timedelta(days=7))
    for name, value in (("KEPT", "5"), ("MIB", "2"), ("DAYS", "1")):
        monkeypatch.setenv(f"WEBHOOKS_REJECTIONS_{name}", value)
    assert Caps.of(Settings.load()) == Caps(rows=5, bytes=2 << 20, age=timedelta(days=1))
