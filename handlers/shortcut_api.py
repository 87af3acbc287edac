"""The part of Shortcut's REST API v3 that the flow uses. Source: developer.shortcut.com/api/rest/v3."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
from pydantic import TypeAdapter

from handlers.calls import TIMEOUT, call, tls
from handlers.models import Story, StoryComment, Workflow
from handlers.settings import needed, settings

_COMMENTS = TypeAdapter(list[StoryComment])
_WORKFLOWS = TypeAdapter(list[Workflow])
LONGEST_COMMENT = 100_000


@asynccontextmanager
async def shortcut_api() -> AsyncGenerator[ShortcutApi]:
    """A client with our token.

    Raises:
        Escalate: there is no token.
    """
    now = settings()
    token = needed(now.shortcut_token, "WEBHOOKS_SHORTCUT_TOKEN", "the stories are read and commented with it")
    headers = {"Shortcut-Token": token.get_secret_value()}
    async with httpx.AsyncClient(base_url=now.shortcut_api, headers=headers, timeout=TIMEOUT, verify=tls()) as http:
        yield ShortcutApi(http)


class ShortcutApi:
    """One method a call; what they raise is said in `handlers.calls`."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def story(self, sc_id: int) -> Story:
        return Story.model_validate(await call(self._http, "GET", f"/stories/{sc_id}"))

    async def comments(self, sc_id: int) -> list[StoryComment]:
        return _COMMENTS.validate_python(await call(self._http, "GET", f"/stories/{sc_id}/comments"))

    async def comment(self, sc_id: int, text: str, external_id: str) -> StoryComment:
        body = {"text": text[:LONGEST_COMMENT], "external_id": external_id}
        return StoryComment.model_validate(await call(self._http, "POST", f"/stories/{sc_id}/comments", json=body))

    async def workflows(self) -> list[Workflow]:
        return _WORKFLOWS.validate_python(await call(self._http, "GET", "/workflows"))

    async def move(self, sc_id: int, workflow_state_id: int) -> None:
        await call(self._http, "PUT", f"/stories/{sc_id}", json={"workflow_state_id": workflow_state_id})
