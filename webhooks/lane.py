"""One phase as one worker runs it: rows are claimed into free slots, known ones first, and each runs in a task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
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
NO_SLOT = timedelta(seconds=1)
AFTER_A_FAILURE_S = 1.0


class Turn:
    """Held by the one row of this process that has one attempt left after its worker died."""

    def __init__(self) -> None:
        self.taken = False
        self.looking = asyncio.Lock()  # held while a lane asks for such a row, so that no other skips its own look


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


class Lane:
    """Claims rows of one phase and runs them, as many at once as there are slots.

    Args:
        pool: the connections.
        gate: whose phase it is.
        phase: named by its claimed status.
        concurrency: the number of slots: how many functions run at once. One that has ended leaves its slot to the
            next claim, while its own end is being written.
        run: does the work of one held claim, and returns how it ends unless it has settled it.
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
        turn: Turn,
        on_moved: Callable[[Iterable[Ready]], None],
    ) -> None:
        self.gate = gate
        self.phase = phase
        self.running: dict[asyncio.Task[None], Claim[Any]] = {}
        self.seen_at = 0.0
        self._working: set[Claim[Any]] = set()  # what runs, or waits for its slot
        self._pool = pool
        self._concurrency = concurrency
        self._run = run
        self._slots = asyncio.Semaphore(concurrency)
        self._pace = Pace()
        self._turn = turn
        self._on_moved = on_moved
        self._known: dict[object, None] = {}
        self._wake = asyncio.Event()
        self._scan_now = True
        self._scan_once_free = False
        self._reserved: tuple[Mapping[str, object], ...] = ()
        self._turns = 0  # whose turn it is among the queues
        self._round_has_more = False
        self._held = False

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
        scan_at = 0.0
        while True:
            self._wake.clear()
            self.seen_at = loop.time()
            try:
                await self._claim_known()
                # Time alone can take the room away: it is looked at once, and claimed for by what was seen.
                if (self._scan_now or loop.time() >= scan_at) and (room := self._room):
                    self._scan_now = False
                    scan_at = loop.time() + self._pool.settings.poll_s
                    if await self._claim_next(room):
                        self._scan_now = True
            except Exception as error:  # the database is away, or refuses: whatever it is, work goes on after it
                log.warning(
                    "cannot claim, trying again", table=self.gate.table, phase=self.phase, error=describe(error)
                )
                await asyncio.sleep(AFTER_A_FAILURE_S)
                self._scan_now = True
                continue
            if self._room and (self._known or self._scan_now):
                continue
            wait_s = self._pool.settings.poll_s if self._held else max(scan_at - loop.time(), 0.01)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s if self._held or self._room else None):
                    await self._wake.wait()

    @property
    def _free(self) -> int:
        """How many slots are free."""
        return max(0, min(self._concurrency - len(self._working), self._ends))

    @property
    def _room(self) -> int:
        """How many fresh rows may be claimed: for the free slots, and for those that come free at once."""
        slots = 0 if self._held else self._concurrency + self._pace.ahead(self._concurrency)
        return max(0, min(slots - len(self._working), self._ends))

    @property
    def _ends(self) -> int:
        return MOST_ENDING - (len(self.running) - len(self._working))

    async def _claim_known(self) -> None:
        while self._known and (room := self._room):
            keys = list(islice(self._known, min(room, MOST_AT_ONCE)))
            for key in keys:
                del self._known[key]
            if len(keys) > 1:
                claims = await self.gate.take_next(self._pool, self.phase, len(keys), which="fresh", keys=keys)
            else:
                claim = await self.gate.take(self._pool, self.phase, keys[0])
                claims = [] if claim is None else [claim]
            self._count(won=len(claims), lost=len(keys) - len(claims))
            for claim in claims:
                self._start(claim)

    async def _claim_next(self, room: int) -> bool:
        """Look through the queue; return whether there is more, so that it is looked through again at once."""
        limit = min(room, MOST_AT_ONCE)
        equal, others = self._next_queue()
        fresh = await self.gate.take_next(self._pool, self.phase, limit, which="fresh", equal=equal)
        for claim in fresh:
            self._start(claim)
        more = len(fresh) == limit
        while self._free:
            tried = await self.gate.take_next(self._pool, self.phase, 1, which="tried", equal=equal)
            if not tried:
                break
            self._start(tried[0])
            fresh += tried
        self._count(won=len(fresh), lost=0)
        if self._free and not self._turn.taken:
            await self._claim_last_chance(equal)
        self._scan_once_free = not more and not self._free
        self._round_has_more = more or self._round_has_more
        return self._round_has_more or others

    def _next_queue(self) -> tuple[Mapping[str, object], bool]:
        """Return the queue whose turn it is, and whether others come in this round."""
        queues: tuple[Mapping[str, object], ...] = ({}, *self._reserved)
        place = self._turns % len(queues)
        self._turns = place + 1
        if place == 0:
            self._round_has_more = False
        return queues[place], place + 1 < len(queues)

    async def _claim_last_chance(self, equal: Mapping[str, object]) -> None:
        async with self._turn.looking:
            if self._turn.taken:
                return
            claims = await self.gate.take_next(self._pool, self.phase, 1, which="last chance", equal=equal)
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
        # Of this task alone, so that nothing has to be taken back.
        structlog.contextvars.bind_contextvars(row=claim.label, phase=self.phase, attempt=claim.attempt)
        try:
            async with claim.held():
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
            self._working.discard(claim)
            self._scan_now = self._scan_now or self._scan_once_free
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
