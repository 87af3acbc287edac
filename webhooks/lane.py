"""One phase as one worker runs it: rows are claimed into free slots, known ones first, and each runs in a task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any

import structlog

from webhooks import observe
from webhooks.claim import Claim
from webhooks.db import Ready
from webhooks.errors import LostClaim, Snooze
from webhooks.gate import Gate
from webhooks.outcome import Stop
from webhooks.phase import Done
from webhooks.pool import Pool
from webhooks.statements import Barred
from webhooks.taking import Batch
from webhooks.text import describe

log = structlog.get_logger(__name__)

MOST_KNOWN = 10_000
MOST_AT_ONCE = 100
MOST_ENDING = 200
# Claims that wait for a slot are made only where it comes free within this time, by what functions took lately.
AHEAD_S = 0.05
MOST_AHEAD = 100
KNOWN_AFTER = 20
SLOT_WITHIN_S = 1.0
NO_SLOT = NO_TURN = timedelta(seconds=1)
PASSED_OVER_S = 1.0
"""For how long at most rows that are known are claimed past one that waits in the queue."""
AFTER_A_FAILURE_S = 1.0


class Turn:
    """Which rows of one gate that are on their last attempt run in this process.

    One that expired before is on its last chance: it may end its worker once more, which would cost each other one its
    last attempt. So it runs while no other row on its last attempt does; those that failed plainly run side by side.

    Args:
        freed: called when rows may be claimed that had to be left.
    """

    def __init__(self, freed: Callable[[], None]) -> None:
        self._freed = freed
        self._alone = False  # one on its last chance runs
        self._awaited = False  # one is due, and waits for those on their last attempt that run
        self._beside = 0  # how many those are

    @property
    def barred(self) -> Barred:
        """Which rows may not be claimed just now."""
        if self._alone or self._awaited:
            return "last attempt"
        return "last chance" if self._beside else "nothing"

    def begins(self, claim: Claim[Any]) -> bool:
        """Note what was claimed; return whether it may run, since another lane of the gate may have come first."""
        if _on_last_attempt(claim):
            if self._alone or (claim.suspect and self._beside):
                return False
            self._alone = claim.suspect
            self._beside += not claim.suspect
        return True

    def last_chance_waits(self) -> None:
        """Let no other row on its last attempt begin before those that run have ended."""
        self._awaited = self._beside > 0

    def ended(self, claim: Claim[Any]) -> None:
        if not _on_last_attempt(claim):
            return
        self._alone = False if claim.suspect else self._alone
        self._beside -= not claim.suspect
        if not self._alone and not self._beside:
            self._awaited = False
            self._freed()


def _on_last_attempt(claim: Claim[Any]) -> bool:
    """Whether a row that was tried has no attempt left after this one."""
    return 1 < claim.attempt == claim.max_attempts


class Pace:
    """How long the functions of a lane take, as far as is known.

    Args:
        clock: seconds that only ever grow.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._runs = 0
        self._seconds = 0.0
        self._since: dict[object, float] = {}  # what runs, the longest first

    @contextmanager
    def timing(self, run: object) -> Generator[None]:
        """Time a run."""
        self._since[run] = self._clock()
        try:
            yield
        finally:
            self.ran(self._clock() - self._since.pop(run))

    def ran(self, seconds: float) -> None:
        """Take note of a run. A slow one counts in full, so that one is enough to go slowly."""
        self._runs += 1
        self._seconds = max(seconds, 0.9 * self._seconds + 0.1 * seconds)

    def ahead(self, slots: int) -> int:
        """Return how many more rows than there are slots may be claimed, because their turn comes at once."""
        if self._runs < KNOWN_AFTER:
            return 0
        now = self._clock()
        longest = max(self._seconds, now - next(iter(self._since.values()), now), 1e-6)
        return min(int(slots * AHEAD_S / longest), MOST_AHEAD)


@dataclass(slots=True)
class _Round:
    """A look through each queue of a lane, as far as it has come."""

    began_at: float = 0.0
    from_front: bool = True
    has_more: bool = False


