"""The phases of the patch flow over a real database; the outside world is respx and a repository on disk."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import respx
from patch_flow import BOT, put, rows, session

from handlers.calls import ProviderFailed
from handlers.patch_sessions import sessions
from handlers.runner import CommandFailed
from handlers.settings import unset_tokens
from webhooks import NotDone, Pool

SHORTCUT = "https://api.app.shortcut.com/api/v3"
PULLS = "https://api.github.com/repos/acme/widgets/pulls"
STORY: dict[str, Any] = {"id": 5, "name": "Retry failed exports", "workflow_id": 1, "workflow_state_id": 10}
COMMENT: dict[str, Any] = {"id": 50, "text": "Which colour?", "created_at": "2026-06-12T09:00:00Z"}
DIFF = "--- a/hello.txt\n+++ b/hello.txt\n@@ -1 +1 @@\n-hello\n+good night\n"


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    async with Pool.open(database_url) as pool:
        yield pool


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WEBHOOKS_SHORTCUT_TOKEN", "shortcut-token")
    monkeypatch.setenv("WEBHOOKS_SHORTCUT_BOT", BOT)
    monkeypatch.setenv("WEBHOOKS_GITHUB_TOKEN", "github-token")
    monkeypatch.setenv("PATCH_GITHUB_REPOSITORY", "acme/widgets")
    with respx.mock:
        yield


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bare repository with one file on main."""
    bare, work = tmp_path / "upstream.git", tmp_path / "work"
    work.mkdir()
    (work / "hello.txt").write_text("hello\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    for command in (
        ["init", "-q", "--bare", str(bare)],
        ["init", "-q"],
        ["add", "."],
        [*who, "commit", "-q", "-m", "first"],
        ["push", "-q", str(bare), "HEAD:refs/heads/main"],
    ):
        subprocess.run(["git", *command], cwd=work, check=True)
    monkeypatch.setenv("PATCH_REPOSITORY", str(bare))
    return bare


def heads(upstream: Path) -> dict[str, str]:
    listed = subprocess.check_output(["git", "for-each-ref", "--format=%(refname:short) %(objectname)"], cwd=upstream)
    return dict(line.split() for line in listed.decode().splitlines())


async def run(pool: Pool, phase: str) -> dict[str, Any]:
    """Run one phase of session 5 once, as a worker would, and return the row it leaves; back-off is skipped."""
    async with pool.transaction() as tx:
        await tx.execute("UPDATE patch_sessions SET not_before = now() - interval '1 second'")
    function = sessions.phases[phase].function
    assert function is not None
    with suppress(NotDone, ProviderFailed, CommandFailed):
        async with sessions.claim(pool, phase, 5) as claim:
            assert claim is not None, f"session is {(await session(pool))['status']}"
            done = await function(claim.row, claim) or claim.done()
            await claim.complete(done.status, **done.columns)
    return await session(pool)


async def outcomes(pool: Pool) -> list[str]:
    found = await rows(pool, "SELECT outcome FROM attempts ORDER BY claimed_at")
    return [row["outcome"] for row in found]


def python(program: str) -> str:
    return shlex.join([sys.executable, "-c", program])


def asks(*questions: str) -> str:
    return python(f"print({json.dumps({'questions': questions})!r})")


def proposes(diff: str) -> str:
    return python(f"print({diff!r})")


# ---- clarify


async def test_without_a_clarifier_nothing_is_asked_and_nobody_is_called(pool: Pool) -> None:
    await put(pool, "received")
    assert (await run(pool, "clarifying"))["status"] == "clarified"


