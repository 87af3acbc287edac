"""The worker: one lane a phase, the inbox's first, and the sweep that frees what dead workers left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import structlog

from webhooks import observe
from webhooks.apply import apply
from webhooks.bell import Bell
from webhooks.claim import Claim
from webhooks.consumer import Consumer
from webhooks.db import Ready, ended
from webhooks.gate import Gate
from webhooks.inbox import inbox
from webhooks.lane import Lane, Turn
from webhooks.notify import check_settings, notifications, notify
from webhooks.phase import Done, Phase, name_of
from webhooks.pool import Pool
from webhooks.status import unknown
from webhooks.text import message_of
from webhooks.worker.fleet import Fleet

log = structlog.get_logger(__name__)

SETTLE_S = 5.0
DEAD_AFTER_S = 30.0
UNKNOWN_EVERY_S = 3600.0
REMEDY = "move them to one of its statuses, or name those that are final in Gate(..., statuses=(...))"


class Worker:
    """Claims deliveries and rows, and runs them.

    Args:
        pool: the connections.
        consumer: whose events and phases are run.
        fleet: this process among the others, where it is registered already; without it the worker does that.

    Attributes:
        bell: tells other processes of work, and hears of theirs.

    Raises:
        ConfigurationError: somebody is to be told of escalations, and there is nothing to sign that with.
    """

    def __init__(self, pool: Pool, consumer: Consumer, fleet: Fleet | None = None) -> None:
        check_settings(pool.settings)
        self._pool = pool
        self._consumer = consumer
        self.bell = Bell(pool)
        self._registers = fleet is None
        self._fleet = Fleet(pool, consumer) if fleet is None else fleet
        self._fleet.on_change = self._divide
        self._tasks: list[asyncio.Task[None]] = []
        own: tuple[Gate[Any], ...] = (inbox, notifications)
        self._swept: list[tuple[Gate[Any], Phase]] = [(gate, phase) for gate in own for phase in gate.phases.values()]
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._turns: dict[str, Turn] = {}
        self._add(inbox, "applying", pool.settings.deliveries_concurrency, self._apply)
        if pool.settings.notify_url is not None:
            self._add(notifications, "notifying", pool.settings.concurrency, self._notify)
        for gate in consumer.gates.values():
            for phase in gate.phases.values():
                self._swept.append((gate, phase))
                if phase.function is not None:
                    self._add(gate, phase.claimed, phase.concurrency, _runs(phase))

    def _add(self, gate: Gate[Any], phase: str, concurrency: int, run: Any) -> None:
        if gate.table not in self._turns:
            self._turns[gate.table] = Turn(partial(self._look_through, gate.table))
        self._lanes[gate.table, phase] = Lane(
            self._pool,
            gate,
            phase,
            concurrency=concurrency,
            run=run,
            turn=self._turns[gate.table],
            on_moved=self.know,
        )

    async def _apply(self, claim: Claim[Any]) -> None:
        if await apply(self._consumer, claim, self._pool.process, self._pool.settings.max_events):
            self.bell.ring()

    async def _notify(self, claim: Claim[Any]) -> None:
        await notify(self._pool.settings, claim)

    def _divide(self) -> None:
        """Take what others have left for this process, and leave to others what is theirs."""
        self._lanes[inbox.table, "applying"].take_reserved([{"wants": want} for want in self._fleet.wanted])
        for where, lane in self._lanes.items():
            lane.hold(where in self._fleet.outranked)

    def know(self, ready: Iterable[Ready]) -> None:
        """Take note of rows that became ready, so that they are claimed at once and by their keys."""
        for row in ready:
            lane = self._lanes.get((row.table, row.phase))
            if lane is not None:
                lane.know(row.key)

    def look(self) -> None:
        """Look through every queue: somebody else left work there."""
        for lane in self._lanes.values():
            lane.look()

    def _look_through(self, table: str) -> None:
        for lane in self._lanes.values():
            if lane.gate.table == table:
                lane.look()

    @property
    def cannot_claim(self) -> str | None:
        """Why nothing is claimed, in whatever phase; None while anything is."""
        if not self.alive:
            return "not at work"
        reasons = [lane.cannot_claim for lane in self._lanes.values()]
        return reasons[0] if None not in reasons else None

    @property
    def alive(self) -> bool:
        """Whether every lane has been at work lately."""
        now = asyncio.get_running_loop().time()
        lately = DEAD_AFTER_S + self._pool.settings.poll_s
        return (
            bool(self._tasks)
            and all(not task.done() for task in self._tasks)
            and all(now - lane.seen_at < lately or lane.running for lane in self._lanes.values())
        )

    def start(self) -> None:
        """Begin to work. The loop's default executor becomes ours: it knows for which row a thread works."""
        asyncio.get_running_loop().set_default_executor(self._pool.threads.executor)
        self.bell.start()
        self._tasks = [
            *(asyncio.create_task(lane.keep_going(), name=f"lane {lane.phase}") for lane in self._lanes.values()),
            asyncio.create_task(self._sweep(), name="sweep"),
            asyncio.create_task(self._hear(), name="hear"),
        ]
        self._tasks.append(asyncio.create_task(self._tell_of_unknown(), name="unknown statuses"))
        if self._registers:
            self._tasks.append(asyncio.create_task(self._fleet.run(), name="fleet"))

    async def stop(self, drain_s: float | None = None, *, hurry: asyncio.Event | None = None) -> None:
        """Stop claiming, let what runs end, and cancel what does not within the drain time.

        Args:
            drain_s: seconds; `WEBHOOKS_DRAIN_S` by default.
            hurry: cuts the drain time short once it is set.
        """
        within_s = self._pool.settings.drain_s if drain_s is None else drain_s
        await ended(self._tasks)
        self._tasks = []
        await self.bell.stop()
        running = {task: claim for lane in self._lanes.values() for task, claim in lane.running.items()}
        if not running:
            return
        log.info("draining", running=len(running), seconds=within_s)
        await _ended(set(running), within_s, hurry)
        for lane in self._lanes.values():
            lane.cut()
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                # Those that wait for their threads keep their rows, and may do so for long.
                while left := {task for task, claim in running.items() if not self._is_over(task, claim)}:
                    await asyncio.wait(left, timeout=SETTLE_S / 50)

    def _is_over(self, task: asyncio.Task[None], claim: Claim[Any]) -> bool:
        return task.done() or claim.label in self._pool.threads.waiting

    async def _hear(self) -> None:
        while True:
            await self.bell.heard.wait()
            self.bell.heard.clear()
            self._fleet.look()
            self.look()

    async def _tell_of_unknown(self) -> None:
        """Count now and every hour the rows that are in a status which no phase knows."""
        while True:
            for gate in self._consumer.gates.values():
                try:
                    async with self._pool.transaction() as tx:
                        found = await unknown(tx, gate)
                except Exception as error:
                    log.warning("cannot count unknown statuses", table=gate.table, error=message_of(error))
                    continue
                reason = None
                if found:
                    rows = ", ".join(f"{count} in {status}" for status, count in found.items())
                    reason = f"rows in a status that no phase knows: {rows}; nothing moves them on: {REMEDY}"
                    log.warning("rows in a status that no phase knows", table=gate.table, rows=rows, remedy=REMEDY)
                self._pool.health.report(f"{gate.table}.status", reason)
            await asyncio.sleep(UNKNOWN_EVERY_S)

    async def _sweep(self) -> None:
        """Free what dead workers left, every quarter of the shortest lease."""
        shortest = min((phase.lease or self._pool.settings.lease).total_seconds() for _, phase in self._swept)
        every_s = min(self._pool.settings.sweep_s, shortest / 4)
        while True:
            for gate, phase in self._swept:
                name = f"{gate.table}.{phase.claimed}.sweep"
                try:
                    moved = await gate.sweep(self._pool, phase.claimed)
                except Exception as error:  # whatever it is, the next phase is swept, and this one later
                    log.warning("cannot sweep, trying again", table=gate.table, error=message_of(error))
                    self._pool.health.report(name, f"cannot be swept: {message_of(error)}")
                    continue
                self._pool.health.report(name, None)
                observe.SWEPT.labels(gate.table, phase.claimed).inc(moved)
            try:
                await self._fleet.end_unhandled()
            except Exception as error:
                log.warning("cannot end what no process handles, trying again", error=message_of(error))
            await asyncio.sleep(every_s)


async def _ended(tasks: set[asyncio.Task[None]], within_s: float, hurry: asyncio.Event | None) -> None:
    """Wait until all tasks have ended, the time is over, or `hurry` is set."""
    ended = asyncio.ensure_future(asyncio.wait(tasks))
    hurried = asyncio.ensure_future((hurry or asyncio.Event()).wait())
    await asyncio.wait({ended, hurried}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    hurried.cancel()
    await asyncio.gather(ended, hurried, return_exceptions=True)


def _runs(phase: Phase) -> Any:
    """Return how a claim of this phase is run."""
    function = phase.function

    async def run(claim: Claim[Any]) -> Done | None:
        if function is None:
            raise RuntimeError(f"phase {phase.claimed} has no function")
        done = cast("object", await function(claim.row, claim))
        if isinstance(done, Done):
            return done
        if claim.settled:
            return None
        said = "nothing" if done is None else f"a {type(done).__name__}"
        raise TypeError(
            f"the phase {phase.claimed} returned {said}, so nobody knows how it ended: "
            f"`return claim.done(…)` at the end of {name_of(function)}"
        )

    return run
