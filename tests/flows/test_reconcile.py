"""Reconciling as a person does it: the command, a receiver on a socket, and a server that stands in for GitHub's API
and really delivers again, signed, a little later."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from click.testing import CliRunner
from consumers import Request, digest, from_github, served
from gates import until
from github_standin import HOOK, PATH, DeliveryLog
from processes import SECRETS, Process, serving, started, webhooks
from psycopg.rows import dict_row
from starlette.applications import Starlette
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse
from starlette.routing import Route

from webhooks.cli.reconcile import reconcile

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
FAILED = "failed to connect"
ASKING = ("reconcile", "github", "--repo", "acme/app", "--hook", str(HOOK))


class GitHub:
    """GitHub, as far as a hook's deliveries go.

    Attributes:
        log: the delivery log.
        url: where its API is.
        held: the guids for which it takes the request to deliver again, and does not answer.
        ended: lets those be answered.
    """

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.log = DeliveryLog()
        self.url = ""
        self.held: set[str] = set()
        self.ended = asyncio.Event()
        self._receiver = ""
        self._tasks: set[asyncio.Task[None]] = set()

    def delivers_to(self, receiver: str) -> None:
        self._receiver = receiver

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/repos/acme/app/hooks", self._hooks),
                Route(f"{PATH}/deliveries", self._deliveries),
                Route(f"{PATH}/deliveries/{{id:int}}/attempts", self._attempts, methods=["POST"]),
            ]
        )

    def request(self, guid: str) -> Request:
        body = json.dumps({"ref": "refs/heads/main", "guid": guid}).encode()
        signature = f"sha256={digest(body, SECRETS['WEBHOOKS_SECRET_GITHUB'])}"
        return from_github(body, guid=guid, hook=str(HOOK), signature=signature)

    async def deliver(self, guid: str) -> int:
        request = self.request(guid)
        url = self._receiver + request.path
        return (await self._http.post(url, headers=request.headers, content=request.body)).status_code

    async def _hooks(self, request: Asked) -> JSONResponse:
        return JSONResponse([{"id": HOOK, "config": {"url": f"{self._receiver}/webhooks/github"}}])

    async def _deliveries(self, request: Asked) -> JSONResponse:
        if request.headers["authorization"] != "Bearer ghp_invented":
            return JSONResponse({"message": "Bad credentials"}, 401)
        params = request.query_params
        items, headers = self.log.page(f"{self.url}{PATH}", int(params["per_page"]), params.get("cursor"))
        return JSONResponse(items, headers=headers)

    async def _attempts(self, request: Asked) -> JSONResponse:
        id = int(request.path_params["id"])
        self.log.asked.append(id)
        guid = self.log.guid_of(id)
        if guid in self.held:
            await self.ended.wait()
            return JSONResponse({}, 500)
        task = asyncio.create_task(self._again(guid))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return JSONResponse({}, 202)

    async def _again(self, guid: str) -> None:
        status = "OK" if 200 <= await self.deliver(guid) < 300 else "failed"
        self.log.add(status, ago=timedelta(0), guid=guid)


@asynccontextmanager
async def github() -> AsyncIterator[GitHub]:
    async with httpx.AsyncClient() as http:
        standin = GitHub(http)
        async with served(standin.app()) as port:
            standin.url = f"http://127.0.0.1:{port}"
            try:
                yield standin
            finally:
                standin.ended.set()


def variables(url: str, standin: GitHub) -> dict[str, str]:
    return {"DATABASE_URL": url, "GITHUB_API": standin.url, "WEBHOOKS_GITHUB_TOKEN": "ghp_invented"}


def stored(url: str) -> dict[str, str]:
    """The status of each delivery, by its guid."""
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        rows = connection.execute("SELECT dedup_key, status FROM deliveries").fetchall()
    return {row["dedup_key"].removeprefix(f"{HOOK}:"): row["status"] for row in rows}


def execute(url: str, statement: Any) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(statement).rowcount


async def asked(process: Process) -> None:
    """Wait until a command has ended."""
    await until(lambda: not process.alive, within_s=60)


async def test_what_is_missing_arrives_although_the_run_is_killed_in_the_middle(
    database_url: str, tmp_path: Path
) -> None:
    async with github() as standin:
        log = standin.log
        a, c = log.add(FAILED, "OK", ago=HOUR), log.add("OK", ago=2 * HOUR)
        b, d = log.add(FAILED, FAILED, ago=4 * HOUR), log.add("OK", ago=3 * HOUR)
        expired = log.add(FAILED, ago=4 * DAY)
        others = [log.add("OK", ago=timedelta(minutes=number)) for number in range(130)]
        given = variables(database_url, standin)
        with serving(tmp_path, database_url) as receiver:
            standin.delivers_to(receiver.receiver)
            for guid in (a, c, *others):
                assert await standin.deliver(guid) == 202

            # Looking changes nothing.
            looked = await asyncio.to_thread(webhooks, tmp_path, *ASKING[:-2], "--since", "5d", **given)
            assert looked.returncode == 3, looked.stderr
            assert "135 deliveries of acme/app since" in looked.stdout
            assert "132 here, 1 missing here, 1 failed there, 1 expired" in looked.stdout
            assert f"{b}  push" in looked.stdout
            assert a not in looked.stdout
            assert not log.asked

            # B is asked for; the answer about D never comes, and the run is killed.
            standin.held = {d}
            with started(tmp_path, *ASKING, "--since", "5d", "--redeliver", name="first", **given) as first:
                await until(lambda: len(log.asked) == 2, within_s=60)
                first.kill()
            await until(lambda: b in stored(database_url))
            assert d not in stored(database_url)

            # Run again: D's claim is a dead run's, and is taken over once it is a minute old.
            standin.held = set()
            expire = "UPDATE redeliveries SET asked_at = asked_at - interval '1 minute' WHERE NOT answered"
            assert execute(database_url, expire) == 1
            arguments = (*ASKING, "--since", "5d", "--redeliver", "--json")
            with started(tmp_path, *arguments, name="second", **given) as second:
                await asked(second)
                assert second.ends() == 3, second.log
            told = {line["guid"]: line for line in json.loads(second.output)["deliveries"]}
            assert told[d]["verdict"] == "missing"
            assert told[d]["redelivery"]["result"] == "arrived"
            assert {told[guid]["verdict"] for guid in (a, b, c, *others)} == {"here"}
            assert told[expired]["verdict"] == "expired"
            assert told[expired]["redelivery"] is None

            # Nothing but B and D was ever asked for, and all is here now.
            assert {log.guid_of(id) for id in log.asked} == {b, d}
            assert log.asked.count(log.asked[0]) == 1
            assert set(stored(database_url)) == {a, b, c, d, *others}
            whole = await asyncio.to_thread(webhooks, tmp_path, *ASKING, "--since", "6h", "--redeliver", **given)
            assert whole.returncode == 0, whole.stdout + whole.stderr


async def test_a_run_that_is_interrupted_says_how_to_go_on(database_url: str, tmp_path: Path) -> None:
    async with github() as standin:
        guid = standin.log.add(FAILED, ago=HOUR)
        standin.held = {guid}
        given = variables(database_url, standin)
        with started(tmp_path, *ASKING, "--redeliver", name="reconcile", **given) as process:
            await until(lambda: standin.log.asked, within_s=60)
            process.signal(signal.SIGINT)
            await asked(process)
            assert process.ends() == 130
        assert "stopped; run the same command again, it goes on where it was" in process.log
        assert "Traceback" not in process.log


async def test_serve_fetches_what_is_missing_by_itself(database_url: str, tmp_path: Path) -> None:
    async with github() as standin:
        here, gone = standin.log.add("OK", ago=HOUR), standin.log.add(FAILED, ago=2 * HOUR)
        settings = {**variables(database_url, standin), "WEBHOOKS_RECONCILE_GITHUB": "acme/app"}
        with serving(tmp_path, database_url, "--reconcile-every", "1s", **settings) as receiver:
            standin.delivers_to(receiver.receiver)
            await standin.deliver(here)
            await until(lambda: gone in stored(database_url), within_s=60)
            later = standin.log.add("OK", ago=timedelta(0))
            await until(lambda: later in stored(database_url), within_s=60)
            await until(lambda: "was missing, and has arrived" in receiver.log, within_s=60)
            receiver.signal()
            assert receiver.ends() == 0
        assert {standin.log.guid_of(id) for id in standin.log.asked} <= {gone, later}


async def test_what_only_the_history_of_a_story_has_is_accepted_and_applied(database_url: str, tmp_path: Path) -> None:
    happened = datetime.now(UTC) - HOUR
    entry = {
        "id": "5f0c7a5e-0001",
        "version": "v1",
        "changed_at": happened.isoformat(),
        "actions": [{"id": 7, "entity_type": "story", "action": "update", "name": "a story"}],
        "references": [{"id": 1, "entity_type": "label", "name": "patch"}],
    }

    async def search(request: Asked) -> JSONResponse:
        return JSONResponse([{"id": 7}], 201)

    async def history(request: Asked) -> JSONResponse:
        return JSONResponse([entry] if request.headers["shortcut-token"] == "invented" else {}, 200)

    routes = [Route("/stories/search", search, methods=["POST"]), Route("/stories/7/history", history)]
    async with served(Starlette(routes=routes)) as port:
        given = {"SHORTCUT_API": f"http://127.0.0.1:{port}", "WEBHOOKS_SHORTCUT_TOKEN": "invented"}
        with serving(tmp_path, database_url):
            asking = ("reconcile", "shortcut", "--since", "6h")
            variables = {"DATABASE_URL": database_url, **given}
            looked = await asyncio.to_thread(webhooks, tmp_path, *asking, **variables)
            assert looked.returncode == 3, looked.stderr
            assert "1 entries of 1 stories since" in looked.stdout
            assert "1 missing here\naccept them with --accept\n" in looked.stdout
            assert stored(database_url) == {}

            taken = await asyncio.to_thread(webhooks, tmp_path, *asking, "--accept", "--json", **variables)
            assert taken.returncode == 0, taken.stderr
            [told] = json.loads(taken.stdout)["entries"]
            assert (told["id"], told["accepted"], told["events"]) == ("5f0c7a5e-0001", True, ["story.update"])
            await until(lambda: stored(database_url) == {"5f0c7a5e-0001": "processed"})

            again = await asyncio.to_thread(webhooks, tmp_path, *asking, "--accept", **variables)
            assert again.returncode == 0, again.stderr
            assert "1 here" in again.stdout


def test_serve_refuses_a_schedule_with_nothing_to_do(database_url: str, tmp_path: Path) -> None:
    arguments = ("serve", "--port", "0", "--control-port", "0", "--reconcile-every", "15m")
    refused = webhooks(tmp_path, *arguments, DATABASE_URL=database_url, **SECRETS)

    assert refused.returncode == 1
    assert "set WEBHOOKS_RECONCILE_GITHUB=OWNER/NAME:HOOK" in refused.stderr


async def test_a_token_that_github_does_not_accept_is_one_line_without_the_token(
    database_url: str, tmp_path: Path
) -> None:
    async with github() as standin:
        given = {**variables(database_url, standin), "WEBHOOKS_GITHUB_TOKEN": "ghp_revoked"}
        refused = await asyncio.to_thread(webhooks, tmp_path, *ASKING, **given)

    assert refused.returncode == 1
    told = "it does not accept WEBHOOKS_GITHUB_TOKEN: set one that is valid"
    assert refused.stderr == f"webhooks: GitHub answered 401 to GET {PATH}/deliveries (Bad credentials): {told}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("github",), "say whose hook: --repo OWNER/NAME, --org ORG or --app"),
        (("github", "--repo", "a/b", "--app"), "say whose hook"),
        (("github", "--app", "--hook", "7"), "an app has one hook"),
        (("github", "--repo", "app"), "'app' is no repository: write OWNER/NAME"),
        (("github", "--repo", "a/..", "--hook", "1"), "is no repository"),
        (("github", "--org", "a/b"), "'a/b' is no organization"),
        (("github", "--repo", "a/b", "--since", "yesterday"), "'yesterday' is no time"),
        (("github", "--repo", "a/b", "--wait", "now"), "write 90m, 12h, 30d or 2w, not 'now'"),
        (("shortcut", "--story", "x"), "'x' is not a valid integer"),
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_is_asked(arguments: tuple[str, ...], told: str) -> None:
    result = CliRunner().invoke(reconcile, [*arguments])

    assert result.exit_code == 2
    assert told in " ".join(result.output.replace("│", " ").split())
