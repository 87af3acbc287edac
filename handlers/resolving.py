"""One claimed issue, from the agent's call to the row's result."""

from __future__ import annotations

from datetime import timedelta

import httpx

from handlers.agent_calls import SLACK, About, Call, Refused
from handlers.agents import Agent
from handlers.issue_comments import Comments, comment_of, number_of
from handlers.issues import Issue
from webhooks import Claim, Escalate, Pool

# An attempt that was put back uncharged, such as one that could not run alone, says nothing of the one before it.
ENDED_BEFORE = """
SELECT outcome FROM attempts WHERE table_name = 'issues' AND key = %(key)s AND claim_seq <> %(claim_seq)s
    AND outcome NOT IN ('snoozed', 'interrupted')
ORDER BY claimed_at DESC LIMIT 1
"""


async def resolve(agent: Agent, http: httpx.AsyncClient, claim: Claim[Issue], repository: str) -> None:
    """Have the agent resolve the issue, tell it on GitHub if it came from there, and complete the claim.

    The two calls are effects of one claim: where the comment fails, the next attempt makes it with the result that is
    recorded, and does not ask the agent again.

    Args:
        agent: who.
        http: its client.
        claim: of the issue.
        repository: what the company's repository is called now.

    Raises:
        Escalate: the agent refused, or the comment needs a token that is not set.
        Exception: whatever else went wrong; another attempt may do better.
    """
    issue = claim.row
    about = About(id=issue.id, title=issue.title, body=issue.body)
    number = number_of(issue.external_ref)
    limit = timedelta(seconds=agent.adapter.timeout_s) + SLACK
    try:
        call = Call(agent, http, claim, repository=None if number is None else repository)
        result = await claim.once("agent", call.ask, about, retry_safe=True, timeout=limit)
    except Refused as error:
        raise Escalate(f"agent {agent.id}: {error}") from error
    claim.noted["result"] = result  # for whoever looks at the row, should it end otherwise than resolved
    if number is not None:
        mark, text = claim.idempotency_key("comment"), comment_of(result)
        await claim.once("comment", Comments(repository).once, issue.company_id, number, text, mark, retry_safe=True)
    await claim.complete(result=result)


async def may_be_deadly(pool: Pool, claim: Claim[Issue]) -> bool:
    """Whether this is the last attempt at an issue whose last one ended with the process that made it."""
    if claim.attempt == 1 or claim.attempt < claim.max_attempts:
        return False
    async with pool.transaction() as tx:
        params = {"key": str(claim.row.id), "claim_seq": claim.claim_seq}
        before = await (await tx.execute(ENDED_BEFORE, params)).fetchone()
    return before is not None and before["outcome"] == "expired"
