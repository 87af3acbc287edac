"""`webhooks trigger`: every sample, good and bad deliveries on purpose, and what is said about the answers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from click.testing import CliRunner, Result
from consumers import SECRET, Stack, arrival, arrived, from_github, served, stack
from gates import until
from processes import started, webhooks
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from handlers import github_issues
from handlers.issues import issues
from handlers.sources import github as handlers_github
from webhooks import Consumer, GitHub, Shortcut, StandardWebhooks
from webhooks.cli.posting import post
from webhooks.cli.trigger import trigger
from webhooks.errors import ConfigurationError
from webhooks.samples import event_of, is_example, names, sample
from webhooks.samples.edit import change
from webhooks.samples.faults import CUT_HERE, Sending, pieces
from webhooks.samples.request import changed, signed
from webhooks.samples.shortcut import ENTITIES
from webhooks.sources import Source

WHSEC = "whsec_" + "YW4gaW52ZW50ZWQgc2VjcmV0IG9mIDMyIGJ5dGVzISE="
SECRETS: dict[str, Sequence[str]] = {"shortcut": (SECRET,), "github": (SECRET,), "acme": (WHSEC,)}
PAYLOADS = Path(__file__).parent / "payloads" / "github"
RIGHTLY = "as it should be: sent wrong on purpose, and not taken"


def a_consumer() -> Consumer:
    """A consumer that has handlers for nothing: every delivery ends with what it was read as."""
    return Consumer(gates=[], sources=[Shortcut(), GitHub(), StandardWebhooks("acme")])


consumer = a_consumer()


@asynccontextmanager
async def receiving(url: str, monkeypatch: pytest.MonkeyPatch, *, work: bool = False) -> AsyncGenerator[Stack]:
    """A receiver on a socket, where `webhooks trigger` finds it."""
    monkeypatch.setenv("DATABASE_URL", url)
    monkeypatch.setenv("WEBHOOKS_APP", "test_trigger:consumer")
    for name, secrets in SECRETS.items():
        monkeypatch.setenv(f"WEBHOOKS_SECRET_{name.upper()}", secrets[0])
    async with (
        stack(url, a_consumer(), work=work, secrets=SECRETS, most_bytes=8 << 20) as running,
        served(running.receiver) as port,
    ):
        monkeypatch.setenv("WEBHOOKS_RECEIVER_URL", f"http://127.0.0.1:{port}")
        yield running


async def ran(*arguments: str) -> Result:
    return await asyncio.to_thread(
        CliRunner().invoke, trigger, arguments, catch_exceptions=False, standalone_mode=False
    )


def run(*arguments: str) -> Result:
    return CliRunner().invoke(trigger, arguments, catch_exceptions=False, standalone_mode=False)


# ---- samples


async def test_every_sample_is_accepted_by_a_receiver_and_read_as_its_event(database_url: str) -> None:
    one = a_consumer()
    wanted: Counter[tuple[str, str]] = Counter()
    async with (
        stack(database_url, one, secrets=SECRETS, most_bytes=8 << 20) as running,
        served(running.receiver) as port,
    ):
        for source in one.sources.values():
            made: list[Sending] = []
            for name in names(source):
                event = "invoice.paid" if name == "any" else event_of(name)
                id = f"id-{source.name}-{name}"
                body = changed(source, sample(source, event if name == "any" else name), [], id)
                made.append(Sending(event, signed(source, event, body, SECRETS[source.name][0], id)))
                if event != "v2.validation":
                    wanted[source.name, event] += 1
            answers = await post(f"http://127.0.0.1:{port}/webhooks/{source.name}", made, 8)
            expected = [200 if answer.sending.event == "v2.validation" else 202 for answer in answers]
            assert [answer.status for answer in answers] == expected

        async def all_read() -> bool:
            rows = await running.sql("SELECT count(*) AS n FROM deliveries WHERE status = 'ignored'")
            return bool(rows[0]["n"] == wanted.total())

        await until(all_read)
        rows = await running.deliveries()

    read: Counter[tuple[str, str]] = Counter()
    for row in rows:
        assert row["reason"].startswith("no handler for "), row["reason"]
        read[row["source"], row["event"].split(", ")[0]] += 1
    assert read == wanted
    assert wanted.total() > 100


def test_every_shipped_payload_of_github_is_a_sample_with_its_licence() -> None:
    folder = files("webhooks.samples") / "github"
    shipped = {json.dumps(json.loads(path.read_text())) for path in PAYLOADS.glob("*.json")}
    names_ = [name for name in names(GitHub()) if is_example(GitHub(), name) and name != "ping"]
    samples = {json.dumps(json.loads((folder / f"{name}.json").read_text())) for name in names_}
    assert samples == shipped
    assert len(shipped) == 23

    notice = (folder / "NOTICE.md").read_text()
    assert "Permission is hereby granted, free of charge" in notice
    assert "Copyright (c) 2018 Gregor Martynus" in notice
    assert set(re.findall(r"^- `(.+)\.json`$", notice, re.MULTILINE)) == set(names_)


@pytest.mark.parametrize("version", ["", "v2."])
def test_every_entity_of_shortcut_is_created_updated_and_deleted(version: str) -> None:
    known = set(names(Shortcut()))
    for kind in ENTITIES:
        assert {f"{version}{kind}.{action}" for action in ("create", "update", "delete")} <= known
    assert {"pull-request.open", "branch.merge", "workspace2.bulk-update", "v2.assigned", "v2.comment-reply"} <= known


@pytest.mark.parametrize("kind", ["story-comment", "story-task", "branch", "commit", "pull-request"])
@pytest.mark.parametrize("action", ["create", "delete"])
def test_a_part_of_a_story_names_its_story(kind: str, action: str) -> None:
    body = sample(Shortcut(), f"{kind}.{action}", {"number": 7, "other_number": 8})
    part = Shortcut().events((), body)[0]
    assert (part.data["id"], part.data["story_id"]) == (8, 7)


async def test_the_issue_samples_drive_the_heartbeat_flow(database_url: str) -> None:
    one = Consumer(gates=[issues], sources=[handlers_github])
    assert github_issues.issues is issues
    states: list[tuple[str, str | None, str]] = []
    async with stack(database_url, one) as running:
        for event in ("issues.assigned", "issues.labeled", "issues.closed"):
            numbers = {"number": 1, "other_number": 70 if event != "issues.labeled" else 71}
            body = changed(handlers_github, sample(handlers_github, event, numbers), [], event)
            request = signed(handlers_github, event, body, SECRET, event)
            answer = await running.client.post("/webhooks/github", headers=list(request.headers), content=request.body)
            assert answer.status_code == 202

            async def applied() -> bool:
                return not await running.sql("SELECT 1 AS n FROM deliveries WHERE status IN ('received', 'applying')")

            await until(applied)
        rows = await running.sql("SELECT external_ref, assigned_agent_id, status FROM issues ORDER BY external_ref")
        states = [(row["external_ref"], row["assigned_agent_id"], row["status"]) for row in rows]

    assert states == [("github#70", "agent-1", "resolved"), ("github#71", "agent-1", "open")]


def test_samples_made_of_the_same_numbers_tell_of_the_same_thing() -> None:
    numbers = {"number": 7, "other_number": 8}
    opened, closed = (sample(GitHub(), f"issues.{action}", numbers) for action in ("opened", "closed"))
    assert opened["issue"]["number"] == closed["issue"]["number"] == 8


@pytest.mark.parametrize(
    ("assignment", "body"),
    [
        ("list[1].a=7", {"list": [0, {"a": 7}], "a.b": {"c": 1}}),
        ('["a.b"].c=[1, {"d": null}]', {"list": [0, {}], "a.b": {"c": [1, {"d": None}]}}),
        ('["a.b"]["x=y"]=1', {"list": [0, {}], "a.b": {"c": 1, "x=y": 1}}),
        ("list[0]=", {"list": ["", {}], "a.b": {"c": 1}}),
        ("list.1.new=a=b", {"list": [0, {"new": "a=b"}], "a.b": {"c": 1}}),
    ],
)
def test_a_path_may_have_brackets_and_quoted_names(assignment: str, body: dict[str, Any]) -> None:
    given: dict[str, Any] = {"list": [0, {}], "a.b": {"c": 1}}
    change(given, assignment)
    assert given == body


@pytest.mark.parametrize("assignment", ["", "=1", "a", "a..b=1", "[x]=1", 'a["b=1', "a]=1"])
def test_a_path_that_cannot_be_read_is_refused(assignment: str) -> None:
    with pytest.raises(ValueError, match="write it as path=value"):
        change({"a": {}}, assignment)


# ---- many


async def test_copies_are_one_delivery_and_fresh_ones_many(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving(database_url, monkeypatch) as running:
        copies = (await ran("github", "push", "--times", "7", "--concurrency", "3")).output
        assert len(await running.deliveries()) == 1
        fresh = (await ran("shortcut", "story.update", "--times", "7", "--fresh")).output
        rows = await running.deliveries()

    assert f"200 delivery: {rows[0]['id']}  status: duplicate  (6 times)" in copies
    assert len(rows) == 8
    assert fresh.count("202 delivery: ") == 7
    assert len({json.loads(row["body"])["actions"][0]["id"] for row in rows[1:]}) == 7


async def test_many_answers_are_a_table_of_counts(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving(database_url, monkeypatch):
        told = (await ran("github", "push", "issues.opened", "--times", "30", "--fresh", "--concurrency", "20")).output
    lines = [line.split() for line in told.splitlines()]
    assert lines == [
        ["event", "status", "answer", "count"],
        ["issues.opened", "202", "accepted", "30"],
        ["push", "202", "accepted", "30"],
    ]


async def test_several_events_are_sent_in_their_order_and_tell_of_one_story(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = ["story.create", "story.update", "story-comment.create", "story.delete"]
    async with receiving(database_url, monkeypatch) as running:
        told = (await ran("shortcut", *events)).output
        rows = await running.deliveries()

    assert [line.split()[0] for line in told.splitlines()] == events
    read = [Shortcut().events((), json.loads(row["body"])) for row in rows]
    assert [found[0].name for found in read] == events
    assert len({found[0].data["story_id"] for found in read}) == 1


async def test_a_shuffled_order_is_told_and_can_be_had_again(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = ["pull_request.opened", "pull_request.synchronize", "pull_request.closed", "push", "star.created"]

    async def order(running: Stack, *options: str) -> tuple[str, list[str]]:
        before = len(await running.deliveries())
        told = (await ran("github", *events, "--times", "2", "--shuffle", *options)).output
        rows = (await running.deliveries())[before:]
        seed, _, named = told.splitlines()[0].removeprefix("order (--seed ").partition("): ")
        assert sorted(named.split(", ")) == sorted(events * 2)
        stored = [GitHub().events(headers(row), json.loads(row["body"]))[0].name for row in rows]
        assert stored == list(dict.fromkeys(named.split(", ")))  # a copy is no delivery of its own
        return seed, named.split(", ")

    async with receiving(database_url, monkeypatch) as running:
        seed, first = await order(running)
        assert await order(running, "--seed", seed) == (seed, first)
        others = [await order(running, "--seed", str(number)) for number in range(4)]
    assert any(other != first for _, other in others)


def headers(row: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in row["headers"])


# ---- a stored delivery


async def test_a_stored_delivery_is_sent_under_a_new_id_or_as_a_copy(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{ "action":"opened", "n": 12345678901234567890, "n": 1.0 }'
    async with receiving(database_url, monkeypatch) as running:
        assert (await running.send(from_github(body, event="issues", guid="one", hook="77"))).status_code == 202
        anew = (await ran("--from-delivery", "1")).output
        copy = (await ran("--from-delivery", "1", "--same-id", "--times", "3")).output
        edited = (await ran("--from-delivery", "1", "--set", "action=closed", "--id", "two")).output
        rows = await running.deliveries()

    assert anew == f"202 delivery: {rows[1]['id']}  status: accepted\n"
    assert copy == "200 delivery: 1  status: duplicate  (3 times)\n"
    assert edited.startswith("202 ")
    assert [row["body"] for row in rows[:2]] == [body, body]
    assert json.loads(rows[2]["body"])["action"] == "closed"
    assert [row["dedup_key"].partition(":")[0] for row in rows] == ["77", "77", "77"]
    assert rows[2]["dedup_key"] == "77:two"
    assert [dict(headers(row))["x-github-event"] for row in rows] == ["issues"] * 3


async def test_a_stored_delivery_of_shortcut_gets_its_new_id_in_its_body(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving(database_url, monkeypatch) as running:
        await ran("shortcut", "story.update", "--id", "one")
        await ran("--from-delivery", "1")
        copy = (await ran("shortcut", "--from-delivery", "1", "--same-id")).output
        rows = await running.deliveries()
        [unreadable] = await arrived(running.pool, arrival(b"\xff", key="x"))
        with pytest.raises(ConfigurationError, match=r"cannot be changed: not UTF-8.*--same-id sends it as it is"):
            await ran("--from-delivery", str(unreadable))

    assert "status: duplicate" in copy
    first, second = (json.loads(row["body"]) for row in rows)
    assert first["id"] == "one"
    assert second["id"] == rows[1]["dedup_key"] != "one"
    assert {**first, "id": None} == {**second, "id": None}


async def test_a_stored_form_stays_a_form_when_it_is_changed(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving(database_url, monkeypatch) as running:
        await ran("github", "issues.opened", "--bad", "form")
        await ran("--from-delivery", "1", "--set", "issue.number=7")
        rows = await running.deliveries()
    assert all(row["body"].startswith(b"payload=%7B") for row in rows)
    assert GitHub().read(headers(rows[1]), rows[1]["body"])["issue"]["number"] == 7


async def test_a_standard_webhook_is_sent_again_by_the_id_in_its_header(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving(database_url, monkeypatch) as running:
        await ran("acme", "invoice.paid", "--id", "msg_1")
        assert "status: duplicate" in (await ran("--from-delivery", "1", "--same-id")).output
        assert "status: accepted" in (await ran("--from-delivery", "1")).output
        assert len(await running.deliveries()) == 2


async def test_a_delivery_that_is_not_there_or_was_pruned_is_named(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving(database_url, monkeypatch) as running:
        await ran("github", "push")
        await running.sql("UPDATE deliveries SET body = NULL, pruned_at = '2026-01-31T12:00Z'")
        with pytest.raises(ConfigurationError, match="delivery 1 cannot be run again: its body was pruned"):
            await ran("--from-delivery", "1")
        with pytest.raises(ConfigurationError, match="there is no delivery 99"):
            await ran("--from-delivery", "99")


# ---- wrong on purpose


async def test_a_wrong_signature_is_refused_as_it_should_be(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving(database_url, monkeypatch) as running:
        for source, event in (("github", "push"), ("shortcut", "story.update"), ("acme", "invoice.paid")):
            result = await ran(source, event, "--bad", "signature", "--times", "3")
            assert result.output.splitlines()[-2:] == ["401 error: bad_signature  (3 times)", RIGHTLY]
        assert await running.deliveries() == []


async def test_a_stale_time_is_refused_where_one_is_signed_and_impossible_elsewhere(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving(database_url, monkeypatch) as running:
        told = (await ran("acme", "invoice.paid", "--bad", "stale")).output
        assert told.splitlines()[-2:] == ["401 error: stale_timestamp", RIGHTLY]
        for source, event in (("github", "push"), ("shortcut", "story.update")):
            with pytest.raises(ConfigurationError, match=f"{source} signs no time, so nothing it sends can be too old"):
                await ran(source, event, "--bad", "stale")
        assert await running.deliveries() == []


async def test_a_truncated_delivery_is_never_stored(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving(database_url, monkeypatch) as running:
        told = (await ran("github", "issues.opened@whole", "--bad", "truncated", "--times", "2")).output
        assert re.match(r"(--- no answer: cut off after \d+ of \d+ bytes|40[08] )", told)
        assert await running.deliveries() == []
        assert "202" in (await ran("github", "push")).output  # and the receiver goes on


async def test_a_form_is_accepted_and_read_like_json(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving(database_url, monkeypatch) as running:
        assert "202 " in (await ran("github", "issues.opened", "--bad", "form", "--set", "issue.number=7")).output
        [row] = await running.deliveries()
        with pytest.raises(ConfigurationError, match="only GitHub sends forms, shortcut does not"):
            await ran("shortcut", "story.update", "--bad", "form")
    assert row["body"].startswith(b"payload=%7B")
    assert dict(headers(row))["content-type"] == "application/x-www-form-urlencoded"
    assert GitHub().read(headers(row), row["body"])["issue"]["number"] == 7


async def test_chunks_that_cut_characters_are_accepted_byte_for_byte(
    database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "body.json"
    file.write_bytes('{"title": "ok 😊 é ☃"}'.encode())
    async with receiving(database_url, monkeypatch) as running:
        await ran("shortcut", "story.update", "--bad", "chunked")
        await ran("github", "push", "--file", str(file), "--exact", "--bad", "chunked")
        rows = await running.deliveries()
    assert json.loads(rows[0]["body"])["webhooks_trigger"] == CUT_HERE
    assert CUT_HERE.encode() in rows[0]["body"]
    assert rows[1]["body"] == file.read_bytes()


async def test_a_chunked_delivery_announces_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, str]] = []

    async def remembers(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            sent.append({name.decode(): value.decode() for name, value in scope["headers"]})
            while (await receive()).get("more_body"):
                pass
            await send({"type": "http.response.start", "status": 202, "headers": []})
            await send({"type": "http.response.body", "body": b"fine"})

    monkeypatch.setenv("WEBHOOKS_APP", "test_trigger:consumer")
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", SECRET)
    async with served(remembers) as port:
        for bad in ((), ("--bad", "chunked")):
            await ran("github", "push", *bad, "--url", f"http://127.0.0.1:{port}")
    whole, chunked = sent
    assert "content-length" in whole
    assert chunked["transfer-encoding"] == "chunked"
    assert "content-length" not in chunked


def test_a_body_is_cut_at_every_byte_of_a_long_character() -> None:
    body = "a😊bé".encode()
    assert pieces(body) == [b"a", *(bytes([byte]) for byte in "😊".encode()), b"b", b"\xc3", b"\xa9"]
    assert b"".join(pieces(b"x" * 50_000)) == b"x" * 50_000


async def test_a_receiver_that_takes_what_it_should_refuse_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def takes_everything(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 202, "headers": []})
            await send({"type": "http.response.body", "body": b"fine"})

    monkeypatch.setenv("WEBHOOKS_APP", "test_trigger:consumer")
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", SECRET)
    async with served(takes_everything) as port:
        url = ("--url", f"http://127.0.0.1:{port}")
        assert (await ran("github", "push", *url)).output == "202 fine\n"
        for bad in ("signature", "truncated"):
            with pytest.raises(click.ClickException, match=r"not refused by http.*, though sent wrong"):
                await ran("github", "push", "--bad", bad, *url)


@pytest.mark.parametrize(
    ("status", "answer", "hint"),
    [
        (401, {"error": "bad_signature"}, "or with its WEBHOOKS_SECRET_GITHUB"),
        (404, {"error": "unknown_source"}, "has no source github"),
        (404, {"error": "Not Found"}, "is that the address of a receiver?"),
        (500, {"error": "unexpected"}, "refused by http://"),
    ],
)
async def test_what_to_do_about_a_refusal_is_told_where_its_cause_is_known(
    status: int, answer: dict[str, str], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEBHOOKS_APP", "test_trigger:consumer")
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", SECRET)
    async with served(JSONResponse(answer, status)) as port:
        with pytest.raises(click.ClickException, match=re.escape(hint)):
            await ran("github", "push", "--url", f"http://127.0.0.1:{port}")


async def test_what_somebody_answers_stays_one_line_and_no_terminal_obeys_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_APP", "test_trigger:consumer")
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", SECRET)
    async with served(JSONResponse({"status": "fine\n202 delivery: 1\x1b[2J"}, 202)) as port:
        told = (await ran("github", "push", "--url", f"http://127.0.0.1:{port}")).output
    assert told == "202 status: fine\\n202 delivery: 1\\x1b[2J\n"


@pytest.mark.usefixtures("_app")
@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://127.0.0.1:8000/webhooks/github", "nowhere"])
def test_what_is_no_base_address_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", SECRET)
    with pytest.raises(ConfigurationError, match=r"is no address to send to|is not a base address"):
        run("github", "push", "--url", url)


# ---- what ends early


class Stops:
    """A receiver that takes three deliveries, and then answers none."""

    def __init__(self, *, silent: bool) -> None:
        self.silent, self.asked, self.over = silent, 0, asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"(?i)content-length: (\d+)", head)
                assert length is not None
                await reader.readexactly(int(length[1]))
                self.asked += 1
                if self.asked > 3:
                    break
                writer.write(b'HTTP/1.1 202 OK\r\ncontent-length: 22\r\n\r\n{"status": "accepted"}')
            if self.silent:
                await reader.read()
            self.over.set()
        except asyncio.IncompleteReadError:
            pass  # somebody who only looked whether anybody is here
        finally:
            writer.close()
            await writer.wait_closed()

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        async with await asyncio.start_server(self, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await self.over.wait()


TEN = ("trigger", "github", "push", "--times", "10", "--fresh", "--concurrency", "1")
GIVEN = {"WEBHOOKS_APP": "test_trigger:consumer", "WEBHOOKS_SECRET_GITHUB": SECRET}


async def test_an_interrupted_call_tells_what_was_answered_until_then(tmp_path: Path) -> None:
    stops = Stops(silent=True)
    async with stops.serving() as url:
        with started(tmp_path, *TEN, "--url", url, name="trigger", **GIVEN) as process:
            await until(lambda: stops.asked == 4, within_s=60)
            process.signal(signal.SIGINT)
            assert await asyncio.to_thread(process.ends) == 130
    assert process.output == "202 status: accepted  (3 times)\n"
    assert process.log == (
        "interrupted: 3 of 10 were answered; what was under way besides (1 at most) may have been taken\n"
    )


async def test_a_receiver_that_goes_away_leaves_what_was_answered_told(tmp_path: Path) -> None:
    async with Stops(silent=False).serving() as url:
        ended = await asyncio.to_thread(webhooks, tmp_path, *TEN, "--url", url, **GIVEN)
    assert ended.returncode == 1
    assert ended.stdout == "202 status: accepted  (3 times)\n"
    early, why = ended.stderr.splitlines()
    assert early == "ended early: 3 of 10 were answered; what was under way besides (1 at most) may have been taken"
    assert why.startswith(f"webhooks: no answer from {url}/webhooks/github: it ended the connection without an answer;")


# ---- the list, and what does not go together


@pytest.fixture
def _app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_APP", "test_trigger:consumer")


@pytest.mark.usefixtures("_app")
def test_the_list_has_every_sample_of_one_source_or_of_all() -> None:
    everything = [line.split()[:2] for line in run("--list").output.splitlines()[1:]]
    every: list[Source] = list(consumer.sources.values())
    assert everything == [[source.name, name] for source in every for name in names(source)]
    github = run("--list", "github").output
    assert {line.split()[0] for line in github.splitlines()[1:]} == {"github"}
    assert re.search(r"github +check_run.completed +the provider's own example", github)
    assert re.search(r"github +issues.labeled +made anew each time", github)
    with pytest.raises(ConfigurationError, match="there is no source 'nobody'"):
        run("--list", "nobody")


@pytest.mark.usefixtures("_app")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "name a source and an event; --list shows what there is"),
        (["github"], "name an event: webhooks trigger --list github shows"),
        (["github", "push", "--list"], "--list goes with a source, or with nothing"),
        (["github", "push", "--exact"], "--exact goes with --file"),
        (["github", "push", "--same-id"], "--same-id goes with --from-delivery"),
        (["github", "push", "--from-delivery", "1"], "--from-delivery goes without an event"),
        (["--from-delivery", "1", "--same-id", "--set", "a=1"], "--same-id goes without --set"),
        (["github", "push", "ping", "--file", __file__], "--file goes with one event"),
        (["github", "push", "ping", "--id", "x"], "--id goes with one event"),
        (["github", "push", "--id", "x", "--fresh"], "--id goes with one event, and without --fresh"),
        (["github", "push", "--file", __file__, "--exact", "--fresh"], "--exact sends no fresh id"),
        (["github", "push", "--seed", "1"], "--seed goes with --shuffle"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: list[str], told: str) -> None:
    with pytest.raises(click.UsageError, match=re.escape(told)):
        run(*arguments)


@pytest.mark.usefixtures("_app")
def test_the_help_says_what_each_bad_delivery_is() -> None:
    told = CliRunner().invoke(trigger, ["--help"]).output
    for bad in ("signature", "stale", "truncated", "form", "chunked"):
        assert re.search(rf"^  --bad {bad} +\S", told, re.MULTILINE)


def test_the_database_is_asked_only_for_a_stored_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_APP", "test_trigger:consumer")
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", SECRET)
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nowhere")
    with pytest.raises(psycopg.OperationalError):
        run("--from-delivery", "1")
