"""One heartbeat at work: its agents side by side, each one's queue in sequence, or as many at once as its settings say.

A run that is stopped or cancelled, because its process stops, gives back uncharged what it was working on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

import httpx
import psycopg
import structlog

from handlers.abreast import abreast_of
from handlers.agent_calls import agents_http
from handlers.agents import Agent
from handlers.issues import Issue, issues
from handlers.resolving import may_be_deadly, resolve
from handlers.tally import Tally, total
from handlers.texts import told
from webhooks import Claim, Pool, Snooze

log = structlog.get_logger(__name__)

SETTLE_S = 30.0
INTERRUPTED = "interrupted: its process was stopped"
ALONE_LATER = timedelta(seconds=1)

# A row keeps the number of its last claim, so what these find is what became of our claims.
ESCALATED = """
SELECT claim_seq FROM issues
WHERE id = ANY(%(ids)s) AND claim_seq = ANY(%(claim_seqs)s) AND status = 'escalated'
"""
END_RUN = """
UPDATE heartbeat_runs SET ended_at = statement_timestamp(), claimed = %(claimed)s, resolved = %(resolved)s,
    failed = %(failed)s, escalated = %(escalated)s, note = %(note)s
WHERE id = %(id)s
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to run.

    Args:
        company_id: whose issues.
        agent_id: only this agent's.
        limit: how many claims at most; None for no limit.
    """

    company_id: str
    agent_id: str | None = None
    limit: int | None = None


class Run:
    """One heartbeat, recorded and ready to be worked.

    Attributes:
        id: its number; its claims are made by `run:<id>`.
        problems: why it did less than one would expect, a sentence each.
        tallies: what became of each agent's claims.
    """

    def __init__(
        self,
        pool: Pool,
        wanted: Wanted,
        id: int,
        started_at: datetime,
        agents: Sequence[Agent],
        problems: Sequence[str],
        *,
        repository: str,
    ) -> None:
        self.id = id
        self.problems = tuple(problems)
        self.tallies = {agent.id: Tally() for agent in agents}
        self._pool = pool
        self._wanted = wanted
        self._repository = repository
        self._started_at = started_at
        self._agents = agents
        self._abreast = abreast_of(pool)
        self._claiming = asyncio.Lock()
        self._claimed = 0
        self._stopping = False
        self._queues: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()

    async def work(self) -> Tally:
        """Work every queue until it is empty or the limit is reached, and return the sum.

        Raises:
            psycopg.Error: the database went away; what had ended by then is recorded if it can be.
        """
        _working.add(self)
        try:
            async with agents_http() as http:
                await self._work(http)
        except Exception as error:
            self.problems += (told(error),)
            raise
        finally:
            await self._end()
            _working.discard(self)
            self._ended.set()
        return total(self.tallies.values())

    def stop(self) -> None:
        """Let `work` return soon: nothing more is claimed, and what is worked on is given back uncharged."""
        if not self._stopping:
            self._stopping = True
            self.problems += (INTERRUPTED,)
        for queue in self._queues:
            queue.cancel()

    async def ended(self) -> None:
        await self._ended.wait()

    async def _work(self, http: httpx.AsyncClient) -> None:
        self._queues = [
            asyncio.create_task(self._work_queue(agent, http), name=f"run {self.id} {agent.id}")
            for agent in self._agents
            for _ in range(agent.adapter.concurrency)
        ]
        if not self._queues:
            return
        try:
            await asyncio.wait(self._queues)
        except asyncio.CancelledError:
            self.stop()
            await asyncio.wait(self._queues, timeout=SETTLE_S)
            raise
        finally:
            failures = [failure for queue in self._queues if (failure := _failure(queue)) is not None]
        # One queue's failure was no reason to stop the others; the database's has reached all of them.
        if failures:
            raise failures[0]

    async def _work_queue(self, agent: Agent, http: httpx.AsyncClient) -> None:
        while not self._stopping and await self._work_next(agent, http):
            pass

    async def _work_next(self, agent: Agent, http: httpx.AsyncClient) -> bool:
        """Claim the agent's next issue and have it resolved; False when there is none, or the limit is reached."""
        claim: Claim[Issue] | None = None
        try:
            async with AsyncExitStack() as held:
                claim, alone = await self._claim_next(agent, held)
                if claim is None:
                    return False
                try:
                    if await may_be_deadly(self._pool, claim) and not await alone():
                        raise Snooze(ALONE_LATER)
                    await resolve(agent, http, claim, self._repository)
                except asyncio.CancelledError:
                    if not self._stopping:
                        raise
                    # Left without complete(), it is released as interrupted, which is not charged.
        except Exception as error:
            if claim is None:
                raise
            log.warning("an issue was not resolved", issue=claim.row.id, agent=agent.id, error=told(error))
        finally:
            if claim is not None:
                self.tallies[agent.id].add(claim)
        return True

    async def _claim_next(
        self, agent: Agent, held: AsyncExitStack
    ) -> tuple[Claim[Issue] | None, Callable[[], Awaitable[bool]]]:
        """Claim what is next, with a seat to work on it.

        One claim at a time a run: that keeps to the limit, and leaves connections to those who work.
        """
        async with self._claiming:
            alone = await held.enter_async_context(self._abreast.seat())
            if self._claimed == self._wanted.limit:
                return None, alone
            claim = await held.enter_async_context(
                issues.claim_next(
                    self._pool,
                    "claimed",
                    claimed_by=f"run:{self.id}",
                    due_by=self._started_at,
                    company_id=self._wanted.company_id,
                    assigned_agent_id=agent.id,
                )
            )
            self._claimed += claim is not None
            return claim, alone

    async def _end(self) -> None:
        note = "; ".join(self.problems) or None
        try:
            async with self._pool.transaction() as tx:
                for tally in self.tallies.values():
                    given = {"ids": list(tally.unresolved.values()), "claim_seqs": list(tally.unresolved)}
                    tally.escalated = (await tx.execute(ESCALATED, given)).rowcount
                counts = total(self.tallies.values()).counts()
                await tx.execute(END_RUN, {"id": self.id, "note": note, **counts})
        except psycopg.Error as error:
            log.error("the end of a run could not be recorded", run=self.id, error=told(error))


_working: set[Run] = set()


async def stop_runs() -> None:
    """Stop all runs of this process, and wait until they have given back what they were working on."""
    runs = list(_working)
    for run in runs:
        run.stop()
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            await asyncio.gather(*(run.ended() for run in runs))


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None
