"""Effects and attempts, which are what is recorded about rows. They are walked in the order of their claims.

Numbers of claims grow with time, but not strictly: a process draws a hundred at once. A claim's time tells its age; the
order only says when to stop looking, at a page on which nothing is old, and what hides behind that is found later.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from webhooks.db import Transaction, compose
from webhooks.gate import Gate
from webhooks.retention.ages import Before, Kind, old
from webhooks.retention.rows import Row, attempt_is_over, effect_is_over, rows_of
from webhooks.retention.step import LOOK, Line, Step, Walk, batch, counted, removed

EFFECTS = compose(
    "SELECT e.*, a.table_name, a.key, a.visit FROM (\n"
    "    SELECT idempotency_key, claim_seq, coalesce(ended_at, call_until) AS at, intended_at AS began_at,\n"
    "        octet_length(idempotency_key) + coalesce(pg_column_size(result), 0) + coalesce(pg_column_size(error), 0)\n"
    "            + 150 AS bytes\n"
    "    FROM {effects} WHERE (claim_seq, idempotency_key) > (%(claim_seq)s::bigint, %(key)s::text)\n"
    "    ORDER BY claim_seq, idempotency_key LIMIT %(look)s\n"
    ") AS e LEFT JOIN {attempts} AS a ON a.claim_seq = e.claim_seq\n"
    "ORDER BY e.claim_seq, e.idempotency_key"
)
# Only as they were read: an effect that was taken over meanwhile is another claim's.
REMOVE_EFFECTS = compose(
    "WITH going AS MATERIALIZED (\n"
    "    SELECT e.idempotency_key FROM {effects} AS e\n"
    "    JOIN unnest(%(keys)s::text[], %(claim_seqs)s::bigint[]) AS read (idempotency_key, claim_seq)\n"
    "        ON e.idempotency_key = read.idempotency_key AND e.claim_seq = read.claim_seq\n"
    "    ORDER BY e.idempotency_key FOR UPDATE OF e SKIP LOCKED\n"
    ")\n"
    "DELETE FROM {effects} AS e USING going WHERE e.idempotency_key = going.idempotency_key\n"
    "RETURNING e.idempotency_key"
)
# An effect tells its row only through its attempt, which therefore stays as long as it does.
ATTEMPTS = compose(
    "SELECT claim_seq, table_name, key, claimed_at AS began_at, ended_at AS at,\n"
    "    octet_length(table_name) + octet_length(key) + coalesce(pg_column_size(error), 0) + 150 AS bytes,\n"
    "    EXISTS (\n"
    "        SELECT FROM {effects} AS e WHERE e.claim_seq = a.claim_seq\n"
    "            AND (coalesce(e.ended_at, e.call_until) < %(effects)s::timestamptz) IS NOT TRUE\n"
    "    ) AS has_effects\n"
    "FROM {attempts} AS a WHERE claim_seq > %(claim_seq)s ORDER BY claim_seq LIMIT %(look)s"
)
REMOVE_ATTEMPTS = compose(
    "WITH going AS MATERIALIZED (\n"
    "    SELECT claim_seq FROM {attempts} WHERE claim_seq = ANY(%(claim_seqs)s) AND ended_at IS NOT NULL\n"
    "    ORDER BY claim_seq FOR UPDATE SKIP LOCKED\n"
    ")\n"
    "DELETE FROM {attempts} AS a USING going WHERE a.claim_seq = going.claim_seq\n"
    "    AND NOT EXISTS (SELECT FROM {effects} AS e WHERE e.claim_seq = a.claim_seq)\n"
    "RETURNING a.claim_seq"
)

NO_CLAIM = "effects whose attempt is not recorded"


def effects(gates: Mapping[str, Gate[Any]], before: Before, *, dry: bool) -> Walk:
    """Remove effects that no attempt can ask for any more."""

    async def step(tx: Transaction, cursor: Any) -> Step:
        if before.effects is None:
            return Step(cursor, more=False)
        claim_seq, key = cursor or (-1, "")
        params = {"claim_seq": claim_seq, "key": key, "look": LOOK}
        page = await (await tx.execute(EFFECTS, params)).fetchall()
        rows = await _rows(tx, gates, [line for line in page if old(line["at"], before.effects)], ages=dry)
        sizes: list[int | None] = []
        for line in page:
            goes = old(line["at"], before.effects) and line["table_name"] in gates
            if goes:
                row = rows.get((line["table_name"], line["key"]))
                goes = (dry and row is not None and row.goes(before)) or effect_is_over(row, line["visit"])
            sizes.append(line["bytes"] if goes else None)
        taken = len(page) if dry else batch(sizes)
        going = [line for line, size in zip(page[:taken], sizes, strict=False) if size is not None]
        refused: Counter[str] = Counter()
        if not dry:

            async def remove(some: Sequence[tuple[str, int]]) -> list[str]:
                params = {"keys": [key for key, _ in some], "claim_seqs": [claim_seq for _, claim_seq in some]}
                gone = await (await tx.execute(REMOVE_EFFECTS, params)).fetchall()
                return [line["idempotency_key"] for line in gone]

            wanted = [(line["idempotency_key"], line["claim_seq"]) for line in going]
            keys = set(await removed(tx, wanted, remove, refused))
            going = [line for line in going if line["idempotency_key"] in keys]
        last = (page[taken - 1]["claim_seq"], page[taken - 1]["idempotency_key"]) if taken else cursor
        left = _left("effects", [line for line in page[:taken] if old(line["at"], before.effects)], gates, refused)
        lines: dict[Kind, Line] = {"effects": counted([(line["at"], line["bytes"]) for line in going])}
        return Step(last, _more(page, taken, before.effects), lines, left)

    return step


def attempts(gates: Mapping[str, Gate[Any]], before: Before, *, dry: bool) -> Walk:
    """Remove attempts that are mere history."""

    async def step(tx: Transaction, cursor: Any) -> Step:
        if before.attempts is None:
            return Step(cursor, more=False)
        params = {"claim_seq": -1 if cursor is None else cursor, "effects": before.effects, "look": LOOK}
        page = await (await tx.execute(ATTEMPTS, params)).fetchall()
        ended = [line for line in page if line["at"] is not None and old(line["at"], before.attempts)]
        rows = await _rows(tx, gates, ended, ages=dry)
        sizes: list[int | None] = []
        for line in page:
            goes = line["at"] is not None and old(line["at"], before.attempts)
            goes = goes and line["table_name"] in gates and not line["has_effects"]
            if goes:
                row = rows.get((line["table_name"], line["key"]))
                goes = (dry and row is not None and row.goes(before)) or attempt_is_over(row, line["claim_seq"])
            sizes.append(line["bytes"] if goes else None)
        taken = len(page) if dry else batch(sizes)
        going = [line for line, size in zip(page[:taken], sizes, strict=False) if size is not None]
        refused: Counter[str] = Counter()
        if not dry:

            async def remove(some: Sequence[int]) -> list[int]:
                gone = await (await tx.execute(REMOVE_ATTEMPTS, {"claim_seqs": list(some)})).fetchall()
                return [line["claim_seq"] for line in gone]

            claim_seqs = set(await removed(tx, [line["claim_seq"] for line in going], remove, refused))
            going = [line for line in going if line["claim_seq"] in claim_seqs]
        last = page[taken - 1]["claim_seq"] if taken else cursor
        seen = {line["claim_seq"] for line in page[:taken]}
        left = _left("attempts", [line for line in ended if line["claim_seq"] in seen], gates, refused)
        lines: dict[Kind, Line] = {"attempts": counted([(line["at"], line["bytes"]) for line in going])}
        return Step(last, _more(page, taken, before.attempts), lines, left)

    return step


def _left(
    what: str, lines: Sequence[Mapping[str, Any]], gates: Collection[str], refused: Mapping[str, int]
) -> Counter[str]:
    """Count the old lines that refuse to go, and those of whose rows this consumer cannot tell how they stand."""
    names: Counter[str | None] = Counter(line["table_name"] for line in lines if line["table_name"] not in gates)
    return Counter(
        {
            NO_CLAIM if name is None else f"{what} of {name}, over which this consumer has no gate": count
            for name, count in names.items()
        }
        | {f"{what} {reason}": count for reason, count in refused.items()}
    )


async def _rows(
    tx: Transaction, gates: Mapping[str, Gate[Any]], lines: Sequence[Mapping[str, Any]], *, ages: bool
) -> dict[tuple[str, str], Row]:
    keys: defaultdict[str, set[str]] = defaultdict(set)
    for line in lines:
        if line["table_name"] in gates:
            keys[line["table_name"]].add(line["key"])
    return {
        (name, key): row
        for name, wanted in keys.items()
        for key, row in (await rows_of(tx, gates[name], wanted, ages=ages)).items()
    }


def _more(page: Sequence[Mapping[str, Any]], taken: int, before: Any) -> bool:
    return taken < len(page) or (len(page) == LOOK and any(old(line["began_at"], before) for line in page))
