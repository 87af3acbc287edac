"""Companies: whose issues agents work on. One that GitHub tells of is a repository, known by its number.

A repository keeps its number when it is renamed, or given to somebody else; then its old name may become another's. So
a company is bound to the number by the first word of a repository that is called as the company is, and only what it is
called now changes afterwards. Names differ in letter case without meaning anything: companies of one repository that
were entered under several spellings, or before a rename was heard of, become one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from handlers.issues import ONGOING, issues
from handlers.models import GitHubRepository
from webhooks import Transaction


@dataclass(frozen=True, slots=True)
class Company:
    """A company, as it is known just now.

    Args:
        id: its key, which never changes.
        repository: what its repository on GitHub is called now, as far as is known; its id for one that is none.
        gone_at: when its repository was deleted.
    """

    id: str
    repository: str
    gone_at: datetime | None


# Somebody who names a company means what is called so now, whatever was called so before.
NAMED = """
SELECT id, coalesce(repository, id) AS repository, repository_gone_at FROM companies
WHERE lower(repository) = lower(%(name)s) OR id = %(name)s OR (repository_id IS NULL AND lower(id) = lower(%(name)s))
ORDER BY lower(repository) IS NOT DISTINCT FROM lower(%(name)s) DESC, id = %(name)s DESC, repository_told_at DESC, id
LIMIT 1
"""
# The one that is bound comes first; of those that are not, one that has agents, because issues wait for agents.
FIND = """
SELECT id, repository_id, repository, repository_told_at, repository_gone_at FROM companies
WHERE repository_id = %(repository_id)s
    OR (repository_id IS NULL AND lower(id) = ANY(SELECT lower(name) FROM unnest(%(names)s::text[]) AS name))
ORDER BY repository_id, EXISTS (SELECT FROM agents WHERE company_id = companies.id) DESC, created_at, id
"""
# Whatever it conflicts with, the number or the id: which company that is, is looked up afterwards.
ENTER = """
INSERT INTO companies (id, name, repository_id, repository, repository_told_at)
VALUES (%(id)s, %(repository)s, %(repository_id)s, %(repository)s, %(at)s) ON CONFLICT DO NOTHING
"""
BIND = """
UPDATE companies SET repository_id = %(repository_id)s, repository = %(repository)s, repository_told_at = %(at)s
WHERE id = %(id)s AND repository_id IS NULL
"""
RENAME = """
UPDATE companies SET name = CASE WHEN name = repository THEN %(repository)s ELSE name END,
    repository = %(repository)s, repository_told_at = %(at)s
WHERE id = %(id)s AND (repository_told_at, repository COLLATE "C") < (%(at)s, %(repository)s)
"""
# Held until the end, so that a deletion which comes meanwhile finds what this event opens.
STAYS = "SELECT repository, repository_gone_at FROM companies WHERE id = %(id)s FOR SHARE"
GONE = "UPDATE companies SET repository_gone_at = greatest(repository_gone_at, %(at)s) WHERE id = %(id)s"
# What is known of issues from before what GitHub said of them was kept. A closing left no result.
REMEMBER = """
INSERT INTO github_issues (repository_id, number, told_at, agent, title, body, priority, closed_at)
SELECT %(repository_id)s, substr(external_ref, 8)::bigint, told_at, assigned_agent_id, title, body, priority,
    CASE WHEN status = 'resolved' AND result IS NULL THEN told_at END
FROM issues WHERE company_id = %(id)s AND external_ref ~ '^github#[1-9][0-9]{0,17}$'
    AND told_at IS NOT NULL AND assigned_agent_id IS NOT NULL
ON CONFLICT (repository_id, number) DO NOTHING
"""

TWICE = """
SELECT here.id AS here, here.status AS status_here, there.id AS there, there.status AS status_there
FROM issues AS there JOIN issues AS here ON here.company_id = %(id)s AND here.external_ref = there.external_ref
WHERE there.company_id = %(other)s
"""
JOIN = (
    """
    UPDATE issues SET company_id = %(id)s WHERE company_id = %(other)s
        AND (external_ref IS NULL OR external_ref NOT IN (
            SELECT external_ref FROM issues WHERE company_id = %(id)s AND external_ref IS NOT NULL))
    """,
    """
    UPDATE agents SET company_id = %(id)s WHERE company_id = %(other)s
        AND id NOT IN (SELECT id FROM agents WHERE company_id = %(id)s)
    """,
    "DELETE FROM agents WHERE company_id = %(other)s",
    "UPDATE heartbeat_runs SET company_id = %(id)s WHERE company_id = %(other)s",
    "DELETE FROM companies WHERE id = %(other)s",
)


async def named(tx: Transaction, name: str) -> Company | None:
    """Find a company by what its repository is called now, in any letter case, or by its id."""
    row = await (await tx.execute(NAMED, {"name": name})).fetchone()
    return None if row is None else Company(row["id"], row["repository"], row["repository_gone_at"])


async def company_of(
    tx: Transaction, repository: GitHubRepository, at: datetime, *, before: Iterable[str] = ()
) -> Company:
    """Find the company that is a repository, entering it where there is none yet.

    Args:
        tx: where.
        repository: as an event tells of it.
        at: the event's own time: of two names the newer one counts.
        before: what else it was called, where the event says so.
    """
    told = {
        "repository_id": repository.id,
        "repository": repository.full_name,
        "names": [repository.full_name, *before],
        "at": at,
    }
    company, *others = await _found_or_entered(tx, told)
    own = {**told, "id": company["id"]}
    if company["repository_id"] is None and (await tx.execute(BIND, own)).rowcount != 1:
        # Another event was quicker, of this repository or of one that has its name now.
        company, *others = await _found_or_entered(tx, told)
        own = {**told, "id": company["id"]}
    if company["repository"] not in (None, repository.full_name):
        await tx.execute(RENAME, own)
    for other in others:
        await _join(tx, {**own, "other": other["id"]})
    if others or company["repository_id"] is None:
        await tx.execute(REMEMBER, own)
    now = await (await tx.execute(STAYS, own)).fetchone()
    if now is None:
        raise LookupError(f"company {company['id']} was removed meanwhile")
    return Company(company["id"], now["repository"], now["repository_gone_at"])


async def gone(tx: Transaction, company: Company, at: datetime) -> None:
    """Note that a company's repository was deleted."""
    await tx.execute(GONE, {"id": company.id, "at": at})


async def _found_or_entered(tx: Transaction, told: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the company first, then others that are to become one with it."""
    found = await (await tx.execute(FIND, told)).fetchall()
    # The name may be the id of a company whose repository was called so before.
    for id in (told["repository"], f"{told['repository']}#{told['repository_id']}"):
        if not found:
            await tx.execute(ENTER, {**told, "id": id})
            found = await (await tx.execute(FIND, told)).fetchall()
    if not found:
        raise LookupError(f"repository {told['repository_id']} cannot be entered: companies of other ones have its ids")
    return found


async def _join(tx: Transaction, told: dict[str, Any]) -> None:
    """Make one company of two. Of an issue that both have, one row stays; it has ended if either of them had."""
    for row in await (await tx.execute(TWICE, told)).fetchall():
        ended = row["status_there"] == "resolved" and row["status_here"] != "resolved"
        await issues.advance(tx, row["here"] if ended else row["there"], ONGOING, "resolved")
    for statement in JOIN:
        await tx.execute(statement, told)
