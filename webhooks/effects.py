"""Calls to the outside world that are remembered, so that a retry reuses the result instead of calling again.

1. The intention is committed, under the claim's fence. 2. The call. 3. The result, under the effect's own fence, so
that an owner who lost the row meanwhile can still say what happened. Between the second and the third there is an
instant in which a crash leaves the answer unknown: such an effect is *ambiguous*, and is never repeated silently.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import time
import typing
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

import psycopg
import structlog
from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python

from webhooks.db import Transaction, clean, compose, finished
from webhooks.db.persist import persist
from webhooks.db.sqlstate import is_about_the_work
from webhooks.errors import ConfigurationError, Escalate, LostClaim, NotDone, Snooze
from webhooks.phase import check_function, name_of
from webhooks.pool import Pool
from webhooks.text import NOT_KEPT, describe, less_and_less, members

if TYPE_CHECKING:
    from webhooks.claim import Claim

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

log = structlog.get_logger(__name__)

RECORD_RESULT_WITHIN_S = 30.0
TRIES_TO_INTEND = 3
ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)

INTEND = compose(
    "INSERT INTO {effects} (idempotency_key, claim_seq, state, input_hash, retry_safe, call_until)\n"
    "VALUES (%(key)s, %(claim_seq)s, 'intended', %(input_hash)s, %(retry_safe)s,\n"
    "    statement_timestamp() + %(timeout)s)\n"
    "ON CONFLICT (idempotency_key) DO NOTHING"
)
FIND = compose(
    "SELECT state, claim_seq, input_hash, result, call_until - statement_timestamp() AS call_left\n"
    "FROM {effects} WHERE idempotency_key = %(key)s"
)
INTEND_AGAIN = compose(
    "UPDATE {effects} SET claim_seq = %(claim_seq)s, state = 'intended', input_hash = %(input_hash)s,\n"
    "    error = NULL, ended_at = NULL, told_by = NULL, calls = calls + %(calls)s,\n"
    "    not_done = not_done + %(not_done)s, retry_safe = %(retry_safe)s,\n"
    "    intended_at = statement_timestamp(), call_until = statement_timestamp() + %(timeout)s\n"
    "WHERE idempotency_key = %(key)s AND state = %(state)s AND claim_seq = %(found_seq)s"
)
RECORD = compose(
    "UPDATE {effects} SET state = %(state)s, result = %(result)s, error = %(error)s,\n"
    "    not_done = not_done + (%(state)s = 'failed')::integer, ended_at = statement_timestamp()\n"
    "WHERE idempotency_key = %(key)s AND claim_seq = %(claim_seq)s AND state = 'intended'"
)


async def once(
    pool: Pool,
    claim: Claim[Any],
    name: str,
    fn: Callable[[*Ts], Awaitable[R]],
    args: tuple[*Ts],
    *,
    reconcile: Callable[[], Awaitable[R | None]] | None,
    retry_safe: bool,
    timeout: timedelta,  # noqa: ASYNC109
) -> R:
    """Call `fn` unless an earlier attempt of this visit did, and return what it returned. See `Claim.once`."""
    check_function(fn, f"effect {name!r}", *args)
    function, bound = _looked_through(fn)
    adapter: TypeAdapter[R] = _result_of(getattr(function, "__func__", function))
    effect = _Effect(claim, name, _input_hash((*bound, *args)), timeout)
    call: Callable[[], Awaitable[R]] = functools.partial(fn, *args)
    try:
        recorded = await effect.intended(retry_safe)
    except _Ambiguous as ambiguous:
        if reconcile is None:
            raise Escalate(
                f"effect {name!r} is ambiguous: it was called, and nobody knows whether it happened. "
                f"Look at the other side for {effect.key}"
            ) from None
        async with asyncio.timeout(timeout.total_seconds()):
            found = await reconcile()
        recorded = await effect.intended(retry_safe, _Looked(ambiguous.claim_seq, happened=found is not None))
        if found is not None:
            call = functools.partial(_given, found)
    if recorded is not None:
        return adapter.validate_json(recorded)
    try:
        async with asyncio.timeout(timeout.total_seconds()):
            value = await call()
    except Exception as error:
        if all(isinstance(member, NotDone) for member in members(error)):
            await finished(effect.record_not_done(pool, describe(error)))
        raise
    try:
        result = clean(json.dumps(adapter.dump_python(value, mode="json", warnings="error"), ensure_ascii=False))
        kept = adapter.validate_json(result)
        await finished(effect.record(pool, "done", result=result))
    except (ValueError, TypeError, RecursionError, psycopg.Error) as error:
        if isinstance(error, psycopg.Error) and not is_about_the_work(error):
            raise
        raise Escalate(f"effect {name!r} was called, but its result cannot be kept: {describe(error)}") from error
    return kept


async def _given(value: R) -> R:
    return value


class _Ambiguous(Exception):
    """An earlier call may or may not have happened; `claim_seq` is the claim that made it."""

    def __init__(self, claim_seq: int) -> None:
        super().__init__(claim_seq)
        self.claim_seq = claim_seq


@dataclass(frozen=True, slots=True)
class _Looked:
    """What the other side said of the call that a claim made."""

    claim_seq: int
    happened: bool


class _Effect:
    """One effect of one attempt: its idempotency key and its fence."""

    def __init__(self, claim: Claim[Any], name: str, input_hash: str, timeout: timedelta) -> None:
        self.claim = claim
        self.name = name
        self.key = claim.idempotency_key(name)
        self.claim_seq = claim.claim_seq
        self.input_hash = input_hash
        self.timeout = timeout
        self.first = name not in claim.effects
        self.unanswered = False
        claim.effects.add(name)

    async def intended(self, retry_safe: bool, looked: _Looked | None = None) -> str | None:
        """Commit the intention, or return the recorded result. Nothing is called yet, so an answer that was lost is
        asked for again.

        Raises:
            _Ambiguous: an earlier call was made, and nothing is known of it but what `looked` says.
        """
        tries = 0

        async def intend() -> str | None:
            nonlocal tries
            tries += 1
            try:
                async with self.claim.transaction() as tx:
                    return await self._intend(tx, retry_safe, looked)
            except psycopg.Error:
                self.unanswered = True
                raise
            return None

        def is_over() -> bool:
            return tries >= TRIES_TO_INTEND or self.claim.is_over()

        return await persist(intend, is_over, what="an effect's intention", about=self.key)

    async def _intend(self, tx: Transaction, retry_safe: bool, looked: _Looked | None) -> str | None:
        """Write down that the call is about to be made; return the recorded result where there is one."""
        params = {
            "key": self.key,
            "claim_seq": self.claim_seq,
            "input_hash": self.input_hash,
            "retry_safe": retry_safe,
            "timeout": self.timeout,
        }
        if (await tx.execute(INTEND, params)).rowcount == 1:
            return None
        found = await (await tx.execute(FIND, params)).fetchone()
        if found is None:
            raise LostClaim(f"effect {self.key} was removed while it was being looked up")
        ours = self.first and self.unanswered and found["claim_seq"] == self.claim_seq
        if found["state"] != "failed" and found["input_hash"] != self.input_hash:
            raise Escalate(
                f"effect {self.name!r} was called with other arguments before, so its result is no answer now: "
                "give another input another name"
            )
        if found["state"] == "done":
            return str(found["result"])
        told = looked if looked is not None and looked.claim_seq == found["claim_seq"] else None
        if found["state"] == "intended" and not (retry_safe or ours or told):
            if found["call_left"] > timedelta(0):
                raise Snooze(found["call_left"])
            raise _Ambiguous(found["claim_seq"])
        # Where the answer to our intention was lost, nothing was called yet; where the call is known to have happened,
        # nothing will be.
        calls = 0 if found["state"] == "intended" and (ours or (told and told.happened)) else 1
        not_done = int(told is not None and not told.happened)
        counts = {"calls": calls, "not_done": not_done}
        again = {**params, **counts, "state": found["state"], "found_seq": found["claim_seq"]}
        if (await tx.execute(INTEND_AGAIN, again)).rowcount != 1:
            raise LostClaim(f"effect {self.key} is being called by somebody else")
        return None

    async def record_not_done(self, pool: Pool, error: str) -> None:
        """Write that the call certainly did not happen, with less text where the database refuses it.

        Raises:
            LostClaim: a later attempt has taken the effect over.
        """
        for text in less_and_less(error):
            try:
                return await self.record(pool, "failed", error=clean(text))
            except psycopg.Error as failure:
                if not is_about_the_work(failure) or text == NOT_KEPT:
                    raise
        return None

    async def record(self, pool: Pool, state: str, *, result: str | None = None, error: str | None = None) -> None:
        """Write what happened, trying again while the database is away: what was done must not be forgotten.

        Raises:
            LostClaim: a later attempt has taken the effect over.
        """
        params = {"key": self.key, "claim_seq": self.claim_seq, "state": state, "result": result, "error": error}
        until = time.monotonic() + RECORD_RESULT_WITHIN_S
        tries = 0

        async def write() -> None:
            nonlocal tries
            tries += 1
            async with pool.transaction() as tx:
                written = (await tx.execute(RECORD, params)).rowcount
                if written != 1 and tries > 1:
                    # The answer to an earlier COMMIT may have been lost: the row itself says.
                    found = await (await tx.execute(FIND, params)).fetchone()
                    written = int(found is not None and (found["state"], found["claim_seq"]) == (state, self.claim_seq))
            if written != 1:
                raise LostClaim(f"effect {self.key} was taken over by a later attempt")

        def is_over() -> bool:
            return self.claim.is_over() and time.monotonic() > until

        await persist(write, is_over, what="an effect's result", about=self.key)


def _looked_through(fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """Return the function within a `partial`, and what the partial binds."""
    bound: tuple[object, ...] = ()
    while isinstance(fn, functools.partial):
        bound = (*fn.args, fn.keywords, *bound)
        fn = fn.func
    return fn, bound


@functools.lru_cache(maxsize=512)
def _result_of(fn: Callable[..., Any]) -> TypeAdapter[Any]:
    """Return how a function's result goes into JSON and back, from its annotation.

    Raises:
        ConfigurationError: it is not annotated, or with a name that cannot be found.
    """
    target = fn if inspect.isroutine(fn) else type(fn).__call__
    try:
        hints = typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ConfigurationError(f"the annotations of {name_of(fn)} cannot be read: {error}") from error
    if "return" not in hints:
        raise ConfigurationError(
            f"what an effect returns is kept, so {name_of(fn)} has to say what that is: "
            "`async def …(…) -> int:`, or `-> None:`"
        )
    try:
        return TypeAdapter(hints["return"])
    except PydanticUserError as error:
        raise ConfigurationError(f"what {name_of(fn)} returns cannot be kept: {error.message}") from error


def _input_hash(args: tuple[Any, ...]) -> str:
    """Return a digest of the arguments, the same on every attempt, also in another process."""
    try:
        plain = to_jsonable_python(_ordered(ANYTHING.dump_python(args)), bytes_mode="base64", inf_nan_mode="strings")
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"the arguments of an effect must be values pydantic can keep: {error}") from error


def _ordered(value: object) -> object:
    """Return a value with its sets as lists in one order: theirs differs from process to process."""
    if isinstance(value, dict):
        return {key: _ordered(part) for key, part in cast("dict[object, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_ordered(part) for part in cast("Sequence[object]", value)]
    if isinstance(value, (set, frozenset)):
        return sorted((_ordered(part) for part in cast("Collection[object]", value)), key=repr)
    return value
