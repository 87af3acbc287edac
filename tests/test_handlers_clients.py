"""The clients of Shortcut and GitHub, and the effects built on them, against both APIs as respx plays them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import respx
from pydantic import ValidationError

from handlers.github_api import github_api
from handlers.models import PatchSession, Story, Workflow, WorkflowState
from handlers.patch_effects import comment_once, done_state, find_or_open, find_questions, move_to_done, read_story
from handlers.runner import CommandFailed
from handlers.settings import settings
from handlers.shortcut_api import shortcut_api
from webhooks import Escalate

SHORTCUT = "https://api.app.shortcut.com/api/v3"
PULLS = "https://api.github.com/repos/acme/widgets/pulls"
SHA = "a" * 40
STORY: dict[str, Any] = {
    "id": 5,
    "name": "Retry failed exports",
    "description": "They fail at night.",
    "workflow_id": 1,
    "workflow_state_id": 10,
    "estimate": 3,
    "comments": [{"id": 1, "text": "please", "created_at": "2026-06-12T10:00:00Z", "deleted": False}],
}
WORKFLOWS: list[dict[str, Any]] = [
    {"id": 2, "states": [{"id": 99, "name": "Completed", "type": "done"}]},
    {
        "id": 1,
        "states": [
            {"id": 10, "name": "In Development", "type": "started"},
            {"id": 11, "name": "Completed", "type": "done"},
            {"id": 12, "name": "Deployed", "type": "done"},
        ],
    },
]
SESSION = PatchSession(sc_id=5, title="Retry failed exports", opened_at=datetime(2026, 6, 12, tzinfo=UTC))


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WEBHOOKS_SHORTCUT_TOKEN", "shortcut-token")
    monkeypatch.setenv("WEBHOOKS_GITHUB_TOKEN", "github-token")
    monkeypatch.setenv("PATCH_GITHUB_REPOSITORY", "acme/widgets")
    with respx.mock:
        yield


def pull(number: int, state: str, sha: str) -> dict[str, Any]:
    url = f"https://github.com/acme/widgets/pull/{number}"
    return {
        "number": number,
        "html_url": url,
        "state": state,
        "head": {"ref": "patch/sc-5", "sha": sha},
        "draft": False,
    }


def sent(route: respx.Route) -> Any:
    return json.loads(route.calls.last.request.content)


CURIOUS = """python3 -c 'import json, sys; print(json.dumps({"questions": [json.load(sys.stdin)["name"]]}))'"""


# ---- reading


async def test_a_story_is_read_with_everything_shortcut_says_of_it() -> None:
    route = respx.get(f"{SHORTCUT}/stories/5").respond(json=STORY)
    story = await read_story(5)
    assert route.calls.last.request.headers["Shortcut-Token"] == "shortcut-token"
    told = json.loads(story.model_dump_json())
    assert (told["name"], told["estimate"], told["comments"][0]["deleted"]) == ("Retry failed exports", 3, False)


@pytest.mark.parametrize(
    ("missing", "client"),
    [
        ("WEBHOOKS_SHORTCUT_TOKEN", shortcut_api),
        ("WEBHOOKS_GITHUB_TOKEN", github_api),
        ("PATCH_GITHUB_REPOSITORY", github_api),
    ],
)
@pytest.mark.parametrize("unset", [True, False])
async def test_what_is_not_set_is_for_a_person_to_set(
    monkeypatch: pytest.MonkeyPatch, missing: str, client: Any, unset: bool
) -> None:
    if unset:
        monkeypatch.delenv(missing)
    else:
        monkeypatch.setenv(missing, "")
    with pytest.raises(Escalate, match=f"^set {missing}: "):
        async with client():
            pass


@pytest.mark.parametrize(
    ("name", "value"),
    [("PATCH_GITHUB_REPOSITORY", "https://github.com/acme/widgets"), ("PATCH_DRAFTER", "draft 'unfinished")],
)
def test_a_setting_that_cannot_be_meant_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError):
        settings()


def test_settings_do_not_show_their_tokens() -> None:
    assert "shortcut-token" not in repr(settings())
    assert "github-token" not in str(settings().model_dump())


# ---- commenting


async def test_a_comment_is_posted_with_its_mark() -> None:
    respx.get(f"{SHORTCUT}/stories/5/comments").respond(json=STORY["comments"])
    answer = {"id": 7, "text": "Which colour?", "external_id": "mark", "created_at": "2026-06-12T10:01:00Z"}
    posted = respx.post(f"{SHORTCUT}/stories/5/comments").respond(201, json=answer)
    comment = await comment_once(5, "Which colour?", "mark")
    assert sent(posted) == {"text": "Which colour?", "external_id": "mark"}
    assert (comment.id, comment.created_at) == (7, datetime(2026, 6, 12, 10, 1, tzinfo=UTC))


async def test_a_comment_whose_mark_is_there_already_is_not_posted_again() -> None:
    there = {"id": 7, "text": "Which colour?", "external_id": "mark", "created_at": "2026-06-12T10:01:00Z"}
    respx.get(f"{SHORTCUT}/stories/5/comments").respond(json=[*STORY["comments"], there])
    assert (await comment_once(5, "Which colour?", "mark")).id == 7


async def test_a_comment_is_cut_to_what_shortcut_takes() -> None:
    respx.get(f"{SHORTCUT}/stories/5/comments").respond(json=[])
    answer = {"id": 7, "text": "", "created_at": "2026-06-12T10:01:00Z"}
    posted = respx.post(f"{SHORTCUT}/stories/5/comments").respond(201, json=answer)
    await comment_once(5, "?" * 200_000, "mark")
    assert len(sent(posted)["text"]) == 100_000


# ---- asking


async def test_without_a_clarifier_there_are_no_questions() -> None:
    assert (await find_questions(Story.model_validate(STORY))).questions == []


@pytest.mark.parametrize(
    ("program", "questions"),
    [
        (
            """python3 -c 'import json, sys; print(json.dumps({"questions": [json.load(sys.stdin)["name"]]}))'""",
            [STORY["name"]],
        ),
        ("echo {}", []),
        ("true", []),
    ],
)
async def test_the_clarifier_reads_the_story_and_prints_its_questions(
    monkeypatch: pytest.MonkeyPatch, program: str, questions: list[str]
) -> None:
    monkeypatch.setenv("PATCH_CLARIFIER", program)
    assert (await find_questions(Story.model_validate(STORY))).questions == questions


@pytest.mark.parametrize("program", ["echo What colour?", "echo []", """echo '{"questions": "one"}'""", "false"])
async def test_a_clarifier_that_says_something_else_has_failed(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setenv("PATCH_CLARIFIER", program)
    with pytest.raises(CommandFailed):
        await find_questions(Story.model_validate(STORY))


# ---- proposing


async def test_a_pull_request_is_opened_when_there_is_none() -> None:
    looked = respx.get(PULLS).respond(json=[])
    opened = respx.post(PULLS).respond(201, json=pull(3, "open", SHA))
    found = await find_or_open(SESSION, SHA)
    assert dict(looked.calls.last.request.url.params) == {"head": "acme:patch/sc-5", "state": "all"}
    assert looked.calls.last.request.headers["Authorization"] == "Bearer github-token"
    assert sent(opened) == {
        "title": "Retry failed exports [sc-5]",
        "body": "Drafted for sc-5.\n",
        "head": "patch/sc-5",
        "base": "main",
    }
    assert (found.number, found.html_url) == (3, "https://github.com/acme/widgets/pull/3")


@pytest.mark.parametrize(
    ("there", "number"),
    [
        ([pull(4, "open", "b" * 40)], 4),
        ([pull(4, "closed", SHA)], 4),
        ([pull(6, "open", SHA), pull(4, "closed", "b" * 40)], 6),
    ],
)
async def test_a_pull_request_that_is_there_is_found(there: list[dict[str, Any]], number: int) -> None:
    respx.get(PULLS).respond(json=there)
    assert (await find_or_open(SESSION, SHA)).number == number


async def test_a_closed_pull_request_of_other_commits_does_not_count() -> None:
    respx.get(PULLS).respond(json=[pull(4, "closed", "b" * 40)])
    respx.post(PULLS).respond(201, json=pull(7, "open", SHA))
    assert (await find_or_open(SESSION, SHA)).number == 7


async def test_the_proposal_says_what_was_asked_and_answered() -> None:
    respx.get(PULLS).respond(json=[])
    opened = respx.post(PULLS).respond(201, json=pull(3, "open", SHA))
    known = {"story_url": "https://app.shortcut.com/acme/story/5", "question": "Which colour?", "answer": "Green."}
    await find_or_open(SESSION.model_copy(update={**known, "title": "x" * 300}), SHA)
    assert sent(opened)["body"] == (
        "Drafted for https://app.shortcut.com/acme/story/5.\n\n### Asked\n\nWhich colour?\n\n### Answered\n\nGreen.\n"
    )
    assert len(sent(opened)["title"]) == 256


# ---- finishing


def state(story_state: int, named: str | None) -> WorkflowState:
    story = Story.model_validate({**STORY, "workflow_state_id": story_state})
    return done_state(story, [Workflow.model_validate(workflow) for workflow in WORKFLOWS], named)


@pytest.mark.parametrize(
    ("story_state", "named", "expected"),
    [(10, None, 11), (12, None, 12), (10, "deployed", 12), (12, "Completed", 11), (10, "In Development", 10)],
)
def test_a_merged_story_belongs_where_the_setting_says_or_where_it_is_done(
    story_state: int, named: str | None, expected: int
) -> None:
    assert state(story_state, named).id == expected


def test_a_state_that_the_workflow_does_not_have_is_for_a_person_to_name() -> None:
    with pytest.raises(Escalate, match=r"set PATCH_DONE_STATE .* In Development, Completed, Deployed"):
        state(10, "Shipped")
    story = Story.model_validate({**STORY, "workflow_id": 3})
    with pytest.raises(Escalate, match="no state at all"):
        done_state(story, [], None)


async def test_a_merged_story_is_moved_once() -> None:
    respx.get(f"{SHORTCUT}/stories/5").respond(json=STORY)
    respx.get(f"{SHORTCUT}/workflows").respond(json=WORKFLOWS)
    moved = respx.put(f"{SHORTCUT}/stories/5").respond(json={**STORY, "workflow_state_id": 11})
    assert await move_to_done(5) == 11
    assert sent(moved) == {"workflow_state_id": 11}


async def test_a_story_that_is_done_already_is_left_where_it_is() -> None:
    respx.get(f"{SHORTCUT}/stories/5").respond(json={**STORY, "workflow_state_id": 12})
    respx.get(f"{SHORTCUT}/workflows").respond(json=WORKFLOWS)
    assert await move_to_done(5) == 12
