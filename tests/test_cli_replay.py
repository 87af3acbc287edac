"""`webhooks replay` and `webhooks export`: what they print, refuse, and end with."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from consumers import SECRET, from_github, from_shortcut, served, stack, stories
from replays import Applied, ended, github, prune, pushed, row_of, settled, split
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from webhooks import Pool
from webhooks.cli.export import export
from webhooks.cli.main import cli
from webhooks.cli.replay import replay
from webhooks.cli.selecting import somebody
from webhooks.errors import ConfigurationError, UnknownName

USAGE = 2


@pytest.fixture(autouse=True)
def _a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEBHOOKS_APP", "shop:consumer")
    monkeypatch.setenv("WEBHOOKS_SECRET_SHORTCUT", SECRET)
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", SECRET)
    if "pool" in request.fixturenames:
        monkeypatch.setenv("DATABASE_URL", request.getfixturevalue("database_url"))


async def ran(command: click.Command, *arguments: str, given: bytes | None = None) -> Result:
    """Run a command as `main` does, but for the exit."""
    return await asyncio.to_thread(CliRunner().invoke, command, arguments, given)


async def plain(command: click.Command, *arguments: str) -> Any:
    return json.loads((await ran(command, *arguments, "--json")).stdout)


def facts(result: Result) -> set[tuple[str, ...]]:
    """What a report says: how many, and what became of them."""
    return {tuple(line.split(maxsplit=1)) for line in map(str.rstrip, result.stdout.splitlines())}


# ---- what contradicts itself


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say which: IDs, filters, --file, or --all"),
        (["--yes"], "say which"),
        (["--limit", "5"], "say which"),
        (["--all", "5"], "--all goes without a filter"),
        (["--all", "--source", "github"], "--all goes without a filter"),
        (["--file", ".", "5"], "--file goes with"),
        (["--file", ".", "--as", "new"], "--file goes with"),
        (["--file", ".", "--since", "1h"], "--file goes with"),
        (["5", "--to", "http://h", "--as", "new"], "--as goes without --to"),
        (["5", "--resign"], "--resign goes with --to or --file"),
        (["5", "--yes", "--dry-run"], "exclude each other"),
        (["--where-json", "repository=x"], "no JSONPath such as"),
        (["--since", "soon"], "is no time"),
        (["--rate", "0", "5"], "--rate"),
        (["0"], "0 is not in the range"),
        (["abc"], "'abc' is no id: write a number, as webhooks deliveries shows them"),
        (["--up-to", "x", "5"], "'x' is no id"),
        (["patch_sessions:1"], "goes with --row"),
        (["--row", "patch_sessions"], "names no row: write TABLE:KEY"),
        (["--file", "missing.ndjson"], "does not exist"),
    ],
)
async def test_options_that_contradict_each_other_are_refused(arguments: list[str], said: str) -> None:
    result = await ran(replay, *arguments)
    assert (result.exit_code, said in result.stderr) == (USAGE, True), result.stderr


async def test_an_address_that_is_none_is_refused_before_anything_is_done() -> None:
    result = await ran(replay, "5", "--to", "127.0.0.1:8000")
    assert isinstance(result.exception, ConfigurationError)
    assert "http://HOST:PORT" in str(result.exception)


@pytest.mark.parametrize("name", ["replay", "export"])
def test_the_help_shows_examples(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert f"webhooks {name} 12" in result.stdout.partition("Examples:")[2]


# ---- within the inbox


async def test_one_delivery_runs_at_once_and_who_did_it_is_written_down(pool: Pool) -> None:
    [id] = await github(pool, pushed())
    await ended(pool, id, "processed", event="push")

    result = await ran(replay, str(id), "--reason", "it was wrong")

    assert (result.exit_code, result.stdout.split()) == (0, ["1", "run", "again"])
    assert (await row_of(pool, id))["status"] == "received"
    async with pool.transaction() as tx:
        [row] = await (await tx.execute("SELECT * FROM decisions")).fetchall()
    assert (row["decided_by"], row["reason"], row["decision"]) == (somebody(), "it was wrong", "replay")


async def test_several_are_only_shown_with_what_would_happen_until_yes(pool: Pool) -> None:
    done, waiting, running, gone = await github(pool, *[pushed()] * 4)
    _, parts = await split(pool, 7, 8)
    await ended(pool, done, "processed", event="push")
    await ended(pool, running, "applying", event="push")
    await ended(pool, gone, "dead", event="push")
    await prune(pool, gone)

    dry = await ran(replay, "--all")
    lines = [line.split(maxsplit=4) for line in map(str.rstrip, dry.stdout.splitlines())]

    assert dry.exit_code == 0
    assert ["github", "push", "processed", "1", "runs again"] in lines
    assert ["github", "push", "applying", "1", "being applied now, left alone"] in lines
    assert ["github", "push", "dead", "1", "pruned, cannot be replayed"] in lines
    assert ["shortcut", "story.update", "processed", "2", "runs again"] in lines
    assert "(not known yet)" in dry.stdout
    assert "made due now" in dry.stdout
    assert "6 deliveries, and nothing was done; do it with --yes" in dry.stdout
    assert (await row_of(pool, done))["status"] == "processed"

    real = await ran(replay, "--all", "--yes")
    assert real.exit_code == 1
    assert facts(real) == {
        ("3", "run again"),
        ("1", "unfinished, made due now"),
        ("1", "being applied, or run again by somebody else, at this moment: left alone"),
        ("1", "pruned, cannot be replayed"),
    }
    assert [(await row_of(pool, id))["status"] for id in (done, waiting, *parts)] == ["received"] * 4


async def test_a_dry_run_of_one_does_nothing(pool: Pool) -> None:
    [id] = await github(pool, pushed())
    await ended(pool, id, "processed", event="push")
    result = await ran(replay, str(id), "--dry-run", "--as", "new")
    assert "a new delivery" in result.stdout
    assert "1 delivery, and nothing was done; do it without --dry-run\n" in result.stdout
    assert (await row_of(pool, id))["status"] == "processed"
    await github(pool, pushed())
    several = await ran(replay, "--all", "--dry-run")
    assert "2 deliveries, and nothing was done; do it with --yes instead of --dry-run\n" in several.stdout


async def test_for_programs_there_is_json(pool: Pool) -> None:
    first, second = await github(pool, pushed(), pushed())
    for id in (first, second):
        await ended(pool, id, "ignored", event="push")

    plan = (await plain(replay, "--event", "push"))["plan"]
    report = (await plain(replay, "--event", "push", "--as", "new", "--yes"))["report"]

    assert plan["total"] == 2
    assert plan["groups"] == [
        {"source": "github", "event": "push", "disposition": "ignored", "pruned": False, "count": 2}
    ]
    assert [found["id"] for found in plan["sample"]] == [first, second]
    assert (report["counts"], report["after"], report["stopped"]) == ({"new": 2}, second, None)


async def test_nothing_selected_is_said(pool: Pool) -> None:
    result = await ran(replay, "--event", "update", "--yes")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "nothing to do\n", "")
    dry = await ran(replay, "--event", "update", "--dry-run")
    assert "0 deliveries, and nothing was done\n" in dry.stdout


async def test_an_event_or_a_row_that_nothing_has_is_noted_with_those_like_it(pool: Pool) -> None:
    [id] = await github(pool, pushed())
    await ended(pool, id, "processed", event="push", moved_rows=["patch_sessions:123"])
    event = await ran(replay, "--event", "puhs", "--yes")
    row = await ran(replay, "--row", "patch_session:123")
    exported = await ran(export, "--event", "puhs")

    assert (event.exit_code, row.exit_code, exported.exit_code) == (0, 0, 0)
    assert "has 'puhs' in its event's name, and no handler is for one; did you mean push?" in event.stderr
    assert "there is no gate over a table 'patch_session'; did you mean patch_sessions?" in row.stderr
    assert (event.stdout, exported.stdout) == ("nothing to do\n", "")
    assert "did you mean push?" in exported.stderr
    assert exported.stderr.endswith("no deliveries\n")


async def test_a_source_that_is_nowhere_is_an_error_before_anything_is_written(pool: Pool, tmp_path: Path) -> None:
    await github(pool, pushed())
    for command, more in ((replay, ["--yes"]), (replay, ["--to", "http://h"]), (export, ["--output", "out"])):
        result = await ran(command, "--source", "githob", *more)
        assert isinstance(result.exception, UnknownName)
        assert "there is no source 'githob'" in str(result.exception)
        assert "did you mean github?" in str(result.exception)
    assert os.listdir(tmp_path) == []


async def test_what_a_sender_wrote_is_shown_and_not_obeyed(pool: Pool) -> None:
    several = await github(pool, pushed(), pushed(), pushed())
    for id in several:
        await ended(pool, id, "ignored", event="\x1b[2J")
    result = await ran(replay, "--all")
    assert "\x1b" not in result.stdout
    assert r"\x1b[2J" in result.stdout


async def test_events_that_only_the_other_way_would_run_are_mentioned(pool: Pool) -> None:
    _, parts = await split(pool, 7, 8)
    await ended(pool, parts[0], "dead", event="story.update")
    result = await ran(replay, "--status", "dead", "--as", "new", "--dry-run")
    assert "1 events that were split off fit as well: --as same runs them" in result.stdout
    refused = await ran(replay, str(parts[0]), "--as", "new")
    assert "only a whole request can be repeated as new" in str(refused.exception)


async def test_bodies_that_cannot_be_looked_into_are_counted(pool: Pool) -> None:
    await github(pool, pushed("acme/app"), pushed("acme/other"), b"\xff")
    result = await ran(replay, "--where-json", "$.repository.full_name=acme/app", "--dry-run")
    assert "1 bodies could not be read" in result.stdout
    assert "1 delivery, and nothing was done" in result.stdout


# ---- to a receiver


class Elsewhere:
    """A receiver that answers as it is told."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.seen: list[tuple[str, bytes]] = []

    async def take(self, request: Request) -> JSONResponse:
        self.seen.append((request.path_params["source"], await request.body()))
        status, answer = self.answers.pop(0) if self.answers else (202, {"status": "accepted", "delivery": 1})
        return JSONResponse(answer, status)


