"""Hooks of a Shortcut workspace. Its API makes, shows and removes one by its id; it lists none and changes none.

So the only hooks that can be found again are those whose id we kept. Sources: Shortcut's `CreateGenericIntegration`
and "Using outgoing webhooks"; one answers the POST with an id, the other with 204 and nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import quote

import httpx

from webhooks.errors import ProviderError
from webhooks.hooks.target import EVERYTHING, Hook
from webhooks.provider_api import ProviderClient, decoded, request
from webhooks.sources.reading import mapping

PATH = "/integrations/webhook"
LONGEST_ADDRESS = 2048
PATIENCE = timedelta(seconds=20)
BY_HAND = "Shortcut → Settings → Integrations → Webhooks"


class ShortcutHooks:
    """The hooks of the workspace of our token."""

    def __init__(self, client: ProviderClient) -> None:
        self._client = client

    async def at(self, url: str) -> list[Hook]:
        """Return nothing: Shortcut has no list to look in."""
        return []

    async def create(self, url: str, secret: str, events: Sequence[str]) -> Hook:
        """Make a hook that sends everything; its id is None where Shortcut does not tell it."""
        if len(url) > LONGEST_ADDRESS:
            raise ProviderError(f"Shortcut takes an address of {LONGEST_ADDRESS} characters at most")
        body = {"webhook_url": url, "secret": secret}
        answer = await request(self._client, "POST", PATH, json=body, patience=PATIENCE)
        return Hook(_id(answer), url, EVERYTHING, active=True)

    async def change(self, id: str, url: str, secret: str, events: Sequence[str], *, replace: bool) -> Hook | None:
        """Remove a hook and make another: Shortcut cannot change one."""
        await self.remove(id)
        return await self.create(url, secret, events)

    async def one(self, id: str) -> Hook | None:
        """Return a hook, None when it is there no more."""
        try:
            answer = await request(self._client, "GET", f"{PATH}/{quote(id, safe='')}", patience=PATIENCE)
        except ProviderError as error:
            if error.status == 404:
                return None
            raise
        found = mapping(decoded(answer))
        url = found.get("webhook_url")
        return Hook(id, url if isinstance(url, str) else None, EVERYTHING, active=found.get("disabled") is not True)

    async def remove(self, id: str) -> bool:
        """Remove a hook; return whether it was still there."""
        try:
            await request(self._client, "DELETE", f"{PATH}/{quote(id, safe='')}", patience=PATIENCE)
        except ProviderError as error:
            if error.status == 404:
                return False
            raise
        return True


def _id(answer: httpx.Response) -> str | None:
    if not answer.content:
        return None
    given = mapping(decoded(answer)).get("id")
    return str(given) if isinstance(given, int | str) and not isinstance(given, bool) and given != "" else None
