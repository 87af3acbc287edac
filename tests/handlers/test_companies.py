"""Repositories that are renamed, given to others and deleted, and companies from before their numbers were known."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
import respx
from consumers import quick
from gates import until_blocked
from heartbeats import enter, open_issue, outcomes_of, run, sql
from issue_events import (
    REPOSITORY,
    REPOSITORY_ID,
    about_repository,
    all_issues,
    assigned,
    event,
    only_issue,
    renamed,
    told,
)
from patch_flow import deliver

from handlers.companies import company_of
from handlers.heartbeat import Unknown
from handlers.issues import issues
from handlers.models import GitHubRepository
from webhooks import Pool
from webhooks.delivery import Delivery

AGENT = "https://agent.example/work"
OLD, NEW = "acme/app", "acme/shop"


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    async with Pool.open(database_url, settings=quick()) as pool:
        yield pool


async def companies(pool: Pool) -> list[tuple[str, int | None, str | None]]:
    found = await sql(pool, "SELECT id, repository_id, repository FROM companies ORDER BY id")
    return [(row["id"], row["repository_id"], row["repository"]) for row in found]


async def bare_company(pool: Pool, id: str, *agents: str) -> None:
    """A company as it was entered before numbers were kept, or by hand."""
    await enter(pool, agents, company=id)


# Renamed


@pytest.mark.parametrize("now", ["Acme/App", NEW, "somebody-else/app"])
async def test_an_issue_is_the_same_whatever_its_repository_is_called(pool: Pool, now: str) -> None:
    await deliver(pool, assigned("coder", at=1, repository=OLD), event("closed", at=2, repository=now))
    row = await only_issue(pool)
    assert (row["company_id"], row["status"]) == (OLD, "resolved")
    assert await companies(pool) == [(OLD, REPOSITORY_ID, now)]


@pytest.mark.invariant(10)
async def test_every_order_around_a_rename_ends_alike(pool: Pool) -> None:
    ends = set[tuple[object, ...]]()
    for number, order in enumerate(itertools.permutations(range(4)), start=1):
        id = 1_000 + number
        old, new = f"acme/app-{number}", f"acme/shop-{number}"
        story = [
            assigned("a", at=1, repository=old, repository_id=id),
            renamed(old, new, at=2, repository_id=id),
            assigned("b", at=3, repository=new, repository_id=id),
            event("closed", at=4, repository=new, repository_id=id, closed_at=4),
        ]
        ended = await deliver(pool, *(story[place] for place in order))
        assert [delivery["status"] for delivery in ended] == ["processed"] * 4
        [row] = await sql(
            pool,
            "SELECT i.*, c.repository FROM issues AS i JOIN companies AS c ON c.id = i.company_id"
            " WHERE c.repository_id = %(id)s",
            id=id,
        )
        ends.add((*told(row), row["repository"] == new))
    assert len(ends) == 1, ends
    assert next(iter(ends))[:2] == ("resolved", "b")


async def test_a_name_that_another_repository_has_now_leads_to_no_row_of_the_first(pool: Pool) -> None:
    await deliver(
        pool,
        assigned("coder", at=1, repository=OLD, repository_id=1),
        assigned("coder", at=2, repository=OLD, repository_id=2),
        event("closed", at=3, repository=OLD, repository_id=2),
        assigned("other", at=4, repository=NEW, repository_id=1, number=2),
    )
    assert await companies(pool) == [(OLD, 1, NEW), (f"{OLD}#2", 2, OLD)]
    found = [(row["company_id"], row["external_ref"], row["status"]) for row in await all_issues(pool)]
    assert found == [(OLD, "github#1", "open"), (f"{OLD}#2", "github#1", "resolved"), (OLD, "github#2", "open")]


async def test_an_older_name_that_is_heard_later_changes_nothing(pool: Pool) -> None:
    await deliver(pool, assigned("a", at=3, repository=NEW), assigned("a", at=2, repository=OLD, number=2))
    assert await companies(pool) == [(NEW, REPOSITORY_ID, NEW)]


async def test_a_name_that_a_person_gave_a_company_stays(pool: Pool) -> None:
    await bare_company(pool, OLD, "coder")
    await sql(pool, "UPDATE companies SET name = 'Our app'")
    await deliver(pool, assigned("coder", at=1, repository=OLD), assigned("coder", at=2, repository=NEW))
    [row] = await sql(pool, "SELECT name, repository FROM companies")
    assert row == {"name": "Our app", "repository": NEW}


# Heartbeats by name


@respx.mock
@pytest.mark.parametrize("name", [OLD, NEW, "ACME/Shop"])
async def test_a_heartbeat_finds_a_company_by_its_id_and_by_what_it_is_called_now(
    pool: Pool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEBHOOKS_GITHUB_TOKEN", "hush")
    called = respx.post(AGENT).respond(json="done")
    path = f"https://api.github.com/repos/{NEW}/issues/1/comments"
    respx.get(path).respond(json=[])
    commented = respx.post(path).respond(201, json={"id": 1, "html_url": "x"})
    await enter(pool, {"coder": {"type": "http", "url": AGENT}}, company=OLD)
    await deliver(pool, assigned("coder", at=1, repository=OLD), renamed(OLD, NEW, at=2))
    assert (await run(pool, company=name))["resolved"] == 1
    asked = json.loads(called.calls.last.request.content)
    assert (asked["company_id"], asked["repository"]) == (OLD, NEW)
    assert commented.call_count == 1
    [beat] = await sql(pool, "SELECT company_id FROM heartbeat_runs")
    assert beat["company_id"] == OLD


async def test_a_name_means_the_repository_that_has_it_now(pool: Pool) -> None:
    await deliver(
        pool,
        assigned("a", at=1, repository=OLD, repository_id=1),
        assigned("a", at=2, repository=NEW, repository_id=1),
        assigned("a", at=3, repository=OLD, repository_id=2),
    )
    await run(pool, company=OLD)
    [beat] = await sql(pool, "SELECT company_id FROM heartbeat_runs")
    assert beat["company_id"] == f"{OLD}#2"


async def test_a_name_of_nobody_is_refused(pool: Pool) -> None:
    await deliver(pool, assigned("a", repository=OLD))
    with pytest.raises(Unknown, match="there is no company 'acme/other'"):
        await run(pool, company="acme/other")


@respx.mock
async def test_a_comment_follows_a_rename_that_nobody_told_of(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_GITHUB_TOKEN", "hush")
    respx.post(AGENT).respond(json="done")
    old, new = (f"https://api.github.com/{of}/issues/1/comments" for of in (f"repos/{OLD}", "repositories/1"))
    respx.get(old).mock(
        side_effect=lambda request: httpx.Response(301, headers={"location": f"{new}?{request.url.query.decode()}"})
    )
    respx.get(new).respond(json=[])
    respx.post(old).respond(307, headers={"location": new})
    commented = respx.post(new).respond(201, json={"id": 1, "html_url": "x"})
    await enter(pool, {"coder": {"type": "http", "url": AGENT}}, company=OLD)
    await deliver(pool, assigned("coder", repository=OLD))
    assert (await run(pool, company=OLD))["resolved"] == 1
    assert commented.calls.last.request.headers["authorization"] == "Bearer hush"
    assert json.loads(commented.calls.last.request.content)["body"].startswith("done")


# Companies from before


async def old_row(pool: Pool, company: str, status: str = "open", **columns: object) -> int:
    """A row as it was written while companies were known by their names alone."""
    given = {"external_ref": "github#1", "told_at": "2026-06-12 10:00:01+00", **columns}
    id = await open_issue(pool, "coder", company=company, **given)
    await sql(pool, "UPDATE issues SET status = %(status)s WHERE id = %(id)s", status=status, id=id)
    return id


@pytest.mark.parametrize("called", [OLD, "Acme/App"])
async def test_the_first_word_of_a_repository_binds_the_company_that_is_called_so(pool: Pool, called: str) -> None:
    await bare_company(pool, OLD, "coder")
    id = await old_row(pool, OLD)
    await deliver(pool, event("closed", at=2, repository=called))
    assert await companies(pool) == [(OLD, REPOSITORY_ID, called)]
    [row] = await all_issues(pool)
    assert (row["id"], row["status"]) == (id, "resolved")


async def test_what_was_heard_before_counts_on(pool: Pool) -> None:
    await bare_company(pool, OLD)
    await old_row(pool, OLD, "resolved", told_at="2026-06-12 10:00:05+00")
    await deliver(pool, assigned("other", at=4, repository=OLD), event("reopened", at=3, repository=OLD))
    row = await only_issue(pool)
    assert (row["status"], row["assigned_agent_id"]) == ("resolved", "coder")
    await deliver(pool, event("reopened", at=6, repository=OLD, assignees=["other"]))
    row = await only_issue(pool)
    assert (row["status"], row["assigned_agent_id"]) == ("open", "other")


async def test_a_renamed_repository_is_known_by_its_former_name(pool: Pool) -> None:
    await bare_company(pool, OLD, "coder")
    await old_row(pool, OLD)
    owner = {"owner": {"from": {"user": {"login": "acme"}}}}
    await deliver(pool, about_repository("transferred", owner, repository="other/app", at=2))
    assert await companies(pool) == [(OLD, REPOSITORY_ID, "other/app")]


@pytest.mark.parametrize(("status", "left"), [("resolved", "resolved"), ("open", "open"), ("claimed", "open")])
async def test_companies_of_one_repository_become_one(pool: Pool, status: str, left: str) -> None:
    """It was renamed before numbers were kept: its issues went on in a second company, which had no agents."""
    await bare_company(pool, OLD, "coder", "writer")
    await bare_company(pool, "Acme/App", "writer")
    first = await old_row(pool, OLD)
    second = await old_row(pool, "Acme/App", "resolved" if status == "resolved" else "open")
    alone = await old_row(pool, "Acme/App", external_ref="github#2")
    if status == "claimed":
        [claim] = await issues.take_next(pool, "claimed", 1, equal={"company_id": "Acme/App"})
        assert claim.key == second
    await sql(pool, "INSERT INTO heartbeat_runs (company_id) VALUES ('Acme/App')")

    await deliver(pool, assigned("coder", at=3, repository="Acme/App", number=3))
    assert await companies(pool) == [(OLD, REPOSITORY_ID, "Acme/App")]
    rows = {row["id"]: (row["company_id"], row["status"]) for row in await all_issues(pool)}
    assert (rows[first], rows[second][1], rows[alone]) == ((OLD, left), "resolved", (OLD, "open"))
    assert await outcomes_of(pool, second) == (["lost"] if status == "claimed" else [])
    agents = await sql(pool, "SELECT company_id, id FROM agents ORDER BY id")
    assert [(agent["company_id"], agent["id"]) for agent in agents] == [(OLD, "coder"), (OLD, "writer")]
    await deliver(pool, event("closed", at=4, repository=NEW, number=2))
    [row] = await sql(pool, "SELECT status FROM issues WHERE id = %(id)s", id=alone)
    assert row["status"] == "resolved"


async def test_agents_that_are_entered_under_another_spelling_are_found(pool: Pool) -> None:
    await deliver(pool, assigned("coder", repository="Acme/App"))
    await bare_company(pool, OLD, "coder")
    await deliver(pool, assigned("coder", at=2, repository="Acme/App", number=2))
    [agent] = await sql(pool, "SELECT company_id FROM agents")
    assert agent["company_id"] == "Acme/App"


# Gone


@pytest.mark.invariant(10)
async def test_issues_of_a_deleted_repository_are_resolved_in_every_order(pool: Pool) -> None:
    for number, order in enumerate(itertools.permutations(range(3)), start=1):
        id, name = 1_000 + number, f"acme/app-{number}"
        story: list[Delivery] = [
            assigned("a", at=1, repository=name, repository_id=id),
            assigned("b", at=2, repository=name, repository_id=id, number=2),
            about_repository("deleted", at=3, repository=name, repository_id=id),
        ]
        await deliver(pool, *(story[place] for place in order))
    found = await sql(pool, "SELECT status, count(*) AS count FROM issues GROUP BY status")
    assert found == [{"status": "resolved", "count": 12}]


async def test_a_deletion_waits_for_what_is_being_opened(pool: Pool) -> None:
    told = GitHubRepository(id=REPOSITORY_ID, full_name=REPOSITORY)
    async with pool.transaction() as tx:
        company = await company_of(tx, told, datetime(2026, 6, 12, tzinfo=UTC))
    async with pool.transaction() as tx:
        assert await company_of(tx, told, datetime(2026, 6, 12, tzinfo=UTC)) == company
        deleting = asyncio.create_task(deliver(pool, about_repository("deleted", at=2)))
        await until_blocked(pool)
        await issues.open(tx, company_id=company.id, title="t", assigned_agent_id="a")
    await deleting
    await deliver(pool)  # whoever waited for a lock too long
    assert (await only_issue(pool))["status"] == "resolved"


async def test_a_deletion_stops_the_agent_that_is_at_work(pool: Pool) -> None:
    await deliver(pool, assigned("a"))
    [claim] = await issues.take_next(pool, "claimed", 1)
    await deliver(pool, about_repository("deleted", at=2))
    assert await outcomes_of(pool, claim.key) == ["lost"]
    assert (await only_issue(pool))["status"] == "resolved"


# Opened again


async def test_an_issue_that_an_agent_resolved_is_worked_on_anew_when_it_is_opened_again(pool: Pool) -> None:
    await deliver(pool, assigned("a", at=1))
    async with issues.claim_next(pool, "claimed") as claim:
        assert claim is not None
        await claim.complete(result='"done"')
    await deliver(pool, assigned("b", at=5), event("closed", at=2, closed_at=2))
    row = await only_issue(pool)
    assert (row["status"], row["assigned_agent_id"], row["result"]) == ("resolved", "a", '"done"')
    again = event("reopened", at=3, assignees=["a"])
    await deliver(pool, again)
    row = await only_issue(pool)
    # The newest word counts, though it was heard while the issue was resolved.
    assert (row["status"], row["assigned_agent_id"], row["result"]) == ("open", "b", None)
    assert (row["visit"] != claim.visit, row["attempt_count"]) == (True, 0)
    # Nobody has begun in this visit, so the newest word goes on to count.
    await deliver(pool, assigned("c", at=6))
    assert (await only_issue(pool))["assigned_agent_id"] == "c"
    async with issues.claim_next(pool, "claimed") as claim:
        assert claim is not None
        await claim.complete(result='"done again"')
    repeated = Delivery(again.source, f"{again.dedup_key}#2", again.headers, again.body)
    await deliver(pool, repeated)
    assert (await only_issue(pool))["result"] == '"done again"'


async def test_the_default_repository_is_that_of_githubs_sample(pool: Pool) -> None:
    await deliver(pool, assigned("a"))
    assert await companies(pool) == [(REPOSITORY, REPOSITORY_ID, REPOSITORY)]
    [row] = await sql(pool, "SELECT count(*) AS count FROM github_issues")
    assert row["count"] == 1


async def test_a_word_about_nothing_leaves_nothing(pool: Pool) -> None:
    label: dict[str, Any] = {"label": "bug", "labels": ["bug"]}
    assert [ended["status"] for ended in await deliver(pool, event("labeled", **label))] == ["ignored"]
    [row] = await sql(pool, "SELECT (SELECT count(*) FROM github_issues) + (SELECT count(*) FROM companies) AS count")
    assert row["count"] == 0
