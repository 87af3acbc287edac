"""Refused requests on their way into the table `rejections`: beside the receiver, never in its way.

A request is queued only after its answer was sent, in memory that is bounded and shared fairly among the sources. One
task with a connection of its own writes what waits, at most once a second and a mebibyte a second, and trims the table
in the same transaction. So whatever is sent by whomever, the disk and the database have a small, steady load of it.
What finds no room, or no database, is dropped and counted.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv6Address, IPv6Network, ip_address

import structlog
from prometheus_client import Counter

from webhooks import observe
from webhooks.db import Connection, ended, transaction
from webhooks.delivery import Headers
from webhooks.errors import Refused, Unavailable
from webhooks.pool import Pool
from webhooks.rejections import MOST_BODY_BYTES, Caps, Rejection, keep, store, trim
from webhooks.signatures import Recipe, verify
from webhooks.sources import Source
from webhooks.wire import Wire

log = structlog.get_logger(__name__)

MOST_WAITING = 1000
MOST_WAITING_BYTES = 16 * 1024 * 1024
MOST_AT_ONCE = 100
MOST_BYTES_AT_ONCE = 4 * 1024 * 1024
WRITE_EVERY_S = 1.0
BYTES_A_SECOND = 1024 * 1024
TRIM_EVERY_S = 3600.0
WITHIN_S = 3.0
# Less than this is hashed faster than a thread is asked to.
SHORT_BYTES = 64 * 1024
ROW_BYTES = 1024
# What is lost with a power cut are the rejections of its last second: not worth a wait for the disk.
LIMITS = "; SET LOCAL statement_timeout = '2s'; SET LOCAL synchronous_commit = off"

DROPPED = Counter(
    "webhooks_rejections_dropped",
    "Refused requests that were not kept, by source: no room for them, or no database.",
    ("source", "reason"),
    registry=observe.REGISTRY,
)

_Queue = tuple[str, bool]  # a source, and whether a secret of ours signed what waits
Likeness = tuple[str, Headers, int, bytes | None]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that the receiver did not let in.

    Args:
        source: the name in its URL.
        cause: why it was refused.
        headers: all header lines as received.
        body: the bytes as received; None where they were not read to their end.
        size: how many were read.
        at: unix seconds, the clock that it was verified by.
        sender: the address that it came from.
    """

    source: str
    cause: str
    headers: Headers
    body: bytes | None
    size: int
    at: float
    sender: str | None = None


