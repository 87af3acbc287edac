"""Shortcut's outgoing webhooks, v1 and v2 (https://developer.shortcut.com/api/webhook/v1)."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, ClassVar

from webhooks.delivery import Headers, RawEvent
from webhooks.errors import Unreadable
from webhooks.signatures import Recipe
from webhooks.sources.base import Source
from webhooks.sources.reading import mapping, moment, objects, read_json, sequence

_STORY_URL = re.compile(r"/story/([0-9]{1,18})(?![0-9])")
_NUMBER = re.compile(r"[0-9]{1,18}")
_LONGEST_PING = 1024

# What belongs to one story. An epic or a label that shares a body with a story does not become that story's.
_PARTS_OF_A_STORY = frozenset({"story-comment", "story-task", "branch", "commit", "pull-request"})


class Shortcut(Source):
    """A source of Shortcut's webhooks: one event an entry of the body's `actions`.

    It is named `entity_type.action` (`story.update`), in v2 `v2.entity_type.action`, and a v2 trigger `v2.assigned`,
    `v2.mentioned`, `v2.comment-reply`. Its data is the entry plus `changed_at`, `member_id`, `references` (with the
    labels created in the same body) and `story_id`; each is None, or empty, where the body does not say.

    Args:
        name: its name in the URL.
        bot_member_id: the member our own token belongs to. What it does is ignored, or our comments would start work.
    """

    recipe: ClassVar[Recipe] = Recipe(header="payload-signature")

    def __init__(self, name: str = "shortcut", *, bot_member_id: str | None = None) -> None:
        super().__init__(name)
        self.bot_member_id = bot_member_id or None

    def identity(self, headers: Headers, body: bytes) -> str | None:
        given = _envelope(body).get("id")
        return given if isinstance(given, str) else None

    def answered(self, headers: Headers, body: bytes) -> bool:
        """Recognise the signed ping with which v2 tests a URL."""
        if len(body) > _LONGEST_PING:
            return False
        envelope = _envelope(body)
        return envelope.get("type") == "validation" and not envelope.keys() & {"actions", "trigger"}

    def events(self, headers: Headers, body: Any) -> list[RawEvent]:
        envelope = mapping(body)
        version = envelope.get("version", "v1")
        found = _v1(envelope) if version == "v1" else _v2(envelope) if version == "v2" else []
        return [RawEvent(name, data, moment(data["changed_at"]), self._ours(data["member_id"])) for name, data in found]

    def _ours(self, member_id: object) -> str | None:
        if self.bot_member_id is None or member_id != self.bot_member_id:
            return None
        return f"made by our own bot (member {self.bot_member_id})"


def _envelope(body: bytes) -> dict[str, Any]:
    try:
        return mapping(read_json(body))
    except Unreadable:
        return {}


def _v1(envelope: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    entries = objects(envelope.get("actions"))
    owners = _Owners(entries)
    common = {
        "changed_at": envelope.get("changed_at"),
        "member_id": envelope.get("member_id"),
        "references": _references(envelope, entries),
    }
    return [
        (name, {**entry, **common, "story_id": owners.story_of(entry)})
        for entry in entries
        if (name := _joined(entry.get("entity_type"), entry.get("action")))
    ]


def _v2(envelope: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    common = {
        "changed_at": envelope.get("timestamp"),
        "member_id": mapping(envelope.get("actor")).get("member_id"),
        "references": objects(envelope.get("references")),
    }
    found = [
        (f"v2.{name}", {**entry, **common, "story_id": _own_story(entry, entry.get("id"))})
        for entry in objects(envelope.get("actions"))
        if (name := _joined(entry.get("entity_type"), entry.get("action")))
    ]
    trigger = mapping(envelope.get("trigger"))
    if kind := _joined(trigger.get("type")):
        found.append((f"v2.{kind}", {**trigger, **common, "story_id": _own_story(trigger, trigger.get("entity_id"))}))
    return found


def _joined(*words: object) -> str | None:
    named = [word for word in words if isinstance(word, str) and word]
    return ".".join(named) if len(named) == len(words) else None


def _references(envelope: dict[str, Any], entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the body's references and, in their form, the labels it creates, which Shortcut leaves out."""
    created: list[dict[str, Any]] = [
        {key: entry[key] for key in ("id", "entity_type", "name", "app_url") if key in entry}
        for entry in entries
        if entry.get("entity_type") == "label" and entry.get("action") == "create"
    ]
    return objects(envelope.get("references")) + created


def _own_story(entry: dict[str, Any], entity_id: object) -> int | None:
    """Return the story that an entry itself names: it is one, or it says its story's id, or links to it."""
    if entry.get("entity_type") == "story":
        return _number(entity_id)
    named = _number(entry.get("story_id"))
    if named is not None:
        return named
    url = entry.get("app_url")
    linked = _STORY_URL.search(url) if isinstance(url, str) else None
    return int(linked[1]) if linked else None


class _Owners:
    """Which story of a v1 body each of its other entries belongs to, where that is certain.

    `primary_id` is no help: it may be a comment, a pull request or a whole workspace. A bulk edit holds many stories
    and one pull request may belong to several, so an entry gets a story only when exactly one can be meant.
    """

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self._stories: set[int] = set()
        self._naming: defaultdict[tuple[str, int | str], set[int]] = defaultdict(set)
        for entry in entries:
            story = _number(entry.get("id"))
            if entry.get("entity_type") != "story" or story is None:
                continue
            self._stories.add(story)
            for field, ids in [*entry.items(), *mapping(entry.get("changes")).items()]:
                change = mapping(ids)
                for named in sequence(ids) + sequence(change.get("adds")) + sequence(change.get("removes")):
                    if isinstance(named, int | str):
                        self._naming[field, named].add(story)

    def story_of(self, entry: dict[str, Any]) -> int | None:
        own = _own_story(entry, entry.get("id"))
        kind, identity = entry.get("entity_type"), entry.get("id")
        if own is not None or not isinstance(kind, str) or kind not in _PARTS_OF_A_STORY:
            return own
        if isinstance(identity, int | str):
            field = kind.removeprefix("story-").replace("-", "_") + "_ids"  # story-comment: comment_ids
            naming = self._naming.get((field, identity), set())
            if naming:
                return next(iter(naming)) if len(naming) == 1 else None
        return next(iter(self._stories)) if len(self._stories) == 1 else None


def _number(value: object) -> int | None:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18 else None