class Lane:
    """Claims rows of one phase and runs them, as many at once as there are slots.

    Args:
        pool: the connections.
        gate: whose phase it is.
        phase: named by its claimed status.
        concurrency: the number of slots: how many functions run at once. One that has ended leaves its slot to the
            next claim, while its own end is being written.
        run: does the work of one held claim, and returns how it ends unless it has settled it.
        turn: shared by all lanes of the gate in this process.
        on_moved: told which rows a claim's end brought into a ready status.

    Attributes:
        cannot_claim: why the last try to claim failed; None when it did not.
    """

    def __init__(
        self,
        pool: Pool,
        gate: Gate[Any],
        phase: str,
        *,
        concurrency: int,
        run: Callable[[Claim[Any]], Awaitable[Done | None]],
        turn: Turn,
        on_moved: Callable[[Iterable[Ready]], None],
    ) -> None:
        self.gate = gate
        self.phase = phase
        self.running: dict[asyncio.Task[None], Claim[Any]] = {}
        self.seen_at = 0.0
        self.cannot_claim: str | None = None
        self._working: set[Claim[Any]] = set()  # what runs, or waits for its slot
        self._suspects: set[Claim[Any]] = set()  # those of them that may end the process
        self._pool = pool
        self._concurrency = concurrency
        self._run = run
        self._slots = asyncio.Semaphore(concurrency)
        self._pace = Pace()
        self._turn = turn
        self._on_moved = on_moved
        self._known: dict[object, None] = {}
        # What became ready here waits in the order in which it is due, and in that order alone.
        self._due_order = gate.order.ascending and gate.order.columns[0] == "not_before"
        self._wake = asyncio.Event()
        self._scan_now = True
        self._scan_at = 0.0
        self._whole_at = 0.0  # when the queues were last read from their fronts
        self._asked_at = 0.0
        self._reserved: tuple[Mapping[str, object], ...] = ()
        self._turns = 0  # whose turn it is among the queues
        self._round = _Round()
        self._held = False

    def know(self, key: object) -> None:
        """Take note of a row that became ready: it is claimed by its key, without a look at the queue.

        Where rows come in another order than they become due (a priority), the queue has to be looked through.
        """
        if self._due_order and len(self._known) < MOST_KNOWN:
            self._known[key] = None
        else:
            self._scan_now = True
        self._wake.set()

    def look(self) -> None:
        """Look through the queue as soon as a slot is free: somebody else left work there."""
        self._scan_now = True
        self._wake.set()

    def take_reserved(self, reserved: Sequence[Mapping[str, object]]) -> None:
        """Look from now on also through these queues of rows that are reserved, by columns and their values, in turn.

        What waits in none of them is looked for neither.
        """
        self._reserved = tuple(reserved)
        if reserved:
            self.look()

    def hold(self, held: bool) -> None:
        """Claim nothing, or claim again. What runs goes on."""
        if held != self._held:
            self._held = held
            self.look()

    async def keep_going(self) -> None:
        """Claim and run until cancelled, whatever the handlers or the database do."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            self.seen_at = loop.time()
            # Read once a round: time alone can take it away.
            room = self._room
            try:
                more = room > 0 and await self._claim(min(room, MOST_AT_ONCE))
                if room:
                    self._tell(None)
                if more:
                    continue
            except Exception as error:  # the database is away, or refuses: whatever it is, work goes on after it
                log.warning(
                    "cannot claim, trying again", table=self.gate.table, phase=self.phase, error=describe(error)
                )
                self._tell(f"cannot be claimed: {describe(error)}")
                await asyncio.sleep(AFTER_A_FAILURE_S)
                self._scan_now = True
                continue
            rests_s = max(self._scan_at - loop.time(), 0.01) if room else None
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pool.settings.poll_s if self._held else rests_s):
                    await self._wake.wait()

    def _tell(self, reason: str | None) -> None:
        if reason != self.cannot_claim:
            self.cannot_claim = reason
            self._pool.health.report(f"{self.gate.table}.{self.phase}.claim", reason)

    @property
    def _room(self) -> int:
        """How many rows may be claimed: for the free slots, and for those that come free at once.

        What waits for a slot while a row runs that may end the process would be charged for its end.
        """
        if self._held:
            return 0
        ahead = 0 if self._suspects else self._pace.ahead(self._concurrency)
        ends = MOST_ENDING - (len(self.running) - len(self._working))
        return max(0, min(self._concurrency + ahead - len(self._working), ends))

    async def _claim(self, limit: int) -> bool:
        """Claim up to `limit` rows; return whether there was anything to ask for.

        A look through the queue comes first where it is due: after `poll_s`, and while rows are known a second after
        the queue was last read from its front. So nothing that waits there is passed over for longer.
        """
        now = asyncio.get_running_loop().time()
        if self._scan_now or now >= self._scan_at or (self._known and now >= self._whole_at + PASSED_OVER_S):
            await self._claim_next(limit, now)
        elif self._known:
            await self._claim_known(limit)
        else:
            return False
        return True

    async def _claim_known(self, limit: int) -> None:
        keys = list(islice(self._known, limit))
        for key in keys:
            del self._known[key]
        batch = await self.gate.take_next(self._pool, self.phase, len(keys), barred=self._turn.barred, keys=keys)
        # One that has to be claimed alone is left, with those behind it.
        self._scan_now = self._scan_now or batch.more
        self._begin(batch, lost=len(keys) - len(batch))

    async def _claim_next(self, limit: int, now: float) -> None:
        """Look through the queue whose turn it is, and go on until nothing is left that waited before what is known."""
        equal, others = self._next_queue(now)
        self._scan_now = False
        self._scan_at = now + self._pool.settings.poll_s
        if self._turn.barred == "last chance" and now >= self._asked_at + PASSED_OVER_S:
            self._asked_at = now
            if await self.gate.last_chance_waits(self._pool, self.phase, equal):
                self._turn.last_chance_waits()
        batch = await self.gate.take_next(self._pool, self.phase, limit, barred=self._turn.barred, equal=equal)
        known = len(self._known)
        for claim in batch:
            self._known.pop(claim.key, None)
        had_unknown = known - len(self._known) < len(batch)
        self._round.has_more |= batch.more and (had_unknown or not self._known)
        self._round.from_front &= batch.from_front
        if self._round.from_front and not others:
            self._whole_at = self._round.began_at
        self._scan_now = self._scan_now or others or self._round.has_more
        self._begin(batch, lost=0)

    def _next_queue(self, now: float) -> tuple[Mapping[str, object], bool]:
        """Return the queue whose turn it is, and whether others come in this round."""
        queues: tuple[Mapping[str, object], ...] = ({}, *self._reserved)
        place = self._turns % len(queues)
        self._turns = place + 1
        if place == 0:
            self._round = _Round(began_at=now)
        return queues[place], place + 1 < len(queues)

    def _begin(self, batch: Batch, *, lost: int) -> None:
        observe.CLAIMS.labels(self.gate.table, self.phase, "won").inc(len(batch))
        observe.CLAIMS.labels(self.gate.table, self.phase, "lost").inc(lost)
        for claim in batch:
            self._start(claim)

    def _start(self, claim: Claim[Any]) -> None:
        self._working.add(claim)
        if claim.suspect:
            self._suspects.add(claim)
        may_run = self._turn.begins(claim)
        task = asyncio.create_task(self._work(claim, may_run), name=f"{claim.label} {self.phase}")
        self.running[task] = claim

        def ended(task: asyncio.Task[None]) -> None:
            del self.running[task]
            self._left(claim)
            if may_run:
                self._turn.ended(claim)
            self._wake.set()

        task.add_done_callback(ended)

    def _left(self, claim: Claim[Any]) -> None:
        """The claim has no slot any more, and waits for none."""
        self._working.discard(claim)
        self._suspects.discard(claim)

    async def _work(self, claim: Claim[Any], may_run: bool) -> None:
        # Of this task alone, so that nothing has to be taken back.
        structlog.contextvars.bind_contextvars(row=claim.label, phase=self.phase, attempt=claim.attempt)
        try:
            async with claim.held():
                if not may_run:
                    raise Snooze(NO_TURN)
                done = await self._worked(claim)
                if not claim.settled and done is not None:
                    await claim.settle(done)
        except asyncio.CancelledError:
            log.info("interrupted")
        except LostClaim as lost:
            observe.LEASE_LOSSES.labels(self.gate.table, self.phase).inc()
            log.warning("lost", reason=str(lost))
        except Exception as error:  # it is recorded in the row and in attempts; the worker goes on
            log.warning("failed", error=describe(error), exc_info=error)
        else:
            if claim.outcome == "done":
                log.info("completed")
        observe.OUTCOMES.labels(self.gate.table, self.phase, claim.outcome or "lost").inc()
        self._on_moved(claim.moved)

    async def _worked(self, claim: Claim[Any]) -> Done | None:
        """Run the function in a slot.

        Raises:
            Snooze: none came free for a row that was claimed ahead.
        """
        try:
            try:
                async with asyncio.timeout(SLOT_WITHIN_S):
                    await self._slots.acquire()
            except TimeoutError:
                raise Snooze(NO_SLOT) from None
            try:
                with self._pace.timing(claim):
                    return await self._guarded(claim)
            finally:
                self._slots.release()
        finally:
            self._left(claim)
            self._wake.set()

    async def _guarded(self, claim: Claim[Any]) -> Done | None:
        try:
            return await self._run(claim)
        except (Exception, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            raise RuntimeError(f"the handler raised {error!r}, which would have ended the worker") from error

    def cut(self) -> None:
        """Cancel what runs, because the worker is stopping: its rows go back uncharged."""
        for claim in list(self.running.values()):
            claim.stop(Stop.DRAIN)
