"""The part of Shortcut's REST API v3 that tells what happened: which stories changed, and a story's history.

Source: developer.shortcut.com/api/rest/v3, "Query Stories" and "Story History". An entry of a history has the schema of
a webhook's body, v1, the `id` by which a copy is known included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from webhooks.errors import ProviderError
from webhooks.nesting import check
from webhooks.provider_api import Clock, ProviderClient, decoded, request
from webhooks.sources.reading import is_array, is_object, moment

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a story's history.

    Args:
        id: what Shortcut calls it, there and in its webhook.
        changed_at: when it happened.
        body: its JSON, byte for byte as it stands in the history.
        data: the same, parsed.
    """

    id: str
    changed_at: datetime
    body: bytes
    data: dict[str, Any]


async def updated_since(client: ProviderClient, since: datetime, *, clock: Clock) -> set[int]:
    """Return the stories that were updated since; Shortcut may leave some out where they are very many.

    Raises:
        ProviderError: Shortcut refused or did not answer.
    """
    asked = {"updated_at_start": since.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")}
    found = decoded(await request(client, "POST", "/stories/search", json=asked, repeatable=True, clock=clock))
    if not is_array(found):
        raise ProviderError("Shortcut answered the search for stories with something that is no list")
    return {story["id"] for story in found if is_object(story) and type(story.get("id")) is int}


async def history(client: ProviderClient, story: int, *, clock: Clock) -> list[Entry]:
    """Return what happened to a story; entries without an id or a time are left out.

    Raises:
        ProviderError: Shortcut refused or did not answer; status 404 where the story is gone.
    """
    response = await request(client, "GET", f"/stories/{story}/history", clock=clock)
    try:
        check(response.content)
        return [entry for data, text in elements(response.content.decode()) if (entry := _entry(data, text))]
    except (ValueError, RecursionError):
        raise ProviderError(f"Shortcut answered with a history of story {story} that cannot be read") from None


def _entry(data: Any, text: str) -> Entry | None:
    if not is_object(data):
        return None
    id, changed_at = data.get("id"), moment(data.get("changed_at"))
    return Entry(id, changed_at, text.encode(), data) if isinstance(id, str) and id and changed_at else None


def elements(text: str) -> Iterator[tuple[Any, str]]:
    """Yield each element of a JSON array, parsed and as it is written.

    Raises:
        ValueError: it is no JSON array.
    """
    at = _past_space(text, 0)
    if text[at : at + 1] != "[":
        raise ValueError("no array")
    at = _past_space(text, at + 1)
    if text[at : at + 1] == "]":
        return
    while True:
        value, end = _DECODER.raw_decode(text, at)
        yield value, text[at:end]
        at = _past_space(text, end)
        if text[at : at + 1] == "]":
            return
        if text[at : at + 1] != ",":
            raise ValueError("an array that does not end")
        at = _past_space(text, at + 1)


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
