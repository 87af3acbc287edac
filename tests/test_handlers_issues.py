"""GitHub issues that become issues of ours: opened, told of anew, closed, and commented on once."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx
from consumers import quick
from heartbeats import due, enter, outcomes_of, run, sql
from issue_events import REPOSITORY, all_issues, assigned, event, labeled, only_issue, told
from patch_flow import deliver, sample

from handlers import consumer
from handlers.issue_comments import LONGEST_TEXT, comment_of, number_of, reference
from handlers.issues import issues
from handlers.standin import standin
from webhooks import Claim, Pool
from webhooks.apply import apply
from webhooks.delivery import Delivery
from webhooks.inbox import inbox, insert

AGENT = "https://agent.example/work"
COMMENTS = f"https://api.github.com/repos/{REPOSITORY}/issues/1/comments"


@pytest.fixture(autouse=True)
def tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_GITHUB_TOKEN", "hush")


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    async with Pool.open(database_url, settings=quick()) as pool:
        yield pool


# Opening


async def test_an_assigned_issue_is_opened_for_the_assignee_in_the_company_of_its_repository(pool: Pool) -> None:
    [ended] = await deliver(pool, assigned("coder"))
    assert ended["status"] == "processed"
    row = await only_issue(pool)
    assert (row["company_id"], row["assigned_agent_id"], row["external_ref"]) == (REPOSITORY, "coder", "github#1")
    assert (row["title"], row["body"]) == ("Spelling error in the README file", "It says “teh”.")
    assert (row["status"], row["priority"], row["max_attempts"]) == ("open", "medium", 5)
    assert [company["id"] for company in await sql(pool, "SELECT id FROM companies")] == [REPOSITORY]


async def test_the_sample_of_github_itself_is_understood(pool: Pool) -> None:
    body = sample("github/issues__opened.json")
    body |= {"action": "assigned", "assignee": body["issue"]["assignee"]}
    delivery = Delivery("github", "1:1", (("x-github-event", "issues"),), json.dumps(body).encode())
    assert [ended["status"] for ended in await deliver(pool, delivery)] == ["processed"]
    assert (await only_issue(pool))["assigned_agent_id"] == "Codertocat"


SAID: list[tuple[dict[str, Any], str, str]] = [
    ({"action": "labeled", "label": "agent:coder", "labels": ["agent:coder"]}, "coder", "medium"),
    ({"action": "labeled", "label": "Agent: coder ", "labels": ["Agent: coder "]}, "coder", "medium"),
    ({"action": "labeled", "label": "agent:coder", "assignees": ["a-person"]}, "coder", "medium"),
    ({"action": "labeled", "label": "bug", "labels": ["bug"], "assignees": ["coder"]}, "coder", "medium"),
    ({"action": "assigned", "assignee": "a-person", "labels": ["bug", "agent:coder"]}, "coder", "medium"),
    ({"action": "assigned", "assignee": "coder", "assignees": ["another", "coder"]}, "coder", "medium"),
    ({"action": "assigned", "assignee": "coder", "labels": ["priority:high", "bug"]}, "coder", "high"),
    (
        {"action": "assigned", "assignee": "coder", "labels": ["priority:low", "Priority: Critical"]},
        "coder",
        "critical",
    ),
    ({"action": "assigned", "assignee": "coder", "labels": ["priority:whatever"]}, "coder", "medium"),
]


async def test_labels_and_assignee_say_who_works_on_it_and_how_urgent_it_is(pool: Pool) -> None:
    for number, (said, agent, priority) in enumerate(SAID, start=1):
        await deliver(pool, event(number=number, **said))
        row = (await all_issues(pool))[-1]
        assert (row["external_ref"], row["assigned_agent_id"], row["priority"]) == (
            reference(number),
            agent,
            priority,
        ), said


async def test_an_issue_that_names_no_agent_opens_nothing(pool: Pool) -> None:
    for delivery in (labeled("bug"), labeled("agent: "), event("assigned")):
        [ended] = await deliver(pool, delivery)
        assert ended["status"] == "ignored"
        assert ended["reason"] == "neither a label agent:<name> nor an assignee says who is to work on it"
    assert await all_issues(pool) == []


async def test_many_words_about_one_issue_open_one(pool: Pool) -> None:
    await deliver(pool, *(assigned("coder") for _ in range(10)), *(labeled("agent:coder") for _ in range(10)))
    assert (await only_issue(pool))["external_ref"] == "github#1"


async def test_words_about_one_issue_that_come_at_once_open_one_and_the_newest_counts(pool: Pool) -> None:
    words = [assigned(f"agent-{at}", at=at) for at in range(1, 11)]
    async with pool.transaction() as tx:
        await insert(tx, words)
    claims = await inbox.take_next(pool, "applying", 10)

    async def apply_one(claim: Claim[Any]) -> None:
        async with claim.held():
            await apply(consumer, claim)

    await asyncio.gather(*map(apply_one, claims))
    assert len(claims) == 10
    await deliver(pool)  # whoever waited for a lock too long
    assert (await only_issue(pool))["assigned_agent_id"] == "agent-10"


async def test_what_postgres_cannot_store_is_replaced(pool: Pool) -> None:
    [ended] = await deliver(pool, assigned("coder", title="a\x00b", body="\ud83d"))
    assert ended["status"] == "processed"
    row = await only_issue(pool)
    assert (row["title"], row["body"]) == ("a\ufffdb", "\ufffd")


async def test_an_issue_without_a_body_has_an_empty_one(pool: Pool) -> None:
    await deliver(pool, assigned("coder", body=None))
    assert (await only_issue(pool))["body"] == ""


# Order


STORIES: dict[str, list[dict[str, Any]]] = {
    "assigned, labeled, closed": [
        {"action": "assigned", "at": 1, "assignee": "a", "assignees": ["a"]},
        {"action": "labeled", "at": 2, "label": "agent:b", "labels": ["agent:b"], "assignees": ["a"], "title": "new"},
        {"action": "closed", "at": 3, "labels": ["agent:b"], "assignees": ["a"], "title": "newest"},
    ],
    "one assignee after the other": [
        {"action": "assigned", "at": 1, "assignee": "a", "assignees": ["a"]},
        {"action": "assigned", "at": 2, "assignee": "b", "assignees": ["b"]},
        {"action": "assigned", "at": 3, "assignee": "a", "assignees": ["a"], "labels": ["priority:high"]},
        {"action": "labeled", "at": 4, "label": "bug", "assignees": ["a"], "labels": ["bug"]},
    ],
    "closed, then told of again": [
        {"action": "assigned", "at": 1, "assignee": "a", "assignees": ["a"]},
        {"action": "closed", "at": 2, "assignees": ["a"]},
        {"action": "labeled", "at": 3, "label": "x", "assignees": ["a"], "labels": ["x"], "state": "closed"},
        {"action": "assigned", "at": 4, "assignee": "b", "assignees": ["b"], "title": "reopened"},
    ],
    "all within one second": [
        {"action": "assigned", "at": 1, "assignee": "a", "assignees": ["a"], "title": "z"},
        {"action": "assigned", "at": 1, "assignee": "b", "assignees": ["a", "b"]},
        {"action": "labeled", "at": 1, "label": "agent:c", "labels": ["agent:c"], "assignees": ["a", "b"]},
        {"action": "closed", "at": 1, "labels": ["agent:c"], "assignees": ["a", "b"]},
    ],
    "urgent within the same second": [
        {"action": "assigned", "at": 1, "assignee": "z", "assignees": ["z"], "labels": ["priority:low"], "title": "z"},
        {"action": "labeled", "at": 1, "label": "priority:critical", "labels": ["priority:critical", "agent:a"]},
        {"action": "labeled", "at": 1, "label": "priority:high", "labels": ["priority:high", "agent:y"], "title": "y"},
    ],
    "closed when nobody was assigned any more": [
        {"action": "assigned", "at": 1, "assignee": "a", "assignees": ["a"]},
        {"action": "closed", "at": 2, "closed_at": 2},
    ],
    "a label on a closed one": [
        {"action": "labeled", "at": 3, "label": "agent:a", "labels": ["agent:a"], "state": "closed", "closed_at": 1},
        {"action": "assigned", "at": 2, "assignee": "b", "assignees": ["b"], "state": "closed", "closed_at": 1},
        {"action": "closed", "at": 1, "closed_at": 1},
    ],
    "closed and opened again": [
        {"action": "assigned", "at": 1, "assignee": "a", "assignees": ["a"]},
        {"action": "closed", "at": 2, "closed_at": 2},
        {"action": "reopened", "at": 3, "assignees": ["b"], "title": "again"},
    ],
    "closed, opened again, and closed for good": [
        {"action": "labeled", "at": 1, "label": "agent:a", "labels": ["agent:a"]},
        {"action": "closed", "at": 2, "closed_at": 2},
        {"action": "reopened", "at": 3},
        {"action": "closed", "at": 4, "closed_at": 4},
    ],
    "closed, and written down late": [
        {"action": "assigned", "at": 1, "assignee": "a", "assignees": ["a"]},
        {"action": "closed", "at": 9, "closed_at": 2},
        {"action": "reopened", "at": 3},
    ],
    "opened again, and told of when it was closed once more": [
        {"action": "assigned", "at": 1, "assignee": "a", "assignees": ["a"]},
        {"action": "reopened", "at": 5, "state": "closed", "closed_at": 4},
        {"action": "closed", "at": 4, "closed_at": 4},
    ],
    "closed and opened again within a second": [
        {"action": "assigned", "at": 1, "assignee": "a", "assignees": ["a"]},
        {"action": "closed", "at": 2, "closed_at": 2},
        {"action": "reopened", "at": 2},
    ],
    "deleted": [
        {"action": "assigned", "at": 1, "assignee": "a", "assignees": ["a"]},
        {"action": "deleted", "at": 2},
        {"action": "reopened", "at": 3},
    ],
    "transferred": [
        {"action": "labeled", "at": 1, "label": "agent:a", "labels": ["agent:a"]},
        {"action": "transferred", "at": 2, "labels": ["agent:a"]},
        {"action": "labeled", "at": 3, "label": "x", "labels": ["agent:b"]},
    ],
}
ENDS_OPEN = {
    "one assignee after the other",
    "urgent within the same second",
    "closed and opened again",
    "closed, and written down late",
}


@pytest.mark.invariant(10)
@pytest.mark.parametrize("name", STORIES)
async def test_every_order_of_arrival_and_every_repetition_ends_alike(name: str, pool: Pool) -> None:
    story = STORIES[name]
    ends: dict[tuple[object, ...], list[int]] = {}
    chance = random.Random(10)
    for number, order in enumerate(itertools.permutations(story), start=1):
        arriving = [*order, chance.choice(order)]
        await deliver(pool, *(event(**{"number": number, **word}) for word in arriving))
        [row] = await sql(pool, "SELECT * FROM issues WHERE external_ref = %(reference)s", reference=reference(number))
        ends.setdefault(told(row), []).append(number)
    assert len(ends) == 1, ends
    assert next(iter(ends))[0] == ("open" if name in ENDS_OPEN else "resolved")
    if name == "urgent within the same second":
        assert next(iter(ends))[1:5] == ("a", "Spelling error in the README file", "It says “teh”.", "critical")


async def test_the_newest_word_counts_until_somebody_has_begun(pool: Pool) -> None:
    await deliver(pool, assigned("a", at=1), assigned("b", at=3), assigned("c", at=2))
    assert (await only_issue(pool))["assigned_agent_id"] == "b"
    async with issues.claim_next(pool, "claimed") as claim:
        assert claim is not None
    # It was given back, and nothing was charged; but the agent may have been asked already.
    await deliver(pool, assigned("d", at=4, title="another"))
    row = await only_issue(pool)
    assert (row["status"], row["attempt_count"]) == ("open", 0)
    assert (row["assigned_agent_id"], row["title"]) == ("b", "Spelling error in the README file")


# Closing


async def test_a_closed_issue_is_resolved(pool: Pool) -> None:
    await deliver(pool, assigned("coder", at=1), event("closed", at=2, assignees=["coder"]))
    row = await only_issue(pool)
    assert (row["status"], row["result"], row["attempt_count"]) == ("resolved", None, 0)


async def test_one_that_nobody_is_assigned_to_any_more_is_resolved_too(pool: Pool) -> None:
    await deliver(pool, assigned("coder", at=1), event("closed", at=2))
    assert (await only_issue(pool))["status"] == "resolved"


async def test_a_late_word_about_a_closed_issue_opens_nothing(pool: Pool) -> None:
    await deliver(pool, event("closed", at=2, assignees=["coder"]))
    assert (await only_issue(pool))["status"] == "resolved"
    await deliver(pool, assigned("coder", at=1), labeled("agent:coder", at=1))
    assert (await only_issue(pool))["status"] == "resolved"


async def test_a_closed_issue_that_would_never_have_been_opened_opens_nothing(pool: Pool) -> None:
    [ended] = await deliver(pool, event("closed"))
    assert ended["status"] == "processed"  # it is remembered: a word from before may still be on its way
    assert await all_issues(pool) == []


@pytest.mark.parametrize("status", ["claimed", "escalated"])
async def test_closing_ends_what_is_worked_on_or_waits_for_a_person(status: str, pool: Pool) -> None:
    await deliver(pool, assigned("coder"))
    id = (await only_issue(pool))["id"]
    if status == "claimed":
        [claim] = await issues.take_next(pool, "claimed", 1)
        await deliver(pool, event("closed", at=2, assignees=["coder"]))
        assert await outcomes_of(pool, claim.key) == ["lost"]
    else:
        await sql(pool, "UPDATE issues SET status = 'escalated', claimed_from = 'open' WHERE id = %(id)s", id=id)
        await deliver(pool, event("closed", at=2, assignees=["coder"]))
    row = await only_issue(pool)
    assert (row["status"], row["claimed_from"], row["lease_until"]) == ("resolved", None, None)


# The comment


class Comments:
    """GitHub's comments on the issue, and what it answers to a new one."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        self.answers: list[httpx.Response | Exception] = []

    def list(self, request: httpx.Request) -> httpx.Response:
        page, size = int(request.url.params["page"]), int(request.url.params["per_page"])
        found = list(enumerate(self.bodies))[(page - 1) * size : page * size]
        return httpx.Response(
            200, json=[{"id": id, "html_url": f"{COMMENTS}/{id}", "body": body} for id, body in found]
        )

    def create(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer hush"
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, httpx.Response) and answer.is_client_error:
            return answer
        self.bodies.append(json.loads(request.content)["body"])
        if isinstance(answer, Exception):
            raise answer
        id = len(self.bodies)
        return answer or httpx.Response(201, json={"id": id, "html_url": f"{COMMENTS}/{id}"})


