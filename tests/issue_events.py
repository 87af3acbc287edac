"""Events of GitHub's issues and repositories, as tests make them from its own samples, and the rows they lead to."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from heartbeats import sql
from patch_flow import sample

from webhooks import Pool
from webhooks.delivery import Delivery

REPOSITORY = "Codertocat/Hello-World"
REPOSITORY_ID = 186853002


def event(
    action: str,
    *,
    at: int = 1,
    assignee: str | None = None,
    assignees: Sequence[str] = (),
    label: str | None = None,
    labels: Sequence[str] = (),
    state: str | None = None,
    title: str = "Spelling error in the README file",
    number: int = 1,
    body: str | None = "It says “teh”.",
    closed_at: int | None = None,
    repository: str = REPOSITORY,
    repository_id: int = REPOSITORY_ID,
) -> Delivery:
    """`issues.<action>`, at second `at`, made from GitHub's own sample."""
    told = sample("github/issues__opened.json")
    told["action"] = action
    told["repository"] |= {"id": repository_id, "full_name": repository}
    told["issue"] |= {
        "number": number,
        "title": title,
        "body": body,
        "state": state or ("closed" if action == "closed" else "open"),
        "updated_at": second(at),
        "closed_at": None if closed_at is None else second(closed_at),
        "assignee": {"login": assignees[0]} if assignees else None,
        "assignees": [{"login": login} for login in assignees],
        "labels": [{"name": name} for name in labels],
    }
    if assignee is not None:
        told["assignee"] = {"login": assignee}
    if label is not None:
        told["label"] = {"name": label}
    return Delivery("github", f"1:{uuid.uuid4()}", (("x-github-event", "issues"),), json.dumps(told).encode())


def second(at: int) -> str:
    return f"2026-06-12T10:00:{at:02}Z"


def about_repository(
    action: str,
    changes: dict[str, Any] | None = None,
    *,
    at: int = 1,
    repository: str = REPOSITORY,
    repository_id: int = REPOSITORY_ID,
) -> Delivery:
    """`repository.<action>`."""
    told = sample("github/repository__renamed.json")
    told |= {"action": action, "changes": changes or {}}
    told["repository"] |= {"id": repository_id, "full_name": repository, "updated_at": second(at)}
    return Delivery("github", f"1:{uuid.uuid4()}", (("x-github-event", "repository"),), json.dumps(told).encode())


def renamed(before: str, repository: str, **more: Any) -> Delivery:
    """`repository.renamed`; only what is before the slash stays."""
    changes = {"repository": {"name": {"from": before.partition("/")[2]}}}
    return about_repository("renamed", changes, repository=repository, **more)


def assigned(login: str, **more: Any) -> Delivery:
    return event("assigned", assignee=login, **{"assignees": [login], **more})


def labeled(name: str, **more: Any) -> Delivery:
    return event("labeled", label=name, **{"labels": [name], **more})


async def all_issues(pool: Pool) -> list[dict[str, Any]]:
    return await sql(pool, "SELECT * FROM issues ORDER BY id")


async def only_issue(pool: Pool) -> dict[str, Any]:
    [row] = await all_issues(pool)
    return row


def told(row: dict[str, Any]) -> tuple[object, ...]:
    """What a row is, as far as GitHub has a say in it."""
    return tuple(row[name] for name in ("status", "assigned_agent_id", "title", "body", "priority", "told_at"))
