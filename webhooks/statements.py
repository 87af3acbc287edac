"""Every statement of a gate, composed once.

Each carries its guard in the WHERE and is read by its row count; a later write carries the fence (`claim_seq`).
Statuses are literals, because a plan made for a parameter cannot use the partial index on one status. Leases are set
with `statement_timestamp()` and compared with `now()`: a transaction that waited for a lock would otherwise grant a
lease that is over already. No UPDATE contains a volatile function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal as OneOf
from typing import LiteralString, TypeAlias

from psycopg.sql import SQL, Composable, Composed, Identifier, Literal, Placeholder

from webhooks.db import clean, compose, named, table
from webhooks.phase import NAME, Key, Phase

Which: TypeAlias = OneOf["any", "fresh", "tried", "last chance"]
"""Which rows of a ready status a claim may take. A row that was tried before is taken alone, so that one which kills
its worker takes no neighbour with it; one that expired and has one attempt left, while no other such row runs here."""

# A subquery for one value is looked up row by row; EXISTS may be turned into a scan of all attempts ever made. What was
# put back uncharged says nothing of the attempt before it.
LAST_CHANCE: LiteralString = (
    "(attempt_count > 0 AND attempt_count = max_attempts - 1\n"
    "        AND coalesce((SELECT a.outcome FROM {attempts} AS a\n"
    "            WHERE a.table_name = %(table)s AND a.key = {key_of_t_text}\n"
    "            AND a.outcome NOT IN ('snoozed', 'interrupted') ORDER BY a.claimed_at DESC LIMIT 1), '') = 'expired')"
)
GUARDS: dict[Which, LiteralString] = {
    "any": "",
    "fresh": " AND attempt_count = 0",
    "tried": " AND attempt_count > 0 AND NOT " + LAST_CHANCE,
    "last chance": " AND " + LAST_CHANCE,
}

GIVEN_BACK = "the answer to the claim was lost"
"""Why a claim is recorded as interrupted under which nobody ever worked."""

NOTIFICATION_ATTEMPTS = 20
"""What a notification's row is given: whoever is to be told may be away for hours."""

# A number of its own for each of many rows, from consecutive ones.
EACH_VISIT: LiteralString = "%(visit)s + array_position(%(claim_seqs)s::bigint[], claim_seq)"
CLEARED = SQL("claimed_by = NULL, claimed_at = NULL, lease_until = NULL")
BACKOFF = SQL("least(%(longest)s, %(first)s * power(2, least(t.attempt_count - 1, 20))) * %(factor)s")

RECORD_ATTEMPT = compose(
    "INSERT INTO {attempts} (claim_seq, table_name, key, phase, visit, attempt, claimed_by, claimed_at)\n"
    "VALUES (%(claim_seq)s, %(table)s, %(key)s, %(phase)s, %(visit)s, %(attempt)s, %(claimed_by)s, %(claimed_at)s)"
)
CLOSE_ATTEMPT = compose(
    "UPDATE {attempts} SET ended_at = statement_timestamp(), outcome = %(outcome)s, error = %(error)s\n"
    "WHERE claim_seq = %(claim_seq)s AND ended_at IS NULL"
)
READ_ATTEMPT = compose("SELECT outcome FROM {attempts} WHERE claim_seq = %(claim_seq)s")
WAKE_PARKED = compose(
    "WITH parked AS MATERIALIZED (\n"
    "    SELECT id FROM {deliveries} WHERE parked_on = ANY(%(rows)s) AND status = 'received'\n"
    "    FOR NO KEY UPDATE SKIP LOCKED\n"
    ")\n"
    "UPDATE {deliveries} AS t SET not_before = statement_timestamp()\n"
    "FROM parked WHERE t.id = parked.id AND t.status = 'received' RETURNING t.id, t.parked_on"
)
RECORD_DECISION = compose(
    "INSERT INTO {decisions} (table_name, key, decision, decided_by, reason)\n"
    "VALUES (%(table)s, %(key)s, %(decision)s, %(decided_by)s, %(reason)s)"
)