async def test_a_clear_story_goes_on_at_once(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCH_CLARIFIER", "echo {}")
    respx.get(f"{SHORTCUT}/stories/5").respond(json=STORY)
    await put(pool, "received")
    assert (await run(pool, "clarifying"))["status"] == "clarified"


async def test_questions_are_one_comment_with_a_mark_of_its_own(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCH_CLARIFIER", asks("Which colour?", "How big?"))
    respx.get(f"{SHORTCUT}/stories/5").respond(json=STORY)
    respx.get(f"{SHORTCUT}/stories/5/comments").respond(json=[])
    posted = respx.post(f"{SHORTCUT}/stories/5/comments").respond(201, json=COMMENT)
    await put(pool, "received")
    visit = (await session(pool))["visit"]
    asked = await run(pool, "clarifying")
    assert (asked["status"], asked["question"], asked["question_comment_id"], asked["asked_at"]) == (
        "asked",
        "Which colour?\n\nHow big?",
        50,
        datetime(2026, 6, 12, 9, tzinfo=UTC),
    )
    assert json.loads(posted.calls.last.request.content) == {
        "text": "Which colour?\n\nHow big?",
        "external_id": f"patch_sessions:5:clarifying:{visit}:ask",
    }


async def test_a_question_whose_answer_was_lost_is_found_and_not_asked_twice(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCH_CLARIFIER", asks("Which colour?"))
    read = respx.get(f"{SHORTCUT}/stories/5").respond(json=STORY)
    comments = respx.get(f"{SHORTCUT}/stories/5/comments").respond(json=[])
    posted = respx.post(f"{SHORTCUT}/stories/5/comments").respond(502)
    await put(pool, "received")
    failed = await run(pool, "clarifying")
    assert (failed["status"], failed["attempt_count"]) == ("received", 1)
    mark = json.loads(posted.calls.last.request.content)["external_id"]
    monkeypatch.setenv("PATCH_CLARIFIER", asks("Something else entirely?"))  # is not asked again either
    comments.respond(json=[{**COMMENT, "external_id": mark}])
    asked = await run(pool, "clarifying")
    assert (asked["status"], asked["question"], asked["question_comment_id"]) == ("asked", "Which colour?", 50)
    assert (read.call_count, posted.call_count) == (1, 1)
    assert await outcomes(pool) == ["error", "done"]


@pytest.mark.parametrize("missing", ["WEBHOOKS_SHORTCUT_TOKEN", "WEBHOOKS_SHORTCUT_BOT"])
async def test_what_asking_needs_is_for_a_person_to_set_and_then_to_retry(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setenv("PATCH_CLARIFIER", asks("Which colour?"))
    respx.get(f"{SHORTCUT}/stories/5").respond(json=STORY)
    respx.get(f"{SHORTCUT}/stories/5/comments").respond(json=[])
    respx.post(f"{SHORTCUT}/stories/5/comments").respond(201, json=COMMENT)
    await put(pool, "received")
    with monkeypatch.context() as unset:
        unset.delenv(missing)
        escalated = await run(pool, "clarifying")
    assert escalated["status"] == "escalated"
    assert escalated["last_error"].startswith(f"set {missing}: ")
    async with pool.transaction() as tx:
        assert await sessions.retry(tx, 5, decided_by="a test", reason="it is set now")
    assert (await run(pool, "clarifying"))["status"] == "asked"


@pytest.mark.parametrize(("headers", "seconds"), [({}, 60), ({"Retry-After": "7"}, 7)])
async def test_too_many_requests_put_the_session_off_uncharged(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], seconds: int
) -> None:
    monkeypatch.setenv("PATCH_CLARIFIER", "echo {}")
    story = respx.get(f"{SHORTCUT}/stories/5").respond(429, headers=headers)
    await put(pool, "received")
    snoozed = await run(pool, "clarifying")
    assert (snoozed["status"], snoozed["attempt_count"]) == ("received", 0)
    (due,) = await rows(pool, "SELECT not_before - now() AS due FROM patch_sessions")
    assert timedelta(seconds=seconds - 5) < due["due"] <= timedelta(seconds=seconds)
    story.respond(json=STORY)
    assert (await run(pool, "clarifying"))["status"] == "clarified"
    assert await outcomes(pool) == ["snoozed", "done"]


# ---- draft


async def test_a_draft_is_kept_with_the_commit_it_applies_to(
    pool: Pool, upstream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCH_DRAFTER", proposes(DIFF))
    respx.get(f"{SHORTCUT}/stories/5").respond(json=STORY)
    await put(pool, "clarified")
    drafted = await run(pool, "drafting")
    assert (drafted["status"], drafted["patch"].strip(), drafted["base_commit"]) == (
        "drafted",
        DIFF.strip(),
        heads(upstream)["main"],
    )


async def test_a_drafter_that_fails_is_run_three_times_and_the_story_read_once(
    pool: Pool, upstream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCH_DRAFTER", python("import sys; sys.exit('the model is overloaded')"))
    read = respx.get(f"{SHORTCUT}/stories/5").respond(json=STORY)
    await put(pool, "clarified", max_attempts=3)
    after = [await run(pool, "drafting") for _ in range(3)]
    assert [row["status"] for row in after] == ["clarified", "clarified", "escalated"]
    assert "the model is overloaded" in after[-1]["last_error"]
    assert read.call_count == 1


async def test_a_session_retried_by_a_person_is_drafted_anew_though_nothing_was_proposed_before(
    pool: Pool, upstream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCH_DRAFTER", "true")
    respx.get(f"{SHORTCUT}/stories/5").respond(json=STORY)
    await put(pool, "clarified")
    escalated = await run(pool, "drafting")
    assert (escalated["status"], "printed no diff" in escalated["last_error"]) == ("escalated", True)
    monkeypatch.setenv("PATCH_DRAFTER", proposes(DIFF))
    async with pool.transaction() as tx:
        assert await sessions.retry(tx, 5, decided_by="a test", reason="another drafter")
    assert (await run(pool, "drafting"))["status"] == "drafted"


# ---- open


PULL: dict[str, Any] = {"number": 3, "html_url": "https://github.com/acme/widgets/pull/3", "state": "open"}


async def drafted(pool: Pool, upstream: Path) -> None:
    opened_at = datetime(2026, 6, 12, tzinfo=UTC)
    await put(pool, "drafted", patch=DIFF, base_commit=heads(upstream)["main"], opened_at=opened_at)


async def test_the_patch_is_pushed_proposed_and_linked_once_whatever_fails_in_between(
    pool: Pool, upstream: Path
) -> None:
    await drafted(pool, upstream)
    looked = respx.get(PULLS).respond(503)
    opened = respx.post(PULLS)
    comments = respx.get(f"{SHORTCUT}/stories/5/comments").respond(503)
    linked = respx.post(f"{SHORTCUT}/stories/5/comments").respond(201, json=COMMENT)
    assert (await run(pool, "opening"))["status"] == "drafted"
    pushed = heads(upstream)["patch/sc-5"]
    looked.respond(json=[])
    opened.respond(201, json={**PULL, "head": {"ref": "patch/sc-5", "sha": pushed}})
    assert (await run(pool, "opening"))["status"] == "drafted"
    comments.respond(json=[])
    done = await run(pool, "opening")
    assert (done["status"], done["pull_request_number"], done["pull_request_url"]) == ("in_review", 3, PULL["html_url"])
    assert (opened.call_count, linked.call_count, heads(upstream)["patch/sc-5"]) == (1, 1, pushed)
    assert json.loads(linked.calls.last.request.content)["text"] == f"Pull request: {PULL['html_url']}"
    assert await outcomes(pool) == ["error", "error", "done"]


async def test_a_pull_request_whose_answer_was_lost_is_found(pool: Pool, upstream: Path) -> None:
    await drafted(pool, upstream)
    looked = respx.get(PULLS).respond(json=[])
    opened = respx.post(PULLS).respond(500)
    respx.get(f"{SHORTCUT}/stories/5/comments").respond(json=[])
    respx.post(f"{SHORTCUT}/stories/5/comments").respond(201, json=COMMENT)
    assert (await run(pool, "opening"))["status"] == "drafted"
    sha = heads(upstream)["patch/sc-5"]
    looked.respond(json=[{**PULL, "state": "closed", "head": {"ref": "patch/sc-5", "sha": sha}}])
    assert (await run(pool, "opening"))["pull_request_number"] == 3
    assert opened.call_count == 1


@pytest.mark.parametrize("missing", ["WEBHOOKS_GITHUB_TOKEN", "PATCH_GITHUB_REPOSITORY", "WEBHOOKS_SHORTCUT_TOKEN"])
async def test_what_opening_needs_is_for_a_person_to_set(
    pool: Pool, upstream: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    await drafted(pool, upstream)
    respx.get(PULLS).respond(json=[{**PULL, "head": {"ref": "patch/sc-5", "sha": "a" * 40}}])
    monkeypatch.delenv(missing)
    escalated = await run(pool, "opening")
    assert escalated["status"] == "escalated"
    assert escalated["last_error"].startswith(f"set {missing}: ")


# ---- finish


async def test_a_merged_session_s_story_is_moved_and_the_session_is_over(pool: Pool) -> None:
    respx.get(f"{SHORTCUT}/stories/5").respond(json=STORY)
    states = [{"id": 10, "name": "Started", "type": "started"}, {"id": 11, "name": "Completed", "type": "done"}]
    respx.get(f"{SHORTCUT}/workflows").respond(json=[{"id": 1, "states": states}])
    moved = respx.put(f"{SHORTCUT}/stories/5").respond(json=STORY)
    await put(pool, "merged")
    assert (await run(pool, "finishing"))["status"] == "finished"
    assert json.loads(moved.calls.last.request.content) == {"workflow_state_id": 11}


def test_one_warning_names_the_tokens_that_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEBHOOKS_SHORTCUT_TOKEN", "WEBHOOKS_SHORTCUT_BOT", "WEBHOOKS_GITHUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    [warning] = unset_tokens()
    assert "WEBHOOKS_SHORTCUT_TOKEN, WEBHOOKS_SHORTCUT_BOT, WEBHOOKS_GITHUB_TOKEN" in warning
    monkeypatch.setenv("WEBHOOKS_SHORTCUT_TOKEN", "t")
    monkeypatch.setenv("WEBHOOKS_SHORTCUT_BOT", "b")
    monkeypatch.setenv("WEBHOOKS_GITHUB_TOKEN", "g")
    assert unset_tokens() == []
