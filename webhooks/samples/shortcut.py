"""What Shortcut tells of: every kind of entity with its actions, as bodies of version 1 and of version 2.

Version 1 is put together as https://developer.shortcut.com/api/webhook/v1 shows it, a part of a story together with the
story's own entry; version 2 names what changed and leaves the rest to be read. Both are templates, see `samples`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

STORY, PART = "$number", "$other_number"
STORY_URL = "https://app.shortcut.com/sample/story/$number"
MEMBER = "00000000-0000-4000-8000-000000000001"
WORKSPACE = "00000000-0000-4000-8000-000000000002"
USUAL = ("create", "update", "delete")
BRINGS, TAKES = frozenset({"create", "open"}), frozenset({"delete"})


@dataclass(frozen=True, slots=True)
class Entity:
    """A kind of thing that events tell of.

    Args:
        fields: what its entry holds besides id and kind.
        actions: what may happen to it.
        changes: what `update` changes, as version 1 writes it.
        listed_in: the list of its story that names it, where it is a part of one.
        with_story: whether its story has an entry of its own also where that list does not change.
        id: its own; a story's, and what hangs on no story, is not that of a part.
    """

    fields: Mapping[str, Any]
    actions: tuple[str, ...] = USUAL
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    listed_in: str | None = None
    with_story: bool = False
    id: str = PART


COMMENT = {"text": "Only when the export is larger than 2 GB.", "author_id": MEMBER}
REPOSITORY = "https://github.com/Codertocat/Hello-World"
BRANCH = "patch/sc-$number"

ENTITIES: Mapping[str, Entity] = {
    "story": Entity(
        {"name": "Exports fail when the disk is full", "story_type": "bug", "app_url": STORY_URL},
        changes={"workflow_state_id": {"new": 500000002, "old": 500000001}, "started": {"new": True, "old": False}},
        id=STORY,
    ),
    "story-comment": Entity(
        {**COMMENT, "app_url": f"{STORY_URL}#activity-$other_number"},
        changes={"text": {"new": COMMENT["text"], "old": "Only when it is large."}},
        listed_in="comment_ids",
    ),
    "story-task": Entity(
        {"description": "Say so in the log", "complete": False},
        changes={"complete": {"new": True, "old": False}},
        listed_in="task_ids",
    ),
    "story-link": Entity(
        {"verb": "blocks", "subject_id": STORY, "object_id": "$other_number"},
        changes={"verb": {"new": "blocks", "old": "relates to"}},
        listed_in="subject_story_link_ids",
    ),
    "epic": Entity(
        {"name": "Exports", "app_url": "https://app.shortcut.com/sample/epic/$other_number"},
        changes={"state": {"new": "in progress", "old": "to do"}, "started": {"new": True, "old": False}},
    ),
    "epic-comment": Entity({**COMMENT, "app_url": "https://app.shortcut.com/sample/epic/$other_number"}),
    "label": Entity(
        {"name": "patch", "app_url": "https://app.shortcut.com/sample/label/$other_number"},
        changes={"name": {"new": "patch", "old": "fix"}},
    ),
    "project": Entity({"name": "Exports"}, changes={"name": {"new": "Exports", "old": "Export"}}),
    "branch": Entity(
        {"name": BRANCH, "url": f"{REPOSITORY}/tree/{BRANCH}"},
        actions=(*USUAL, "push", "merge"),
        listed_in="branch_ids",
        with_story=True,
    ),
    "commit": Entity(
        {"message": "Say so when the disk is full [sc-$number]", "url": f"{REPOSITORY}/commit/ec26c3e57ca3"},
        listed_in="commit_ids",
        with_story=True,
    ),
    "pull-request": Entity(
        {"number": 7, "title": "Say so when the disk is full [sc-$number]", "url": f"{REPOSITORY}/pull/7"},
        actions=(*USUAL, "open", "reopen", "close", "sync", "comment"),
        listed_in="pull_request_ids",
        with_story=True,
    ),
}
BULK = "workspace2.bulk-update"
BY_MACHINE = frozenset({"branch", "commit", "pull-request"})  # whose events name no member

INTERACTIONS: Mapping[str, Mapping[str, Any]] = {
    "assigned": {},
    "mentioned": {"context": "comment", "comment_id": "$other_number"},
    "comment-reply": {"comment_id": "$other_number"},
}
VALIDATION = "v2.validation"


def names() -> Iterator[str]:
    """Yield the events that a body can be made for."""
    pairs = [f"{kind}.{action}" for kind, entity in ENTITIES.items() for action in entity.actions]
    yield from (*pairs, BULK)
    yield from (f"v2.{name}" for name in (*pairs, *INTERACTIONS))
    yield VALIDATION


def template(event: str) -> dict[str, Any]:
    """Return the body of one of those events, with `$number` and the like in it."""
    if event == VALIDATION:
        return {"type": "validation"}
    version, _, rest = event.partition(".")
    if version != "v2":
        return _v1(_bulk() if event == BULK else _entries(event))
    if rest in INTERACTIONS:
        story = {"type": rest, "entity_type": "story", "entity_id": "$number"}
        return _v2({"trigger": {**story, **INTERACTIONS[rest]}})
    return _v2({"actions": [_observed(rest)]})


def _entry(kind: str, action: str, id: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "entity_type": kind, "action": action, **more}


def _entries(event: str) -> list[dict[str, Any]]:
    kind, _, action = event.rpartition(".")
    entity = ENTITIES[kind]
    more = {"changes": dict(entity.changes)} if action == "update" and entity.changes else {}
    entries = [_entry(kind, action, entity.id, **entity.fields, **more)]
    changed: dict[str, Any] | None = None
    if entity.listed_in is not None and action in BRINGS | TAKES:
        changed = {entity.listed_in: {"adds" if action in BRINGS else "removes": [entity.id]}}
    elif entity.with_story:
        changed = {"updated_at": {"new": "$now"}}
    if changed is not None:
        entries.append(_entry("story", "update", STORY, **ENTITIES["story"].fields, changes=changed))
    return entries


def _bulk() -> list[dict[str, Any]]:
    story = ENTITIES["story"]
    stories = [
        _entry("story", "update", id, **{**story.fields, "app_url": url}, changes=dict(story.changes))
        for id, url in ((STORY, STORY_URL), (PART, STORY_URL.replace("$number", "$other_number")))
    ]
    return [_entry("workspace2", "bulk-update", WORKSPACE, name="Sample"), *stories]


def _v1(entries: list[dict[str, Any]]) -> dict[str, Any]:
    first = entries[0]
    by = {} if first["entity_type"] in BY_MACHINE else {"actor_name": "webhooks trigger", "member_id": MEMBER}
    envelope = {"id": "$uuid", "changed_at": "$now", "version": "v1", "primary_id": first["id"], **by}
    return {**envelope, "actions": entries}


def _observed(pair: str) -> dict[str, Any]:
    kind, _, action = pair.rpartition(".")
    entity = ENTITIES[kind]
    fields = {"global_id": f"v2:{kind}:{WORKSPACE}:{entity.id}", "app_url": entity.fields.get("app_url")}
    changes = [{"attribute": "label_ids", "adds": [18], "removes": [], "truncated": False}]
    return _entry(kind, action, entity.id, **fields, **({"changes": changes} if pair == "story.update" else {}))


def _v2(content: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "$uuid",
        "version": "v2",
        "timestamp": "$now",
        "actor": {"displayable_name": "webhooks trigger", "member_id": MEMBER, "mention_name": "trigger"},
        "workspace2": {"id": WORKSPACE, "url_slug": "sample"},
        "installation_id": "00000000-0000-4000-8000-000000000003",
        **content,
    }
