"""Hooks of a GitHub repository (docs.github.com/rest/repos/webhooks). The token needs `admin:repo_hook`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from webhooks.errors import ProviderError
from webhooks.hooks.target import Hook, same_address
from webhooks.provider_api import ProviderClient, decoded, request
from webhooks.sources.reading import mapping, objects, sequence

PAGE = 100
# A repository has 20 hooks an event at most, 250 on a server of one's own: more pages than this is no list of hooks.
MOST_PAGES = 100
# Whoever pressed Ctrl-C does not wait minutes for a rate limit; what is left then is found at the next start.
PATIENCE = timedelta(seconds=20)


class GitHubHooks:
    """The hooks of one repository.

    Args:
        client: with our token.
        repository: `OWNER/REPO`.
    """

    def __init__(self, client: ProviderClient, repository: str) -> None:
        self._client = client
        self._path = f"/repos/{repository}/hooks"

    async def listed(self) -> list[Hook]:
        """Return every hook of the repository that the token may see."""
        found: list[Hook] = []
        for page in range(1, MOST_PAGES + 1):
            params = {"per_page": PAGE, "page": page}
            answer = await request(self._client, "GET", self._path, params=params, patience=PATIENCE)
            hooks = objects(decoded(answer))
            found += [_hook(one) for one in hooks]
            if len(hooks) < PAGE:
                break
        return found

    async def at(self, url: str) -> list[Hook]:
        """Return every hook that sends to an address."""
        return [hook for hook in await self.listed() if same_address(hook.url, url)]

    async def create(self, url: str, secret: str, events: Sequence[str]) -> Hook:
        """Make a hook. GitHub sends it a `ping` at once."""
        body = {"name": "web", "active": True, "events": list(events), "config": _config(url, secret)}
        answer = await request(self._client, "POST", self._path, json=body, patience=PATIENCE)
        return _hook(mapping(decoded(answer)))

    async def change(self, id: str, url: str, secret: str, events: Sequence[str], *, replace: bool) -> Hook | None:
        """Give a hook another address, another secret and more events; None when it is there no more.

        Args:
            id: which hook.
            url: its address from now on.
            secret: what it signs with from now on; the old one cannot be read back.
            events: what it sends.
            replace: whether to send nothing else any more.
        """
        subscribed = {"events" if replace else "add_events": list(events)}
        body = {"active": True, "config": _config(url, secret), **subscribed}
        try:
            # To set the same values twice does no harm.
            answer = await request(self._client, "PATCH", self._one(id), json=body, repeatable=True, patience=PATIENCE)
        except ProviderError as error:
            if error.status == 404:
                return None
            raise
        return _hook(mapping(decoded(answer)))

    async def remove(self, id: str) -> bool:
        """Remove a hook; return whether it was still there."""
        try:
            await request(self._client, "DELETE", self._one(id), patience=PATIENCE)
        except ProviderError as error:
            if error.status == 404:
                return False
            raise
        return True

    def _one(self, id: str) -> str:
        return f"{self._path}/{quote(id, safe='')}"


def _config(url: str, secret: str) -> dict[str, str]:
    return {"url": url, "content_type": "json", "secret": secret, "insecure_ssl": "0"}


def _hook(found: dict[str, Any]) -> Hook:
    last = mapping(found.get("last_response"))
    said = " ".join(str(last[key]) for key in ("code", "message") if last.get(key) is not None)
    url = mapping(found.get("config")).get("url")
    return Hook(
        id=str(found["id"]) if "id" in found else None,
        url=url if isinstance(url, str) else None,
        events=tuple(event for event in sequence(found.get("events")) if isinstance(event, str)),
        active=found.get("active") is True,
        last=said or None,
    )
