"""The registry: which gates and sources make up one consumer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from click import Command
from starlette.routing import BaseRoute

from webhooks.db import Transaction
from webhooks.errors import ConfigurationError
from webhooks.gate import Gate
from webhooks.gate.columns import lacking, writes
from webhooks.sources import Handler, Source


class Consumer:
    """What `webhooks serve --app handlers:consumer` runs.

    Args:
        gates: the gated tables.
        sources: who may send, each at `/webhooks/{its name}`.
        routes: Starlette routes of your own, behind the control plane's checks.
        commands: click commands of your own, under `webhooks`.
        dev: an async context manager that runs while `serve --dev` does, such as a stand-in for other services.
        warnings: asked once on start; each thing it returns is told as a warning, such as a token that is not set.

    Raises:
        ConfigurationError: two gates share a table, or two sources a name.
    """

    def __init__(
        self,
        *,
        gates: Sequence[Gate[Any]],
        sources: Sequence[Source],
        routes: Sequence[BaseRoute] = (),
        commands: Sequence[Command] = (),
        dev: Callable[[], AbstractAsyncContextManager[None]] | None = None,
        warnings: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self.gates = {gate.table: gate for gate in gates}
        self.sources = {source.name: source for source in sources}
        self.routes = tuple(routes)
        self.commands = tuple(commands)
        self.dev = dev
        self.warnings = warnings
        if len(self.gates) != len(gates):
            raise ConfigurationError("two gates over one table: declare all its phases on one gate")
        if len(self.sources) != len(sources):
            raise ConfigurationError("two sources have one name: give one of them another, it is its URL")
        for own in ("deliveries", "notifications"):
            if own in self.gates:
                raise ConfigurationError(f"the table {own} is the library's own, it has its gate already")

    async def check(self, tx: Transaction) -> list[str]:
        """Compare the tables with what the gates need, and with the columns that handlers and phases write there.

        Returns:
            One sentence a fault; empty when all is well.
        """
        faults = [fault for gate in self.gates.values() for fault in await gate.check(tx)]
        functions: list[Callable[..., Any]] = [
            *(handler.function for source in self.sources.values() for handler in source.handlers.values()),
            *(phase.function for gate in self.gates.values() for phase in gate.phases.values() if phase.function),
        ]
        found = [write for function in functions for write in writes(function, Gate)]
        for gate in self.gates.values():
            faults += await lacking(tx, gate.table, [write for write in found if write.of is gate])
        return faults

    def handler(self, source: str, event: str) -> Handler | None:
        """Return what is registered for an event, if anything is."""
        known = self.sources.get(source)
        return None if known is None else known.handlers.get(event)
