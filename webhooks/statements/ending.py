"""How a claim ends: by its holder, by its lease, or because no attempt is left."""

from __future__ import annotations

from functools import lru_cache
from typing import LiteralString

from psycopg.sql import SQL, Composable, Composed, Identifier, Literal, Placeholder

from webhooks.db import compose, named
from webhooks.phase import Phase
from webhooks.statements.gated import CLEARED, KEY_TEXT, Gated

NOTIFICATION_ATTEMPTS = 20
"""What a notification's row is given: whoever is to be told may be away for hours."""

# A number of its own for each of many rows, from consecutive ones.
EACH_VISIT: LiteralString = "%(visit)s + array_position(%(claim_seqs)s::bigint[], claim_seq)"
BACKOFF = SQL("least(%(longest)s, %(first)s * power(2, least(t.attempt_count - 1, 20))) * %(factor)s")


def late(phase: Phase) -> Composable:
    """Rows whose lease is over."""
    return SQL("status = {} AND lease_until < now()").format(Literal(phase.claimed))


def spent(phase: Phase) -> Composable:
    """Ready rows without an attempt left."""
    return SQL("status = {} AND attempt_count >= max_attempts").format(Literal(phase.ready))


class Ending(Gated):
    """Ends of claims. What escalates a row may tell of it in the same statement."""

    @lru_cache(maxsize=256)  # noqa: B019
    def complete(self, phase: Phase, to: str, columns: tuple[str, ...], entered: Phase | None) -> bytes:
        """Move our rows to a done status; each that enters another phase's ready status starts a visit of its own."""
        moving = named(
            "UPDATE {table} SET status = {to}, {move}\nWHERE {among} AND {fences}\nRETURNING status, claim_seq",
            table=self.table,
            to=Literal(to),
            move=self.move(columns, entered, EACH_VISIT),
            among=self.among(),
            fences=self.fences(phase),
        )
        return self._closing(moving)

    @lru_cache(maxsize=64)  # noqa: B019
    def release(self, phase: Phase, columns: tuple[str, ...] = (), notify: bool = False) -> bytes:
        """Put our row back where it was claimed from, or escalate it when its attempts are used up."""
        own = [SQL("{} = {}, ").format(Identifier(column), Placeholder("set_" + column)) for column in columns]
        escalates = SQL("(%(escalate)s OR attempt_count - %(refund)s >= max_attempts)")
        moving = named(
            "UPDATE {table} SET status = CASE WHEN {escalates} THEN {escalated} ELSE {ready} END,\n"
            "    claimed_from = CASE WHEN {escalates} THEN {ready} END,\n"
            "    attempt_count = greatest(attempt_count - %(refund)s, 0),\n"
            "    not_before = statement_timestamp() + %(delay)s, last_error = coalesce(%(error)s, last_error),\n"
            "    {own}{cleared}\n"
            "WHERE {fence}\n"
            "RETURNING {returned}",
            table=self.table,
            escalates=escalates,
            escalated=self.escalated,
            ready=Literal(phase.ready),
            own=Composed(own),
            cleared=CLEARED,
            fence=self.fence(phase),
            returned=SQL("{}, status, claim_seq, attempt_count, last_error").format(self.key_list)
            if notify
            else SQL("status, claim_seq"),
        )
        return self._closing(moving, *([self._notified(phase, "moved rows")] if notify else []))

    def expire(self, phase: Phase, notify: bool = False, *, alone: bool = False) -> bytes:
        """Free rows whose lease is over: back with a wait, or escalated. Their attempts are recorded as expired."""
        return compose(
            'WITH "late claims" AS MATERIALIZED (\n'
            "    {picked}\n"
            '), "freed rows" AS (\n'
            "    UPDATE {table} AS t SET\n"
            "        status = CASE WHEN t.attempt_count >= t.max_attempts THEN {escalated} ELSE {ready} END,\n"
            "        claimed_from = CASE WHEN t.attempt_count >= t.max_attempts THEN {ready} END,\n"
            "        not_before = statement_timestamp() + {backoff},\n"
            "        last_error = 'lease expired: ' || coalesce(t.claimed_by, 'somebody') || ' stopped answering',\n"
            "        {cleared}\n"
            '    FROM "late claims" AS l WHERE {same_key} AND t.status = {claimed}\n'
            "        AND t.claim_seq IS NOT DISTINCT FROM l.claim_seq\n"
            "    RETURNING t.*\n"
            '), "closed attempts" AS (\n'
            "    UPDATE {attempts} AS a SET\n"
            "        ended_at = statement_timestamp(), outcome = 'expired', error = f.last_error\n"
            '    FROM "freed rows" AS f WHERE a.claim_seq = f.claim_seq AND a.ended_at IS NULL\n'
            "){notified}\n"
            'SELECT {key}, status FROM "freed rows"',
            picked=self.picked(late(phase), alone=alone, more=", claim_seq"),
            key=self.key_answer,
            table=self.table,
            claimed=Literal(phase.claimed),
            escalated=self.escalated,
            ready=Literal(phase.ready),
            backoff=BACKOFF,
            cleared=CLEARED,
            same_key=self.same_key("t", "l"),
            notified=SQL(", {}").format(self._notified(phase, "freed rows")) if notify else SQL(""),
        )

    def exhausted(self, phase: Phase, notify: bool = False, *, alone: bool = False) -> bytes:
        """Escalate ready rows without an attempt left (`max_attempts` was lowered)."""
        more = SQL(", t.attempt_count, t.last_error") if notify else SQL("")
        escalation = named(
            'WITH "spent rows" AS MATERIALIZED (\n'
            "    {picked}\n"
            ")\n"
            "UPDATE {table} AS t SET status = {escalated}, claimed_from = {ready},\n"
            "    last_error = coalesce(t.last_error, 'no attempt is left')\n"
            'FROM "spent rows" WHERE {same_key} AND t.status = {ready} AND t.attempt_count >= t.max_attempts\n'
            "RETURNING {key}, t.status{more}",
            picked=self.picked(spent(phase), alone=alone),
            table=self.table,
            ready=Literal(phase.ready),
            escalated=self.escalated,
            same_key=self.same_key("t", "spent rows"),
            key=self.key_answer_of_t,
            more=more,
        )
        answer = SQL("{}, {}, status").format(self.key_list, Identifier(KEY_TEXT))
        return self._told(phase, escalation, answer) if notify else escalation.as_bytes(None)

    def _closing(self, moving: Composable, *more: Composable) -> bytes:
        """Compose a statement that ends claims of ours so that it closes their lines in `attempts`, where the row was
        ours."""
        return compose(
            'WITH "moved rows" AS (\n{moving}\n), "closed attempts" AS (\n'
            "    UPDATE {attempts} AS a\n"
            "    SET ended_at = statement_timestamp(), outcome = %(outcome)s, error = %(error)s\n"
            '    FROM "moved rows" AS m WHERE a.claim_seq = m.claim_seq AND a.ended_at IS NULL\n'
            "){more}\n"
            'SELECT status, claim_seq FROM "moved rows"',
            moving=moving,
            more=Composed([SQL(", {}").format(part) for part in more]),
        )

    def _told(self, phase: Phase, moving: Composable, answer: Composable) -> bytes:
        """Compose a statement that may escalate so that it tells of it, in the same breath."""
        return compose(
            'WITH "moved rows" AS (\n{moving}\n), {notified}\nSELECT {answer} FROM "moved rows"',
            moving=moving,
            notified=self._notified(phase, "moved rows"),
            answer=answer,
        )

    def _notified(self, phase: Phase, moved: str) -> Composable:
        return named(
            '"notifications made" AS (\n'
            "    INSERT INTO {notifications} (table_name, key, phase, attempts_made, reason, status, max_attempts)\n"
            "    SELECT {name}, {key_text}, {phase}, attempt_count, last_error, 'pending', {limit}\n"
            "    FROM {moved} WHERE status = {escalated}\n"
            ")",
            name=Literal(self.name),
            key_text=self.key_text,
            phase=Literal(phase.claimed),
            limit=Literal(NOTIFICATION_ATTEMPTS),
            moved=Identifier(moved),
            escalated=self.escalated,
        )
