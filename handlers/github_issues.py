"""GitHub issues become issues of ours: `issues.assigned`, `issues.labeled` and `issues.closed`.

The company is the repository, by its full name. The agent is the one that a label `agent:<name>` names, else the
assignee; a label `priority:<priority>` sets the priority. Who is no agent of ours leaves a row that nobody claims.

Events come in any order, so each is taken for what it is: the state of the issue at a time. While nobody has begun, the
newest word counts, and of two words of the same second the greater one, so that every order ends alike. Closing is
final here, whenever it is heard of; taking an assignee or a label away stops nothing.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel

from handlers.issue_comments import reference
from handlers.issues import PRIORITIES, Priority, issues
from handlers.models import GitHubRepository
from handlers.sources import github
from handlers.texts import Text
from webhooks import Event, Ignore, Transaction

AGENT_LABEL = "agent:"
PRIORITY_LABEL = "priority:"
PRIORITY_OF: dict[str, Priority] = {priority: priority for priority in PRIORITIES}


class Label(BaseModel):
    name: Text


class Account(BaseModel):
    login: Text


class GitHubIssue(BaseModel):
    number: int
    title: Text
    body: Text | None = None
    state: str = "open"
    labels: list[Label] = []
    assignee: Account | None = None
    assignees: list[Account] = []


class IssueEvent(BaseModel):
    """`assignee` and `label` are what the event is about; the issue holds all there are."""

    issue: GitHubIssue
    repository: GitHubRepository
    label: Label | None = None
    assignee: Account | None = None

    @property
    def agent(self) -> str | None:
        """Who is to work on it: a label says so more plainly than an assignee, who may be a person looking after it."""
        named = [name for label in self._labels if (name := _after(AGENT_LABEL, label.name))]
        assigned = [account.login for account in (self.assignee, self.issue.assignee, *self.issue.assignees) if account]
        return next(iter((*named, *assigned)), None)

    @property
    def priority(self) -> Priority:
        """The highest that a label names, else medium."""
        named = (_after(PRIORITY_LABEL, label.name).casefold() for label in self._labels)
        found: list[Priority] = [priority for name in named if (priority := PRIORITY_OF.get(name)) is not None]
        return min(found, key=PRIORITIES.index) if found else "medium"

    @property
    def _labels(self) -> list[Label]:
        return [*([self.label] if self.label else []), *self.issue.labels]


def _after(prefix: str, label: str) -> str:
    return label[len(prefix) :].strip() if label.casefold().startswith(prefix) else ""


@github.on("issues.assigned", model=IssueEvent)
@github.on("issues.labeled", model=IssueEvent)
async def ask_agent(event: Event[IssueEvent], tx: Transaction) -> None:
    if event.data.issue.state == "closed":
        await close_issue(event, tx)
        return
    if not await _open(event, tx, "open"):
        await tx.execute(RETELL, _columns(event))


@github.on("issues.closed", model=IssueEvent)
async def close_issue(event: Event[IssueEvent], tx: Transaction) -> None:
    """Resolve it, whoever works on it; an unheard-of one is opened as resolved, so that a late word opens nothing."""
    told = event.data
    if told.agent is not None:
        if await _open(event, tx, "resolved"):
            return
        await tx.execute(RETELL, _columns(event))
    key = {"company_id": told.repository.full_name, "external_ref": reference(told.issue.number)}
    row = await (await tx.execute(FIND, key)).fetchone()
    if row is None:
        raise Ignore("no agent was asked: neither a label agent:<name> nor an assignee")
    await issues.advance(tx, row["id"], ("open", "claimed", "escalated"), "resolved")


FIND = "SELECT id FROM issues WHERE company_id = %(company_id)s AND external_ref = %(external_ref)s"
ENTER = "INSERT INTO companies (id, name) VALUES (%(company_id)s, %(company_id)s) ON CONFLICT (id) DO NOTHING"
# `claim_seq` is there once somebody has begun, and for good.
RETELL = """
UPDATE issues SET assigned_agent_id = %(assigned_agent_id)s, title = %(title)s, body = %(body)s,
    priority = %(priority)s, told_at = %(told_at)s
WHERE company_id = %(company_id)s AND external_ref = %(external_ref)s
    AND status IN ('open', 'resolved') AND claim_seq IS NULL
    AND (told_at, assigned_agent_id, title, body, priority)
        < (%(told_at)s, %(assigned_agent_id)s, %(title)s, %(body)s, %(priority)s)
"""


async def _open(event: Event[IssueEvent], tx: Transaction, status: str) -> bool:
    """Open the row in `status`; False where it is there already.

    Raises:
        Ignore: the event names no agent.
    """
    columns = _columns(event)
    if columns["assigned_agent_id"] is None:
        raise Ignore("neither a label agent:<name> nor an assignee says who is to work on it")
    await tx.execute(ENTER, columns)
    return await issues.open(tx, to=status, **columns)


def _columns(event: Event[IssueEvent]) -> dict[str, str | datetime | None]:
    told = event.data
    return {
        "company_id": told.repository.full_name,
        "external_ref": reference(told.issue.number),
        "assigned_agent_id": told.agent,
        "title": told.issue.title,
        "body": told.issue.body or "",
        "priority": told.priority,
        "told_at": event.occurred_at or event.received_at,
    }