@pytest.fixture
def outside() -> Iterator[respx.MockRouter]:
    with respx.mock(assert_all_called=False) as router:
        yield router


@pytest.fixture
def comments(outside: respx.MockRouter) -> Comments:
    """Those of the one issue."""
    found = Comments()
    outside.get(COMMENTS).mock(side_effect=found.list)
    outside.post(COMMENTS).mock(side_effect=found.create)
    return found


@pytest.fixture
async def resolving(pool: Pool, outside: respx.MockRouter) -> respx.Route:
    """An open issue of GitHub's, and the agent it is assigned to; its calls."""
    await enter(pool, {"coder": {"type": "http", "url": AGENT}}, company=REPOSITORY)
    await deliver(pool, assigned("coder"))
    return outside.post(AGENT).respond(json={"summary": "Mended in a1b2c3."})


async def test_what_an_agent_resolved_is_commented_on_the_issue(
    resolving: respx.Route, comments: Comments, pool: Pool
) -> None:
    assert await run(pool, company=REPOSITORY) == {"claimed": 1, "resolved": 1, "failed": 0, "escalated": 0}
    row = await only_issue(pool)
    assert (row["status"], row["result"]) == ("resolved", '{"summary": "Mended in a1b2c3."}')
    assert comments.bodies == [f"Mended in a1b2c3.\n\n<!-- issues:{row['id']}:claimed:{row['visit']}:comment -->"]