@pytest.fixture
async def elsewhere() -> AsyncGenerator[tuple[Elsewhere, str]]:
    other = Elsewhere()
    app = Starlette(routes=[Route("/webhooks/{source}", other.take, methods=["POST"])])
    async with served(app) as port:
        yield other, f"http://127.0.0.1:{port}"


async def test_a_summary_tells_every_answer_and_why_some_were_refused(
    pool: Pool, elsewhere: tuple[Elsewhere, str]
) -> None:
    other, base = elsewhere
    other.answers = [
        (202, {"status": "accepted", "delivery": 1}),
        (200, {"status": "duplicate", "delivery": 1}),
        (200, {"status": "rearmed", "delivery": 1}),
        (401, {"error": "stale_timestamp"}),
        (401, {"error": "bad_signature"}),
        (401, {"error": "bad_signature"}),
    ]
    await github(pool, *[pushed()] * 6)

    result = await ran(replay, "--all", "--to", base, "--yes", "--concurrency", "1")

    assert result.exit_code == 1
    said = facts(result)
    assert {("1", "accepted"), ("1", "duplicate"), ("1", "here already, armed again"), ("3", "refused")} <= said
    assert "2 x bad_signature" in result.stdout
    assert "too old: --resign" in result.stderr
    assert "another secret than the one known here" in result.stderr  # they came without a signature, and got ours


