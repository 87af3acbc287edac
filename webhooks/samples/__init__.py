"""Sample deliveries, one JSON file an event, for sending to a receiver of one's own.

A value that is exactly `$number` or `$other_number` becomes a number, fresh in every delivery; inside a longer text
they, `$uuid`, `$now` and `$event` are replaced. `any.json` serves every event of a provider.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from importlib.resources.abc import Traversable
from secrets import randbelow
from string import Template
from typing import Any

from webhooks.errors import ConfigurationError
from webhooks.sources import GitHub, Shortcut, Source, StandardWebhooks
from webhooks.sources.reading import is_array, is_object

FOLDERS: Mapping[type[Source], str] = {
    Shortcut: "shortcut",
    GitHub: "github",
    StandardWebhooks: "standard_webhooks",
}
ANY = "any"


def names(source: Source) -> list[str]:
    """Return the events that a source has a sample of; `any` stands for every other one."""
    folder = _folder(source)
    found = () if folder is None else folder.iterdir()
    return sorted(file.name.removesuffix(".json") for file in found if file.name.endswith(".json"))


def sample(source: Source, event: str) -> dict[str, Any]:
    """Return a body with which the source's provider would tell of an event, new in every call.

    Raises:
        ConfigurationError: there is none; the message lists those there are.
    """
    known, folder = names(source), _folder(source)
    name = event if event in known else ANY
    if folder is None or name not in known:
        listed = f"there are: {', '.join(known)}; or " if known else ""
        raise ConfigurationError(f"there is no sample of {source.name} {event}: {listed}give a body with --file")
    body = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    fresh = {
        "uuid": str(uuid.uuid4()),
        "now": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "event": event,
        "number": 1_000_000 + randbelow(9_000_000),
        "other_number": 10_000_000 + randbelow(90_000_000),
    }
    filled: dict[str, Any] = _filled(body, fresh)
    return filled


def _folder(source: Source) -> Traversable | None:
    return next((files(__name__) / name for kind, name in FOLDERS.items() if isinstance(source, kind)), None)


def _filled(value: Any, fresh: Mapping[str, Any]) -> Any:
    if is_object(value):
        return {key: _filled(part, fresh) for key, part in value.items()}
    if is_array(value):
        return [_filled(part, fresh) for part in value]
    if isinstance(value, str) and "$" in value:
        whole = fresh.get(value.removeprefix("$")) if value.startswith("$") else None
        return whole if isinstance(whole, int) else Template(value).substitute(fresh)
    return value
