"""What can be said about a stored rejection, with the secrets of today."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from webhooks.hints import Evidence, Other, hints
from webhooks.source_secrets import dev_secrets, previous_secrets, secrets_found
from webhooks.sources import Source


@dataclass(frozen=True, slots=True)
class Known:
    """The secrets of a consumer's sources, by source.

    Args:
        in_force: those that requests are verified with today.
        previous: those that `WEBHOOKS_SECRET_<SOURCE>_PREVIOUS` names.
        made: the one that `serve --dev` made, where another is in force.
    """

    in_force: Mapping[str, Sequence[str]] = field(repr=False)
    previous: Mapping[str, Sequence[str]] = field(repr=False)
    made: Mapping[str, Sequence[str]] = field(repr=False)


def known(sources: Iterable[str], home: Path) -> Known:
    """Read the secrets of sources, as a `serve` that is started here and now would.

    Raises:
        ConfigurationError: what is set cannot be used.
    """
    in_force = {name: secrets_found(home, name) for name in sources}
    kept = {name: dev_secrets(home, name) for name in in_force if (home / "secrets" / name).exists()}
    return Known(
        in_force,
        {name: previous_secrets(name) for name in in_force},
        {name: made for name, made in kept.items() if made != in_force[name]},
    )


def explained(row: Mapping[str, Any], sources: Mapping[str, Source], secrets: Known) -> list[str]:
    """Return what can be said about a row of `one`; it may take a second on a long body."""
    name = row["source"]
    if row.get("delivery") is not None:
        return [f"it was accepted since, as delivery {row['delivery']}"]
    if name not in sources:
        return [f"this consumer has no source `{name}` any more"]
    others = [Other(other.name, other.recipe, secrets.in_force[other.name]) for other in sources.values()]
    evidence = Evidence(
        source=name,
        recipe=sources[name].recipe,
        cause=row["cause"],
        headers=row["headers"],
        body=row["body"],
        body_bytes=row["body_bytes"],
        received_at=row["received_at"].timestamp(),
        secrets=secrets.in_force[name],
        previous=secrets.previous[name],
        made=secrets.made.get(name, ()),
        others=[other for other in others if other.name != name],
    )
    return hints(evidence)
