"""Random interleavings of everything that moves a row, by several workers, against a real database.

A small model says what each row must be after each step. The proof that `webhooks verify` gives is the second judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import psycopg
import pytest
from gates import sql
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from webhooks import Consumer, Gate, LostClaim, Pool
from webhooks.claim import Claim
from webhooks.outcome import Release
from webhooks.settings import Settings
from webhooks.taking import Batch
from webhooks.verify import verify

T = TypeVar("T")

GATE = Gate("patch_sessions", key="sc_id")
GATE.phase("received", claimed="clarifying", done=("clarified", "asked"), max_attempts=3)
GATE.phase("clarified", claimed="drafting", done="drafted", max_attempts=2)
PHASES = tuple(GATE.phases.values())
CONSUMER = Consumer(gates=[GATE], sources=[])

KEYS = (1, 2, 3, 4)
ENDINGS = (
    Release("error", charged=True, escalate=False, delay=timedelta(0), error="no luck"),
    Release("error", charged=True, escalate=False, delay=timedelta(hours=1), error="no luck"),
    Release("snoozed", charged=False, escalate=False, delay=timedelta(0), error=None),
    Release("interrupted", charged=False, escalate=False, delay=timedelta(0), error="the worker is stopping"),
    Release("escalated", charged=True, escalate=True, delay=timedelta(0), error="look at it"),
)


@dataclass(frozen=True)
class How:
    """The details of a step.

    Args:
        pick: which of the rows or claims that fit, so that few steps do nothing.
        stray: whether it may be any row or claim at all, such as one that was lost long ago.
        number: how many, of whatever it is.
        to: where a row is moved to from outside.
        ending: how a claim is released.
    """

    pick: int
    stray: bool
    number: int
    to: str
    ending: Release


HOW = st.builds(
    How,
    pick=st.integers(0, 5),
    stray=st.sampled_from((False, False, False, True)),
    number=st.integers(1, 3),
    to=st.sampled_from(("received", "clarified", "clarified", "asked", "drafted", "escalated")),
    ending=st.sampled_from(ENDINGS),
)
# What workers do all day comes up more often than what a person does by hand.
STEPS = st.sampled_from(
    (
        *("claim", "release", "advance") * 3,
        *("claim_next", "run_out_of_lease", "sweep", "complete", "retry") * 2,
        *("renew", "become_due", "open", "change_the_limit", "claim_by_hand", "all_at_once"),
    )
)


@dataclass
class Model:
    """What a row must be. `holder` is the claim that may write; a row claimed by hand has none."""

    status: str
    limit: int
    attempts: int = 0
    came_from: str | None = None
    holder: int | None = None
    leased: bool = False
    over: bool = False
    resting: bool = False

    @property
    def claimable(self) -> bool:
        return self.attempts < self.limit and not self.resting

    def enter(self, status: str) -> None:
        """It comes into a status from outside: all that belonged to a claim is gone."""
        phase = GATE.entered(status)
        if phase is not None:
            self.attempts, self.limit = 0, phase.max_attempts
        self.status, self.came_from, self.holder = status, None, None
        self.leased = self.over = self.resting = False

    def back(self, *, escalate: bool, resting: bool) -> None:
        """It goes back to where it was claimed from, or to a person."""
        came_from = self.came_from
        assert came_from is not None
        self.status, self.came_from = ("escalated", came_from) if escalate else (came_from, None)
        self.holder, self.leased, self.over, self.resting = None, False, False, resting


class Interleavings(RuleBasedStateMachine):
    runner: ClassVar[asyncio.Runner]
    workers: ClassVar[list[Pool]]

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, Model] = {}
        self.claims: list[Claim[Any]] = []
        self.outcomes: dict[int, str | None] = {}
        self.run(self.sql("TRUNCATE patch_sessions, attempts, decisions"))
        for key, to in zip(KEYS, ("received", "clarified", "clarified", "clarified"), strict=True):
            self._open(key, to)

    # One rule, because Hypothesis would leave out some of several in every example: these belong together.
    @rule(what=STEPS, how=HOW)
    def step(self, what: str, how: How) -> None:
        getattr(self, what)(how)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def sql(self, text: str, **params: object) -> list[dict[str, Any]]:
        return await sql(self.workers[0], text, **params)

    def _row(self, pick: int, *statuses: str) -> tuple[int, Model]:
        """One of the rows in some statuses; any where none is."""
        fit = [key for key, row in self.rows.items() if row.status in statuses] or list(KEYS)
        key = fit[pick % len(fit)]
        return key, self.rows[key]

    # ---- from outside

    def open(self, how: How) -> None:
        self._open(KEYS[how.pick % len(KEYS)], how.to)

    def _open(self, key: int, to: str) -> None:
        async def open_row() -> bool:
            async with self.workers[0].transaction() as tx:
                return await GATE.open(tx, to=to, sc_id=key, title="a story")
            raise AssertionError

        assert self.run(open_row()) == (key not in self.rows)
        if key not in self.rows:
            self.rows[key] = Model(to, 0)
            self.rows[key].enter(to)

    def advance(self, how: How) -> None:
        key, row = self._row(how.pick, *(() if how.stray else ("asked", "drafted", "escalated")))
        from_ = ("drafted", "drafting", "closed") if how.number == 3 else (row.status, "closed")
        moved, found = self.run(self._advance(key, from_, how.to))
        assert (moved, found) == ((True, None) if row.status in from_ else (False, row.status))
        if moved:
            if row.holder is not None:
                self.outcomes[row.holder] = "lost"
            row.enter(how.to)

    async def _advance(self, key: int, from_: tuple[str, ...], to: str) -> tuple[bool, str | None]:
        async with self.workers[1].transaction() as tx:
            moved = await GATE.advance(tx, key, from_, to)
            return bool(moved), moved.found
        raise AssertionError

    def retry(self, how: How) -> None:
        async def retried() -> bool:
            async with self.workers[0].transaction() as tx:
                return await GATE.retry(tx, key, decided_by="Ann", reason="why not")
            raise AssertionError

        key, row = self._row(how.pick, "escalated")
        fits = row.status == "escalated" and row.came_from is not None
        assert self.run(retried()) == fits
        if fits:
            row.enter(row.came_from or "")

    def change_the_limit(self, how: How) -> None:
        key, row = self._row(how.pick, "received", "clarified", "clarifying", "drafting")
        limit = how.number - how.stray
        self.run(self.sql("UPDATE patch_sessions SET max_attempts = %(n)s WHERE sc_id = %(key)s", n=limit, key=key))
        row.limit = limit

    def claim_by_hand(self, how: How) -> None:
        key, row = self._row(how.pick, "clarified")
        text = "UPDATE patch_sessions SET status = 'drafting' WHERE sc_id = %(key)s AND status = 'clarified'"
        self.run(self.sql(text, key=key))
        if row.status == "clarified":
            row.status = "drafting"

    # ---- time

    def become_due(self, how: How) -> None:
        self.run(self.sql("UPDATE patch_sessions SET not_before = now()"))
        for row in self.rows.values():
            row.resting = False

    def run_out_of_lease(self, how: How) -> None:
        key, row = self._row(how.pick, "clarifying", "drafting")
        text = "UPDATE patch_sessions SET lease_until = now() - interval '1 s' WHERE sc_id = %(key)s"
        self.run(self.sql(f"{text} AND lease_until IS NOT NULL", key=key))
        row.over = row.leased

    # ---- workers

    def _won(self, claim: Claim[Any]) -> None:
        row = self.rows[int(str(claim.key))]
        row.came_from, row.status, row.holder, row.leased = row.status, claim.phase, claim.claim_seq, True
        row.attempts += 1
        assert claim.attempt == row.attempts
        assert claim.claim_seq not in self.outcomes
        self.outcomes[claim.claim_seq] = None
        self.claims.append(claim)

    def claim(self, how: How) -> None:
        key, row = self._row(how.pick, *(() if how.stray else ("received", "clarified")))
        phase = GATE.entered(row.status) or PHASES[how.pick % 2]

        async def contend() -> list[Claim[Any] | None]:
            return await asyncio.gather(
                *(GATE.take(self.workers[rival % 2], phase.claimed, key) for rival in range(how.number))
            )

        won = [claim for claim in self.run(contend()) if claim is not None]
        assert len(won) == (row.status == phase.ready and row.claimable)
        for claim in won:
            self._won(claim)

    def claim_next(self, how: How) -> None:
        phase, limit, rivals = PHASES[how.pick % 2], how.number, 1 + how.stray

        async def contend() -> list[Batch]:
            return await asyncio.gather(
                *(GATE.take_next(self.workers[rival % 2], phase.claimed, limit) for rival in range(rivals))
            )

        ready = {key for key, row in self.rows.items() if row.status == phase.ready and row.claimable}
        taken = self.run(contend())
        assert all(len(some) <= limit for some in taken)
        won = [claim for some in taken for claim in some]
        assert {claim.key for claim in won} <= ready
        assert len(won) == len({claim.key for claim in won})
        # One whose last worker died is taken alone, and a rival passes over rows that another one is just looking at:
        # both may come away with fewer than there are, but not with none, and alone one is told that there are more.
        assert won or not ready
        if rivals == 1:
            assert len(won) >= min(limit, len(ready)) or taken[0].more
        for claim in won:
            self._won(claim)

    def complete(self, how: How) -> None:
        claim = self._claim(how)
        if claim is None:
            return
        status = "drafted" if claim.phase == "drafting" else "asked" if how.to == "asked" else "clarified"
        row = self.rows[int(str(claim.key))]
        if row.holder != claim.claim_seq:
            with pytest.raises(LostClaim):
                self.run(claim.complete(status, note="written by a late one"))
            return
        self.run(claim.complete(status))
        self.outcomes[claim.claim_seq] = "done"
        row.enter(status)

    def release(self, how: How) -> None:
        claim, ending = self._claim(how), how.ending
        if claim is None:
            return
        row = self.rows[int(str(claim.key))]
        if row.holder != claim.claim_seq:
            with pytest.raises(LostClaim):
                self.run(claim.settle(ending))
            return
        self.run(claim.settle(ending))
        self.outcomes[claim.claim_seq] = ending.outcome
        row.attempts -= not ending.charged
        row.back(escalate=ending.escalate or row.attempts >= row.limit, resting=ending.delay > timedelta(0))

    def _claim(self, how: How) -> Claim[Any] | None:
        """A claim that may write; or, now and then, one of the newest that somebody made, whatever became of it."""
        holders = {row.holder for row in self.rows.values()}
        live = [claim for claim in self.claims if claim.claim_seq in holders]
        fit = self.claims if how.stray or not live else live
        return fit[-1 - how.pick % len(fit)] if fit else None

    def renew(self, how: How) -> None:
        """What the renewer's thread does for all claims that its process believes it has."""
        phase = PHASES[how.pick % 2]
        owned = GATE.owned(phase.claimed, self.workers[0])
        mine = [claim for claim in self.claims if claim.phase == phase.claimed]
        params = {"claim_seqs": [claim.claim_seq for claim in mine], "lease": owned.lease}
        keys = GATE.key.lists([claim.key for claim in mine])
        text = owned.renewal.renew
        renewed = {row["claim_seq"] for row in self.run(sql(self.workers[0], text, **keys, **params))}
        held = {claim.claim_seq for claim in mine}
        assert renewed == {row.holder for row in self.rows.values() if row.holder in held}
        for row in self.rows.values():
            if row.holder in renewed:
                row.over = False

    def sweep(self, how: How) -> None:
        for phase in PHASES:
            self._sweep(phase, rivals=how.number)

    def _sweep(self, phase: Any, *, rivals: int) -> None:
        async def contend() -> list[int]:
            return await asyncio.gather(
                *(GATE.sweep(self.workers[rival % 2], phase.claimed) for rival in range(rivals))
            )

        late = [row for row in self.rows.values() if row.status == phase.claimed and row.over]
        bare = [row for row in self.rows.values() if row.status == phase.claimed and not row.leased]
        for row in late:
            if row.holder is not None:
                self.outcomes[row.holder] = "expired"
            row.back(escalate=row.attempts >= row.limit, resting=False)
        spent = [row for row in self.rows.values() if row.status == phase.ready and row.attempts >= row.limit]
        for row in spent:
            row.status, row.came_from = "escalated", phase.ready
        for row in bare:
            row.came_from, row.leased = phase.ready, True
        assert sum(self.run(contend())) == len(late) + len(bare) + len(spent)

    def all_at_once(self, how: How) -> None:
        """Claims, a sweep, a person and an owner meet on one row. Who wins is open; what is left must add up."""
        owner = self._claim(how)
        key = self._row(how.pick, "received", "clarified")[0] if owner is None else int(str(owner.key))
        phase = PHASES[how.pick % 2] if owner is None else GATE.phases[owner.phase]

        async def meet() -> list[Any]:
            return await asyncio.gather(
                GATE.take(self.workers[0], phase.claimed, key),
                GATE.take_next(self.workers[1], phase.claimed, 1),
                GATE.sweep(self.workers[1], phase.claimed),
                self._advance(key, (phase.ready, phase.claimed), phase.ready),
                *([] if owner is None else [owner.complete("drafted" if owner.phase == "drafting" else "clarified")]),
                return_exceptions=True,
            )

        known, taken, *others = self.run(meet())
        won = [claim for claim in (known, *taken) if claim is not None]
        assert all(isinstance(claim, Claim) for claim in won)
        for other in others:
            assert not isinstance(other, Exception) or isinstance(other, (LostClaim, psycopg.errors.LockNotAvailable))
        self.claims += won
        self._look()

    def _look(self) -> None:
        """Take over what the tables say, after a step whose result the model cannot foretell."""
        rows = self.run(
            self.sql("SELECT *, lease_until < now() AS over, not_before > now() AS resting FROM patch_sessions")
        )
        self.outcomes = {
            row["claim_seq"]: row["outcome"] for row in self.run(self.sql("SELECT claim_seq, outcome FROM attempts"))
        }
        for row in rows:
            leased = row["lease_until"] is not None
            self.rows[row["sc_id"]] = Model(
                row["status"],
                row["max_attempts"],
                row["attempt_count"],
                row["claimed_from"],
                row["claim_seq"] if leased else None,
                leased,
                bool(row["over"]),
                row["resting"],
            )

    # ---- what must hold

    @invariant()
    def the_tables_say_what_the_model_says(self) -> None:
        rows = self.run(self.sql("SELECT * FROM patch_sessions ORDER BY sc_id"))
        assert [row["sc_id"] for row in rows] == sorted(self.rows)
        for row in rows:
            model = self.rows[row["sc_id"]]
            assert (row["status"], row["attempt_count"], row["max_attempts"], row["claimed_from"]) == (
                model.status,
                model.attempts,
                model.limit,
                model.came_from,
            )
            assert (row["lease_until"] is not None) == model.leased
            assert model.holder is None or row["claim_seq"] == model.holder
            assert row["note"] is None
        attempts = self.run(self.sql("SELECT claim_seq, outcome FROM attempts"))
        assert {attempt["claim_seq"]: attempt["outcome"] for attempt in attempts} == self.outcomes

    def teardown(self) -> None:
        async def proof() -> list[str]:
            async with self.workers[0].transaction() as tx:
                checks = await verify(tx, CONSUMER, self.workers[0].settings)
            # Leases are set back by hand here, and not every one has been swept.
            return [
                f"{check.name}: {check.offences}"
                for check in checks
                if not check.holds and "past its lease" not in check.name
            ]

        assert self.run(proof()) == []


@pytest.mark.invariant(4)
@pytest.mark.invariant(5)
@pytest.mark.invariant(6)
@pytest.mark.invariant(7)
def test_any_interleaving_of_workers_leaves_what_the_model_says(database_url: str) -> None:
    async def opened(stack: AsyncExitStack) -> list[Pool]:
        quick = Settings(backoff_base_s=0.000_001, backoff_max_s=0.000_001)
        return [await stack.enter_async_context(Pool.open(database_url, settings=quick)) for _ in range(2)]

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        Interleavings.runner, Interleavings.workers = runner, runner.run(opened(stack))
        try:
            run_state_machine_as_test(  # type: ignore[no-untyped-call]
                Interleavings,
                settings=settings(
                    max_examples=12,
                    stateful_step_count=100,
                    deadline=None,
                    database=None,
                    phases=(Phase.generate,),  # to make it shorter would take minutes: a step is a round trip or two
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            with suppress(asyncio.CancelledError):
                runner.run(stack.aclose())
