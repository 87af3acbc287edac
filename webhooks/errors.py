"""Every error of the library, one tree.

::

    WebhooksError
    ├── ConfigurationError      a setting, a secret or a definition is wrong: nothing starts
    │   ├── SchemaBehind        the database lacks sections of schema.sql: run `webhooks migrate`
    │   └── UnknownName         a filter names what is nowhere: a command was used wrongly (2), a request is bad (400)
    ├── Refused                 a request was not authenticated; carries the named cause
    ├── Unreadable              a verified body cannot be read; its delivery is stored and ends `dead`
    ├── Unavailable             the database did not answer in time; the sender should try again
    ├── ProviderError           a provider's API refused a call or did not answer; says what to do
    ├── LostClaim               somebody else owns the row now; nothing of ours was written
    └── NotDone                 an effect's call certainly did not happen

    Snooze, Escalate            how a phase ends other than by returning
    Ignore, Park                how an event handler ends other than by returning

The last four are control flow, not faults, and so stand outside the tree.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from webhooks.text import as_text

if TYPE_CHECKING:
    from webhooks.gate import Gate


LONGEST_SNOOZE = timedelta(days=3650)


class WebhooksError(Exception):
    """Base of every fault this library raises."""


class ConfigurationError(WebhooksError):
    """A setting, a secret or a definition is wrong; the message says which and what to do."""


class SchemaBehind(ConfigurationError):
    """The database lacks sections of ``schema.sql``."""


class UnknownName(ConfigurationError):
    """A filter names what is nowhere; the message says what there is, names like it first."""


class Refused(WebhooksError):
    """A request is not authenticated.

    Args:
        cause: one of ``missing_signature``, ``malformed_header``, ``duplicate_header``, ``bad_signature``,
            ``stale_timestamp``, ``no_secret``. Safe to show to the sender: it names no computed value.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class Unreadable(WebhooksError):
    """A verified body cannot be read (not UTF-8, not JSON, …); the message is the reason shown to a person."""


class Unavailable(WebhooksError):
    """The database did not answer in time: nothing was promised, the sender should try again."""


class ProviderError(WebhooksError):
    """A provider's API did not do what was asked; the message says what to do about it, and shows no secret.

    Args:
        message: for a person.
        status: the status code of its answer, None where there was no answer.
        retry_after: how long it asks us to stay away, where it said so and that is longer than we wait in a call.
    """

    def __init__(self, message: str, *, status: int | None = None, retry_after: timedelta | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class LostClaim(WebhooksError):
    """The row is no longer ours: its lease ran out, or a person or a later phase moved it. Nothing was written."""


class NotDone(WebhooksError):
    """Raised by an effect's function when the call certainly did not happen, so that the next attempt calls again.

    Args:
        reason: what the other side said; an exception is described.
        retry_after: how long the other side asked us to wait (a 429). A phase that ends with such an error
            is snoozed for that long instead of being charged an attempt.
    """

    def __init__(self, reason: str | BaseException = "", *, retry_after: timedelta | None = None) -> None:
        super().__init__(as_text(reason))
        self.retry_after = retry_after


class Snooze(Exception):
    """Ends a phase: try again after `for_` (at least a second, at most ten years); no attempt is charged."""

    def __init__(self, for_: timedelta) -> None:
        super().__init__(f"snoozed for {for_}")
        self.for_ = min(max(for_, timedelta(seconds=1)), LONGEST_SNOOZE)


class Escalate(Exception):
    """Ends a phase or an event: a person has to decide, nothing runs until then. An exception is a reason too."""

    def __init__(self, reason: str | BaseException) -> None:
        self.reason = as_text(reason)
        super().__init__(self.reason)


class Ignore(Exception):
    """Ends an event handler: this event is none of our business, and `reason` says why. Its writes are rolled back."""

    def __init__(self, reason: str | BaseException) -> None:
        self.reason = as_text(reason)
        super().__init__(self.reason)


class Park(Exception):
    """Ends an event handler: put the delivery aside until its row moves on, or is there. Its writes are rolled back.

    Args:
        gate: the gate whose row the delivery waits for.
        key: the row's key.
        while_in: the statuses in which waiting makes sense; in any other the delivery is ignored.
        for_: how long to wait at most; then the delivery is `dead`: parked too long.
        missing: what becomes of it while there is no such row: it waits for one (the event that opens the row may come
            later), or is ignored.
    """

    def __init__(
        self,
        gate: Gate[Any],
        key: object,
        *,
        while_in: Collection[str],
        for_: timedelta = timedelta(hours=1),
        missing: Literal["wait", "ignore"] = "wait",
    ) -> None:
        super().__init__(f"parked on {gate.table}:{key} while it is in {', '.join(sorted(while_in))}")
        self.gate = gate
        self.key = key
        self.while_in = frozenset(while_in)
        self.for_ = for_
        self.missing = missing
