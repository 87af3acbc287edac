"""Names in a filter that nothing has are told with those like them, wherever they can be given."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import shop
from click.testing import CliRunner, Result
from consumers import SECRET, arrival, arrived, stack, stories
from gates import opened, sql
from replays import Applied, ended, github, pushed
from test_control import asking

from webhooks import Consumer, Pool
from webhooks.cli.main import cli, main
from webhooks.errors import UnknownName
from webhooks.near import MOST_SHOWN, there_are
from webhooks.selection import Names, unknown
from webhooks.selection.names import CAUSES

ROOT = Path(__file__).parent.parent


async def doubts(pool: Pool, consumer: Consumer | None = None, **names: str) -> list[str]:
    async with pool.transaction() as tx:
        return await unknown(tx, consumer, Names(**names))


# ---- what is like it


@pytest.mark.parametrize(
    ("given", "known", "told"),
    [
        ("githob", ["shop", "github"], "did you mean github? There are: github, shop"),
        ("GITHOB", ["github"], "did you mean github? There are: github"),
        ("pull_requst", ["push", "pull_request.closed"], "did you mean pull_request.closed? There are: pull_request."),
        ("relese", ["release.published", "push"], "did you mean release.published? There are: release.published, push"),
        ("stripe", ["github", "shop"], "there are: github, shop"),
        ("x", [], "there are none"),
    ],
)
def test_those_like_it_come_first(given: str, known: Sequence[str], told: str) -> None:
    assert there_are(given, known).startswith(told)


def test_of_many_some_are_shown_and_the_others_counted() -> None:
    told = there_are("event-7x", [f"event-{number}" for number in range(30)])
    assert told.startswith("did you mean event-7")
    assert told.endswith(f", and {30 - MOST_SHOWN} more")
    assert told.count("event-7,") == 1


# ---- what nothing has


async def test_a_source_is_known_to_the_consumer_or_to_anything_stored_or_it_is_an_error(pool: Pool) -> None:
    consumer = Applied().consumer()
    await github(pool, pushed())
    await arrived(pool, arrival(b"{}", source="gone"))
    await sql(
        pool,
        "INSERT INTO rejections (source, cause, headers, body_bytes, body_sha256, received_at, last_at)"
        " VALUES ('once', 'own_cause', '[]', 0, '', now(), now())",
    )
    for known in ("github", "SHOP", "Gone", "once"):
        assert await doubts(pool, consumer, source=known) == []
    with pytest.raises(UnknownName) as refused:
        await doubts(pool, consumer, source="githob")
    assert "no source 'githob', neither in this consumer nor in what is stored" in str(refused.value)
    assert "did you mean github? There are: github, gone, once, shop, shortcut" in str(refused.value)
    [note] = await doubts(pool, None, source="shop")
    assert note.endswith("there are: github, gone, once")


async def test_a_cause_is_one_of_ours_or_one_that_was_kept_or_it_is_an_error(pool: Pool) -> None:
    for cause in (*CAUSES, "BAD_SIGNATURE"):
        assert await doubts(pool, cause=cause) == []
    with pytest.raises(UnknownName, match=r"refused for 'bad_sig'; did you mean bad_signature\?"):
        await doubts(pool, cause="bad_sig")
    with pytest.raises(UnknownName):
        await doubts(pool, cause="own_cause")
    await sql(
        pool,
        "INSERT INTO rejections (source, cause, headers, body_bytes, body_sha256, received_at, last_at)"
        " VALUES ('github', 'own_cause', '[]', 0, '', now(), now())",
    )
    assert await doubts(pool, cause="own_cause") == []


def test_the_causes_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "rejections.md").read_text()
    table = page.partition("| cause | it means |")[2].partition("\n\n")[0]
    named = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.partition(" | ")[0])]
    assert named == list(CAUSES)


async def test_an_event_is_known_when_a_handler_or_a_stored_delivery_has_it_in_its_name(pool: Pool) -> None:
    consumer = Applied().consumer()
    [id, other] = await github(pool, pushed(), pushed())
    await ended(pool, id, "ignored", event="release.published, release.edited")
    await ended(pool, other, "ignored", event="\x1b[2J")
    for known in ("PUBLISHED, rel", "push", "star.CREATED", "paid"):
        assert await doubts(pool, consumer, event=known) == []
    [note] = await doubts(pool, consumer, event="relese.published")
    assert "'relese.published' in its event's name, and no handler is for one; did you mean release.published" in note
    [note] = await doubts(pool, None, event="paid")
    assert "did you mean" not in note
    [note] = await doubts(pool, consumer, event="100%_\0")
    assert "release.edited" in note


async def test_a_row_is_known_when_it_is_there_or_a_delivery_moved_it_or_waits_for_it(pool: Pool) -> None:
    consumer = Applied().consumer()
    await opened(pool, consumer.gates["patch_sessions"], 5, to="received")
    moved, parked = await github(pool, pushed(), pushed())
    await ended(pool, moved, "processed", event="push", moved_rows=["patch_sessions:4143259"])
    await ended(pool, parked, "received", event="push", parked_on="patch_sessions:7")
    for known in ("patch_sessions:5", "patch_sessions:4143259", "patch_sessions:7"):
        assert await doubts(pool, consumer, row=known) == []
    [note] = await doubts(pool, consumer, row="patch_session:5")
    assert "there is no gate over a table 'patch_session'; did you mean patch_sessions?" in note
    [note] = await doubts(pool, consumer, row="patch_sessions:4143295")
    assert "there is no such row; did you mean patch_sessions:4143259?" in note
    [note] = await doubts(pool, None, row="patch_sessions:5")
    assert note.startswith("no stored delivery moved patch_sessions:5 or waits for it; ")


# ---- on the command line


@pytest.fixture
def _as_serve(monkeypatch: pytest.MonkeyPatch, database_url: str, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEBHOOKS_APP", "shop:consumer")
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("WEBHOOKS_SECRET_SHORTCUT", SECRET)
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", SECRET)


async def ran(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli, arguments)


@pytest.mark.usefixtures("_as_serve")
@pytest.mark.parametrize(
    "arguments",
    [
        ("deliveries", "--source", "githob"),
        ("replay", "--source", "githob", "--yes"),
        ("replay", "--source", "githob", "--as", "new"),
        ("export", "--source", "githob"),
        ("rejections", "--source", "githob"),
        ("rejections", "list", "--source", "githob", "--json"),
        ("rejections", "reverify", "--source", "githob", "--yes"),
        ("rejections", "--cause", "githob"),
        ("rejections", "list", "--cause", "githob"),
        ("rejections", "reverify", "--cause", "githob"),
        ("reconcile", "github", "--repo", "acme/app", "--source", "githob"),
        ("reconcile", "shortcut", "--source", "githob"),
    ],
)
async def test_a_source_or_a_cause_that_is_nowhere_is_an_error_of_every_command(arguments: tuple[str, ...]) -> None:
    result = await ran(*arguments)
    assert isinstance(result.exception, UnknownName)
    assert "githob" in str(result.exception)
    assert result.stdout == ""


@pytest.mark.usefixtures("_as_serve")
def test_such_an_error_is_one_of_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["webhooks", "deliveries", "--source", "githob"])
    with pytest.raises(SystemExit) as ended_with:
        main()
    assert ended_with.value.code == 2
    assert capsys.readouterr().err.startswith("webhooks: there is no source 'githob'")


@pytest.mark.usefixtures("_as_serve")
async def test_what_a_sender_called_an_event_is_noted_and_not_obeyed(pool: Pool) -> None:
    [id] = await github(pool, pushed())
    await ended(pool, id, "ignored", event="\x1b[2J")
    result = await ran("deliveries", "--event", "nothing", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, [])
    assert "\x1b" not in result.stderr
    assert r"\x1b[2J" in result.stderr


@pytest.mark.usefixtures("_as_serve")
async def test_without_a_consumer_what_is_stored_is_looked_through_and_only_noted(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEBHOOKS_APP", "nowhere:consumer")
    await github(pool, pushed())
    result = await ran("deliveries", "--source", "githob")
    assert (result.exit_code, result.stdout) == (0, "no deliveries\n")
    assert "did you mean github?" in result.stderr


@pytest.mark.usefixtures("_as_serve")
async def test_a_source_that_is_known_and_has_nothing_is_no_error(pool: Pool) -> None:
    result = await ran("deliveries", "--source", "GitHub", "--event", "update")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "no deliveries\n", "")


# ---- over the control plane


async def test_the_control_plane_answers_400_for_a_source_or_a_cause_and_notes_an_event_or_a_row(
    database_url: str,
) -> None:
    async with stack(database_url, shop.consumer, work=False) as running, asking(running, shop.consumer) as client:
        await arrived(running.pool, arrival(stories(1)))
        for path in (
            "/api/deliveries?source=githob",
            "/api/rejections?source=githob",
            "/api/rejections/kinds?source=githob",
            "/api/rejections?cause=githob",
            "/api/rejections/kinds?cause=githob",
        ):
            answer = await client.get(path)
            assert (answer.status_code, "githob" in answer.json()["error"]) == (400, True), path
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/api/replays", {"source": "githob"}),
            ("/api/replays", {"source": "githob", "yes": True}),
            ("/api/rejections/reverify", {"source": "githob"}),
            ("/api/rejections/reverify", {"cause": "githob", "yes": True}),
        ]
        for path, body in bodies:
            answer = await client.post(path, json=body)
            assert (answer.status_code, "githob" in answer.json()["error"]) == (400, True), (path, body)
        listed = (await client.get("/api/deliveries?event=story.updat.")).json()
        planned = (await client.post("/api/replays", json={"row": "patch_session:1"})).json()
        found = (await client.get("/api/deliveries")).json()
        missing = await client.post("/api/rejections/reverify", json={"ids": [999]})

    assert (listed["deliveries"], "did you mean story.update?" in listed["notes"][0]) == ([], True)
    assert (planned["plan"]["total"], "did you mean patch_sessions?" in planned["notes"][0]) == (0, True)
    assert (len(found["deliveries"]), found["notes"]) == (1, [])
    assert (missing.status_code, missing.json()["error"]) == (
        404,
        "there is no rejection 999; the oldest ones are forgotten",
    )
