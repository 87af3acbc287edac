"""The command: what each part of it prints, and that every error is one line and a non-zero exit."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
import shop
from click.testing import CliRunner, Result
from consumers import SECRET, Stack, arrival, arrived, from_github, from_shortcut, quick, served, stack, stories
from gates import until
from processes import ROOT, empty_database, environment, webhooks
from rich.table import Table

from webhooks import Consumer, Event, GitHub, Ignore, Pool, Shortcut, StandardWebhooks, Transaction
from webhooks.cli.app import console, printable, told
from webhooks.cli.deliveries import deliveries
from webhooks.cli.main import Commands, cli
from webhooks.cli.migrate import migrate
from webhooks.cli.serve import command
from webhooks.cli.status import age, status
from webhooks.cli.trigger import trigger
from webhooks.deliveries import since
from webhooks.errors import ConfigurationError, Unavailable, WebhooksError
from webhooks.migrate import schema_sql, sections
from webhooks.samples import event_of, is_example, names, sample
from webhooks.samples.edit import change

COMMANDS = ("serve", "work", "migrate", "status", "deliveries", "trigger")


@pytest.fixture(autouse=True)
def _a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEBHOOKS_APP", "shop:consumer")


def run(command: click.Command, *arguments: str) -> Result:
    """Run one command in this process; what it raises is raised."""
    return CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)


async def ran(command: click.Command, *arguments: str) -> Result:
    """The same from a test that serves something meanwhile."""
    return await asyncio.to_thread(run, command, *arguments)


def rows_of(table: str) -> list[list[str]]:
    """The cells of a printed table, less its heading."""
    return [line.split() for line in table.splitlines()[1:] if line.strip()]


# ---- help, and the consumer's own commands


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_shows_an_example(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])

    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"webhooks {name}" in result.output.partition("Example")[2]


def test_help_lists_our_commands_and_the_consumers_own() -> None:
    result = CliRunner().invoke(cli, ["--help"])

    assert result.exit_code == 0
    for name in (*COMMANDS, "greet"):
        assert f"\n  {name} " in result.output
    assert "Say hello." in result.output


def test_help_works_without_a_consumer_and_says_why_its_commands_are_missing() -> None:
    result = CliRunner().invoke(cli, ["--app", "nowhere:consumer", "--help"])

    assert result.exit_code == 0
    told = " ".join(result.output.split())
    assert "No commands of your own are shown: --app nowhere:consumer: there is no module nowhere" in told
    assert "\n  serve " in result.output


def test_a_command_of_the_consumer_runs(tmp_path: Path) -> None:
    done = webhooks(tmp_path, "greet")

    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


def test_our_own_commands_do_not_load_the_consumer_only_to_be_found() -> None:
    context = click.Context(cli, info_name="webhooks")
    context.params["app"] = "nowhere:consumer"
    assert isinstance(cli, Commands)

    assert cli.get_command(context, "status") is status
    assert "webhooks.app" not in context.meta


# ---- errors


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["frobnicate"], 2, "webhooks: No such command 'frobnicate'. (see webhooks --help)"),
        (["status", "--frob"], 2, "webhooks: No such option '--frob'. (see webhooks status --help)"),
        (["--app", "nowhere:x", "status"], 1, "webhooks: --app nowhere:x: there is no module nowhere in "),
        (["status", "--app", "nowhere:x"], 1, "webhooks: --app nowhere:x: there is no module nowhere in "),
        (
            ["--app", "nowhere:x", "frobnicate"],
            2,
            "webhooks: No such command 'frobnicate'. (--app nowhere:x: there is no",
        ),
        (["status"], 1, "webhooks: there is no database in "),
        (["deliveries", "--since", "soon"], 2, "webhooks: Invalid value for '--since': 'soon' is no time: write 30m"),
        (["deliveries", "--body"], 2, "webhooks: --body goes with the ID of a delivery"),
        (["trigger", "nobody", "push"], 1, "webhooks: there is no source 'nobody'; there are: shortcut, github"),
        (["trigger", "github", "push"], 1, "webhooks: no secret to sign with: set WEBHOOKS_SECRET_GITHUB"),
        (["serve", "--reload", "--port", "0"], 2, "webhooks: --reload needs fixed ports"),
    ],
)
def test_an_error_is_one_line_and_a_nonzero_exit(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    done = webhooks(tmp_path, *arguments)

    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://me:hunter2@127.0.0.1:1/x", "webhooks: the database does not answer: "),
        ("me:hunter2", "webhooks: DATABASE_URL: write postgresql://"),
    ],
)
def test_a_database_that_cannot_be_reached_is_one_line_without_its_password(
    tmp_path: Path, url: str, said: str
) -> None:
    done = webhooks(tmp_path, "status", DATABASE_URL=url)

    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert "hunter2" not in done.stderr


def test_a_setting_that_is_wrong_is_one_line(tmp_path: Path) -> None:
    done = webhooks(tmp_path, "status", WEBHOOKS_LEASE_S="soon")

    assert done.returncode == 1
    assert done.stderr.startswith("webhooks: WEBHOOKS_LEASE_S: ")


def test_output_into_a_pipe_that_is_closed_ends_quietly(database_url: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "webhooks", "status"],
            env=environment(DATABASE_URL=database_url),
            cwd=tmp_path,
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )

    assert done.stderr == b""
    assert done.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
def test_output_that_finds_no_space_is_one_line(database_url: str, tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "webhooks", "status"],
            env=environment(DATABASE_URL=database_url),
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )

    assert done.stderr == b"webhooks: no space is left on the disk: what was written is not whole\n"
    assert done.returncode == 1


# ---- migrate and status


def test_migrate_prints_the_sections_it_applied_and_then_nothing_to_do(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with empty_database(server_url) as url:
        monkeypatch.setenv("DATABASE_URL", url)
        applied = run(migrate).output.splitlines()
        again = run(migrate).output

    wanted = sections(schema_sql())
    assert applied == [f"applied section {section.number}: {section.title}" for section in wanted]
    assert again == "nothing to do\n"


async def test_status_shows_every_phase_the_inbox_included(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Pool.open(database_url, settings=quick()) as pool:
        await arrived(pool, arrival(b"{}"), arrival(b"{}"))
        async with pool.transaction() as tx:
            await tx.execute(
                "INSERT INTO patch_sessions (sc_id, title, status, claimed_from, not_before) VALUES"
                " (1, '', 'received', NULL, now() - interval '3 h 20 min'), (2, '', 'clarifying', 'received', now()),"
                " (3, '', 'escalated', 'received', now())"
            )
            await tx.execute("UPDATE deliveries SET parked_on = 'x:1', parked_since = now() WHERE id = 1")
    monkeypatch.setenv("DATABASE_URL", database_url)

    table, _, parked = (await ran(status)).output.partition("\n\n")
    lines = json.loads((await ran(status, "--json")).output)["phases"]

    inbox, clarifying = rows_of(table)
    assert (inbox[:4], inbox[5:]) == (["deliveries", "applying", "received", "1"], ["0", "0"])
    assert clarifying == ["patch_sessions", "clarifying", "received", "1", "3h", "20m", "1", "1"]
    assert parked == "parked deliveries: 1 (webhooks deliveries --status parked)\n"
    assert [(line["phase"], line["backlog"], line["parked"]) for line in lines] == [
        ("applying", 1, 1),
        ("clarifying", 1, 0),
    ]
    assert lines[1]["oldest_s"] >= 12_000


async def test_a_schema_that_is_behind_is_refused_with_the_command(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Pool.open(database_url, settings=quick()) as pool, pool.transaction() as tx:
        await tx.execute("DELETE FROM webhooks_schema")
    monkeypatch.setenv("DATABASE_URL", database_url)

    for asked in (status, deliveries):
        with pytest.raises(WebhooksError, match="run: webhooks migrate"):
            await ran(asked)


# ---- deliveries


@asynccontextmanager
async def some_deliveries(url: str) -> AsyncGenerator[Stack]:
    """One processed, one ignored by a rule, one nobody has a handler for, one that cannot be read, one split."""
    shortcut, github = Shortcut(), GitHub()

    @shortcut.on("story.update")
    async def take(event: Event, tx: Transaction) -> None:
        label = event.data.get("label", "patch")
        if label != "patch":
            raise Ignore(f"label {label!r} is not 'patch'")

    async with stack(url, Consumer(gates=[], sources=[shortcut, github])) as running:
        for request in (
            from_shortcut(stories(1)),
            from_shortcut(stories(2, label="Patch")),
            from_github(b'{"action": "opened"}', event="issues"),
            from_shortcut(b"\xff"),
            from_shortcut(stories(3, 4)),
        ):
            assert (await running.send(request)).status_code == 202

            async def applied() -> bool:
                return not await running.sql("SELECT 1 FROM deliveries WHERE status IN ('received', 'applying')")

            await until(applied)
        yield running


async def test_deliveries_are_listed_with_the_rule_and_the_value_that_ignored_them(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 11: a filter that never matches because of letter case, and an event without a handler."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    async with some_deliveries(database_url):
        printed = (await ran(deliveries)).output
        listed = json.loads((await ran(deliveries, "--json", "--status", "IGNORED")).output)

    lines = printed.splitlines()
    assert any("ignored" in line and "label 'Patch' is not 'patch'" in line for line in lines)
    assert any("ignored" in line and "no handler for issues.opened" in line for line in lines)
    assert any("dead" in line and "not UTF-8: byte 0xff at position 0" in line for line in lines)
    assert any("processed" in line and "split into 2 events" in line for line in lines)
    assert [row["reason"] for row in listed] == ["no handler for issues.opened", "label 'Patch' is not 'patch'"]
    assert [int(cells[0]) for cells in rows_of(printed)] == sorted((int(c[0]) for c in rows_of(printed)), reverse=True)


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--source", "GitHub"], [3]),
        (["--event", "ISSUES"], [3]),
        (["--status", "dead"], [4]),
        (["--disposition", "Dead"], [4]),
        (["--status", "parked"], []),
        (["--limit", "2"], [7, 6]),
        (["--since", "1h", "--status", "dead"], [4]),
        (["--since", "2999-01-01"], []),
    ],
)
async def test_deliveries_are_filtered(
    database_url: str, monkeypatch: pytest.MonkeyPatch, options: list[str], ids: list[int]
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    async with some_deliveries(database_url):
        printed = (await ran(deliveries, *options)).stdout

    assert [int(cells[0]) for cells in rows_of(printed)] == ids
    assert printed.startswith("no deliveries" if not ids else "id")


async def test_a_list_that_is_cut_says_so_and_filters_do_not_go_with_an_id(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    async with some_deliveries(database_url):
        cut, whole = await ran(deliveries, "--limit", "2"), await ran(deliveries)
        with pytest.raises(click.UsageError, match="filters go without an ID"):
            await ran(deliveries, "4", "--status", "dead")
        with pytest.raises(click.UsageError, match="'abc' is no id: write a number"):
            await ran(deliveries, "abc")

    assert (cut.stderr, whole.stderr) == ("the newest 2; --limit shows more\n", "")


async def test_one_delivery_is_shown_whole(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    async with some_deliveries(database_url) as running:
        [stored] = await running.sql("SELECT dedup_key, body FROM deliveries WHERE id = 2")
        shown = (await ran(deliveries, "2")).output
        split = (await ran(deliveries, "5")).output
        part = (await ran(deliveries, "7")).output
        raw = await ran(deliveries, "2", "--body")
        data = json.loads((await ran(deliveries, "2", "--json")).output)

    facts = dict(line.strip().split("  ", 1) for line in shown.partition("\n\n")[0].splitlines())
    assert facts["event"] == "story.update"
    assert facts["status"] == "ignored"
    assert facts["reason"] == "label 'Patch' is not 'patch'"
    assert facts["dedup key"] == stored["dedup_key"]
    assert facts["attempt"].endswith(": done")
    assert "  content-type: application/json\n" in shown
    assert '\n      "label": "Patch"' in shown.replace("        ", "      ")
    assert "split into  6, 7" in split
    assert "event number  2 of delivery 5" in part
    assert '"name": "story 4"' in part  # the body is its parent's
    assert raw.stdout_bytes == stored["body"]
    assert json.loads(data["body"])["version"] == "v1"


async def test_a_delivery_that_is_not_there_is_an_error(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)

    with pytest.raises(click.ClickException, match="there is no delivery 9"):
        await ran(deliveries, "9")


async def test_what_a_sender_wrote_is_shown_and_not_obeyed_by_the_terminal(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    async with Pool.open(database_url, settings=quick()) as pool:
        await arrived(pool, arrival('{"title": "\x1b[2J [red]é\u202e😊"}'.encode()))

    shown = (await ran(deliveries, "1")).output

    assert "\x1b" not in shown
    assert "\\x1b[2J [red]é\\u202e😊" in shown


async def test_a_form_is_shown_as_the_json_in_it(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    request = from_github(b"payload=%7B%22zen%22%3A1%7D", content_type="application/x-www-form-urlencoded")
    async with stack(database_url, shop.consumer, work=False) as running:
        await running.send(request)
        shown = (await ran(deliveries, "1")).output

    assert '  {\n    "zen": 1\n  }\n' in shown


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("90s", timedelta(seconds=90)),
        ("30m", timedelta(minutes=30)),
        ("2h", timedelta(hours=2)),
        (" 3 D ", timedelta(days=3)),
        ("1w", timedelta(weeks=1)),
        ("99999999w", timedelta(days=36_500)),
        ("2026-01-31T12:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31", datetime(2026, 1, 31).astimezone()),
    ],
)
def test_a_time_is_read(text: str, read: datetime | timedelta) -> None:
    assert since(text) == read


@pytest.mark.parametrize("text", ["", "h", "-1h", "1y", "yesterday", "2026-13-01", "1h2m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        since(text)


# ---- trigger


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_SHORTCUT", SECRET)
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", f"{SECRET},an older one")


Trigger = Callable[..., Any]


@asynccontextmanager
async def triggering(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Stack]:
    """A receiver on a socket, where `webhooks trigger` finds it."""
    async with stack(url, shop.consumer, work=False) as running, served(running.receiver) as port:
        monkeypatch.setenv("WEBHOOKS_RECEIVER_URL", f"http://127.0.0.1:{port}")
        yield running


async def bodies(running: Stack) -> list[Any]:
    return [json.loads(row["body"]) for row in await running.deliveries()]


@pytest.mark.usefixtures("secrets")
async def test_every_trigger_is_a_new_delivery_and_times_repeats_one(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with triggering(database_url, monkeypatch) as running:
        once = (await ran(trigger, "shortcut", "story.update")).output
        many = (await ran(trigger, "github", "pull_request.closed", "--times", "5")).output
        again = (await ran(trigger, "shortcut", "story.update")).output
        stored = await running.deliveries()

    assert once == "202 delivery: 1  status: accepted\n"
    new = stored[1]["id"]
    assert sorted(many.splitlines()) == [
        f"200 delivery: {new}  status: duplicate  (4 times)",
        f"202 delivery: {new}  status: accepted",
    ]
    assert again.startswith("202 ")
    assert [row["source"] for row in stored] == ["shortcut", "github", "shortcut"]


@pytest.mark.usefixtures("secrets")
async def test_values_of_the_body_are_set(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["actions.0.id=7", "references.0.name=later", 'actions.0.extra={"a": [1]}', "references.1=null"]
    async with triggering(database_url, monkeypatch) as running:
        await ran(trigger, "shortcut", "story.update", *(f"--set={change}" for change in changes))
        [body] = await bodies(running)

    assert body["actions"][0]["id"] == 7
    assert body["actions"][0]["extra"] == {"a": [1]}
    assert [reference and reference["name"] for reference in body["references"]] == ["later", None]


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("actions.3.id=1", "there is no actions.3: actions is a list of 1"),
        ("nothing.id=1", "there is no nothing: the body has id, changed_at"),
        ("version.x=1", "there is no version.x: version is neither an object nor a list"),
        ("actions.x=1", "there is no actions.x: actions is a list of 1"),
        ("version", "write it as path=value"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(change: str, said: str) -> None:
    with pytest.raises(click.UsageError, match=said):
        run(trigger, "shortcut", "story.update", "--set", change)


@pytest.mark.usefixtures("secrets")
async def test_a_file_is_sent_with_a_fresh_id_or_exactly_as_it_is(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "body.json"
    file.write_bytes(stories(9, id="its-own-id"))
    async with triggering(database_url, monkeypatch) as running:
        for options in ([], ["--exact"], ["--exact"], ["--id", "a-given-id"]):
            await ran(trigger, "shortcut", "story.update", "--file", str(file), *options)
        stored = await running.deliveries()

    assert [row["dedup_key"] for row in stored][1:] == ["its-own-id", "a-given-id"]
    assert stored[0]["dedup_key"] not in ("its-own-id", "a-given-id")
    assert stored[1]["body"] == file.read_bytes()


@pytest.mark.usefixtures("secrets")
async def test_a_file_that_is_no_json_is_sent_as_it_is(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "body"
    file.write_bytes(b"\xff")
    async with triggering(database_url, monkeypatch) as running:
        assert "202 delivery: 1" in (await ran(trigger, "shortcut", "story.update", "--file", str(file))).output
        assert (await running.deliveries())[0]["body"] == b"\xff"
        with pytest.raises(ConfigurationError, match="--set cannot change the file: not UTF-8"):
            await ran(trigger, "shortcut", "story.update", "--file", str(file), "--set", "a=1")


@pytest.mark.usefixtures("secrets")
async def test_a_body_that_says_another_event_is_remarked_upon(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "body.json"
    file.write_bytes(stories(9))
    async with triggering(database_url, monkeypatch):
        result = await ran(trigger, "shortcut", "story.delete", "--file", str(file))

    assert result.stderr == "note: the body says story.update, not story.delete\n"


async def test_a_refused_delivery_is_an_error(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_SHORTCUT", "not the receiver's")
    async with triggering(database_url, monkeypatch):
        with pytest.raises(click.ClickException, match=r"refused by http://127\.0\.0\.1"):
            await ran(trigger, "shortcut", "story.update")


@pytest.mark.usefixtures("secrets")
def test_a_receiver_that_does_not_answer_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(Unavailable, match="is webhooks serve running"):
        run(trigger, "shortcut", "story.update", "--url", "http://127.0.0.1:1")


@pytest.mark.usefixtures("secrets")
def test_an_event_without_a_sample_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"there are: .*issues.opened, .*; or give a body with --file"):
        run(trigger, "github", "fork")


@pytest.mark.parametrize("source", [Shortcut(), GitHub(), StandardWebhooks()], ids=lambda source: source.name)
def test_every_sample_says_the_event_it_is_named_for_and_is_new_each_time(source: Any) -> None:
    for name in names(source):
        event = "invoice.paid" if name == "any" else event_of(name)
        headers = (("x-github-event", event.partition(".")[0]),)
        body = sample(source, event if name == "any" else name)
        if event == "v2.validation":  # a test of the URL, which tells of nothing
            assert source.answered(headers, json.dumps(body).encode())
            continue
        assert event in [found.name for found in source.events(headers, body)]
        assert "$" not in json.dumps(body)
        if name not in ("ping", "push"):
            assert (body == sample(source, name)) is is_example(source, name)


def test_the_samples_hang_together() -> None:
    [updated] = Shortcut().events((), sample(Shortcut(), "story.update"))
    assert updated.data["changes"]["label_ids"]["adds"] == [updated.data["references"][0]["id"]]
    assert updated.data["references"][0]["name"] == "patch"
    comment, story = Shortcut().events((), sample(Shortcut(), "story-comment.create"))
    assert comment.data["story_id"] == story.data["id"]
    assert story.data["changes"]["comment_ids"]["adds"] == [comment.data["id"]]


def test_a_change_may_append_to_a_list_and_add_a_field() -> None:
    body: dict[str, Any] = {"list": [1], "object": {}}
    for assignment in ("list.1=2", "list.0=one", "object.new=a=b", "text=12 apples"):
        change(body, assignment)

    assert body == {"list": ["one", 2], "object": {"new": "a=b"}, "text": "12 apples"}


# ---- small things


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59, "59s"), (61, "1m 1s"), (12_000, "3h 20m"), (90_061, "1d 1h")]
)
def test_an_age_is_told_in_two_units_at_most(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_on_a_narrow_terminal_no_word_of_a_table_is_cut() -> None:
    shown = console()
    shown.width = 20
    table = Table("event", "reason", box=None, pad_edge=False)
    table.add_row("pull_request_review.dismissed", "no handler")
    with shown.capture() as captured:
        shown.print(table)
    assert "…" not in captured.get()
    assert "".join(line[:9].strip() for line in captured.get().splitlines()[1:]) == "pull_request_review.dismissed"


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert printable("a\x1b\x9b\u202e\ud800\n\té😊") == "a\\x1b\\x9b\\u202e\\ud800\n\té😊"


def test_an_error_of_the_database_is_told_on_one_line() -> None:
    assert told(psycopg.OperationalError("no\nroute")) == "the database does not answer: no route"
    assert told(psycopg.errors.InsufficientPrivilege("denied\nfor x")) == "the database refused: denied for x"


@pytest.mark.parametrize(
    ("argv", "on_path", "shown"),
    [
        (str(ROOT / "webhooks" / "__main__.py"), None, "python -m webhooks"),
        ("bin/webhooks", "bin/webhooks", "webhooks"),
        ("bin/webhooks", None, "bin/webhooks"),
    ],
)
def test_the_command_to_try_is_shown_as_it_can_be_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: str, on_path: str | None, shown: str
) -> None:
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "webhooks"
    script.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin") if on_path else "/nowhere")
    monkeypatch.setattr(sys, "argv", [argv])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    assert command() == shown
