"""A heartbeat: one run in which each agent of a company works its queue until it is empty.

Runs may overlap, in one process or in many: a claim is one statement, so no two of them ever work on one issue. An
issue that a run gives back is due later than the run began, and a run claims only what was due when it began, so it
never claims one twice.
"""

from __future__ import annotations

from dataclasses import replace

import structlog

from handlers.agents import read_agents
from handlers.companies import named
from handlers.heartbeat_run import Run, Wanted
from handlers.issues import issues
from webhooks import Pool

log = structlog.get_logger(__name__)

AGENTS = """
SELECT id, adapter, paused FROM agents
WHERE company_id = %(company_id)s AND id = coalesce(%(agent_id)s, id) ORDER BY id
"""
BEGIN_RUN = """
INSERT INTO heartbeat_runs (company_id, agent_id, claim_limit) VALUES (%(company_id)s, %(agent_id)s, %(limit)s)
RETURNING id, started_at
"""


class Unknown(LookupError):
    """There is no such company, or it has no such agent."""


class Unusable(ValueError):
    """The one agent that was asked for cannot be called: its settings are wrong."""


async def begin(pool: Pool, wanted: Wanted) -> Run:
    """Record a run that is about to be worked.

    Args:
        pool: the connections.
        wanted: of which company (by its id, or by what its repository is called now), and how much.

    Raises:
        Unknown: there is no such company, or it has no such agent.
        Unusable: the one agent asked for has settings that cannot be read.
    """
    # Where no worker runs, nobody else frees what a dead run left.
    await issues.sweep(pool, "claimed")
    async with pool.transaction() as tx:
        company = await named(tx, wanted.company_id)
        if company is None:
            raise Unknown(f"there is no company {wanted.company_id!r}")
        wanted = replace(wanted, company_id=company.id)
        params = {"company_id": wanted.company_id, "agent_id": wanted.agent_id, "limit": wanted.limit}
        rows = await (await tx.execute(AGENTS, params)).fetchall()
        if wanted.agent_id is not None and not rows:
            raise Unknown(f"company {wanted.company_id!r} has no agent {wanted.agent_id!r}")
        agents, problems = read_agents(row for row in rows if not row["paused"])
        if wanted.agent_id is not None:
            if problems:
                raise Unusable(problems[0])
            problems = [f"agent {row['id']} is paused" for row in rows if row["paused"]]
        run = await (await tx.execute(BEGIN_RUN, params)).fetchone()
        if run is None:
            raise RuntimeError("INSERT returned no row")
    for problem in problems:
        log.warning("an agent is passed over", company=wanted.company_id, reason=problem)
    return Run(pool, wanted, run["id"], run["started_at"], agents, problems, repository=company.repository)
