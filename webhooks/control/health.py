"""Whether this process can do what it is there for, found out by trying: what `/readyz` says.

A receiver is there to store deliveries, and `serve` with its worker is one, too; `work` is there to claim. One that
cannot is not ready, so that a balancer sends its deliveries elsewhere. Whatever else is at fault leaves it ready: it
is degraded, and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import psycopg

from webhooks.accept import Accepter
from webhooks.control.ask import Asker
from webhooks.db import NEXT_BLOCK, Statement, Transaction, compose
from webhooks.errors import SchemaBehind, Unavailable
from webhooks.inbox import inbox
from webhooks.migrate import require_current
from webhooks.settings import Settings
from webhooks.statements import RECORD_ATTEMPT
from webhooks.text import message_of
from webhooks.worker import Worker

OK = "ok"
UNKNOWN = "unknown"
AGAIN_AFTER_S = 1.0
"""Whoever presents no token cannot have it tried more often."""

# A delivery as it is accepted, and as long as several pages, so that a full disk refuses it. Its number is one that no
# delivery has, and no number is used up; it is taken back at once.
STORE = compose(
    "INSERT INTO {deliveries} (id, source, dedup_key, origin, headers, body, status, max_attempts)\n"
    "OVERRIDING SYSTEM VALUE\n"
    "SELECT min(-1 - (random() * 1e15)::bigint), 'readyz', min(random()::text), 'received', '[]'::jsonb,\n"
    "    convert_to(string_agg(md5(random()::text), ''), 'UTF8'), 'received', 1\n"
    "FROM generate_series(1, 1000)\n"
    "ON CONFLICT (source, dedup_key, position) DO NOTHING\n"
    "RETURNING id, source, dedup_key"
)
UNDO = "ROLLBACK TO SAVEPOINT trial"


@dataclass(frozen=True, slots=True)
class Process:
    """What runs in this process, as far as it can be asked.

    Args:
        asker: the way to the database.
        settings: the environment.
        worker: None under `--no-worker`.
        accepter: None where no receiver runs.
    """

    asker: Asker
    settings: Settings
    worker: Worker | None
    accepter: Accepter | None


@dataclass(frozen=True, slots=True)
class Found:
    """What was found out about a process.

    Args:
        checks: each with `ok`, or with what is wrong.
        degraded: what else is at fault, by its name.
        ready: whether it can do what it is there for.
    """

    checks: Mapping[str, str]
    degraded: Mapping[str, str]
    ready: bool

    def as_json(self, *, trusted: bool) -> dict[str, object]:
        """Return it for whoever may know all of it, or for anybody: names, true and false."""
        told: dict[str, object] = {"ready": self.ready}
        told["checks"] = self.checks if trusted else {name: text == OK for name, text in self.checks.items()}
        if self.degraded:
            told["degraded"] = self.degraded if trusted else dict.fromkeys(self.degraded, True)
        return told


class Readiness:
    """Finds out whether a process can do what it is there for, over a connection of its own: no other question of the
    control plane is waited for.

    Args:
        process: what runs in it.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._asker = process.asker.beside()
        self._looking: asyncio.Task[Found] | None = None
        self._looked_at = 0.0

    async def look(self, *, trusted: bool) -> Found:
        """Try what this process is there for; whoever asks meanwhile gets the same answer.

        Args:
            trusted: whether it is tried however lately it was.
        """
        now = asyncio.get_running_loop().time()
        looking = self._looking
        if looking is None or (looking.done() and (trusted or now - self._looked_at >= AGAIN_AFTER_S)):
            self._looked_at = now
            looking = self._looking = asyncio.create_task(self._look(), name="webhooks-readyz")
        return await asyncio.shield(looking)

    async def _look(self) -> Found:
        worker, accepter, pool = self._process.worker, self._process.accepter, self._asker.pool
        checks = await self._tried()
        if accepter is not None:
            checks["inbox"] = accepter.cannot_store or checks["inbox"]
        if worker is not None:
            checks["worker"] = worker.cannot_claim or checks["worker"]
        for name, answer in checks.items():
            pool.health.report(name, None if answer == OK else answer)
        if pool.health.leaving:
            checks["stopping"] = "this process was asked to stop"
        # A receiver does its work while its worker does not.
        needed = checks.keys() - ({"worker"} if accepter is not None else frozenset[str]())
        degraded = {name: reason for name, reason in pool.health.degraded.items() if name not in needed}
        return Found(checks, degraded, all(checks[name] == OK for name in needed))

    async def _tried(self) -> dict[str, str]:
        checks = {"database": OK, "schema": UNKNOWN}
        trials = self._trials()
        checks |= dict.fromkeys(trials, UNKNOWN)

        async def question(tx: Transaction) -> None:
            try:
                await require_current(tx.connection, schema=self._process.settings.schema_name)
                checks["schema"] = OK
            except SchemaBehind as error:
                checks["schema"] = str(error)
            for name, statements in trials.items():
                checks[name] = await _trial(tx, statements)

        try:
            await self._asker.ask(question)
        except (Unavailable, psycopg.Error) as error:
            checks["database"] = " ".join(message_of(error).split())
        return checks

    def _trials(self) -> dict[str, Sequence[Statement]]:
        trials: dict[str, Sequence[Statement]] = {}
        if self._process.worker is not None:
            trials["worker"] = _claim()
        if self._process.accepter is not None:
            trials["inbox"] = [(STORE, None)]
        return trials


def _claim() -> list[Statement]:
    """Return what a claim of a delivery does, of one that is not there."""
    phase = inbox.phases["applying"]
    nobody: dict[str, object] = {"fence": -1, "claimed_by": "readyz", "lease": timedelta(0)}
    attempt: dict[str, object] = {
        "claim_seq": -1,
        "table": inbox.table,
        "key": "-1",
        "phase": phase.claimed,
        "visit": -1,
        "attempt": 0,
        "claimed_by": "readyz",
        "claimed_at": "now",
    }
    return [
        (NEXT_BLOCK, None),
        (inbox.statements.claim(phase), {**inbox.key.params(-1), **nobody}),
        (RECORD_ATTEMPT, attempt),
    ]


async def _trial(tx: Transaction, statements: Sequence[Statement]) -> str:
    """Run some statements and take them back; return `ok`, or why one was refused.

    Raises:
        psycopg.Error: the connection was lost.
    """
    await tx.execute("SAVEPOINT trial")
    answer = OK
    try:
        for statement in statements:
            await tx.execute(*statement)
    except psycopg.Error as error:
        answer = " ".join(message_of(error).split())
    await tx.execute(UNDO)
    return answer
