"""What every source has: a name, a recipe, handlers, and a way to read what its provider sends."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar, overload

from pydantic import BaseModel

from webhooks import signatures
from webhooks.delivery import Data, Event, Headers, RawEvent
from webhooks.errors import ConfigurationError
from webhooks.phase import check_function, name_of
from webhooks.signatures import Recipe
from webhooks.sources.reading import digest_key, fit_key, read_json

if TYPE_CHECKING:
    from webhooks.db import Transaction

Model = TypeVar("Model", bound=BaseModel)
EventHandler: TypeAlias = "Callable[[Event[Data], Transaction], Coroutine[Any, Any, None]]"

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,49}")  # it stands in the URL and, in capitals, in the name of a setting
_ALWAYS_KEPT = frozenset({"content-type", "content-encoding", "user-agent"})


@dataclass(frozen=True, slots=True)
class Handler:
    """One function registered for one event.

    Args:
        event: the event's name.
        function: what is called.
        model: what the event's data is read as first; None hands over the dict.
    """

    event: str
    function: EventHandler[Any]
    model: type[BaseModel] | None


class Source(ABC):
    """A provider at one URL, `/webhooks/{name}`, with its own secrets and handlers.

    A new provider is a subclass: `recipe`, `events`, and `identity` where the provider gives its deliveries an id.
    Everything but `on` is pure; nothing but `verify`, `read` and `on` raises, whatever the request holds.

    Args:
        name: where it is in the URL; two sources of one provider need two names.

    Raises:
        ConfigurationError: the name cannot stand in a URL, or the class has no recipe.
    """

    recipe: ClassVar[Recipe]
    event_headers: ClassVar[frozenset[str]] = frozenset()
    """The headers, in lower case, that say what the delivery is; kept with it."""
    redelivery_window: ClassVar[timedelta] = timedelta(days=30)
    """How long after a delivery its provider may send it again; its key is kept at least that long. Generous, where
    the provider does not say."""

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"{name!r} cannot name a source: use at most 50 lower-case letters, digits, '-' and '_', a letter first"
            )
        if not hasattr(type(self), "recipe"):
            raise ConfigurationError(f"{type(self).__name__} has no recipe: say how its provider signs")
        self.name = name
        self.handlers: dict[str, Handler] = {}

    @cached_property
    def kept_headers(self) -> frozenset[str]:
        """The names of the headers that are stored; all others are dropped, credentials and cookies among them."""
        return _ALWAYS_KEPT | self.recipe.headers | self.event_headers

    def keep(self, headers: Headers) -> Headers:
        """Return the header lines that are stored, in their order."""
        kept = self.kept_headers
        return tuple(line for line in headers if line[0] in kept)

    def verify(self, headers: Headers, body: bytes, secrets: Sequence[str], now: float) -> None:
        """Return if the request was signed with one of the secrets.

        Raises:
            Refused: with the named cause.
        """
        signatures.verify(self.recipe, headers, body, secrets, now)

    def answered(self, headers: Headers, body: bytes) -> bool:
        """Say whether a verified request is a mere test of the URL: answered with 200, and not stored."""
        return False

    def dedup_key(self, headers: Headers, body: bytes) -> str:
        """Return what a second copy of this delivery has in common with the first: printable, at most 200 characters.

        Without an id from the sender it is the SHA-256 of the body.
        """
        given = self.identity(headers, body)
        return fit_key(given) if given else digest_key(body)

    def identity(self, headers: Headers, body: bytes) -> str | None:
        """Return the id that the sender gave the delivery and repeats with every copy, None where it gave none."""
        return None

    def read(self, headers: Headers, body: bytes) -> Any:
        """Parse a verified body.

        Raises:
            Unreadable: with the reason for a person.
        """
        return read_json(body)

    @abstractmethod
    def events(self, headers: Headers, body: Any) -> list[RawEvent]:
        """Return what a parsed body says happened, in the order of the body; nothing where it says nothing."""

    @overload
    def on(self, event: str) -> Callable[[EventHandler[dict[str, Any]]], EventHandler[dict[str, Any]]]: ...
    @overload
    def on(self, event: str, *, model: type[Model]) -> Callable[[EventHandler[Model]], EventHandler[Model]]: ...
    def on(self, event: str, *, model: type[Any] | None = None) -> Callable[[EventHandler[Any]], EventHandler[Any]]:
        """Register the decorated coroutine function for an event.

        Args:
            event: its name, exactly as the source spells it.
            model: a pydantic model that the event's data is read as; without it `event.data` is a dict.

        Raises:
            ConfigurationError: the event has a handler already, or the function is not `async def` with two arguments.
        """

        def register(function: EventHandler[Any]) -> EventHandler[Any]:
            earlier = self.handlers.get(event)
            if earlier is not None:
                raise ConfigurationError(
                    f"{self.name} has two handlers for {event!r}: {name_of(earlier.function)} and {name_of(function)}; "
                    "keep one and let it do both"
                )
            check_function(function, f"{self.name}: the handler of {event!r}", "event", "tx")
            self.handlers[event] = Handler(event, function, model)
            return function

        return register
