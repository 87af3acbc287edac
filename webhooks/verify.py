"""Proof, read from the tables, that nothing ran twice and nothing was left behind.

Every check is one statement, so that it sees one moment of the database, and answers with the lines that break it.
Claims are ordered by the database's time alone: neither a `claim_seq` nor an id says which came first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, LiteralString

from psycopg.sql import SQL, Composable, Literal

from webhooks import statements
from webhooks.consumer import Consumer
from webhooks.db import Transaction, compose, table
from webhooks.gate import Gate
from webhooks.rows import gates_of
from webhooks.settings import Settings

SWEEPS_OF_GRACE = 3

# Of claims and effects, what has ended since then or has not ended.
SINCE = SQL(
    "(%(since)s::timestamptz IS NULL OR coalesce(ended_at, 'infinity') >= %(since)s)\n"
    "    AND (%(ago)s::interval IS NULL OR coalesce(ended_at, 'infinity') >= statement_timestamp() - %(ago)s)"
)
# Under a claim that was given back nobody ever worked: the process that made it never learned of it.
GIVEN_BACK = SQL("coalesce(outcome = 'interrupted' AND error = {}, false)").format(Literal(statements.GIVEN_BACK))
# A claim keeps others away until it ends, unless it is recorded as taken away.
BINDS_UNTIL = SQL(
    "CASE WHEN outcome IN ('expired', 'lost') OR {} THEN NULL ELSE coalesce(ended_at, 'infinity') END"
).format(GIVEN_BACK)

COUNT = compose(
    "SELECT count(*) AS claims, count(*) FILTER (WHERE outcome = 'done') AS done,\n"
    "    count(*) FILTER (WHERE starts_with(claimed_by, 'run:')) AS by_runs,\n"
    "    (SELECT count(*) FROM {effects} WHERE {since}) AS effects\n"
    "FROM {attempts} WHERE {since}",
    since=SINCE,
)
OVERLAPS = compose(
    "WITH claims AS (\n"
    "    SELECT claim_seq, table_name, key, phase, claimed_at, max({binds_until}) OVER (\n"
    "        PARTITION BY table_name, key ORDER BY claimed_at, ended_at\n"
    "        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING\n"
    "    ) AS bound_until\n"
    "    FROM {attempts} WHERE {since}\n"
    ")\n"
    "SELECT c.table_name || ':' || c.key AS row, ARRAY[earlier.claim_seq, c.claim_seq] AS seqs,\n"
    "    c.phase, c.claimed_at,\n"
    "    earlier.phase AS earlier_phase, earlier.claimed_at AS earlier_from, earlier.ended_at AS earlier_until\n"
    "FROM claims AS c, LATERAL (\n"
    "    SELECT claim_seq, phase, claimed_at, ended_at FROM {attempts} AS a\n"
    "    WHERE a.table_name = c.table_name AND a.key = c.key AND a.claim_seq <> c.claim_seq\n"
    "        AND a.claimed_at <= c.claimed_at AND {binds_until} > c.claimed_at\n"
    "    ORDER BY a.claimed_at DESC LIMIT 1\n"
    ") AS earlier\n"
    "WHERE c.bound_until > c.claimed_at ORDER BY c.claimed_at",
    since=SINCE,
    binds_until=BINDS_UNTIL,
)
BACKWARDS = compose(
    "SELECT table_name || ':' || key AS row, ARRAY[claim_seq] AS seqs, claimed_at, ended_at FROM {attempts}\n"
    "WHERE ended_at < claimed_at AND {since} ORDER BY claimed_at",
    since=SINCE,
)
DONE_TWICE = compose(
    "SELECT table_name || ':' || key AS row, phase, visit, array_agg(claim_seq ORDER BY ended_at) AS seqs\n"
    "FROM {attempts} WHERE outcome = 'done' AND {since}\n"
    "GROUP BY table_name, key, phase, visit HAVING count(*) > 1 ORDER BY max(ended_at)",
    since=SINCE,
)
SAME_RUN = compose(
    "SELECT table_name || ':' || key AS row, claimed_by, array_agg(claim_seq ORDER BY claimed_at) AS seqs\n"
    "FROM {attempts} WHERE starts_with(claimed_by, 'run:') AND NOT {given_back} AND {since}\n"
    "GROUP BY table_name, key, claimed_by HAVING count(*) > 1 ORDER BY max(claimed_at)",
    since=SINCE,
    given_back=GIVEN_BACK,
)
CALLED_TWICE = compose(
    "SELECT idempotency_key AS row, ARRAY[claim_seq] AS seqs, calls, not_done FROM {effects}\n"
    "WHERE calls - not_done > 1 AND NOT retry_safe AND {since} ORDER BY intended_at",
    since=SINCE,
)

# Of the rows of one gate. Statuses are literals, so that the index on claimed rows is used.
COUNT_ROWS: LiteralString = (
    "SELECT count(*) AS claimed, (\n"
    "    SELECT count(*) FROM {attempts} WHERE ended_at IS NULL AND table_name = %(table)s\n"
    ") AS open_attempts FROM {gated} WHERE status IN ({claimed})"
)
NOT_SWEPT: LiteralString = (
    "SELECT %(table)s || ':' || {key} AS row, ARRAY[claim_seq] AS seqs, status, lease_until FROM {gated}\n"
    "WHERE status IN ({claimed}) AND lease_until < now() - %(grace)s ORDER BY lease_until"
)
WITHOUT_ROW: LiteralString = (
    "SELECT a.table_name || ':' || a.key AS row, ARRAY[a.claim_seq] AS seqs, a.phase, a.claimed_at\n"
    "FROM {attempts} AS a WHERE a.ended_at IS NULL AND a.table_name = %(table)s AND NOT EXISTS (\n"
    "    SELECT FROM {gated} AS g WHERE g.status IN ({claimed}) AND g.status = a.phase AND g.claim_seq = a.claim_seq\n"
    ") ORDER BY a.claimed_at"
)
# One claimed by hand has no lease yet, or one of the sweep's and no number.
WITHOUT_ATTEMPT: LiteralString = (
    "SELECT %(table)s || ':' || {key} AS row, ARRAY[g.claim_seq] AS seqs, g.status FROM {gated} AS g\n"
    "WHERE g.status IN ({claimed}) AND g.lease_until IS NOT NULL AND g.claim_seq IS NOT NULL AND NOT EXISTS (\n"
    "    SELECT FROM {attempts} AS a WHERE a.claim_seq = g.claim_seq AND a.ended_at IS NULL\n"
    ") ORDER BY g.claimed_at"
)


TRIES: LiteralString = (
    "SELECT attempt_count AS attempts, count(*) AS rows FROM {gated} GROUP BY attempt_count ORDER BY attempt_count"
)


@dataclass(frozen=True, slots=True)
class Offence:
    """What breaks a check.

    Args:
        row: `table:key`, or an effect's idempotency key.
        claim_seqs: the claims it is about, as they are numbered in `attempts`.
        told: what is wrong, as a sentence.
    """

    row: str
    claim_seqs: tuple[int, ...]
    told: str


@dataclass(frozen=True, slots=True)
class Check:
    """One check with its answer.

    Args:
        name: what must hold.
        looked_at: how many lines were looked at.
        of: what they are.
        offences: what breaks it.
    """

    name: str
    looked_at: int
    of: str
    offences: tuple[Offence, ...]

    @property
    def holds(self) -> bool:
        return not self.offences


async def verify(
    tx: Transaction, consumer: Consumer, settings: Settings, since: datetime | timedelta | None = None
) -> list[Check]:
    """Run every check over `attempts`, `effects` and the gated tables of a consumer.

    Args:
        tx: where to look; nothing is written.
        consumer: whose gates.
        settings: how often is swept.
        since: leave out claims and effects that ended before that time, or longer ago than that.
    """
    params = {
        "since": since if isinstance(since, datetime) else None,
        "ago": since if isinstance(since, timedelta) else None,
    }
    [count] = await (await tx.execute(COUNT, params)).fetchall()

    async def check(name: str, counted: str, of: str, query: bytes, tell: Callable[[Row], str]) -> Check:
        return Check(name, count[counted], of, tuple(await _offences(tx, query, params, tell)))

    return [
        await check("no two claims of one row overlap", "claims", "claims", OVERLAPS, _overlap),
        await check("no claim ended before it began", "claims", "claims", BACKWARDS, _backwards),
        await check("no visit was done twice", "done", "claims that are done", DONE_TWICE, _twice),
        await check("no run claimed a row twice", "by_runs", "claims by runs", SAME_RUN, _same_run),
        await check("no effect was called twice", "effects", "effects", CALLED_TWICE, _called_twice),
        *await _rows(tx, gates_of(consumer).values(), settings),
    ]


async def tries(tx: Transaction, consumer: Consumer) -> dict[str, dict[int, int]]:
    """Count the rows of each table by their attempts: more than one means tried again, and is no offence."""
    found: dict[str, dict[int, int]] = {}
    for gate in gates_of(consumer).values():
        rows = await (await tx.execute(compose(TRIES, gated=table(gate.table)))).fetchall()
        found[gate.table] = {row["attempts"]: row["rows"] for row in rows}
    return found


def as_json(checks: Sequence[Check], tries: Mapping[str, Mapping[int, int]]) -> dict[str, Any]:
    """Return the checks, and the rows by their attempts, as plain values."""
    plain = [
        {
            "check": check.name,
            "holds": check.holds,
            "looked_at": check.looked_at,
            "of": check.of,
            "offences": [
                {"row": offence.row, "claim_seqs": list(offence.claim_seqs), "told": offence.told}
                for offence in check.offences
            ],
        }
        for check in checks
    ]
    attempts = {name: {str(number): rows for number, rows in of.items()} for name, of in tries.items()}
    return {"holds": all(check.holds for check in checks), "checks": plain, "rows_by_attempts": attempts}


Row = Mapping[str, Any]


async def _rows(tx: Transaction, gates: Iterable[Gate[Any]], settings: Settings) -> list[Check]:
    """Check the rows: their leases are swept, and every claim stands in its row and in `attempts`."""
    claimed = open_attempts = 0
    late: list[Offence] = []
    without_row: list[Offence] = []
    without_attempt: list[Offence] = []
    for gate in gates:
        if not gate.phases:
            continue
        params = {"table": gate.table, "grace": timedelta(seconds=SWEEPS_OF_GRACE * settings.sweep_s)}
        [count] = await (await tx.execute(_of(gate, COUNT_ROWS), params)).fetchall()
        claimed += count["claimed"]
        open_attempts += count["open_attempts"]
        late += await _offences(tx, _of(gate, NOT_SWEPT), params, _late)
        without_row += await _offences(tx, _of(gate, WITHOUT_ROW), params, _without_row)
        without_attempt += await _offences(tx, _of(gate, WITHOUT_ATTEMPT), params, _without_attempt)
    return [
        Check("no row is past its lease without having been swept", claimed, "claimed rows", tuple(late)),
        Check("every open attempt has its claimed row", open_attempts, "open attempts", tuple(without_row)),
        Check("every claimed row has its open attempt", claimed, "claimed rows", tuple(without_attempt)),
    ]


def _of(gate: Gate[Any], text: LiteralString) -> bytes:
    claimed: Composable = SQL(", ").join(Literal(phase) for phase in gate.phases)
    return compose(text, gated=table(gate.table), claimed=claimed, key=gate.statements.key_text)


async def _offences(
    tx: Transaction, query: bytes, params: Mapping[str, object], tell: Callable[[Row], str]
) -> list[Offence]:
    rows = await (await tx.execute(query, params)).fetchall()
    return [Offence(row["row"], tuple(seq for seq in row["seqs"] if seq is not None), tell(row)) for row in rows]


def _overlap(row: Row) -> str:
    ended = "has not ended" if row["earlier_until"] is None else f"ended at {row['earlier_until']}"
    return (
        f"claimed for {row['phase']} at {row['claimed_at']}, while the claim for {row['earlier_phase']} of "
        f"{row['earlier_from']} {ended}"
    )


def _backwards(row: Row) -> str:
    return (
        f"claimed at {row['claimed_at']} and ended at {row['ended_at']}: the database's clock was set back, "
        "so what overlapped then cannot be told"
    )


def _twice(row: Row) -> str:
    return f"{row['phase']} was done {len(row['seqs'])} times in visit {row['visit']}"


def _same_run(row: Row) -> str:
    return f"claimed {len(row['seqs'])} times by {row['claimed_by']}"


def _called_twice(row: Row) -> str:
    unknown = row["calls"] - row["not_done"]
    return f"called {row['calls']} times, of which {unknown} may have happened, and it is not safe to repeat"


def _late(row: Row) -> str:
    return f"in {row['status']}, its lease was over at {row['lease_until']}: is a worker running? webhooks work"


def _without_row(row: Row) -> str:
    return f"its attempt at {row['phase']} of {row['claimed_at']} is open, but the row is not claimed by it"


def _without_attempt(row: Row) -> str:
    return f"it is claimed in {row['status']}, but no open attempt is recorded for that claim"
