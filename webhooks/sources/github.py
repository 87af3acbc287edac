"""GitHub's repository, organization and app webhooks (https://docs.github.com/en/webhooks)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, ClassVar
from urllib.parse import unquote_to_bytes

from webhooks.delivery import Headers, RawEvent
from webhooks.errors import Unreadable
from webhooks.signatures import Recipe
from webhooks.sources.base import Source
from webhooks.sources.reading import first, is_object, mapping, moment, read_json

_FORM = "application/x-www-form-urlencoded"

# What an event is about, the most particular first: a comment's body holds its issue as well.
_SUBJECTS = (
    "comment",
    "review",
    "pull_request",
    "issue",
    "workflow_run",
    "check_suite",
    "deployment_status",
    "deployment",
    "release",
    "projects_v2_item",
    "discussion",
    "milestone",
)


class GitHub(Source):
    """A source of GitHub's webhooks: an event is `<event>.<action>`, or `<event>`, and its data is the whole body.

    Bodies may be JSON or GitHub's form encoding. Only `X-Hub-Signature-256` counts; the SHA-1 header does not.
    """

    recipe: ClassVar[Recipe] = Recipe(header="x-hub-signature-256", prefix="sha256=")
    event_headers: ClassVar[frozenset[str]] = frozenset(
        {
            "x-github-event",
            "x-github-delivery",
            "x-github-hook-id",
            "x-github-hook-installation-target-type",
            "x-github-hook-installation-target-id",
            "x-github-enterprise-version",
            "x-github-enterprise-host",
        }
    )
    # https://docs.github.com/en/webhooks/testing-and-troubleshooting-webhooks/redelivering-webhooks (an Enterprise
    # Server: seven days, which WEBHOOKS_KEEP_KEYS_GITHUB can say).
    redelivery_window: ClassVar[timedelta] = timedelta(days=3)

    def __init__(self, name: str = "github") -> None:
        super().__init__(name)

    def identity(self, headers: Headers, body: bytes) -> str | None:
        """Return `hook id:guid`: GitHub gives all hooks of one event the same guid, and a redelivery its first one."""
        guid = first(headers, "x-github-delivery")
        hook = first(headers, "x-github-hook-id")
        return f"{hook}:{guid}" if guid and hook else guid

    def read(self, headers: Headers, body: bytes) -> Any:
        content_type = first(headers, "content-type") or ""
        if content_type.partition(";")[0].strip().lower() != _FORM:
            return read_json(body)
        for field in body.split(b"&"):
            name, _, value = field.partition(b"=")
            if name == b"payload":
                return read_json(unquote_to_bytes(value.replace(b"+", b" ")))
        raise Unreadable("a form without the field payload")

    def events(self, headers: Headers, body: Any) -> list[RawEvent]:
        event = first(headers, "x-github-event")
        if event is None or not is_object(body):
            return []
        action = body.get("action")
        name = f"{event}.{action}" if isinstance(action, str) and action else event
        return [RawEvent(name, body, _occurred_at(event, body))]


def _occurred_at(event: str, data: dict[str, Any]) -> datetime | None:
    """Return when the subject of the event last changed, which is the closest that GitHub comes to saying."""
    if event == "push":
        return moment(mapping(data.get("repository")).get("pushed_at"))
    if data.get("action") == "deleted":
        return None  # the deleted thing says when it was last edited, which may be years ago
    if event == "repository":
        return moment(mapping(data.get("repository")).get("updated_at"))
    for subject in _SUBJECTS:
        changed = moment(mapping(data.get(subject)).get("updated_at"))
        if changed is not None:
            return changed
    return moment(data.get("updated_at"))
