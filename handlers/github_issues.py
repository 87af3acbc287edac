"""GitHub issues become issues of ours.

The company is the repository, by its number (`handlers.companies`). The agent is the one that a label `agent:<name>`
names, else the assignee; a label `priority:<priority>` sets the priority. Who is no agent of ours leaves a row that
nobody claims.

Events come in any order, so each is taken for what it says was so at its own time (`handlers.github_facts`), and the
row follows what is known in all. While nobody has begun, the newest word about an issue counts. One that is closed is
resolved, whoever works on it and whenever it is heard of, until it is opened again later; one that was deleted, or
given to another repository, for good. Taking an assignee or a label away stops nothing.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, Field, StringConstraints

from handlers.companies import Company, company_of, gone
from handlers.github_facts import Facts, Word
from handlers.issue_comments import reference
from handlers.issues import EXTERNAL, ONGOING, PRIORITIES, Priority, issues
from handlers.models import GitHubRepository, Id
from handlers.sources import github
from handlers.texts import Text
from webhooks import Event, Ignore, Transaction

AGENT_LABEL = "agent:"
PRIORITY_LABEL = "priority:"
PRIORITY_OF: dict[str, Priority] = {priority: priority for priority in PRIORITIES}

Name = Annotated[Text, StringConstraints(max_length=500)]


class Label(BaseModel):
    name: Name


class Account(BaseModel):
    login: Name


class GitHubIssue(BaseModel):
    number: Id
    title: Text
    body: Text | None = None
    state: str = "open"
    closed_at: AwareDatetime | None = None
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


class Renamed(BaseModel):
    from_: Name = Field(alias="from")


class Owner(BaseModel):
    login: Name


class Owners(BaseModel):
    user: Owner | None = None
    organization: Owner | None = None


class NewOwner(BaseModel):
    from_: Owners = Field(alias="from")


class RepositoryChanges(BaseModel):
    name: Renamed | None = None


class Changes(BaseModel):
    repository: RepositoryChanges | None = None
    owner: NewOwner | None = None


class RepositoryEvent(BaseModel):
    repository: GitHubRepository
    changes: Changes = Changes()

    @property
    def before(self) -> list[str]:
        """What the repository was called before, where the event says so."""
        owner, _, name = self.repository.full_name.partition("/")
        changes = self.changes
        if changes.repository is not None and changes.repository.name is not None:
            return [f"{owner}/{changes.repository.name.from_}"]
        owners = (changes.owner.from_.user, changes.owner.from_.organization) if changes.owner is not None else ()
        return [f"{former.login}/{name}" for former in owners if former is not None]


@github.on("issues.assigned", model=IssueEvent)
@github.on("issues.labeled", model=IssueEvent)
@github.on("issues.closed", model=IssueEvent)
@github.on("issues.reopened", model=IssueEvent)
@github.on("issues.transferred", model=IssueEvent)
@github.on("issues.deleted", model=IssueEvent)
async def hear(event: Event[IssueEvent], tx: Transaction) -> None:
    """Keep what the event says, and let the row follow what is known then."""
    told, said = event.data, facts_of(event)
    if said == Facts():
        raise Ignore("neither a label agent:<name> nor an assignee says who is to work on it")
    company = await company_of(tx, told.repository, time_of(event))
    key = {"repository_id": told.repository.id, "number": told.issue.number}
    before = await _known(tx, key)
    known = before.and_(said)
    if known != before:
        await tx.execute(KEEP, {**key, **_columns(known)})
    await _follow(tx, company, told.issue.number, known, reopened=known.reopened_at != before.reopened_at)


@github.on("repository.renamed", model=RepositoryEvent)
@github.on("repository.transferred", model=RepositoryEvent)
async def rename(event: Event[RepositoryEvent], tx: Transaction) -> None:
    """Let the company be called what its repository is called now; one that has the old name becomes the same."""
    await company_of(tx, event.data.repository, time_of(event), before=event.data.before)


@github.on("repository.deleted", model=RepositoryEvent)
async def end_all(event: Event[RepositoryEvent], tx: Transaction) -> None:
    """Resolve all issues of a repository that is gone; later words about them open nothing."""
    at = time_of(event)
    company = await company_of(tx, event.data.repository, at)
    await gone(tx, company, at)
    for row in await (await tx.execute(OF_COMPANY, {"company_id": company.id, "ongoing": list(ONGOING)})).fetchall():
        await issues.advance(tx, row["id"], ONGOING, "resolved")


def time_of(event: Event[Any]) -> datetime:
    return event.occurred_at or event.received_at


def facts_of(event: Event[IssueEvent]) -> Facts:
    """What an event says of its issue."""
    told, at = event.data, time_of(event)
    action = event.name.removeprefix("issues.")
    if action in ("transferred", "deleted"):
        return Facts(gone_at=at)
    agent = told.agent
    word = None if agent is None else Word(at, agent, told.issue.title, told.issue.body or "", told.priority)
    if action == "closed" or told.issue.state == "closed":  # by the time the event was written, whatever it tells of
        return Facts(word, closed_at=told.issue.closed_at or at)
    return Facts(word, reopened_at=at if action == "reopened" else None)


# The line is locked until the end, so that words about one issue are heard one after the other.
BEGIN = """
INSERT INTO github_issues (repository_id, number) VALUES (%(repository_id)s, %(number)s)
ON CONFLICT (repository_id, number) DO NOTHING
"""
KNOWN = """
SELECT told_at, agent, title, body, priority, closed_at, reopened_at, gone_at FROM github_issues
WHERE repository_id = %(repository_id)s AND number = %(number)s FOR NO KEY UPDATE
"""
KEEP = """
UPDATE github_issues SET told_at = %(told_at)s, agent = %(agent)s, title = %(title)s, body = %(body)s,
    priority = %(priority)s, closed_at = %(closed_at)s, reopened_at = %(reopened_at)s, gone_at = %(gone_at)s
