"""A delivery as its provider would send it: the id where the provider puts it, its headers, its signature."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from webhooks.delivery import Headers
from webhooks.samples import edit
from webhooks.signatures import sign
from webhooks.sources import GitHub, Shortcut, Source
from webhooks.sources.reading import is_object

HOOK_ID = "1"


@dataclass(frozen=True, slots=True)
class Request:
    """What is posted to `/webhooks/{source}`."""

    headers: Headers
    body: bytes


def changed(source: Source, body: Any, changes: Sequence[str], id: str) -> bytes:
    """Write a body with a delivery's own id, where that is in the body, and with the changes of `--set`.

    Raises:
        ValueError: a change has no place in the body.
    """
    if isinstance(source, Shortcut) and is_object(body):
        body["id"] = id
    for assignment in changes:
        edit.change(body, assignment)
    return json.dumps(body).encode()


def signed(source: Source, event: str, body: bytes, secret: str, id: str) -> Request:
    """Add the headers with which the source's provider would send a body.

    Args:
        source: who is to have sent it.
        event: what it tells of; GitHub says so in a header.
        body: the bytes to send.
        secret: one of the source's.
        id: the delivery's.

    Raises:
        ConfigurationError: the secret cannot sign.
    """
    headers = [("content-type", "application/json"), ("user-agent", "webhooks trigger")]
    if isinstance(source, GitHub):
        headers += [
            ("x-github-event", event.partition(".")[0]),
            ("x-github-delivery", id),
            ("x-github-hook-id", HOOK_ID),
        ]
    return Request((*headers, *sign(source.recipe, body, secret, now=time.time(), id=id)), body)