def column_params(columns: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters `set_<column>` of columns to write; text is rid of what PostgreSQL cannot store."""
    return {f"set_{column}": clean(value) if isinstance(value, str) else value for column, value in columns.items()}


def _plain(order_by: LiteralString) -> tuple[LiteralString, ...]:
    """Return the columns of an ascending order, none where it is anything else."""
    parts: list[LiteralString] = order_by.split(",")
    columns: tuple[LiteralString, ...] = tuple(part.strip() for part in parts)
    return columns if all(NAME.fullmatch(column) for column in columns) else ()


class Statements:
    """The statements of one gate over one table.

    Args:
        name: the table.
        key: the columns that name a row.
        columns: the columns a claim reads; empty for all of them.
        order_by: what `claim_next` orders by.
        escalated: the status of a row whose attempts ran out.
    """

    def __init__(
        self,
        name: LiteralString,
        key: Key,
        columns: Sequence[str],
        order_by: LiteralString,
        escalated: LiteralString,
    ) -> None:
        self.name = name
        self.table = table(name)
        self.key = key
        self.columns = SQL(", ").join(map(Identifier, columns)) if columns else SQL("*")
        self.order_by = SQL(order_by)
        self.marks = _plain(order_by)
        self.escalated = Literal(escalated)
        self.is_key = SQL(" AND ").join(
            SQL(column) + SQL(" = %(") + SQL(param) + SQL(")s")
            for column, param in zip(key.columns, key.names(), strict=True)
        )
        self.key_list = SQL(", ").join(map(SQL, key.columns))
        self.key_of_t = SQL(", ").join(SQL("t.{}").format(SQL(column)) for column in key.columns)
        self.key_text = SQL(" || '/' || ").join(SQL("{}::text").format(SQL(column)) for column in key.columns)
        self.key_of_t_text = SQL(" || '/' || ").join(SQL("t.{}::text").format(SQL(column)) for column in key.columns)

    def same_key(self, left: LiteralString, right: LiteralString) -> Composable:
        return SQL(" AND ").join(
            SQL("{}.{} = {}.{}").format(SQL(left), SQL(column), SQL(right), SQL(column)) for column in self.key.columns
        )

    def among(self) -> Composable:
        """The rows whose keys were passed as lists, one list a key column.

        Of several columns each is compared by itself, because only the column gives a list of text its type; what
        else the WHERE says (a fence, `key_text`) leaves out the combinations nobody meant.
        """
        return SQL(" AND ").join(
            SQL("{} = ANY({})").format(SQL(column), Placeholder(param))
            for column, param in zip(self.key.columns, self.key.names(), strict=True)
        )

    def fence(self, phase: Phase) -> Composable:
        """Our row while it is ours. A claim made by hand has no lease, and the number of the row's last claim."""
        return SQL("{} AND status = {} AND claim_seq = %(claim_seq)s AND lease_until IS NOT NULL").format(
            self.is_key, Literal(phase.claimed)
        )

    def fences(self, phase: Phase) -> Composable:
        """The same for many rows at once."""
        return SQL("status = {} AND claim_seq = ANY(%(claim_seqs)s) AND lease_until IS NOT NULL").format(
            Literal(phase.claimed)
        )

    def _take(self, phase: Phase) -> Composable:
        return SQL(
            "claimed_from = {ready}, attempt_count = attempt_count + 1,\n"
            "    claimed_by = %(claimed_by)s, claimed_at = statement_timestamp(),\n"
            "    lease_until = statement_timestamp() + %(lease)s"
        ).format(ready=Literal(phase.ready))

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
        which: Which = "any",
        equal: tuple[str, ...] = (),
        due_by: bool = False,
        known: bool = False,
        marked: bool = False,
    ) -> bytes:
        """Claim the next `limit` rows nobody else is claiming, in order, and write their lines in `attempts`.

        Args:
            phase: what they wait for.
            which: see `Which`.
            equal: columns that must equal the parameters `equal_<column>`.
            due_by: whether a row must have been due at the parameter `due_by`.
            known: whether only the rows in the key lists may be taken.
            marked: whether to begin at the parameters `mark_0`, `mark_1`, … rather than at the front.
        """
        return compose(
            "WITH due AS MATERIALIZED (\n"
            "    SELECT {key_list} FROM {table} AS t\n"
            "    WHERE status = {ready} AND attempt_count < max_attempts AND not_before <= now(){guards}\n"
            "    ORDER BY {order_by} LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED\n"
            "), placed AS (\n"
            "    SELECT {key_list}, row_number() OVER () AS place FROM due\n"
            "), claimed AS (\n"
            "    UPDATE {table} AS t SET status = {claimed}, claim_seq = %(fence)s + placed.place - 1,\n"
            "    {take}\n"
            "    FROM placed WHERE {same_key} AND t.status = {ready}\n"
            "    RETURNING t.*\n"
            "), recorded AS (\n"
            "    INSERT INTO {attempts} (claim_seq, table_name, key, phase, visit, attempt, claimed_by, claimed_at)\n"
            "    SELECT claim_seq, %(table)s, {key_text}, {claimed}, visit, attempt_count, claimed_by, claimed_at\n"
            "    FROM claimed\n"
            ")\n"
            "SELECT {columns}{marks} FROM claimed",
            key_list=self.key_list,
            table=self.table,
            ready=Literal(phase.ready),
            guards=self._guards(which, equal, due_by, known) + self._from_mark(marked),
            order_by=self.order_by,
            claimed=Literal(phase.claimed),
            take=self._take(phase),
            same_key=self.same_key("t", "placed"),
            key_text=self.key_text,
            columns=self.columns,
            marks=Composed(
                [SQL(", {}::text AS {}").format(SQL(column), Identifier(name)) for column, name in self._named_marks()]
            ),
        )

    def _named_marks(self) -> list[tuple[LiteralString, str]]:
        return [(column, f"mark_{place}") for place, column in enumerate(self.marks)]

    def _from_mark(self, marked: bool) -> Composed:
        if not marked:
            return Composed([])
        columns, names = zip(*self._named_marks(), strict=True)
        mark = SQL(", ").join(map(Placeholder, names))
        return SQL(" AND ({}) >= ({})").format(SQL(", ").join(map(SQL, columns)), mark)

    def _guards(self, which: Which, equal: tuple[str, ...], due_by: bool, known: bool) -> Composed:
        guards: list[Composable] = [named(GUARDS[which], key_of_t_text=self.key_of_t_text)]
        guards += [SQL(" AND {} = {}").format(Identifier(column), Placeholder("equal_" + column)) for column in equal]
        if due_by:
            guards.append(SQL(" AND not_before <= %(due_by)s"))
        if known:
            guards.append(SQL(" AND {}").format(self.among()))
            if len(self.key.columns) > 1:
                guards.append(SQL(" AND {} = ANY(%(keys)s)").format(self.key_text))
        return Composed(guards)

    def waiting(
        self, phase: Phase, which: Which, equal: tuple[str, ...] = (), due_by: bool = False, known: bool = False
    ) -> bytes:
        """Read the keys that `claim_next` would take, a hundred of them, without a lock."""
        return compose(
            "SELECT {key_list} FROM {table} AS t\n"
            "WHERE status = {ready} AND attempt_count < max_attempts AND not_before <= now(){guards}\n"
            "ORDER BY {order_by} LIMIT 100",
            key_list=self.key_list,
            table=self.table,
            ready=Literal(phase.ready),
            guards=self._guards(which, equal, due_by, known),
            order_by=self.order_by,
        )

    def renew(self, phase: Phase) -> bytes:
        """Extend the leases of all claims of this process in one phase."""
        return compose(
            "WITH mine AS MATERIALIZED (\n"
            "    SELECT {key_list} FROM {table}\n"
            "    WHERE {among} AND {fences}\n"
            "    ORDER BY {key_list} FOR NO KEY UPDATE SKIP LOCKED\n"
            ")\n"
            "UPDATE {table} AS t SET lease_until = statement_timestamp() + %(lease)s\n"
            "FROM mine WHERE {same_key} AND t.status = {claimed} AND t.claim_seq = ANY(%(claim_seqs)s)\n"
            "RETURNING t.claim_seq",
            key_list=self.key_list,
            table=self.table,
            among=self.among(),
            fences=self.fences(phase),
            claimed=Literal(phase.claimed),
            same_key=self.same_key("t", "mine"),
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

    @lru_cache(maxsize=256)  # noqa: B019
    def complete(self, phase: Phase, to: str, columns: tuple[str, ...], entered: Phase | None) -> bytes:
        """Move our rows to a done status; each that enters another phase's ready status starts a visit of its own."""
        moving = named(
            "UPDATE {table} SET status = {to}, {move}\nWHERE {among} AND {fences}\nRETURNING status, claim_seq",
            table=self.table,
            to=Literal(to),
            move=self._move(columns, entered, EACH_VISIT),
            among=self.among(),
            fences=self.fences(phase),
        )
        return self._closing(moving)

    def _closing(self, moving: Composable, *more: Composable) -> bytes:
        """Compose a statement that ends claims of ours so that it closes their lines in `attempts`, where the row was
        ours."""
        return compose(
            "WITH moved AS (\n{moving}\n), closed AS (\n"
            "    UPDATE {attempts} AS a\n"
            "    SET ended_at = statement_timestamp(), outcome = %(outcome)s, error = %(error)s\n"
            "    FROM moved WHERE a.claim_seq = moved.claim_seq AND a.ended_at IS NULL\n"
            "){more}\n"
            "SELECT status, claim_seq FROM moved",
            moving=moving,
            more=Composed([SQL(", {}").format(part) for part in more]),
        )

    def _move(self, columns: tuple[str, ...], entered: Phase | None, visit: LiteralString) -> Composable:
        parts: list[Composable] = [
            SQL("{} = {}").format(Identifier(column), Placeholder("set_" + column)) for column in columns
        ]
        parts += [CLEARED, SQL("claimed_from = NULL, last_error = NULL, not_before = statement_timestamp()")]
        if entered is not None:
            parts.append(
                SQL("visit = {}, attempt_count = 0, max_attempts = {}").format(
                    SQL(visit), Literal(entered.max_attempts)
                )
            )
        return SQL(", ").join(parts)

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
        return self._closing(moving, *([self._notified(phase, "moved")] if notify else []))

    def _told(self, phase: Phase, moving: Composable, answer: Composable) -> bytes:
        """Compose a statement that may escalate so that it tells of it, in the same breath."""
        return compose(
            "WITH moved AS (\n{moving}\n), {notified}\nSELECT {answer} FROM moved",
            moving=moving,
            notified=self._notified(phase, "moved"),
            answer=answer,
        )

    def _notified(self, phase: Phase, moved: LiteralString) -> Composable:
        return named(
            "notified AS (\n"
            "    INSERT INTO {notifications} (table_name, key, phase, attempts_made, reason, status, max_attempts)\n"
            "    SELECT {name}, {key_text}, {phase}, attempt_count, last_error, 'pending', {limit}\n"
            "    FROM {moved} WHERE status = {escalated}\n"
            ")",
            name=Literal(self.name),
            key_text=self.key_text,
            phase=Literal(phase.claimed),
            limit=Literal(NOTIFICATION_ATTEMPTS),
            moved=SQL(moved),
            escalated=self.escalated,
        )

    def give_back(self, phase: Phase) -> bytes:
        """Undo claims of ours whose answer was lost: as if they had not been made."""
        return compose(
            "WITH given AS (\n"
            "    UPDATE {table} AS t SET status = {ready}, claimed_from = NULL,\n"
            "        attempt_count = greatest(attempt_count - 1, 0), {cleared}\n"
            "    WHERE status = {claimed} AND claim_seq >= %(fence)s AND claim_seq < %(fence)s + %(count)s\n"
            "    RETURNING claim_seq\n"
            ")\n"
            "UPDATE {attempts} AS a SET ended_at = statement_timestamp(), outcome = 'interrupted',\n"
            "    error = {reason}\n"
            "FROM given WHERE a.claim_seq = given.claim_seq AND a.ended_at IS NULL",
            table=self.table,
            ready=Literal(phase.ready),
            claimed=Literal(phase.claimed),
            cleared=CLEARED,
            reason=Literal(GIVEN_BACK),
        )

    def expire(self, phase: Phase, notify: bool = False) -> bytes:
        """Free rows whose lease is over: back with a wait, or escalated. Their attempts are recorded as expired."""
        return compose(
            "WITH late AS MATERIALIZED (\n"
            "    SELECT {key_list}, claim_seq FROM {table} WHERE status = {claimed} AND lease_until < now()\n"
            "    ORDER BY {key_list} LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED\n"
            "), freed AS (\n"
            "    UPDATE {table} AS t SET\n"
            "        status = CASE WHEN t.attempt_count >= t.max_attempts THEN {escalated} ELSE {ready} END,\n"
            "        claimed_from = CASE WHEN t.attempt_count >= t.max_attempts THEN {ready} END,\n"
            "        not_before = statement_timestamp() + {backoff},\n"
            "        last_error = 'lease expired: ' || coalesce(t.claimed_by, 'somebody') || ' stopped answering',\n"
            "        {cleared}\n"
            "    FROM late WHERE {same_key} AND t.status = {claimed}\n"
            "        AND t.claim_seq IS NOT DISTINCT FROM late.claim_seq\n"
            "    RETURNING t.*\n"
            "), closed AS (\n"
            "    UPDATE {attempts} AS a SET\n"
            "        ended_at = statement_timestamp(), outcome = 'expired', error = freed.last_error\n"
            "    FROM freed WHERE a.claim_seq = freed.claim_seq AND a.ended_at IS NULL\n"
            "){notified}\n"
            "SELECT {key_list}, status FROM freed",
            key_list=self.key_list,
            table=self.table,
            claimed=Literal(phase.claimed),
            escalated=self.escalated,
            ready=Literal(phase.ready),
            backoff=BACKOFF,
            cleared=CLEARED,
            same_key=self.same_key("t", "late"),
            notified=SQL(", {}").format(self._notified(phase, "freed")) if notify else SQL(""),
        )

    def adopt(self, phase: Phase) -> bytes:
        """Give a row that was claimed by hand (the bare UPDATE, no lease) a lease and a way back."""
        return compose(
            "WITH bare AS MATERIALIZED (\n"
            "    SELECT {key_list} FROM {table} WHERE status = {claimed} AND lease_until IS NULL\n"
            "    ORDER BY {key_list} LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED\n"
            ")\n"
            "UPDATE {table} AS t SET claimed_from = {ready}, lease_until = statement_timestamp() + %(lease)s,\n"
            "    claimed_at = statement_timestamp(), claimed_by = coalesce(t.claimed_by, 'somebody by hand'),\n"
            "    claim_seq = NULL\n"
            "FROM bare WHERE {same_key} AND t.status = {claimed} AND t.lease_until IS NULL\n"
            "RETURNING {key_of_t}, t.status",
            key_list=self.key_list,
            table=self.table,
            claimed=Literal(phase.claimed),
            ready=Literal(phase.ready),
            same_key=self.same_key("t", "bare"),
            key_of_t=self.key_of_t,
        )

    def exhausted(self, phase: Phase, notify: bool = False) -> bytes:
        """Escalate ready rows without an attempt left (`max_attempts` was lowered)."""
        more = SQL(", t.attempt_count, t.last_error") if notify else SQL("")
        escalation = named(
            "WITH spent AS MATERIALIZED (\n"
            "    SELECT {key_list} FROM {table} WHERE status = {ready} AND attempt_count >= max_attempts\n"
            "    ORDER BY {key_list} LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED\n"
            ")\n"
            "UPDATE {table} AS t SET status = {escalated}, claimed_from = {ready},\n"
            "    last_error = coalesce(t.last_error, 'no attempt is left')\n"
            "FROM spent WHERE {same_key} AND t.status = {ready} AND t.attempt_count >= t.max_attempts\n"
            "RETURNING {key_of_t}, t.status{more}",
            key_list=self.key_list,
            table=self.table,
            ready=Literal(phase.ready),
            escalated=self.escalated,
            same_key=self.same_key("t", "spent"),
            key_of_t=self.key_of_t,
            more=more,
        )
        answer = SQL("{}, status").format(self.key_list)
        return self._told(phase, escalation, answer) if notify else escalation.as_bytes(None)

    @lru_cache(maxsize=256)  # noqa: B019
    def open(self, to: str, columns: tuple[str, ...], entered: Phase | None) -> bytes:
        """Insert a row, or nothing where it is there already."""
        names: list[Composable] = [SQL("status"), *map(Identifier, columns)]
        values: list[Composable] = [Literal(to), *(Placeholder("set_" + column) for column in columns)]
        if entered is not None:
            names.append(SQL("max_attempts"))
            values.append(Literal(entered.max_attempts))
        return compose(
            "INSERT INTO {table} ({names})\nVALUES ({values})\nON CONFLICT DO NOTHING\nRETURNING {key}",
            table=self.table,
            names=SQL(", ").join(names),
            values=SQL(", ").join(values),
            key=self.key_list,
        )

    @lru_cache(maxsize=256)  # noqa: B019
    def advance(self, from_: tuple[str, ...], to: str, columns: tuple[str, ...], entered: Phase | None) -> bytes:
        """Move a row from one of some statuses to another, whoever holds it."""
        return compose(
            "UPDATE {table} SET status = {to}, {move}\nWHERE {is_key} AND {guard}\nRETURNING claim_seq",
            table=self.table,
            to=Literal(to),
            move=self._move(columns, entered, "%(visit)s"),
            is_key=self.is_key,
            guard=SQL("status = {}").format(Literal(from_[0]))
            if len(from_) == 1
            else SQL("status IN ({})").format(SQL(", ").join(map(Literal, from_))),
        )

    @lru_cache(maxsize=16)  # noqa: B019
    def retry(self, phases: tuple[Phase, ...]) -> bytes:
        """Give an escalated row a new set of attempts, back in the status it was claimed from."""
        return compose(
            "UPDATE {table} SET status = claimed_from, claimed_from = NULL, attempt_count = 0,\n"
            "    max_attempts = CASE claimed_from {each} ELSE max_attempts END, not_before = statement_timestamp()\n"
            "WHERE {is_key} AND status = {escalated} AND claimed_from IS NOT NULL\n"
            "RETURNING status",
            table=self.table,
            each=SQL(" ").join(
                SQL("WHEN {} THEN {}").format(Literal(phase.ready), Literal(phase.max_attempts)) for phase in phases
            ),
            is_key=self.is_key,
            escalated=self.escalated,
        )

    def status(self) -> bytes:
        return compose("SELECT status FROM {table} WHERE {is_key}", table=self.table, is_key=self.is_key)