@pytest.mark.parametrize("answer", [httpx.Response(502), httpx.ReadTimeout("no answer")], ids=["502", "no answer"])
async def test_a_comment_that_may_have_been_made_is_looked_for_first_and_the_agent_is_not_asked_again(
    answer: httpx.Response | Exception, resolving: respx.Route, comments: Comments, pool: Pool
) -> None:
    # It stands on the second page by the time of the second attempt.
    comments.bodies += [f"noise {number}" for number in range(100)]
    comments.answers = [answer]
    assert (await run(pool, company=REPOSITORY))["failed"] == 1
    between = await only_issue(pool)
    assert (between["status"], between["result"]) == ("open", '{"summary": "Mended in a1b2c3."}')
    await due(pool)
    assert (await run(pool, company=REPOSITORY))["resolved"] == 1
    assert len(comments.bodies) == 101
    assert resolving.call_count == 1


async def test_a_comment_that_was_refused_is_made_by_the_next_attempt(
    resolving: respx.Route, comments: Comments, pool: Pool
) -> None:
    comments.answers = [httpx.Response(403, json={"message": "not yet"})]
    assert (await run(pool, company=REPOSITORY))["failed"] == 1
    await due(pool)
    assert (await run(pool, company=REPOSITORY))["resolved"] == 1
    assert len(comments.bodies) == 1
    assert resolving.call_count == 1