async def test_one_that_has_no_signature_is_signed_on_its_way_out(pool: Pool, elsewhere: tuple[Elsewhere, str]) -> None:
    other, base = elsewhere
    [id] = await github(pool, pushed())
    result = await ran(replay, str(id), "--to", base)
    assert "1 signed with the secret here" in result.stdout
    assert other.seen == [("github", pushed())]


async def test_a_receiver_that_is_busy_is_asked_again_and_gets_each_once(
    pool: Pool, elsewhere: tuple[Elsewhere, str]
) -> None:
    other, base = elsewhere
    other.answers = [(503, {"error": "unavailable"}), (429, {}), (202, {"status": "accepted", "delivery": 1})]
    bodies = [pushed(n=number) for number in range(3)]
    await github(pool, *bodies)

    report = (await plain(replay, "--all", "--to", base, "--yes", "--concurrency", "1"))["report"]

    assert report["counts"] == {"accepted": 3}
    assert [body for _, body in other.seen] == [bodies[0], bodies[0], *bodies]


async def test_a_receiver_that_is_not_there_leaves_nothing_done_and_no_place_to_go_on_from(pool: Pool) -> None:
    [id] = await github(pool, pushed())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        base = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = await ran(replay, str(id), "--to", base)
    assert result.exit_code == 1
    assert "the receiver does not take deliveries" in result.stderr
    assert result.stderr.endswith("nothing was done: run the same command again\n")


