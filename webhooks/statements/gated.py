"""A gated table as the statements name it: its key, its columns, and the fence of a claim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import LiteralString

from psycopg.sql import SQL, Composable, Identifier, Literal, Placeholder

from webhooks.db import compose, table
from webhooks.phase import Key, Order, Phase

KEY_TEXT = "webhooks key"
"""What statements answer the key's text as. It stands beside all columns of a table, so no column is called that."""

CLEARED = SQL("claimed_by = NULL, claimed_at = NULL, lease_until = NULL")


class Gated:
    """What every statement about one table is made of.

    Every name of the table's is quoted, so that it may be called `order`. Names of ours in the same statement are two
    words, which neither a gate's table nor a key column is.

    Args:
        name: the table.
        key: the columns that name a row.
        columns: the columns a claim reads; empty for all of them.
        order: what `claim_next` orders by.
        escalated: the status of a row whose attempts ran out.
        reserved: a column that keeps a row, where it is not NULL, for whoever asks for its value.
    """

    def __init__(
        self,
        name: LiteralString,
        key: Key,
        columns: Sequence[str],
        order: Order,
        escalated: LiteralString,
        reserved: LiteralString | None = None,
    ) -> None:
        self.name = name
        self.reserved = reserved
        self.table = table(name)
        self.key = key
        self.order_by = order.sql
        self.marks = order.columns if order.ascending else ()
        self.escalated = Literal(escalated)
        self.is_key = SQL(" AND ").join(
            SQL("{} = {}").format(Identifier(column), Placeholder(param))
            for column, param in zip(key.columns, key.names(), strict=True)
        )
        self.key_list = SQL(", ").join(map(Identifier, key.columns))
        self.key_text = _key_text([Identifier(column) for column in key.columns])
        self.key_of_t_text = _key_text([Identifier("t", column) for column in key.columns])
        # A row's key, in what a statement answers: its columns, and its text.
        self.key_answer = SQL("{}, {} AS {}").format(self.key_list, self.key_text, Identifier(KEY_TEXT))
        self.key_answer_of_t = SQL("{}, {} AS {}").format(
            SQL(", ").join(Identifier("t", column) for column in key.columns), self.key_of_t_text, Identifier(KEY_TEXT)
        )
        self.columns = SQL("{}, {} AS {}").format(
            SQL(", ").join(map(Identifier, columns)) if columns else SQL("*"), self.key_text, Identifier(KEY_TEXT)
        )
        self.not_refusing = SQL("{} <> ALL(%(refusing)s)").format(self.key_text)

    @property
    def unreserved(self) -> Composable:
        """What keeps a look through the queue from the rows that are reserved for somebody."""
        return SQL("") if self.reserved is None else SQL(" AND {} IS NULL").format(Identifier(self.reserved))

    def same_key(self, left: LiteralString, right: LiteralString) -> Composable:
        return SQL(" AND ").join(
            SQL("{} = {}").format(Identifier(left, column), Identifier(right, column)) for column in self.key.columns
        )

    def among(self) -> Composable:
        """The rows whose keys were passed as lists, one list a key column.

        Of several columns each is compared by itself, because only the column gives a list of text its type; what
        else the WHERE says (a fence, `key_text`) leaves out the combinations nobody meant.
        """
        return SQL(" AND ").join(
            SQL("{} = ANY({})").format(Identifier(column), Placeholder(param))
            for column, param in zip(self.key.columns, self.key.names(), strict=True)
        )

    def picked(self, due: Composable, *, alone: bool, more: LiteralString = "") -> Composable:
        """The rows that a sweep takes on: the first hundred in the order of their keys, or one alone.

        Those whose keys are in `refusing` are left out.
        """
        return SQL(
            "SELECT {key_list}{more} FROM {table} WHERE {due} AND {which}\n"
            "    ORDER BY {key_list} LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED"
        ).format(
            key_list=self.key_list,
            more=SQL(more),
            table=self.table,
            due=due,
            which=self.is_key if alone else self.not_refusing,
        )

    def listed(self, due: Composable) -> bytes:
        """Read the keys of those rows, without a lock."""
        return compose(
            "SELECT {key} FROM {table} WHERE {due} AND {which} ORDER BY {key_list} LIMIT 100",
            key=self.key_answer,
            key_list=self.key_list,
            table=self.table,
            due=due,
            which=self.not_refusing,
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

    def move(self, columns: tuple[str, ...], entered: Phase | None, visit: LiteralString) -> Composable:
        """What a row that moves on is set to: our columns, no claim, and a visit of its own where a phase waits."""
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


def _key_text(columns: Sequence[Composable]) -> Composable:
    """Write a key as text: as it is where it is one column; else the parts joined by `/`, each with its own `/` as
    `%2F` and `%` as `%25`, so that no two rows have one text. `Key.text` writes what was read the same way."""
    texts = [SQL("{}::text").format(column) for column in columns]
    if len(texts) == 1:
        return texts[0]
    # chr(37), because a percent sign is a placeholder where there are parameters, and none where there are not.
    escaped = SQL("replace(replace({}, chr(37), chr(37) || '25'), '/', chr(37) || '2F')")
    return SQL(" || '/' || ").join(escaped.format(text) for text in texts)
