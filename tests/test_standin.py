"""The local stand-in for Shortcut and GitHub, over real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from handlers.checkout import checkout, git
from handlers.models import CommentEvent, Draft, PatchSession, PullRequest, PullRequestEvent, StoryEvent
from handlers.patch_effects import (
    comment_once,
    find_or_open,
    find_questions,
    move_to_done,
    push_patch,
    read_story,
    run_drafter,
)
from handlers.settings import settings
from handlers.sources import github, shortcut
from handlers.standin import standin
from handlers.standin.drafter import draft
from handlers.standin.server import listen, served
from handlers.standin.state import PERSON_ID
from webhooks import NotDone

SECRETS = {"shortcut": "secret of shortcut", "github": "secret of github"}
AT_ONCE = timedelta(0)
NEVER = timedelta(hours=1)


class Receiver:
    """Takes the stand-in's deliveries as the real one would: verified, and read by the real sources."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self.refuse = 0

    async def take(self, request: Request) -> PlainTextResponse:
        if self.refuse:
            self.refuse -= 1
            return PlainTextResponse("not yet", 503)
        source = {"shortcut": shortcut, "github": github}[request.path_params["source"]]
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw)
        body = await request.body()
        source.verify(headers, body, [SECRETS[source.name]], datetime.now(UTC).timestamp())
        assert source.dedup_key(headers, body)
        for event in source.events(headers, source.read(headers, body)):
            self.events.put_nowait((event.name, event.data))
        return PlainTextResponse("", 202)

    async def next(self, name: str) -> dict[str, Any]:
        """What the next event of this name says; others are passed over."""
        return (await self.first_of(name))[1]

    async def first_of(self, *names: str) -> tuple[str, dict[str, Any]]:
        async with asyncio.timeout(20):
            while True:
                found, data = await self.events.get()
                if found in names:
                    return found, data


@pytest.fixture
async def receiver(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    sock = listen(0)
    monkeypatch.setenv("WEBHOOKS_RECEIVER_URL", f"http://127.0.0.1:{sock.getsockname()[1]}")
    for name, secret in SECRETS.items():
        monkeypatch.setenv(f"WEBHOOKS_SECRET_{name.upper()}", secret)
    app = Starlette(routes=[Route("/webhooks/{source}", receiver.take, methods=["POST"])])
    async with served(app, sock):
        yield receiver


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as client:
        yield client


@asynccontextmanager
async def running(directory: Path, delay: timedelta = NEVER) -> AsyncIterator[None]:
    async with standin(directory=directory, port=0, delay=delay):
        yield


async def proposed(sc_id: int, patch: Draft) -> PullRequest:
    session = PatchSession(
        sc_id=sc_id,
        title=f"Story {sc_id}",
        patch=patch.diff,
        base_commit=patch.base_commit,
        opened_at=datetime(2026, 6, 12, tzinfo=UTC),
    )
    return await find_or_open(session, await push_patch(session))


# ---- stories


async def test_a_story_it_never_heard_of_is_made_up_with_our_label(receiver: Receiver, tmp_path: Path) -> None:
    async with running(tmp_path):
        story = json.loads((await read_story(16927)).model_dump_json())
        assert (story["id"], [label["name"] for label in story["labels"]]) == (16927, ["patch"])
        assert story["app_url"].endswith("/story/16927")


async def test_a_story_made_by_a_person_comes_back_as_a_signed_event_that_opens_a_session(
    receiver: Receiver, tmp_path: Path, http: httpx.AsyncClient
) -> None:
    async with running(tmp_path):
        new = {"name": "Which colour?", "labels": [{"name": "patch"}]}
        made = (await http.post(f"{settings().shortcut_api}/stories", json=new)).json()
        event = StoryEvent.model_validate(await receiver.next("story.create"))
        assert (event.id, event.name, event.labels_added) == (made["id"], "Which colour?", {"patch"})


async def test_a_label_put_on_a_story_comes_back_as_a_signed_event(
    receiver: Receiver, tmp_path: Path, http: httpx.AsyncClient
) -> None:
    async with running(tmp_path):
        story = f"{settings().shortcut_api}/stories/5"
        await http.put(story, json={"labels": []})
        await http.put(story, json={"labels": [{"name": "other"}, {"name": "patch"}]})
        removal = StoryEvent.model_validate(await receiver.next("story.update"))
        addition = StoryEvent.model_validate(await receiver.next("story.update"))
        assert (removal.labels_added, addition.labels_added) == (set(), {"other", "patch"})


async def test_what_the_bot_asks_a_person_answers_later(receiver: Receiver, tmp_path: Path) -> None:
    async with running(tmp_path, AT_ONCE):
        question = await comment_once(5, "Which colour?", "mark")
        assert (await comment_once(5, "Which colour?", "mark")).id == question.id
        asked = CommentEvent.model_validate(await receiver.next("story-comment.create"))
        answered = CommentEvent.model_validate(await receiver.next("story-comment.create"))
        assert (asked.id, asked.author_id, asked.story_id) == (question.id, settings().shortcut_bot, 5)
        assert (answered.author_id, answered.story_id) == (PERSON_ID, 5)
        assert answered.id > question.id


async def test_a_story_is_moved_to_a_done_state(receiver: Receiver, tmp_path: Path) -> None:
    async with running(tmp_path):
        state = await move_to_done(5)
        assert (await read_story(5)).workflow_state_id == state
        changes = (await receiver.next("story.update"))["changes"]
        assert changes == {"workflow_state_id": {"new": state, "old": 1}}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/stories", {}, 400),
        ("PUT", "/stories/5", {"workflow_state_id": 77}, 422),
        ("GET", "/nothing", None, 404),
        ("DELETE", "/workflows", None, 405),
    ],
)
async def test_what_it_does_not_understand_is_refused_with_a_message(
    receiver: Receiver, tmp_path: Path, http: httpx.AsyncClient, method: str, path: str, body: Any, status: int
) -> None:
    async with running(tmp_path):
        refusal = await http.request(method, settings().shortcut_api + path, json=body)
        assert refusal.status_code == status
        assert refusal.json()["message"]


