"""Sample deliveries for sending to a receiver of one's own: a JSON file an event, and Shortcut's, put together.

A value that is exactly `$number` or `$other_number` becomes a number, fresh in every delivery; inside a longer text
they, `$uuid`, `$now` and `$event` are replaced. `any.json` serves every event of a provider. A further sample of an
event has a word after an `@`: `issues.opened@whole`.
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
from webhooks.samples import shortcut
from webhooks.sources import GitHub, Shortcut, Source, StandardWebhooks
from webhooks.sources.reading import is_array, is_object

FOLDERS: Mapping[type[Source], str] = {
    Shortcut: "shortcut",
    GitHub: "github",
    StandardWebhooks: "standard_webhooks",
}
ANY = "any"


def names(source: Source) -> list[str]:
    """Return the samples that a source has; `any` stands for every event without one."""
    folder = _folder(source)
    found = [] if folder is None else [file.name for file in folder.iterdir()]
    named = {name.removesuffix(".json") for name in found if name.endswith(".json")}
    return sorted(named | set(shortcut.names() if isinstance(source, Shortcut) else ()))


def event_of(name: str) -> str:
    """Return the event that a sample is of."""
    return name.partition("@")[0]


def is_example(source: Source, name: str) -> bool:
    """Say whether a sample is one of the provider's own examples, which is the same in every call."""
    folder = _folder(source)
    return folder is not None and (folder / f"{name}.json").is_file() and "$" not in _text(folder / f"{name}.json")


def numbers() -> dict[str, int]:
    """Draw what `$number` and `$other_number` stand for; samples made with the same ones tell of the same thing."""
    return {"number": 1_000_000 + randbelow(9_000_000), "other_number": 10_000_000 + randbelow(90_000_000)}


def sample(source: Source, event: str, fresh: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return a body with which the source's provider would tell of an event, new in every call.

    Args:
        source: whose.
        event: the event, or one of `names`.
        fresh: what `numbers` drew, where several samples are to belong together.

    Raises:
        ConfigurationError: there is none; the message lists those there are.
    """
    known, folder = names(source), _folder(source)
    name = event if event in known else ANY
    if folder is None or name not in known:
        listed = f"there are: {', '.join(known)}; or " if known else ""
        raise ConfigurationError(f"there is no sample of {source.name} {event}: {listed}give a body with --file")
    file = folder / f"{name}.json"
    body = json.loads(_text(file)) if file.is_file() else shortcut.template(name)
    values = {
        "uuid": str(uuid.uuid4()),
        "now": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "event": event_of(event),
        **(fresh or numbers()),
    }
    filled: dict[str, Any] = _filled(body, values)
    return filled


def _folder(source: Source) -> Traversable | None:
    return next((files(__name__) / name for kind, name in FOLDERS.items() if isinstance(source, kind)), None)


def _text(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")


def _filled(value: Any, fresh: Mapping[str, Any]) -> Any:
    if is_object(value):
        return {key: _filled(part, fresh) for key, part in value.items()}
    if is_array(value):
        return [_filled(part, fresh) for part in value]
    if isinstance(value, str) and "$" in value:
        whole = fresh.get(value.removeprefix("$")) if value.startswith("$") else None
        return whole if isinstance(whole, int) else Template(value).substitute(fresh)
    return value
