"""How long each kind of thing is kept, and so before which time it is old enough to go."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Literal, get_args

from webhooks.settings import Settings, keep_keys_for
from webhooks.sources import Source

Kind = Literal["keys", "bodies", "headers", "notifications", "runs", "effects", "attempts"]
"""In the order in which they go: what loses its row needs no update before, and attempts outlive their effects."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """How long each kind is kept; None: for ever.

    Args:
        bodies: bodies of finished deliveries.
        headers: their headers.
        keys: the deliveries themselves, of sources that this consumer does not know.
        keys_of: the same, by the name of a source that it knows.
        attempts: attempts; notifications that were sent, and heartbeat runs, age with them.
        effects: effects.
        notes: what a person should know about how these came about.
    """

    bodies: timedelta | None = None
    headers: timedelta | None = None
    keys: timedelta | None = None
    keys_of: Mapping[str, timedelta | None] = field(default_factory=dict[str, "timedelta | None"])
    attempts: timedelta | None = None
    effects: timedelta | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Settings, sources: Mapping[str, Source]) -> Ages:
        """Read the settings. No key is kept for less than its provider's time for sending it again, nor for less than
        a refused request can be verified again.

        Raises:
            ConfigurationError: `WEBHOOKS_KEEP_KEYS_<SOURCE>` cannot be read.
        """
        refused = timedelta(days=settings.rejections_days)
        keys_of: dict[str, timedelta | None] = {}
        notes: list[str] = []
        for name, source in sources.items():
            wanted, least = keep_keys_for(name, settings), max(source.redelivery_window, refused)
            keys_of[name] = _at_least(wanted, least)
            if wanted is not None and wanted < least:
                notes.append(
                    f"keys of {name} are kept {told(least)} and not {told(wanted)}: a delivery may be sent "
                    "again, or a refused one accepted, for so long"
                )
        return cls(
            bodies=settings.keep_bodies,
            headers=settings.keep_headers,
            keys=_at_least(settings.keep_keys, max(Source.redelivery_window, refused)),
            keys_of=keys_of,
            attempts=settings.keep_attempts,
            effects=settings.keep_effects,
            notes=tuple(notes),
        )

    def only(self, kinds: Collection[Kind]) -> Ages:
        """Return the same ages for some kinds, with all others kept for ever."""
        return replace(
            self,
            bodies=self.bodies if "bodies" in kinds else None,
            headers=self.headers if "headers" in kinds else None,
            keys=self.keys if "keys" in kinds else None,
            keys_of={name: age if "keys" in kinds else None for name, age in self.keys_of.items()},
            attempts=self.attempts if "attempts" in kinds else None,
            effects=self.effects if "effects" in kinds else None,
        )

    def of_kind(self, kind: Kind) -> tuple[timedelta | None, ...]:
        """Return how long a kind is kept; several where sources differ, the shortest first."""
        if kind == "keys":
            ages = set(self.keys_of.values()) or {self.keys}
            return tuple(sorted(ages, key=lambda age: (age is None, age or timedelta(0))))
        if kind == "bodies":
            return (self.bodies,)
        if kind == "headers":
            return (self.headers,)
        return (self.effects,) if kind == "effects" else (self.attempts,)


def _at_least(age: timedelta | None, least: timedelta) -> timedelta | None:
    return None if age is None else max(age, least)


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """The times, by the database's clock, before which a kind is old enough to go; None: never."""

    bodies: datetime | None
    headers: datetime | None
    keys: datetime | None
    keys_of: Mapping[str, datetime | None]
    attempts: datetime | None
    effects: datetime | None

    @classmethod
    def at(cls, ages: Ages, now: datetime) -> Before:
        def ago(age: timedelta | None) -> datetime | None:
            return None if age is None else now - age

        return cls(
            bodies=ago(ages.bodies),
            headers=ago(ages.headers),
            keys=ago(ages.keys),
            keys_of={name: ago(age) for name, age in ages.keys_of.items()},
            attempts=ago(ages.attempts),
            effects=ago(ages.effects),
        )

    def key_goes(self, source: str, received_at: datetime) -> bool:
        """Say whether a delivery's row is old enough to go."""
        return old(received_at, self.keys_of.get(source, self.keys))

    @property
    def latest_key(self) -> datetime | None:
        """The time from which on no row is old enough."""
        return max((time for time in (self.keys, *self.keys_of.values()) if time is not None), default=None)

    @property
    def latest_content(self) -> datetime | None:
        """The time from which on no body and no headers are old enough."""
        return max((time for time in (self.bodies, self.headers) if time is not None), default=None)


def old(time: datetime, before: datetime | None) -> bool:
    """Say whether something of that time may go."""
    return before is not None and time < before


def told(age: timedelta | None) -> str:
    """Return a length of time as the settings take it: `30d`, `12h`, `off`."""
    if age is None:
        return "off"
    seconds = int(age.total_seconds())
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