@pytest.mark.parametrize(("name", "asked"), [("Which colour?", 1), ("Paint it green", 0)])
async def test_its_clarifier_asks_about_a_story_whose_name_is_a_question(
    receiver: Receiver, tmp_path: Path, http: httpx.AsyncClient, name: str, asked: int
) -> None:
    async with running(tmp_path):
        await http.put(f"{settings().shortcut_api}/stories/5", json={"name": name})
        assert len((await find_questions(await read_story(5))).questions) == asked


# ---- pull requests


async def test_a_pull_request_is_merged_by_its_reviewer_and_comes_back_as_a_signed_event(
    receiver: Receiver, tmp_path: Path
) -> None:
    async with running(tmp_path, AT_ONCE):
        patch = await run_drafter(await read_story(5), "Which colour?", "Green")
        pull_request = await proposed(5, patch)
        assert (await receiver.next("pull_request.opened"))["number"] == pull_request.number
        event = PullRequestEvent.model_validate(await receiver.next("pull_request.closed")).pull_request
        assert (event.number, event.merged, event.head.ref) == (pull_request.number, True, "patch/sc-5")
        assert event.head.repo == event.base.repo
        async with checkout("main") as directory:
            assert "Answered: Green" in await git("show", "HEAD:notes/sc-5.md", cwd=directory)


async def test_a_story_can_be_patched_a_second_time(receiver: Receiver, tmp_path: Path) -> None:
    async with running(tmp_path, AT_ONCE):
        for number in (1, 2):
            patch = await run_drafter(await read_story(5), None, None)
            assert (await proposed(5, patch)).number == number
            assert (await receiver.next("pull_request.closed"))["pull_request"]["merged"]


async def test_a_pull_request_that_does_not_fit_any_more_is_closed(receiver: Receiver, tmp_path: Path) -> None:
    async with running(tmp_path, AT_ONCE):
        first = await run_drafter(await read_story(5), None, None)
        second = Draft(diff=first.diff.replace("Drafted", "Also drafted"), base_commit=first.base_commit)
        await proposed(5, first)
        await receiver.next("pull_request.closed")
        await proposed(6, second)
        closed = (await receiver.next("pull_request.closed"))["pull_request"]
        assert (closed["head"]["ref"], closed["merged"], closed["merged_at"]) == ("patch/sc-6", False, None)


async def test_a_person_can_merge_or_close_before_the_reviewer_does(
    receiver: Receiver, tmp_path: Path, http: httpx.AsyncClient
) -> None:
    async with running(tmp_path):
        pulls = f"{settings().github_api}/repos/{settings().github_repository}/pulls"
        for sc_id in (5, 6):
            await proposed(sc_id, await run_drafter(await read_story(sc_id), None, None))
        assert (await http.put(f"{pulls}/1/merge")).json()["merged"]
        assert (await http.put(f"{pulls}/1/merge")).status_code == 405
        assert (await http.patch(f"{pulls}/2", json={"state": "closed"})).json()["state"] == "closed"
        ends = [await receiver.next("pull_request.closed") for _ in range(2)]
        assert [(end["number"], end["pull_request"]["merged"]) for end in ends] == [(1, True), (2, False)]
        assert [pull["number"] for pull in (await http.get(pulls, params={"state": "all"})).json()] == [2, 1]
        assert (await http.get(pulls)).json() == []


