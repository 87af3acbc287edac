"""How a row is claimed, and how it stays claimed."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal as OneOf
from typing import LiteralString, TypeAlias

from psycopg.sql import SQL, Composable, Composed, Identifier, Literal, Placeholder

from webhooks.db import compose, named
from webhooks.phase import Phase
from webhooks.statements.gated import CLEARED, Gated

Barred: TypeAlias = OneOf["nothing", "last chance", "last attempt"]
"""Which rows a claim leaves: none, those on their last chance, or all that were tried and have one attempt left. On its
last chance is a row with one attempt left whose last charged attempt expired: it may end its worker once more."""

# A subquery for one value is looked up row by row; EXISTS may be turned into a scan of all attempts ever made. What was
# put back uncharged says nothing of the attempt before it.
EXPIRED: LiteralString = (
    "coalesce((SELECT a.outcome FROM {attempts} AS a\n"
    "            WHERE a.table_name = %(table)s AND a.key = {key_of_t_text}\n"
    "            AND a.outcome NOT IN ('snoozed', 'interrupted') ORDER BY a.claimed_at DESC LIMIT 1), '') = 'expired'"
)
SUSPECT: LiteralString = "CASE WHEN attempt_count > 0 THEN " + EXPIRED + " ELSE false END"
LAST_ATTEMPT: LiteralString = "attempt_count > 0 AND attempt_count = max_attempts - 1"
LAST_CHANCE: LiteralString = LAST_ATTEMPT + "\n        AND " + EXPIRED
GUARDS: dict[Barred, LiteralString] = {
    "nothing": "",
    "last chance": " AND NOT (" + LAST_CHANCE + ")",
    "last attempt": " AND NOT (" + LAST_ATTEMPT + ")",
}

GIVEN_BACK = "the answer to the claim was lost"
"""Why a claim is recorded as interrupted under which nobody ever worked."""


def mark_name(place: int) -> str:
    """Return the name of a part of the mark. It stands beside all columns of a table, so no column is called that."""
    return f"webhooks mark {place}"


# What else a claim answers about itself, beside the columns of each of its rows.
DUE = "webhooks due"
IS_SUSPECT = "webhooks suspect"


def bare(phase: Phase) -> Composable:
    """Rows that were claimed by hand."""
    return SQL("status = {} AND lease_until IS NULL").format(Literal(phase.claimed))


class Claiming(Gated):
    """Claims of known rows and of the next ones, their leases, and claims that are undone."""

    def claim(self, phase: Phase) -> bytes:
        """Claim a known row: one conditional UPDATE, and its row count is the answer."""
        return compose(
            "UPDATE {table} SET status = {claimed}, claim_seq = %(fence)s,\n"
            "    {take}\n"
            "WHERE {is_key} AND status = {ready} AND attempt_count < max_attempts AND not_before <= now()\n"
            "RETURNING {columns}",
            table=self.table,
            claimed=Literal(phase.claimed),
            take=self._take(phase),
            is_key=self.is_key,
            ready=Literal(phase.ready),
            columns=self.columns,
        )

    @lru_cache(maxsize=256)  # noqa: B019 - gates live as long as the process
    def claim_next(
        self,
        phase: Phase,
        barred: Barred = "nothing",
        equal: tuple[str, ...] = (),
        due_by: bool = False,
        known: bool = False,
        left_out: bool = False,
        marked: bool = False,
    ) -> bytes:
        """Claim the next `limit` rows nobody else is claiming, in order, and write their lines in `attempts`.

        A row whose last charged attempt expired may end its worker again, and is claimed alone: only the rows before
        the first of them are claimed, or that one where it is the first. What else was locked is let go at the COMMIT.
        Each row answered says how many were due, and whether it is such a one.

        Args:
            phase: what they wait for.
            barred: see `Barred`.
            equal: columns that must equal the parameters `equal_<column>`.
            due_by: whether a row must have been due at the parameter `due_by`.
            known: whether only the rows in the key lists may be taken.
            left_out: whether the rows whose keys are in `refusing` are left out.
            marked: whether to begin at the parameters `mark_0`, `mark_1`, … rather than at the front.
        """
        return compose(
            'WITH "due rows" AS MATERIALIZED (\n'
            "    SELECT {key_list}, attempt_count FROM {table} AS t\n"
            "    WHERE status = {ready} AND attempt_count < max_attempts AND not_before <= now(){guards}\n"
            "    ORDER BY {order_by} LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED\n"
            '), "placed rows" AS MATERIALIZED (\n'
            '    SELECT {key_list}, row_number() OVER () AS "claim order",\n'
            '        {suspect} AS "is suspect"\n'
            '    FROM "due rows" AS t\n'
            '), "claimed rows" AS (\n'
            '    UPDATE {table} AS t SET status = {claimed}, claim_seq = %(fence)s + "claim order" - 1,\n'
            "    {take}\n"
            '    FROM "placed rows" WHERE {same_key} AND t.status = {ready} AND (\n'
            '        "claim order" = 1 OR ("claim order" <\n'
            '            (SELECT min("claim order") FROM "placed rows" WHERE "is suspect")) IS NOT FALSE)\n'
            "    RETURNING t.*\n"
            '), "recorded attempts" AS (\n'
            "    INSERT INTO {attempts} (claim_seq, table_name, key, phase, visit, attempt, claimed_by, claimed_at)\n"
            "    SELECT claim_seq, %(table)s, {key_text}, {claimed}, visit, attempt_count, claimed_by, claimed_at\n"
            '    FROM "claimed rows"\n'
            ")\n"
            'SELECT {columns}{marks}, (SELECT count(*) FROM "placed rows") AS {due},\n'
            '    (SELECT "is suspect" FROM "placed rows" WHERE "claim order" = 1) AS {is_suspect} FROM "claimed rows"',
            key_list=self.key_list,
            table=self.table,
            ready=Literal(phase.ready),
            guards=self._guards(barred, equal, due_by, known, left_out) + self._from_mark(marked),
            order_by=self.order_by,
            suspect=self._of_attempts(SUSPECT),
            claimed=Literal(phase.claimed),
            take=self._take(phase),
            same_key=self.same_key("t", "placed rows"),
            key_text=self.key_text,
            columns=self.columns,
            marks=Composed(
                [
                    SQL(", {}::text AS {}").format(Identifier(column), Identifier(mark_name(place)))
                    for place, column in enumerate(self.marks)
                ]
            ),
            due=Identifier(DUE),
            is_suspect=Identifier(IS_SUSPECT),
        )

    def waiting(
        self, phase: Phase, barred: Barred, equal: tuple[str, ...] = (), due_by: bool = False, known: bool = False
    ) -> bytes:
        """Read the keys that `claim_next` would take, a hundred of them, without a lock, and which it takes alone.

        The rows whose keys are in `refusing` are left out.
        """
        return compose(
            "SELECT {key}, {suspect} AS {is_suspect} FROM {table} AS t\n"
            "WHERE status = {ready} AND attempt_count < max_attempts AND not_before <= now(){guards}\n"
            "ORDER BY {order_by} LIMIT 100",
            key=self.key_answer,
            suspect=self._of_attempts(SUSPECT),
            is_suspect=Identifier(IS_SUSPECT),
            table=self.table,
            ready=Literal(phase.ready),
            guards=self._guards(barred, equal, due_by, known, left_out=True),
            order_by=self.order_by,
        )

    @lru_cache(maxsize=64)  # noqa: B019
    def last_chance_waits(self, phase: Phase, equal: tuple[str, ...] = ()) -> bytes:
        """Look for a row on its last chance among the first thousand that are due; later ones come nearer."""
        return compose(
            "SELECT 1 AS found FROM (\n"
            "    SELECT {key_list}, attempt_count, max_attempts FROM {table}\n"
            "    WHERE status = {ready} AND attempt_count < max_attempts AND not_before <= now(){guards}\n"
            "    ORDER BY {order_by} LIMIT 1000\n"
            ") AS t WHERE {last_chance} LIMIT 1",
            key_list=self.key_list,
            table=self.table,
            ready=Literal(phase.ready),
            guards=self._guards("nothing", equal, due_by=False, known=False, left_out=True),
            order_by=self.order_by,
            last_chance=self._of_attempts(LAST_CHANCE),
        )

    def _take(self, phase: Phase) -> Composable:
        return SQL(
            "claimed_from = {ready}, attempt_count = attempt_count + 1,\n"
            "    claimed_by = %(claimed_by)s, claimed_at = statement_timestamp(),\n"
            "    lease_until = statement_timestamp() + %(lease)s"
        ).format(ready=Literal(phase.ready))

    def _from_mark(self, marked: bool) -> Composed:
        if not marked:
            return Composed([])
        mark = SQL(", ").join(Placeholder(f"mark_{place}") for place in range(len(self.marks)))
        return SQL(" AND ({}) >= ({})").format(SQL(", ").join(map(Identifier, self.marks)), mark)

    def _of_attempts(self, text: LiteralString) -> Composed:
        return named(text, key_of_t_text=self.key_of_t_text)

    def _guards(self, barred: Barred, equal: tuple[str, ...], due_by: bool, known: bool, left_out: bool) -> Composed:
        guards: list[Composable] = [self._of_attempts(GUARDS[barred])]
        guards += [SQL(" AND {} = {}").format(Identifier(column), Placeholder("equal_" + column)) for column in equal]
        if not known and self.reserved not in equal:
            guards.append(self.unreserved)
        if due_by:
            guards.append(SQL(" AND not_before <= %(due_by)s"))
        if left_out:
            guards.append(SQL(" AND {}").format(self.not_refusing))
        if known:
            guards.append(SQL(" AND {}").format(self.among()))
            if len(self.key.columns) > 1:
                guards.append(SQL(" AND {} = ANY(%(keys)s)").format(self.key_text))
        return Composed(guards)

    def renew(self, phase: Phase) -> bytes:
        """Extend the leases of all claims of this process in one phase."""
        return compose(
            'WITH "our rows" AS MATERIALIZED (\n'
            "    SELECT {key_list} FROM {table}\n"
            "    WHERE {among} AND {fences}\n"
            "    ORDER BY {key_list} FOR NO KEY UPDATE SKIP LOCKED\n"
            ")\n"
            "UPDATE {table} AS t SET lease_until = statement_timestamp() + %(lease)s\n"
            'FROM "our rows" WHERE {same_key} AND t.status = {claimed} AND t.claim_seq = ANY(%(claim_seqs)s)\n'
            "RETURNING t.claim_seq",
            key_list=self.key_list,
            table=self.table,
            among=self.among(),
            fences=self.fences(phase),
            claimed=Literal(phase.claimed),
            same_key=self.same_key("t", "our rows"),
        )

    def still_held(self, phase: Phase) -> bytes:
        """Read, without a lock, which of our claims a renewal skipped but nobody took."""
        return compose(
            "SELECT claim_seq FROM {table} WHERE {among} AND {fences}",
            table=self.table,
            among=self.among(),
            fences=self.fences(phase),
        )

    def hold(self, phase: Phase) -> bytes:
        """Lock our row by its fence and extend its lease."""
        return compose(
            "UPDATE {table} SET lease_until = greatest(lease_until, statement_timestamp() + %(lease)s)\nWHERE {fence}",
            table=self.table,
            fence=self.fence(phase),
        )

    def give_back(self, phase: Phase) -> bytes:
        """Undo claims of ours whose answer was lost: as if they had not been made."""
        return compose(
            'WITH "given back" AS (\n'
            "    UPDATE {table} AS t SET status = {ready}, claimed_from = NULL,\n"
            "        attempt_count = greatest(attempt_count - 1, 0), {cleared}\n"
            "    WHERE status = {claimed} AND claim_seq >= %(fence)s AND claim_seq < %(fence)s + %(count)s\n"
            "    RETURNING claim_seq\n"
            ")\n"
            "UPDATE {attempts} AS a SET ended_at = statement_timestamp(), outcome = 'interrupted',\n"
            "    error = {reason}\n"
            'FROM "given back" AS g WHERE a.claim_seq = g.claim_seq AND a.ended_at IS NULL',
            table=self.table,
            ready=Literal(phase.ready),
            claimed=Literal(phase.claimed),
            cleared=CLEARED,
            reason=Literal(GIVEN_BACK),
        )

    def adopt(self, phase: Phase, *, alone: bool = False) -> bytes:
        """Give a row that was claimed by hand (the bare UPDATE, no lease) a lease and a way back."""
        return compose(
            'WITH "bare claims" AS MATERIALIZED (\n'
            "    {picked}\n"
            ")\n"
            "UPDATE {table} AS t SET claimed_from = {ready}, lease_until = statement_timestamp() + %(lease)s,\n"
            "    claimed_at = statement_timestamp(), claimed_by = coalesce(t.claimed_by, 'somebody by hand'),\n"
            "    claim_seq = NULL\n"
            'FROM "bare claims" WHERE {same_key} AND t.status = {claimed} AND t.lease_until IS NULL\n'
            "RETURNING {key}, t.status",
            picked=self.picked(bare(phase), alone=alone),
            table=self.table,
            claimed=Literal(phase.claimed),
            ready=Literal(phase.ready),
            same_key=self.same_key("t", "bare claims"),
            key=self.key_answer_of_t,
        )
