"""The lines of `webhooks export`: one JSON object a delivery, its body as base64 of the exact bytes."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from webhooks.captures.capture import Capture
from webhooks.delivery import Headers
from webhooks.nesting import loads
from webhooks.sources.reading import is_array, is_object, moment

VERSION = 1
_BEGINNING = re.compile(rb'\{"version": \d+, "id": \d+, "source": ')  # as `written` begins every line


def written(facts: Mapping[str, Any], headers: Headers, body: bytes, *, redacted: bool) -> bytes:
    """Write a delivery as one line, without its line end.

    Args:
        facts: `id`, `source`, `dedup_key`, `event`, `origin` and `received_at`.
        headers: its header lines.
        body: its bytes.
        redacted: whether something was taken out of them.
    """
    received_at: datetime = facts["received_at"]
    line = {
        "version": VERSION,
        "id": facts["id"],
        "source": facts["source"],
        "dedup_key": facts["dedup_key"],
        "event": facts["event"],
        "origin": facts["origin"],
        "received_at": received_at.isoformat(),
        "headers": headers,
        "sha256": hashlib.sha256(body).hexdigest(),
        **({"redacted": True} if redacted else {}),
        "body_base64": base64.b64encode(body).decode("ascii"),
    }
    return json.dumps(line).encode("ascii")


def is_line(content: bytes) -> bool:
    """Say whether a file's first line is one of an export, be it a broken one, or cut before its body."""
    text = content.lstrip()
    return text.startswith(b"{") and (b'"body_base64"' in text or (bool(_BEGINNING.match(text)) and not _is_json(text)))


def read(line: bytes, *, place: int, name: str, ended: bool = True) -> Capture:
    """Read a line back. What is wrong with it is its `fault`.

    Args:
        line: without its line end.
        place: its place.
        name: its name.
        ended: whether it had a line end; a file that was cut has none.
    """
    try:
        found = loads(line)
    except ValueError:
        fault = "it is not JSON" if ended else "it is cut short: the file ends in the middle of it"
        return Capture(place=place, name=name, fault=fault)
    if not is_object(found) or "body_base64" not in found:
        return Capture(place=place, name=name, fault="it is no line of an export: it has no body_base64")
    if found.get("version") != VERSION:
        fault = f"it is of version {found.get('version')!r}, and this program reads version {VERSION}"
        return Capture(place=place, name=name, fault=fault)
    headers, source, event = _headers(found.get("headers")), found.get("source"), found.get("event")
    received_at = moment(found.get("received_at"))
    try:
        body = base64.b64decode(found["body_base64"], validate=True)
    except (binascii.Error, ValueError, TypeError):
        return Capture(place=place, name=name, fault="body_base64 is not base64")
    if headers is None or not isinstance(source, str) or received_at is None:
        return Capture(place=place, name=name, fault="it lacks headers, source or received_at")
    if hashlib.sha256(body).hexdigest() != found.get("sha256"):
        return Capture(place=place, name=name, fault="the body was changed: it is not what sha256 says")
    return Capture(
        place=place,
        name=name,
        source=source,
        event=event if isinstance(event, str) else None,
        headers=headers,
        body=body,
        received_at=received_at,
    )


def _is_json(text: bytes) -> bool:
    try:
        loads(text)
    except ValueError:
        return False
    return True


def _headers(value: object) -> Headers | None:
    if not is_array(value):
        return None
    lines: list[tuple[str, str]] = []
    for line in value:
        if not is_array(line) or len(line) != 2 or not all(isinstance(part, str) for part in line):
            return None
        lines.append((line[0].lower(), line[1]))
    return tuple(lines)
