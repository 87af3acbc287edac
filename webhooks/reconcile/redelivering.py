"""Having GitHub deliver again what is missing, and waiting until it is here."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from webhooks.errors import ProviderError
from webhooks.inbox import Copy
from webhooks.provider_api import Clock, ProviderClient
from webhooks.reconcile import asking
from webhooks.reconcile.common import CLOCK, Begin, Tell, quiet
from webhooks.reconcile.comparing import Line
from webhooks.reconcile.github import Comparison, copies, copies_here
from webhooks.reconcile.github_log import ask_again

LOOK_EVERY_S = 1.0
TRY_EVERY_S = 10.0
"""Between two tries to take over what another run claimed, and perhaps never asked for."""
ASK_EVERY_S = 1.0
"""GitHub asks for a second between requests that make it do something."""
PATIENCE = timedelta(minutes=5)
DELIVERED_WITHIN = timedelta(minutes=2)

ASKED_NOW = "GitHub agreed to deliver it again"
ASKED_BEFORE = "it was asked for a short time ago, and is not asked for again so soon"

# What GitHub answers when it cannot deliver something again, whoever asks however often.
NOT_REDELIVERABLE = frozenset({400, 404, 410, 422})
# What it answers about us, not about a delivery: it would answer the same for all the others.
NOT_OURS = frozenset({401, 403})
# Where a time to stay away is that of a limited rate. A 503 names one too, and may be about this delivery alone.
LIMITED = frozenset({403, 429})


Result = Literal["arrived", "not arrived", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a delivery that was missing.

    Args:
        result: `refused`: GitHub cannot deliver it again; `failed`: GitHub could not take the request just now.
        asked: whether this run asked for it; another may have, or it came by itself.
        reason: for a person, where it did not arrive.
        delivery: its id here, once it arrived.
    """

    result: Result
    asked: bool
    reason: str | None = None
    delivery: int | None = None


async def redeliver(
    begin: Begin,
    client: ProviderClient,
    comparison: Comparison,
    *,
    wait: timedelta = DELIVERED_WITHIN,
    growing: bool = False,
    clock: Clock = CLOCK,
    tell: Tell = quiet,
) -> dict[str, Outcome]:
    """Have GitHub deliver again what is missing, and wait until it has arrived.

    What another run asked for within the last minutes is not asked for again, only waited for. A run that was cut off
    leaves nothing behind that keeps the next one from going on.

    Args:
        begin: opens a transaction.
        client: one of GitHub's.
        comparison: what is missing.
        wait: how long to wait for the last one after it was asked for.
        growing: ask more and more seldom for what does not arrive.
        clock: the time and how to wait.
        tell: told of progress.

    Returns:
        What became of each missing delivery, by guid.

    Raises:
        ProviderError: GitHub does not let us, or limits the rate for longer than five minutes.
    """
    run = _Run(begin, client, comparison, growing, clock)
    # On a schedule nobody waits for what was not asked for now.
    until = clock.now() + (0 if growing else wait.total_seconds())
    try_at = 0.0
    async with begin() as tx:
        await asking.forget(tx, comparison.hook.scope)
    while run.open:
        if clock.now() >= try_at:
            for line in [line for line in run.open.values() if line.guid not in run.asked]:
                if await run.ask(line):
                    tell("asking GitHub to deliver again", len(run.asked), len(comparison.wanted))
                    until = clock.now() + wait.total_seconds()
                    await clock.sleep(ASK_EVERY_S)
            try_at = clock.now() + TRY_EVERY_S
        await run.look()
        tell("waiting for them to arrive", len(run.outcomes), len(comparison.wanted))
        if not run.open or clock.now() >= until:
            break
        await clock.sleep(LOOK_EVERY_S)
    return run.ended()


class _Run:
    """One run's missing deliveries: those still open, and what became of the others."""

    def __init__(
        self, begin: Begin, client: ProviderClient, comparison: Comparison, growing: bool, clock: Clock
    ) -> None:
        self._begin, self._client, self._clock, self._growing = begin, client, clock, growing
        self._source, self._hook = comparison.source, comparison.hook
        self._patience = PATIENCE
        self.open = {line.guid: line for line in comparison.wanted}
        self.asked: set[str] = set()
        self.outcomes: dict[str, Outcome] = {}

    async def ask(self, line: Line) -> bool:
        """Ask for a delivery, unless it is here by now, or somebody asked just before; return whether that was done."""
        scope, guid = self._hook.scope, line.guid
        async with self._begin() as tx:
            copy = (await copies(tx, self._source, self._hook, [guid])).get(guid)
            ours = copy is None and await asking.claim(tx, scope, guid, growing=self._growing)
        if copy is not None:
            self._arrived(guid, copy)
        if not ours:
            return False
        try:
            await ask_again(self._client, self._hook, line.attempt, clock=self._clock)
        except ProviderError as error:
            if error.retry_after is not None and error.status in LIMITED:
                await self._stay_away(guid, error, error.retry_after)
            elif error.status in NOT_OURS:
                raise
            elif error.status in NOT_REDELIVERABLE:
                self._close(guid, Outcome("refused", asked=True, reason=str(error)))
            else:
                # Of this one only: those after it must not wait until GitHub has forgotten about it.
                self._close(guid, Outcome("failed", asked=False, reason=str(error)))
            return False
        async with self._begin() as tx:
            await asking.answered(tx, scope, guid)
        self.asked.add(guid)
        return True

    async def look(self) -> None:
        """See which have arrived."""
        for guid, copy in (await copies_here(self._begin, self._source, self._hook, list(self.open))).items():
            self._arrived(guid, copy)

    def ended(self) -> dict[str, Outcome]:
        """Return what became of each, those included that did not arrive."""
        for guid in list(self.open):
            asked = guid in self.asked
            self._close(guid, Outcome("not arrived", asked, ASKED_NOW if asked else ASKED_BEFORE))
        return self.outcomes

    async def _stay_away(self, guid: str, error: ProviderError, pause: timedelta) -> None:
        """Wait as long as GitHub asks for, holding nothing meanwhile."""
        async with self._begin() as tx:
            await asking.give_back(tx, self._hook.scope, guid)
        if pause > self._patience:
            raise error
        self._patience -= pause
        await self._clock.sleep(pause.total_seconds())

    def _arrived(self, guid: str, copy: Copy) -> None:
        self._close(guid, Outcome("arrived", asked=guid in self.asked, delivery=copy.id))

    def _close(self, guid: str, outcome: Outcome) -> None:
        del self.open[guid]
        self.outcomes[guid] = outcome