WHERE repository_id = %(repository_id)s AND number = %(number)s
"""
# Somebody has begun once there is an attempt of this visit, even one that was given back: the agent may know of it.
FIND = """
SELECT id, status, EXISTS (
    SELECT FROM attempts WHERE table_name = 'issues' AND key = issues.id::text AND visit = issues.visit) AS begun
FROM issues WHERE company_id = %(company_id)s AND external_ref = %(external_ref)s
"""
RETELL = """
UPDATE issues SET assigned_agent_id = %(assigned_agent_id)s, title = %(title)s, body = %(body)s,
    priority = %(priority)s, told_at = %(told_at)s
WHERE id = %(id)s AND status IN ('open', 'resolved')
    AND (assigned_agent_id, title, body, priority, told_at) IS DISTINCT FROM
        (%(assigned_agent_id)s, %(title)s, %(body)s, %(priority)s, %(told_at)s)
"""
OF_COMPANY = "SELECT id FROM issues WHERE company_id = %(company_id)s AND status = ANY(%(ongoing)s) ORDER BY id"


async def _known(tx: Transaction, key: dict[str, int]) -> Facts:
    await tx.execute(BEGIN, key)
    row = await (await tx.execute(KNOWN, key)).fetchone()
    if row is None:
        raise LookupError(f"issue {key['number']} of repository {key['repository_id']} was removed meanwhile")
    word = None if row["told_at"] is None else Word(*(row[name] for name in ("told_at", *WORD)))
    return Facts(word, row["closed_at"], row["reopened_at"], row["gone_at"])


WORD = ("agent", "title", "body", "priority")


def _columns(known: Facts) -> dict[str, object]:
    word = known.word
    return {
        "told_at": word and word.told_at,
        **{name: word and getattr(word, name) for name in WORD},
        "closed_at": known.closed_at,
        "reopened_at": known.reopened_at,
        "gone_at": known.gone_at,
    }


async def _follow(tx: Transaction, company: Company, number: int, known: Facts, *, reopened: bool) -> None:
    """Let the row be what follows from what is known; without anybody to work on the issue there is none."""
    word = known.word
    if word is None:
        return
    ended = known.ended or company.gone_at is not None
    key = {"company_id": company.id, "external_ref": reference(number)}
    columns: dict[str, object] = {
        "assigned_agent_id": word.agent,
        "title": word.title,
        "body": word.body,
        "priority": word.priority,
        "told_at": word.told_at,
    }
    row = await (await tx.execute(FIND, key)).fetchone()
    if row is None:
        await issues.open(tx, to="resolved" if ended else "open", unique=EXTERNAL, **key, **columns)
    elif reopened and not ended and row["status"] == "resolved":
        await issues.advance(tx, row["id"], "resolved", "open", result=None, **columns)
    else:
        if not row["begun"]:
            await tx.execute(RETELL, {**columns, "id": row["id"]})
        if ended:
            await issues.advance(tx, row["id"], ONGOING, "resolved")
