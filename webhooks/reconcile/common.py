"""What reconciling with any provider needs: a way to the database, the time, a source, somebody to tell of progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from webhooks.consumer import Consumer
from webhooks.db import Transaction
from webhooks.errors import ConfigurationError
from webhooks.provider_api import Clock
from webhooks.sources import Source

Begin = Callable[[], AbstractAsyncContextManager[Transaction]]
"""Opens a transaction: `pool.transaction`, or that of one connection."""
Tell = Callable[[str, int, int | None], None]
"""Told of progress: what is being done, how much is done, of how much where that is known."""

CLOCK = Clock()


def quiet(what: str, done: int, of: int | None) -> None:
    """Tell nobody of progress."""


def source_of(consumer: Consumer, kind: type[Source], name: str | None = None) -> Source:
    """Return the consumer's source of a provider: the one named, or the only one.

    Raises:
        ConfigurationError: there is none, or there are several and none is named.
    """
    ours = {source.name: source for source in consumer.sources.values() if isinstance(source, kind)}
    if name is not None and name in ours:
        return ours[name]
    if name is None and len(ours) == 1:
        return next(iter(ours.values()))
    listed = ", ".join(ours) or "none"
    if name is not None:
        raise ConfigurationError(f"there is no source {name!r} of {kind.__name__}; there are: {listed}")
    raise ConfigurationError(f"which source of {kind.__name__}? Say it with --source; there are: {listed}")