class Refusals:
    """Keeps what the receiver refused.

    Args:
        pool: whose address and settings the connection takes; the pool's own connections are not used.
        sources: by name, whose requests are kept.
        caps: how much of them; with no rows nothing is.
        secrets: by source, those in force and those there were before: what one of them signed is kept apart.
    """

    def __init__(
        self,
        pool: Pool,
        sources: Mapping[str, Source],
        caps: Caps,
        secrets: Callable[[str], Sequence[str]] = lambda source: (),
    ) -> None:
        self._sources = sources
        self._caps = caps
        self._wire = Wire(pool)
        self._secrets = secrets
        queues = [(name, proved) for proved in (True, False) for name in sources]
        self._waiting: dict[_Queue, dict[Likeness, Rejection]] = {queue: {} for queue in queues}
        self._bytes = dict.fromkeys(queues, 0)
        shares = max(len(sources), 1)
        self._most = max(MOST_WAITING // shares, 10)
        self._most_bytes = max(MOST_WAITING_BYTES // shares, 2 * MOST_BODY_BYTES)
        self._arrived = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._told = False

    @property
    def waiting(self) -> int:
        """How many refused requests wait to be written."""
        return sum(map(len, self._waiting.values()))

    def start(self) -> None:
        """Start the task that writes."""
        self._task = asyncio.create_task(self._run(), name="webhooks-rejections")

    async def stop(self) -> None:
        """Write what waits, as far as that can be done within three seconds, then end."""
        self._stopping.set()
        self._arrived.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=WITHIN_S)
            await ended([self._task])
        while left := self._next_group(MOST_AT_ONCE, MOST_BYTES_AT_ONCE):
            self._drop(left, "stopping")
        await self._wire.close()

    async def keep(self, refusal: Refusal) -> None:
        """Queue a refused request whose sender has had the answer."""
        source, body = refusal.source, refusal.body
        if self._caps.rows == 0 or self._stopping.is_set():
            return
        proved = body is not None and await self._is_proved(refusal.headers, body)
        queue = (source, proved)
        if self._full(queue):
            DROPPED.labels(source, "no room").inc()
            return
        kept = keep(self._sources[source], refusal.headers)
        digest = None
        if body is not None:
            digest = _sha256(body) if len(body) <= SHORT_BYTES else await asyncio.to_thread(_sha256, body)
        likeness = (refusal.cause, kept, refusal.size, digest)
        waiting = self._waiting[queue]
        before = waiting.get(likeness)
        if before is not None:
            waiting[likeness] = replace(before, last_at=max(refusal.at, before.last_at), times=before.times + 1)
            return
        stored = body if refusal.size <= MOST_BODY_BYTES else None
        waiting[likeness] = Rejection(
            source,
            refusal.cause,
            kept,
            stored,
            refusal.size,
            digest,
            refusal.at,
            last_at=refusal.at,
            proved=proved,
            sender=_network(refusal.sender),
        )
        self._bytes[queue] += _weight(waiting[likeness])
        self._arrived.set()

    def _full(self, queue: _Queue) -> bool:
        return len(self._waiting[queue]) >= self._most or self._bytes[queue] >= self._most_bytes

    async def _is_proved(self, headers: Headers, body: bytes) -> bool:
        """Whether somebody who knows a secret of ours sent this, whatever its age and wherever it was meant to go."""
        if not any(name in other.recipe.headers for other in self._sources.values() for name, _ in headers):
            return False
        look = partial(
            _signed_by_one_of, headers, body, [(s.recipe, self._secrets(s.name)) for s in self._sources.values()]
        )
        return look() if len(body) <= SHORT_BYTES else await asyncio.to_thread(look)

    async def _run(self) -> None:
        while True:
            group = self._next_group(MOST_AT_ONCE, MOST_BYTES_AT_ONCE)
            # Also with nothing to add: on start, and every hour, what has grown too old is removed.
            await self._write(sorted(group, key=lambda rejection: rejection.received_at))
            pause = max(WRITE_EVERY_S, sum(map(_weight, group)) / BYTES_A_SECOND)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            if self.waiting:
                continue
            if self._stopping.is_set():
                return
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(TRIM_EVERY_S):
                    await self._arrived.wait()

    def _next_group(self, most: int, most_bytes: int) -> list[Rejection]:
        """Take what is written next, in turn from every source."""
        group: list[Rejection] = []
        size = 0
        while self.waiting:
            for queue, waiting in self._waiting.items():
                if not waiting:
                    continue
                if len(group) >= most or (group and size >= most_bytes):
                    return group
                rejection = waiting.pop(next(iter(waiting)))
                self._bytes[queue] -= _weight(rejection)
                size += _weight(rejection)
                group.append(rejection)
        return group

    async def _write(self, group: list[Rejection]) -> None:
        error: BaseException | None = None
        try:
            # A connection that was idle may be dead without our knowing: the second try is on a new one.
            for _ in range(2):
                if not self._wire.up and not await self._wire.connect(WITHIN_S):
                    error = Unavailable(self._wire.failure)
                    break
                error = await self._wire.run(partial(self._flush, group), WITHIN_S)
                if error is None or self._wire.up:
                    break
        except asyncio.CancelledError:
            self._drop(group, "stopping")
            raise
        if error is None:
            self._told = False
            return
        self._drop(group, "no database")
        if not self._told:
            log.warning("refused requests cannot be kept and are dropped", error=str(error) or self._wire.failure)
        self._told = True

    async def _flush(self, group: list[Rejection], connection: Connection) -> None:
        async with transaction(connection, LIMITS) as tx:
            if group:
                await store(tx, group)
            await trim(tx, self._caps)

    def _drop(self, group: Collection[Rejection], reason: str) -> None:
        for rejection in group:
            DROPPED.labels(rejection.source, reason).inc(rejection.times)


def _signed_by_one_of(headers: Headers, body: bytes, signers: Sequence[tuple[Recipe, Sequence[str]]]) -> bool:
    for recipe, secrets in signers:
        with suppress(Refused):
            verify(replace(recipe, tolerance_s=None), headers, body, secrets, 0)
            return True
    return False


def _network(sender: str | None) -> str | None:
    """Return the address that requests are grouped by: in IPv6 a household has many."""
    try:
        address = ip_address(sender or "")
    except ValueError:
        return None
    return str(IPv6Network((address, 64), strict=False)) if isinstance(address, IPv6Address) else str(address)


def _sha256(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def _weight(rejection: Rejection) -> int:
    return ROW_BYTES + len(rejection.body or b"")
