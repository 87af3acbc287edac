"""What `bench/claims.py` measures side by side: one module a library, each set up as its own documentation says."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib import metadata
from typing import Literal, LiteralString, TypeAlias

Mode: TypeAlias = Literal["single", "default", "tuned", "pickup"]
"""One job at a time; the library's own defaults; fifty at a time; the defaults again, with jobs coming in."""

Go: TypeAlias = Callable[[], Awaitable[None]]
Enqueue: TypeAlias = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to work off jobs.

    Args:
        name: as the table shows it.
        distributions: the packages whose versions matter.
        fill: makes its tables in an empty database and inserts jobs 1 to n.
        done: the query that counts its completed jobs.
        work: runs its worker until it is cancelled; awaits `go` when all that can be opened beforehand is open.
        enqueueing: opens what inserts one job from another process; None where the worker's process has to do it.
        settings: what each mode means to it; without "pickup" that is not measured.
        uvloop: whether its own command runs on uvloop.
    """

    name: str
    distributions: tuple[str, ...]
    fill: Callable[[str, int], Awaitable[None]]
    done: LiteralString
    work: Callable[[str, Mode, int, Go], Awaitable[None]]
    enqueueing: Callable[[str], AbstractAsyncContextManager[Enqueue]] | None
    settings: Mapping[Mode, str]
    uvloop: bool


# Where each is, and the packages that have to be there.
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "webhooks-known": ("peers.ours:known", ()),
    "webhooks-queue": ("peers.ours:queue", ()),
    "webhooks-agents": ("peers.ours:agents", ()),
    "procrastinate": ("peers.procrastinate:peer", ("procrastinate",)),
    "pgqueuer": ("peers.pgqueuer:peer", ("pgqueuer", "asyncpg")),
    "oban": ("peers.oban:peer", ("oban",)),
    "chancy": ("peers.chancy:peer", ("chancy",)),
    "absurd": ("peers.absurd:peer", ("absurd_sdk", "absurdctl")),
}
OURS = tuple(name for name in PEERS if name.startswith("webhooks-"))


def missing(name: str) -> list[str]:
    """Return the packages that a peer needs and that are not installed."""
    return [package for package in PEERS[name][1] if importlib.util.find_spec(package) is None]


def load(name: str) -> Peer:
    module, attribute = PEERS[name][0].split(":")
    peer = getattr(importlib.import_module(module), attribute)
    assert isinstance(peer, Peer)
    return peer


def versions(name: str) -> dict[str, str]:
    return {distribution: metadata.version(distribution) for distribution in load(name).distributions}