async def test_too_many_requests_are_waited_for_uncharged(
    resolving: respx.Route, comments: Comments, pool: Pool
) -> None:
    comments.answers = [httpx.Response(429, headers={"retry-after": "30"})]
    await run(pool, company=REPOSITORY)
    row = await only_issue(pool)
    assert (row["status"], row["attempt_count"]) == ("open", 0)


async def test_without_a_token_the_result_is_kept_and_a_person_is_asked_for_the_token(
    resolving: respx.Route, comments: Comments, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEBHOOKS_GITHUB_TOKEN")
    assert (await run(pool, company=REPOSITORY))["escalated"] == 1
    row = await only_issue(pool)
    assert (row["status"], row["result"]) == ("escalated", '{"summary": "Mended in a1b2c3."}')
    assert row["last_error"] == "set WEBHOOKS_GITHUB_TOKEN: the agent's result is commented on GitHub with it"
    monkeypatch.setenv("WEBHOOKS_GITHUB_TOKEN", "hush")
    async with pool.transaction() as tx:
        assert await issues.retry(tx, row["id"], decided_by="somebody", reason="the token is set")
    assert (await run(pool, company=REPOSITORY))["resolved"] == 1
    assert len(comments.bodies) == 1
    assert resolving.call_count == 1


async def test_an_issue_that_is_closed_while_its_agent_works_is_not_commented_on(
    resolving: respx.Route, comments: Comments, pool: Pool
) -> None:
    closing: list[dict[str, Any]] = []

    async def close(request: httpx.Request) -> httpx.Response:
        closing.extend(await deliver(pool, event("closed", at=2, assignees=["coder"])))
        return httpx.Response(200, json="done")

    resolving.mock(side_effect=close)
    assert (await run(pool, company=REPOSITORY))["failed"] == 1
    assert [ended["status"] for ended in closing] == ["processed"]
    assert comments.bodies == []
    row = await only_issue(pool)
    assert (row["status"], row["result"]) == ("resolved", None)


async def test_the_stand_in_plays_both_the_agent_and_github(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEBHOOKS_GITHUB_TOKEN")
    async with standin(directory=tmp_path, port=0):
        url = (tmp_path / "url").read_text().strip()
        await enter(pool, {"coder": {"type": "http", "url": f"{url}/agents/coder?seconds=0"}}, company=REPOSITORY)
        await deliver(pool, assigned("coder"))
        assert (await run(pool, company=REPOSITORY))["resolved"] == 1
        async with httpx.AsyncClient(trust_env=False) as http:
            found = (await http.get(f"{url}/github/repos/{REPOSITORY}/issues/1/comments")).json()
            asked = (await http.get(f"{url}/agents/")).json()
    [comment] = found
    assert comment["body"].startswith("coder looked into “Spelling error in the README file” and mended it.")
    assert asked == {"calls": 1, "accepted": 1}


@pytest.mark.parametrize(
    ("result", "comment"),
    [
        ('{"summary": " mended ", "x": 1}', "mended"),
        ('{"comment": "said", "summary": "not said"}', "said"),
        ('{"text": "said"}', "said"),
        ('"said"', "said"),
        ('{"summary": 7}', '```json\n{\n  "summary": 7\n}\n```'),
        ('{"summary": ""}', '```json\n{\n  "summary": ""\n}\n```'),
        ("[1]", "```json\n[\n  1\n]\n```"),
        ("null", "```json\nnull\n```"),
        (json.dumps("x" * 100_000), "x" * LONGEST_TEXT),
    ],
    ids=["summary", "comment", "text", "string", "number", "empty", "list", "null", "long"],
)
def test_a_result_is_commented_in_its_own_words_or_as_it_is(result: str, comment: str) -> None:
    assert comment_of(result) == comment


def test_only_a_reference_to_github_has_a_number_there() -> None:
    assert number_of(reference(7)) == 7
    assert [number_of(text) for text in (None, "", "tracker-7", "github#0", "github#x", "github#7 ")] == [None] * 6
