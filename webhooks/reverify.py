"""Verifying refused requests again, with the secrets of today, as of the time of their receipt.

What verifies now goes through the same door as any other request: the source's own `verify`, its dedup key, and the
accept path's `store`. It becomes a delivery of origin `received`, because that is what it is: a request that a provider
sent here and signed rightly; `rejections.delivery` says which one came in late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from webhooks import accept, inbox, signatures
from webhooks.consumer import Consumer
from webhooks.db import Transaction
from webhooks.delivery import Delivery
from webhooks.errors import ConfigurationError, Refused
from webhooks.inbox import Identity, identity
from webhooks.rejections import WANTED, Filter, composed, wanted_params
from webhooks.sources import Source
from webhooks.tunnel.probe import is_probe

AT_ONCE = 20

CANDIDATES = composed(
    "SELECT id FROM {rejections}\n{wanted}\n"
    "    AND delivery IS NULL AND (%(ids)s::bigint[] IS NULL OR id = ANY(%(ids)s))\n"
    "ORDER BY received_at, id",
    wanted=WANTED,
)
KEPT = composed("SELECT id FROM {rejections} WHERE id = ANY(%(ids)s)")
LOOK = composed(
    "SELECT id, source, cause, headers, body, body_bytes, received_at FROM {rejections}\n"
    "WHERE id = ANY(%(ids)s) AND delivery IS NULL ORDER BY received_at, id"
)
# Of two people who do this at once, one has the row.
TAKE = composed(
    "WITH mine AS MATERIALIZED (\n"
    "    SELECT id FROM {rejections} WHERE id = ANY(%(ids)s) AND delivery IS NULL FOR NO KEY UPDATE SKIP LOCKED\n"
    ")\n"
    "SELECT r.id, source, cause, headers, body, body_bytes, received_at FROM {rejections} AS r\n"
    "JOIN mine ON mine.id = r.id ORDER BY received_at, r.id"
)
SETTLE = composed(
    "UPDATE {rejections} AS r SET delivery = became.delivery, accepted_at = statement_timestamp()\n"
    "FROM unnest(%(ids)s::bigint[], %(deliveries)s::bigint[]) AS became (id, delivery)\n"
    "WHERE r.id = became.id AND r.delivery IS NULL"
)

Outcome = Literal["accepted", "duplicate", "rearmed", "answered", "refused"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became, or would become, of a rejection.

    Args:
        id: the rejection's.
        source: whose it is.
        cause: why it was refused then.
        outcome: `accepted`, `duplicate` and `rearmed` are what the accept path answers; `answered`: a test of the URL,
            of which nothing is stored; `refused`: it stays what it is.
        delivery: the delivery that it became, or is a copy of.
        told: why it stays refused, or what else there is to say.
    """

    id: int
    source: str
    cause: str
    outcome: Outcome
    delivery: int | None = None
    told: str = ""


async def candidates(tx: Transaction, wanted: Filter, ids: Sequence[int] | None = None) -> list[int]:
    """Return the rejections, oldest first, that were not accepted yet; `limit` does not count here.

    Args:
        tx: to read in.
        wanted: which.
        ids: only those of them.

    Raises:
        ConfigurationError: there is no rejection of an id.
    """
    if ids is not None:
        kept = {row["id"] for row in await (await tx.execute(KEPT, {"ids": list(ids)})).fetchall()}
        missing = sorted({*ids} - kept)
        if missing:
            raise ConfigurationError(
                f"there is no rejection {', '.join(map(str, missing))}; the oldest ones are forgotten"
            )
    params = {**wanted_params(wanted), "ids": None if ids is None else list(ids)}
    return [row["id"] for row in await (await tx.execute(CANDIDATES, params)).fetchall()]