async def test_what_is_pruned_cannot_be_sent_and_the_rest_is(pool: Pool, elsewhere: tuple[Elsewhere, str]) -> None:
    other, base = elsewhere
    gone, _ = await github(pool, pushed(), pushed())
    await prune(pool, gone)
    dry = await ran(replay, "--all", "--to", base)
    assert f"sent to {base}" in dry.stdout
    assert "pruned, cannot be replayed" in dry.stdout
    result = await ran(replay, "--all", "--to", base, "--yes")
    assert (result.exit_code, len(other.seen)) == (1, 1)


async def test_a_bulk_edit_is_sent_once_and_whole(pool: Pool, elsewhere: tuple[Elsewhere, str]) -> None:
    other, base = elsewhere
    parent, parts = await split(pool, 7, 8)
    await ran(replay, str(parts[0]), str(parts[1]), str(parent), "--to", base)
    assert [source for source, _ in other.seen] == ["shortcut"]


# ---- out of files


async def test_the_payloads_of_a_directory_become_deliveries(database_url: str, pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "payloads"
    folder.mkdir()
    (folder / "push__branch.json").write_bytes(pushed())
    (folder / "star__created.json").write_bytes(b'{"action": "created"}')
    applied = Applied()
    async with stack(database_url, applied.consumer()) as running:
        dry = await ran(replay, "--file", str(folder), "--source", "github")
        real = await ran(replay, "--file", str(folder), "--source", "github", "--yes")
        again = await ran(replay, "--file", str(folder), "--source", "github", "--yes")
        await settled(running.pool)
        rows = await running.deliveries()

    lines = [line.split() for line in dry.stdout.splitlines()]
    assert ["github", "star.created", "1", "accepted"] in lines
    assert "2 deliveries, and nothing was done; do it with --yes" in dry.stdout
    assert ["2", "accepted"] in [line.split() for line in real.stdout.splitlines()]
    assert ["2", "duplicate"] in [line.split() for line in again.stdout.splitlines()]
    assert sorted((row["event"], row["status"], row["origin"]) for row in rows) == [
        ("push", "processed", "replay"),
        ("star.created", "ignored", "replay"),
    ]


async def test_a_captured_request_is_one_delivery_and_goes_at_once(pool: Pool, tmp_path: Path) -> None:
    request = from_shortcut(stories(7))
    file = tmp_path / "request.http"
    file.write_bytes(request.raw())

    result = await ran(replay, "--file", str(file))

    assert (result.exit_code, result.stdout.split()) == (0, ["1", "accepted"])
    async with pool.transaction() as tx:
        [row] = await (await tx.execute("SELECT source, body FROM deliveries")).fetchall()
    assert (row["source"], bytes(row["body"])) == ("shortcut", request.body)


async def test_an_export_that_was_cut_is_left_at_the_line_that_is_cut_and_says_how_to_go_on(
    pool: Pool, tmp_path: Path
) -> None:
    several = [await github(pool, pushed(n=number)) for number in range(3)]
    lines = (await ran(export)).stdout_bytes.splitlines(keepends=True)
    async with pool.transaction() as tx:
        await tx.execute("TRUNCATE deliveries")
    (tmp_path / "cut").write_bytes(b"".join(lines)[:-10])
    (tmp_path / "first").write_bytes(lines[0][:200])
    (tmp_path / "middle").write_bytes(lines[0] + lines[1][:200] + b"\n" + lines[2])

    dry = await ran(replay, "--file", "cut")
    cut = await ran(replay, "--file", "cut", "--yes")
    first = await ran(replay, "--file", "first", "--source", "github")
    middle = await ran(replay, "--file", "middle", "--yes", "--limit", "3")
    rest = await ran(replay, "--file", "middle", "--yes", "--after", "2")

    assert len(several) == 3
    assert (dry.exit_code, cut.exit_code, first.exit_code, middle.exit_code, rest.exit_code) == (1, 1, 1, 1, 0)
    assert "1 cannot be read, and a replay ends at the first\n  line 3 of cut: it is cut short" in dry.stdout
    assert "2 deliveries, and nothing was done; do it with --yes" in dry.stdout
    assert facts(cut) >= {("2", "accepted"), ("1", "failed")}
    assert cut.stderr == (
        "line 3 of cut: it is cut short: the file ends in the middle of it; 2 before it done, nothing after it. "
        "Mend the file and run the same command again (what was done is known as a duplicate), "
        "or leave it out with --after 3\n"
    )
    assert first.stderr == (
        "line 1 of first: it is cut short: the file ends in the middle of it; nothing was done. "
        "Mend the file and run the same command again\n"
    )
    assert "line 2 of middle: it is not JSON; 1 before it done" in middle.stderr
    assert "or leave it out with --after 2 --limit 1\n" in middle.stderr
    assert facts(rest) >= {("1", "accepted")}
    async with pool.transaction() as tx:
        stored = await (await tx.execute("SELECT body FROM deliveries ORDER BY id")).fetchall()
    assert sorted(bytes(row["body"]) for row in stored) == [pushed(n=number) for number in (0, 1, 2)]


async def test_a_payload_that_is_no_json_is_refused_and_stored_nowhere(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "payloads"
    folder.mkdir()
    (folder / "push.json").write_bytes(pushed())
    (folder / "star.json").write_bytes(b'{"action": "created"')
    alone = await ran(replay, "--file", "payloads/star.json", "--source", "github")
    several = await ran(replay, "--file", "payloads", "--source", "github", "--yes")
    report = (await plain(replay, "--file", "payloads", "--source", "github", "--yes"))["report"]

    assert alone.exit_code == several.exit_code == 1
    assert "payloads/star.json: it cannot be read as a payload: not JSON: Expecting ',' delimiter" in alone.stderr
    assert "1 before it done, nothing after it" in several.stderr
    assert (report["counts"], report["after"]) == ({"duplicate": 1, "failed": 1}, 2)
    async with pool.transaction() as tx:
        assert (await (await tx.execute("SELECT count(*) AS n FROM deliveries")).fetchall())[0]["n"] == 1


async def test_a_source_that_a_file_does_not_hold_is_an_error(pool: Pool, tmp_path: Path) -> None:
    await github(pool, pushed())
    (tmp_path / "all.ndjson").write_bytes((await ran(export, "--all")).stdout_bytes)
    result = await ran(replay, "--file", "all.ndjson", "--source", "githob", "--yes")
    assert isinstance(result.exception, UnknownName)
    assert "all.ndjson holds nothing of a source 'githob'; did you mean github?" in str(result.exception)


async def test_a_request_that_was_changed_is_refused_with_its_cause(pool: Pool, tmp_path: Path) -> None:
    request = from_github(pushed(), signature="sha256=" + "0" * 64)
    file = tmp_path / "request.http"
    file.write_bytes(request.raw())

    result = await ran(replay, "--file", str(file))
    anew = await ran(replay, "--file", str(file), "--resign")

    assert result.exit_code == 1
    assert "1 x bad_signature" in result.stdout
    assert "--resign" in result.stderr
    assert anew.exit_code == 0


async def test_an_export_comes_in_through_standard_input(pool: Pool) -> None:
    await github(pool, pushed())
    lines = (await ran(export)).stdout_bytes
    async with pool.transaction() as tx:
        await tx.execute("TRUNCATE deliveries")

    result = await ran(replay, "--file", "-", given=lines)

    assert result.exit_code == 0
    assert "1 signed with the secret here" in result.stdout


async def test_a_file_goes_to_a_receiver_without_a_database(
    tmp_path: Path, elsewhere: tuple[Elsewhere, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    other, base = elsewhere
    (tmp_path / "push.json").write_bytes(pushed())

    result = await ran(replay, "--file", "push.json", "--source", "github", "--to", base)

    assert result.exit_code == 0, result.output
    assert other.seen == [("github", pushed())]


# ---- export


async def test_an_export_into_a_file_is_there_only_once_it_is_whole(pool: Pool, tmp_path: Path) -> None:
    first, second = await github(pool, pushed(), pushed(email="ann@example.com"))
    result = await ran(export, "--redact", "$.email", "--output", "out.ndjson")
    lines = [json.loads(line) for line in (tmp_path / "out.ndjson").read_text().splitlines()]

    assert result.exit_code == 0
    assert [(line["id"], line.get("redacted")) for line in lines] == [(first, None), (second, True)]
    assert "1 value and 0 header lines taken out, of 1 of 2 deliveries" in result.stderr
    assert "2 deliveries in out.ndjson" in result.stderr
    assert os.listdir(tmp_path) == ["out.ndjson"]

    (tmp_path / "out.ndjson").write_text("the old one")
    failed = await ran(export, "999", "--output", "out.ndjson")
    assert "there is no delivery 999" in str(failed.exception)
    assert (tmp_path / "out.ndjson").read_text() == "the old one"
    assert os.listdir(tmp_path) == ["out.ndjson"]


async def test_all_is_what_an_export_writes_without_a_filter(pool: Pool) -> None:
    await github(pool, pushed(), pushed())
    assert (await ran(export, "--all")).stdout == (await ran(export)).stdout
    assert (await ran(export, "--all", "--source", "github")).exit_code == USAGE


async def test_what_has_to_be_left_out_is_named_and_the_exit_says_so(pool: Pool) -> None:
    broken, whole = await github(pool, b'{"email": "secret', pushed())
    result = await ran(export, "--redact", "$.email")
    assert result.exit_code == 1
    assert f"delivery {broken} is left out: its body cannot be read" in result.stderr
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == [whole]
    assert "secret" not in result.stdout


async def test_an_export_needs_no_consumer_unless_bodies_are_looked_into(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEBHOOKS_APP", "nowhere:consumer")
    await github(pool, pushed())
    assert (await ran(export)).exit_code == 0
    assert isinstance((await ran(export, "--redact", "$.a")).exception, ConfigurationError)


@pytest.mark.parametrize("what", ["email", "header:", "$.["])
async def test_what_cannot_be_redacted_is_refused(what: str) -> None:
    assert (await ran(export, "--redact", what)).exit_code == USAGE