async def test_a_branch_has_one_open_pull_request_and_must_exist(
    receiver: Receiver, tmp_path: Path, http: httpx.AsyncClient
) -> None:
    async with running(tmp_path):
        pull_request = await proposed(5, await run_drafter(await read_story(5), None, None))
        shown = await http.get(pull_request.html_url)
        assert "+# Story 5 of the stand-in" in shown.text
        pulls = f"{settings().github_api}/repos/{settings().github_repository}/pulls"
        for branch in ("patch/sc-5", "patch/sc-6"):
            refused = await http.post(pulls, json={"title": "again", "head": branch, "base": "main"})
            assert (refused.status_code, branch in refused.json()["message"]) == (422, True)
        assert (await http.get(f"{pulls}/9")).status_code == 404


async def test_a_delivery_is_sent_again_while_the_receiver_is_not_ready(
    receiver: Receiver, tmp_path: Path, http: httpx.AsyncClient
) -> None:
    async with running(tmp_path):
        receiver.refuse = 1
        await http.put(f"{settings().shortcut_api}/stories/5", json={"name": "Renamed"})
        assert (await receiver.next("story.update"))["changes"]["name"]["new"] == "Renamed"


# ---- from one run to the next


async def test_what_was_pending_when_it_stopped_is_done_when_it_runs_again(receiver: Receiver, tmp_path: Path) -> None:
    async with running(tmp_path):
        await proposed(5, await run_drafter(await read_story(5), None, None))
        await comment_once(6, "Which colour?", "mark")
        await receiver.next("story-comment.create")
    async with running(tmp_path, AT_ONCE):
        happened = {(await receiver.first_of("pull_request.closed", "story-comment.create"))[0] for _ in range(2)}
        assert happened == {"pull_request.closed", "story-comment.create"}


async def test_settings_point_at_it_while_it_runs_and_those_of_a_person_stay(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCH_DRAFTER", "my-drafter")
    monkeypatch.setenv("PATCH_CLARIFIER", "")
    monkeypatch.setenv("PATCH_GITHUB_REPOSITORY", "acme/widgets")
    before = dict(os.environ)
    async with running(tmp_path):
        now = settings()
        assert (now.drafter, now.github_repository) == ("my-drafter", "acme/widgets")
        assert now.clarifier
        assert now.shortcut_api.startswith("http://127.0.0.1:")
        async with httpx.AsyncClient(base_url=now.github_api) as http:
            assert (await http.get("/repos/acme/widgets/pulls")).json() == []
    assert {**os.environ, "PATCH_CLARIFIER": ""} == before
    with pytest.raises(NotDone, match=r"^no connection to 127\.0\.0\.1"):
        await at(now.shortcut_api, monkeypatch, lambda: read_story(5))


async def at(url: str, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Awaitable[object]]) -> None:
    monkeypatch.setenv("SHORTCUT_API", url)
    monkeypatch.setenv("WEBHOOKS_SHORTCUT_TOKEN", "stand-in")
    await call()


async def test_two_of_them_can_run_at_once(receiver: Receiver, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with standin(directory=tmp_path, port=port, delay=NEVER):
            assert not settings().shortcut_api.startswith(f"http://127.0.0.1:{port}/")
            assert (await read_story(5)).id == 5


async def test_without_git_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(click.ClickException, match="need the program git"):
        async with running(tmp_path):
            pass


# ---- its drafter


@pytest.mark.parametrize("before", [[], ["# Earlier\n"]])
def test_its_drafter_prints_a_diff_that_git_applies(tmp_path: Path, before: list[str]) -> None:
    story = {
        "id": 5,
        "name": "Ça marche?",
        "description": "One.\n\nTwo.",
        "question": "Which?",
        "answer": "Green.\nOr red.",
    }
    diff = draft(story, before, datetime(2026, 6, 12, tzinfo=UTC))
    note = tmp_path / "notes" / "sc-5.md"
    if before:
        note.parent.mkdir()
        note.write_text("".join(before))
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff.encode(), check=True)
    assert note.read_text().startswith("# Earlier\n\n# Ça marche?\n" if before else "# Ça marche?\n")
    assert note.read_text().endswith("Answered: Green.\nOr red.\n")