async def reverify(
    tx: Transaction,
    consumer: Consumer,
    secrets: Mapping[str, Sequence[str]],
    ids: Sequence[int],
    *,
    ignore_age: bool = False,
    dry: bool = False,
) -> list[Verdict]:
    """Verify rejections again, and accept what verifies; at most `AT_ONCE` in one transaction, for their bodies' sake.

    Args:
        tx: what can be applied afterwards is added to its `moved`.
        consumer: whose sources verify.
        secrets: by source, those in force.
        ids: which; one that was accepted meanwhile, or that somebody else has just now, is left out.
        ignore_age: accept a request though its signed time was too far from that of its receipt.
        dry: only say what would become of them.
    """
    rows = await (await tx.execute(LOOK if dry else TAKE, {"ids": list(ids)})).fetchall()
    verdicts: list[Verdict] = []
    good: list[tuple[dict[str, Any], Delivery, str]] = []
    for row in rows:
        judged = _judged(row, consumer, secrets, ignore_age=ignore_age)
        if isinstance(judged, Verdict):
            verdicts.append(judged)
        else:
            good.append((row, *judged))
    became = await (_known if dry else _stored)(tx, consumer, [delivery for _, delivery, _ in good])
    settled: dict[int, int] = {}
    for row, delivery, note in good:
        key = identity(delivery)
        outcome, id_, told = became.get(key, ("refused", None, "another copy was removed just now: try again"))
        verdicts.append(Verdict(row["id"], row["source"], row["cause"], outcome, id_, note or told))
        if outcome == "accepted":
            became[key] = ("duplicate", id_, "another rejection of the same delivery")
        if id_ is not None:
            settled[row["id"]] = id_
    if settled and not dry:
        await tx.execute(SETTLE, {"ids": list(settled), "deliveries": list(settled.values())})
    return sorted(verdicts, key=lambda verdict: verdict.id)


_Became = dict[Identity, tuple[Outcome, int | None, str]]


async def _stored(tx: Transaction, consumer: Consumer, deliveries: Sequence[Delivery]) -> _Became:
    found = await accept.store(tx, consumer, deliveries) if deliveries else {}
    return {key: (accepted.status, accepted.delivery, "") for key, accepted in found.items()}


async def _known(tx: Transaction, consumer: Consumer, deliveries: Sequence[Delivery]) -> _Became:
    """Say what `_stored` would do."""
    became: _Became = {identity(delivery): ("accepted", None, "") for delivery in deliveries}
    for key, copy in (await inbox.find(tx, list(became))).items():
        became[key] = ("rearmed" if copy.status == "dead" else "duplicate", copy.id, f"it is {copy.status}")
    return became


def _judged(
    row: dict[str, Any], consumer: Consumer, secrets: Mapping[str, Sequence[str]], *, ignore_age: bool
) -> Verdict | tuple[Delivery, str]:
    """Verify one as of its receipt: the delivery that it is, with a note, or the verdict where it is none."""

    def verdict(outcome: Outcome, told: str) -> Verdict:
        return Verdict(row["id"], row["source"], row["cause"], outcome, told=told)

    source = consumer.sources.get(row["source"])
    if source is None:
        return verdict("refused", "this consumer has no such source any more")
    if row["body"] is None:
        return verdict("refused", f"its body ({row['body_bytes']} bytes came) was not kept")
    headers, body = tuple((name, value) for name, value in row["headers"]), bytes(row["body"])
    note = ""
    try:
        source.verify(headers, body, secrets.get(source.name, ()), row["received_at"].timestamp())
    except Refused as refused:
        if refused.cause != "stale_timestamp":
            return verdict("refused", refused.cause)
        if not ignore_age or not _right_but_old(source, headers, body, secrets.get(source.name, ())):
            return verdict("refused", "stale_timestamp, as of its receipt; --ignore-age accepts it all the same")
        note = "its age was ignored"
    if is_probe(body) or source.answered(headers, body):
        return verdict("answered", "a test of the URL: nothing to store")
    return Delivery(source.name, source.dedup_key(headers, body), source.keep(headers), body), note


def _right_but_old(source: Source, headers: Any, body: bytes, secrets: Sequence[str]) -> bool:
    """Say whether nothing but its age is wrong, whatever the order in which a source of the user's own looks."""
    try:
        signatures.verify(replace(source.recipe, tolerance_s=None), headers, body, secrets, 0)
    except Refused:
        return False
    return True
