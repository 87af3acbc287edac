"""One phase as one worker runs it: rows are claimed into free slots, known ones first, and each runs in a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import structlog

from webhooks import observe
from webhooks.claim import Claim
from webhooks.db import Ready, finished
from webhooks.errors import LostClaim
from webhooks.gate import Gate
from webhooks.outcome import Stop
from webhooks.phase import Done
from webhooks.pool import Pool

log = structlog.get_logger(__name__)

MOST_KNOWN = 10_000
MOST_ENDING = 100
AFTER_A_FAILURE_S = 1.0


class Turn:
    """Held by the one row of this process that has one attempt left after its worker died."""

    def __init__(self) -> None:
        self.taken = False
        self.looking = asyncio.Lock()  # held while a lane asks for such a row, so that no other skips its own look


class Lane:
    """Claims rows of one phase and runs them, as many at once as there are slots.

    Args:
        pool: the connections.
        gate: whose phase it is.
        phase: named by its claimed status.
        concurrency: the number of slots: how many functions run at once. One that has ended leaves its slot to the
            next claim, while its own end is being written.
        run: does the work of one held claim, and returns how it ends unless it has settled it.
        in_batches: whether known rows are claimed many at once, rather than each by the conditional UPDATE alone.
        turn: shared by all lanes of the process.
        on_moved: told which rows a claim's end brought into a ready status.
    """

    def __init__(
        self,
        pool: Pool,
        gate: Gate[Any],
        phase: str,
        *,
        concurrency: int,
        run: Callable[[Claim[Any]], Awaitable[Done | None]],
        in_batches: bool,
        turn: Turn,
        on_moved: Callable[[Iterable[Ready]], None],
    ) -> None:
        self.gate = gate
        self.phase = phase
        self.running: dict[asyncio.Task[None], Claim[Any]] = {}
        self.seen_at = 0.0
        self._working: set[Claim[Any]] = set()
        self._pool = pool
        self._concurrency = concurrency
        self._run = run
        self._in_batches = in_batches
        self._turn = turn
        self._on_moved = on_moved
        self._known: dict[object, None] = {}
        self._wake = asyncio.Event()
        self._scan_now = True

    def know(self, key: object) -> None:
        """Take note of a row that became ready: it is claimed by its key, without a look at the queue."""
        if len(self._known) < MOST_KNOWN:
            self._known[key] = None
        else:
            self._scan_now = True
        self._wake.set()

    def look(self) -> None:
        """Look through the queue as soon as a slot is free: somebody else left work there."""
        self._scan_now = True
        self._wake.set()

    async def keep_going(self) -> None:
        """Claim and run until cancelled, whatever the handlers or the database do."""
        loop = asyncio.get_running_loop()
        scan_at = 0.0
        while True:
            self._wake.clear()
            self.seen_at = loop.time()
            try:
                await self._claim_known()
                if self._free and (self._scan_now or loop.time() >= scan_at):
                    self._scan_now = False
                    scan_at = loop.time() + self._pool.settings.poll_s
                    if await self._claim_next():
                        self._scan_now = True
            except Exception as error:  # the database is away, or refuses: whatever it is, work goes on after it
                log.warning(
                    "cannot claim, trying again", table=self.gate.table, phase=self.phase, error=str(error).strip()
                )
                await asyncio.sleep(AFTER_A_FAILURE_S)
                self._scan_now = True
                continue
            if self._free and (self._known or self._scan_now):
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(max(scan_at - loop.time(), 0.01) if self._free else None):
                    await self._wake.wait()

    @property
    def _free(self) -> int:
        ending = len(self.running) - len(self._working)
        return min(self._concurrency - len(self._working), MOST_ENDING - ending)

    async def _claim_known(self) -> None:
        while self._known and self._free:
            count = self._free if self._in_batches else 1
            keys = list(self._known)[: min(count, 100)]
            for key in keys:
                del self._known[key]
            if self._in_batches:
                claims = await self.gate.take_next(self._pool, self.phase, len(keys), which="fresh", keys=keys)
            else:
                claim = await self.gate.take(self._pool, self.phase, keys[0])
                claims = [] if claim is None else [claim]
            self._count(won=len(claims), lost=len(keys) - len(claims))
            for claim in claims:
                self._start(claim)

    async def _claim_next(self) -> bool:
        """Look through the queue; return whether to look again as soon as a slot is free."""
        limit = min(self._free, 100)
        fresh = await self.gate.take_next(self._pool, self.phase, limit, which="fresh")
        for claim in fresh:
            self._start(claim)
        more = len(fresh) == limit
        while self._free:
            tried = await self.gate.take_next(self._pool, self.phase, 1, which="tried")
            if not tried:
                break
            self._start(tried[0])
            fresh += tried
        self._count(won=len(fresh), lost=0)
        if self._free and not self._turn.taken:
            await self._claim_last_chance()
        return more or not self._free

    async def _claim_last_chance(self) -> None:
        async with self._turn.looking:
            if self._turn.taken:
                return
            claims = await self.gate.take_next(self._pool, self.phase, 1, which="last chance")
            self._turn.taken = bool(claims)
        if not claims:
            return
        self._count(won=1, lost=0)
        self._start(claims[0], holds_turn=True)

    def _count(self, *, won: int, lost: int) -> None:
        observe.CLAIMS.labels(self.gate.table, self.phase, "won").inc(won)
        observe.CLAIMS.labels(self.gate.table, self.phase, "lost").inc(lost)

    def _start(self, claim: Claim[Any], *, holds_turn: bool = False) -> None:
        self._working.add(claim)
        task = asyncio.create_task(self._work(claim), name=f"{claim.label} {self.phase}")
        self.running[task] = claim

        def ended(task: asyncio.Task[None]) -> None:
            del self.running[task]
            self._working.discard(claim)
            if holds_turn:
                self._turn.taken = False
                self._scan_now = True
            self._wake.set()

        task.add_done_callback(ended)

    async def _work(self, claim: Claim[Any]) -> None:
        with structlog.contextvars.bound_contextvars(row=claim.label, phase=self.phase, attempt=claim.attempt):
            try:
                async with claim.held():
                    done = await self._guarded(claim)
                    if not claim.settled:
                        await finished(claim.settle(done or claim.done()))
            except asyncio.CancelledError:
                log.info("interrupted")
            except LostClaim as lost:
                observe.LEASE_LOSSES.labels(self.gate.table, self.phase).inc()
                log.warning("lost", reason=str(lost))
            except Exception as error:  # it is recorded in the row and in attempts; the worker goes on
                log.warning("failed", error=f"{type(error).__name__}: {error}", exc_info=error)
            else:
                if claim.outcome == "done":
                    log.info("completed")
            observe.OUTCOMES.labels(self.gate.table, self.phase, claim.outcome or "lost").inc()
            self._on_moved(claim.moved)

    async def _guarded(self, claim: Claim[Any]) -> Done | None:
        try:
            return await self._run(claim)
        except (Exception, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            raise RuntimeError(f"the handler raised {error!r}, which would have ended the worker") from error
        finally:
            self._working.discard(claim)
            self._wake.set()

    def cut(self) -> None:
        """Cancel what runs, because the worker is stopping: its rows go back uncharged."""
        for claim in list(self.running.values()):
            claim.stop(Stop.DRAIN)
