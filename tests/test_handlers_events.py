"""What deliveries do to patch sessions: every order, every status, nothing of the outside world."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from patch_flow import (
    BOT,
    PERSON,
    apply_due,
    commented,
    created,
    deliver,
    endings,
    labelled,
    pull_request,
    put,
    rows,
    sample,
    session,
    shortcut_delivery,
    texts,
)

from handlers.patch_sessions import sessions
from webhooks import Pool

ASKED_AT = datetime(2026, 6, 12, 9, 0, tzinfo=UTC)
QUESTION: dict[str, Any] = {"question": "Which colour?", "question_comment_id": 50, "asked_at": ASKED_AT}
STATUSES = (
    "received",
    "clarifying",
    "asked",
    "clarified",
    "drafting",
    "drafted",
    "opening",
    "in_review",
    "merged",
    "finishing",
    "finished",
    "closed",
    "escalated",
)


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    async with Pool.open(database_url) as pool:
        yield pool


# ---- labels


@pytest.mark.parametrize("delivery", [labelled(), labelled(label="PATCH"), created()])
async def test_the_label_opens_a_session(pool: Pool, delivery: Any) -> None:
    assert texts(await deliver(pool, delivery)) == [("processed", None)]
    opened = await session(pool)
    assert (opened["status"], opened["sc_id"]) == ("received", 5)
    assert opened["title"]
    assert opened["story_url"].startswith("https://app.shortcut.com/acme/story/")


async def test_another_label_is_ignored_and_the_reason_names_the_rule_and_what_was_seen(pool: Pool) -> None:
    assert texts(await deliver(pool, labelled(label="Patchwork"))) == [
        ("ignored", "label 'patch' not among those added: Patchwork")
    ]
    state_change = shortcut_delivery(sample("shortcut/v1_story_update_state_change.json"))
    assert texts(await deliver(pool, state_change)) == [("ignored", "label 'patch' not among those added: none")]


async def test_a_title_that_postgres_would_refuse_opens_a_session_all_the_same(pool: Pool) -> None:
    assert texts(await deliver(pool, labelled(title="a\0b \ud83d"))) == [("processed", None)]
    assert (await session(pool))["title"].startswith("a")


async def test_the_label_is_a_setting(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCH_LABEL", "ready-for-bot")
    assert [row["status"] for row in await deliver(pool, labelled(), created(label="ready-for-bot"))] == [
        "ignored",
        "processed",
    ]


async def test_case_14_the_label_again_and_again_is_one_session_wherever_it_is_by_then(pool: Pool) -> None:
    await deliver(pool, *(labelled() for _ in range(5)))
    opened = await session(pool)
    await put(pool, "drafting")
    assert texts(await deliver(pool, labelled(title="Renamed"))) == [("processed", None)]
    found = await session(pool)
    assert (found["status"], found["visit"], found["title"]) == ("drafting", opened["visit"], "Retry failed exports")


async def test_taking_the_label_off_or_deleting_the_story_stops_nothing(pool: Pool) -> None:
    await deliver(pool, labelled())
    removed = sample("shortcut/v1_story_update_label_add_new_label.json")
    removed["actions"][0] |= {"id": 5, "changes": {"label_ids": {"removes": [12135]}}}
    deleted = sample("shortcut/v1_story_delete.json")
    deleted["actions"][0]["id"] = 5
    await deliver(pool, shortcut_delivery(removed), shortcut_delivery(deleted))
    assert (await session(pool))["status"] == "received"


async def test_a_bulk_edit_opens_a_session_for_each_story(pool: Pool) -> None:
    body = sample("shortcut/v1_bulk_update.json")
    for action in body["actions"][1:]:
        action["changes"] = {"label_ids": {"adds": [18]}}
    body["references"] = [{"id": 18, "entity_type": "label", "name": "patch"}]
    await deliver(pool, shortcut_delivery(body))
    found = await rows(pool, "SELECT sc_id, title FROM patch_sessions ORDER BY sc_id")
    assert [(row["sc_id"], row["title"]) for row in found] == [
        (17001, "Story 17001"),
        (17002, "Story 17002"),
        (17003, "Story 17003"),
    ]


# ---- comments


async def test_an_answer_moves_an_asked_session_on(pool: Pool) -> None:
    await put(pool, "asked", **QUESTION)
    assert texts(await deliver(pool, commented())) == [("processed", None)]
    answered = await session(pool)
    assert (answered["status"], answered["answer"], answered["answered_by"]) == ("clarified", "Green.", PERSON)
    assert (answered["attempt_count"], answered["max_attempts"]) == (0, 3)


@pytest.mark.parametrize(
    "comment",
    [
        pytest.param({"comment_id": 49}, id="number before the question's"),
        pytest.param({"comment_id": 50}, id="the question itself"),
        pytest.param({"changed_at": "2026-06-12T08:59:59.999Z"}, id="time before the question's"),
    ],
)
async def test_a_comment_older_than_the_question_is_no_answer(pool: Pool, comment: dict[str, Any]) -> None:
    await put(pool, "asked", **QUESTION)
    before = await session(pool)
    assert texts(await deliver(pool, commented(**comment))) == [("ignored", "older than the question")]
    assert await session(pool) == before


async def test_case_15_our_own_comment_is_no_answer(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_SHORTCUT_BOT", BOT)
    await put(pool, "asked", **QUESTION)
    assert texts(await deliver(pool, commented(author_id=BOT))) == [("ignored", "our own comment")]
    assert (await session(pool))["status"] == "asked"


async def test_a_comment_without_text_or_a_story_of_ours_is_ignored(pool: Pool) -> None:
    await put(pool, "asked", **QUESTION)
    assert texts(await deliver(pool, commented(text=None), commented(text=""), commented(sc_id=6))) == [
        ("ignored", "not a comment with text on a story"),
        ("ignored", "not a comment with text on a story"),
        ("ignored", "no session for story 6"),
    ]


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "asked"])
async def test_a_comment_waits_while_the_question_may_be_on_its_way_and_else_changes_nothing(
    pool: Pool, status: str
) -> None:
    await put(pool, status)
    (ended,) = await deliver(pool, commented())
    assert (await session(pool))["status"] == status
    if status in ("received", "clarifying"):
        assert (ended["status"], ended["parked_on"]) == ("received", "patch_sessions:5")
    else:
        assert (ended["status"], ended["parked_on"]) == ("ignored", None)
        assert status in ended["reason"]


@pytest.mark.parametrize(("comment_id", "status"), [(100, "clarified"), (49, "asked"), (50, "asked")])
async def test_a_comment_that_came_before_its_question_was_recorded_counts_if_it_is_newer(
    pool: Pool, comment_id: int, status: str
) -> None:
    await put(pool, "received")
    early = commented(comment_id)
    await deliver(pool, early)
    async with sessions.claim(pool, "clarifying", 5) as claim:
        assert claim is not None
        await claim.complete("asked", **QUESTION)
    await apply_due(pool)  # what completing has woken
    assert (await session(pool))["status"] == status
    assert [row["status"] for row in await endings(pool, early)] == [
        "processed" if status == "clarified" else "ignored"
    ]


async def test_of_two_answers_the_first_to_arrive_counts_and_the_other_changes_nothing(pool: Pool) -> None:
    await put(pool, "asked", **QUESTION)
    first, second = await deliver(pool, commented(100, "Green."), commented(101, "No, red."))
    assert (first["status"], second["status"]) == ("processed", "ignored")
    assert (await session(pool))["answer"] == "Green."


# ---- pull requests


@pytest.mark.parametrize("merged", [True, False])
async def test_a_closed_pull_request_ends_the_review(pool: Pool, merged: bool) -> None:
    await put(pool, "in_review")
    assert texts(await deliver(pool, pull_request("closed", merged=merged))) == [("processed", None)]
    ended = await session(pool)
    assert ended["status"] == ("merged" if merged else "closed")
    assert ended["merged_at"] == (datetime(2026, 6, 12, 12, tzinfo=UTC) if merged else None)


MOVES = {("in_review", True), ("in_review", False), ("closed", True)}


@pytest.mark.parametrize(("status", "merged"), sorted(set(itertools.product(STATUSES, [True, False])) - MOVES))
async def test_a_closed_pull_request_waits_for_a_session_that_is_not_there_yet_and_else_changes_nothing(
    pool: Pool, status: str, merged: bool
) -> None:
    await put(pool, status)
    (ended,) = await deliver(pool, pull_request("closed", merged=merged))
    assert (await session(pool))["status"] == status
    waits = status in ("drafted", "opening", "escalated")
    assert (ended["status"], ended["parked_on"]) == (("received", "patch_sessions:5") if waits else ("ignored", None))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"branch": "feature"}, "branch 'feature' is not one of ours (patch/sc-<id>)"),
        ({"branch": "patch/sc-5x"}, "branch 'patch/sc-5x' is not one of ours (patch/sc-<id>)"),
        ({"branch": "patch/sc-05"}, "branch 'patch/sc-05' is not one of ours (patch/sc-<id>)"),
        ({"branch": "x/patch/sc-5"}, "branch 'x/patch/sc-5' is not one of ours (patch/sc-<id>)"),
        ({"branch": "patch/sc-" + "9" * 30}, f"branch 'patch/sc-{'9' * 30}' is not one of ours (patch/sc-<id>)"),
        ({"head__repo__full_name": "mallory/Hello-World"}, "the branch is a fork's"),
        ({"head__repo": None}, "the branch is a fork's"),
        ({"branch": "patch/sc-999999999999999999"}, "patch_sessions:999999999999999999 is missing"),
    ],
)
async def test_a_branch_that_is_not_ours_is_ignored(pool: Pool, changes: dict[str, Any], reason: str) -> None:
    await put(pool, "in_review")
    (ended,) = await deliver(pool, pull_request("closed", merged=True, **changes))
    assert (ended["status"], ended["reason"].split(":  ")[0][: len(reason)]) == ("ignored", reason)
    assert (await session(pool))["status"] == "in_review"


@pytest.mark.parametrize(("ours", "status"), [("codertocat/hello-world", "merged"), ("acme/widgets", "in_review")])
async def test_only_the_configured_repository_counts(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, ours: str, status: str
) -> None:
    monkeypatch.setenv("PATCH_GITHUB_REPOSITORY", ours)
    await put(pool, "in_review")
    await deliver(pool, pull_request("closed", merged=True))
    assert (await session(pool))["status"] == status


@pytest.mark.parametrize("name", ["acme/widgets", "codertocat/HELLO-world"])
@pytest.mark.parametrize("ours", [None, "Codertocat/Hello-World", "acme/before"])
async def test_the_repository_of_a_session_is_known_by_its_number_whatever_it_is_called(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, ours: str | None, name: str
) -> None:
    if ours is not None:
        monkeypatch.setenv("PATCH_GITHUB_REPOSITORY", ours)
    await put(pool, "in_review", repository_id=186853002)
    called = {"head__repo__full_name": name, "base__repo__full_name": name}
    await deliver(pool, pull_request("closed", merged=True, **called))
    assert (await session(pool))["status"] == "merged"


async def test_another_repository_is_not_the_session_s_though_it_has_its_name_now(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCH_GITHUB_REPOSITORY", "Codertocat/Hello-World")
    await put(pool, "in_review", repository_id=7)
    assert texts(await deliver(pool, pull_request("closed", merged=True))) == [
        ("ignored", "repository Codertocat/Hello-World is not the one of this session's pull request")
    ]


@pytest.mark.parametrize("status", ["drafted", "opening", "escalated"])
@pytest.mark.parametrize(("number", "ends"), [(186853002, "merged"), (7, "in_review")])
async def test_a_renamed_repository_is_waited_for_until_its_number_is_known(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, status: str, number: int, ends: str
) -> None:
    monkeypatch.setenv("PATCH_GITHUB_REPOSITORY", "acme/before")
    await put(pool, status)
    [ended] = await deliver(pool, pull_request("closed", merged=True))
    assert (ended["status"], ended["parked_on"]) == ("received", "patch_sessions:5")
    await put(pool, "drafted")
    async with sessions.claim(pool, "opening", 5) as claim:
        assert claim is not None
        await claim.complete(repository_id=number)
    await apply_due(pool)
    assert (await session(pool))["status"] == ends


@pytest.mark.parametrize("order", list(itertools.permutations(["opened", "synchronize", "closed"])))
async def test_case_13_invariant_10_every_order_of_a_pull_request_s_events_ends_the_same(
    pool: Pool, order: tuple[str, ...]
) -> None:
    deliveries = [pull_request(action, merged=True) for action in order]
    await put(pool, "in_review")
    await deliver(pool, *deliveries)
    assert (await session(pool))["status"] == "merged"


@pytest.mark.parametrize("order", list(itertools.permutations(["opened", "synchronize", "closed"])))
async def test_case_13_invariant_10_the_same_while_the_session_is_still_opening(
    pool: Pool, order: tuple[str, ...]
) -> None:
    await put(pool, "drafted")
    await deliver(pool, *(pull_request(action, merged=True) for action in order))
    async with sessions.claim(pool, "opening", 5) as claim:
        assert claim is not None
        await claim.complete()
    await apply_due(pool)
    assert (await session(pool))["status"] == "merged"


@pytest.mark.parametrize("order", list(itertools.permutations(["closed", "reopened", "merged"])))
@pytest.mark.parametrize("status", ["drafted", "in_review"])
async def test_invariant_10_closed_reopened_and_merged_ends_merged_in_every_order(
    pool: Pool, order: tuple[str, ...], status: str
) -> None:
    kinds = {
        "closed": pull_request("closed"),
        "reopened": pull_request("reopened"),
        "merged": pull_request("closed", merged=True),
    }
    await put(pool, status)
    await deliver(pool, *(kinds[name] for name in order))
    if status == "drafted":
        async with sessions.claim(pool, "opening", 5) as claim:
            assert claim is not None
            await claim.complete()
        await apply_due(pool)
    assert (await session(pool))["status"] == "merged"
