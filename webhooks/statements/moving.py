"""What happens to a row from outside, whoever holds it."""

from __future__ import annotations

from functools import lru_cache

from psycopg.sql import SQL, Composable, Identifier, Literal, Placeholder

from webhooks.db import compose
from webhooks.phase import Conflict, Phase
from webhooks.statements.gated import KEY_TEXT, Gated


class Moving(Gated):
    """Rows that are opened, moved on by an event, or given back their attempts by a person."""

    @lru_cache(maxsize=256)  # noqa: B019
    def open(self, to: str, columns: tuple[str, ...], entered: Phase | None, there: Conflict | None = None) -> bytes:
        """Insert a row, or nothing where it is there already; without `there` every conflict is an error."""
        names: list[Composable] = [SQL("status"), *map(Identifier, columns)]
        values: list[Composable] = [Literal(to), *(Placeholder("set_" + column) for column in columns)]
        if entered is not None:
            names.append(SQL("max_attempts"))
            values.append(Literal(entered.max_attempts))
        return compose(
            "INSERT INTO {table} ({names})\nVALUES ({values}){unless}\nRETURNING {key}",
            table=self.table,
            names=SQL(", ").join(names),
            values=SQL(", ").join(values),
            unless=SQL("") if there is None else SQL("\nON CONFLICT {} DO NOTHING").format(_target(there)),
            key=self.key_answer,
        )

    @lru_cache(maxsize=256)  # noqa: B019
    def advance(self, from_: tuple[str, ...], to: str, columns: tuple[str, ...], entered: Phase | None) -> bytes:
        """Move a row from one of some statuses to another, whoever holds it."""
        return compose(
            "UPDATE {table} SET status = {to}, {move}\nWHERE {is_key} AND {guard}\nRETURNING {key}, claim_seq",
            table=self.table,
            to=Literal(to),
            move=self.move(columns, entered, "%(visit)s"),
            is_key=self.is_key,
            key=self.key_answer,
            guard=SQL("status = {}").format(Literal(from_[0]))
            if len(from_) == 1
            else SQL("status IN ({})").format(SQL(", ").join(map(Literal, from_))),
        )

    @lru_cache(maxsize=16)  # noqa: B019
    def retry(self, phases: tuple[Phase, ...]) -> bytes:
        """Give an escalated row a new set of attempts, back in the status it was claimed from. Its error stays: by that
        the next claims know that something was decided."""
        return compose(
            "UPDATE {table} SET status = claimed_from, claimed_from = NULL, attempt_count = 0,\n"
            "    max_attempts = CASE claimed_from {each} ELSE max_attempts END, not_before = statement_timestamp(),\n"
            "    last_error = coalesce(last_error, 'escalated by hand')\n"
            "WHERE {is_key} AND status = {escalated} AND claimed_from IS NOT NULL\n"
            "RETURNING {key}, status, visit",
            key=self.key_answer,
            table=self.table,
            each=SQL(" ").join(
                SQL("WHEN {} THEN {}").format(Literal(phase.ready), Literal(phase.max_attempts)) for phase in phases
            ),
            is_key=self.is_key,
            escalated=self.escalated,
        )

    def status(self) -> bytes:
        return compose("SELECT status FROM {table} WHERE {is_key}", table=self.table, is_key=self.is_key)

    def spelled(self) -> bytes:
        """Read the text of a key: of its row, or of one that is not there, whose parts are of the columns' types."""
        return compose(
            "SELECT coalesce((SELECT {key_text} FROM {table} WHERE {is_key}), (\n"
            "    SELECT {key_text}\n"
            "    FROM (SELECT {key_list} FROM {table} WHERE false UNION ALL SELECT {given}) AS asked\n"
            ")) AS {name}",
            key_text=self.key_text,
            key_list=self.key_list,
            table=self.table,
            is_key=self.is_key,
            name=Identifier(KEY_TEXT),
            given=SQL(", ").join(map(Placeholder, self.key.names())),
        )


def _target(there: Conflict) -> Composable:
    """Name the unique index that a conflict is found by."""
    columns = SQL("({})").format(SQL(", ").join(map(Identifier, there.columns)))
    if there.where is None:
        return columns
    # As PostgreSQL itself prints it.
    return columns + SQL(" WHERE ") + SQL(there.where.replace("%", "%%"))  # pyright: ignore[reportArgumentType]
