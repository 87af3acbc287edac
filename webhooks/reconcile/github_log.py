"""GitHub's delivery log: read page by page, and asked to deliver something again.

Source: GitHub, "REST API endpoints for repository webhooks", "for organization webhooks" and "for GitHub App webhooks".
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx
from pydantic import AwareDatetime, BaseModel, ConfigDict, TypeAdapter, ValidationError

from webhooks.errors import ConfigurationError, ProviderError
from webhooks.provider_api import Clock, ProviderClient, decoded, request
from webhooks.reconcile.targets import Target
from webhooks.sources.reading import mapping, objects

PER_PAGE = 100
KEPT_FOR = timedelta(days=3)
"""How long github.com keeps a delivery, and so can deliver it again; an Enterprise Server keeps it for seven days."""
MOST_PAGES = 5000
"""More than a busy hook fills in the days that its log is kept: half a million attempts."""
ASK_TIMEOUT_S = 10.0


class Attempt(BaseModel):
    """One line of the log: GitHub tried to deliver something. A redelivery is a line of its own, with the same guid."""

    model_config = ConfigDict(frozen=True)

    id: int
    guid: str
    delivered_at: AwareDatetime
    redelivery: bool = False
    status: str | None = None
    status_code: int | None = None
    event: str | None = None
    action: str | None = None

    @property
    def succeeded(self) -> bool:
        """Whether GitHub counts it as delivered. Time-outs have no status code that says so: only `OK` does."""
        return (self.status or "").upper() == "OK"


_PAGE = TypeAdapter(list[Attempt])


@dataclass(frozen=True, slots=True)
class Hook:
    """A hook whose log can be read.

    Args:
        target: whose it is.
        path: where it is in the API.
        id: what GitHub sends as `X-GitHub-Hook-ID`; None for an app that nothing was delivered to yet.
    """

    target: Target
    path: str
    id: int | None

    @property
    def scope(self) -> str:
        """What its redeliveries are noted under."""
        return f"github:{self.path}"


async def found(client: ProviderClient, target: Target, source: str, *, clock: Clock) -> Hook:
    """Return the hook that is meant.

    Args:
        client: one of GitHub's.
        target: with the hook's id, or without: then it is the only one that points to `/webhooks/…`.
        source: the name of our source; where several hooks point to a receiver, the one that points to this is meant.
        clock: the time and how to wait.

    Raises:
        ConfigurationError: none is meant for certain; the message lists those there are.
        ProviderError: GitHub refused or did not answer.
    """
    if target.kind == "app":
        return Hook(target, "/app/hook", await _id_of_app_hook(client, clock))
    if target.hook is not None:
        return Hook(target, f"{target.hooks_path}/{target.hook}", target.hook)
    response = await request(client, "GET", target.hooks_path, params={"per_page": PER_PAGE}, clock=clock)
    addresses = {hook["id"]: _address(hook) for hook in objects(decoded(response)) if isinstance(hook.get("id"), int)}
    ours = [id for id, address in addresses.items() if address.rstrip("/").endswith(f"/webhooks/{source}")]
    if not ours:
        ours = [id for id, address in addresses.items() if "/webhooks/" in address]
    if len(ours) == 1:
        return Hook(target, f"{target.hooks_path}/{ours[0]}", ours[0])
    listed = ", ".join(f"{id} ({addresses[id]})" for id in ours or addresses)
    how_many = "several hooks point" if ours else "no hook points"
    raise ConfigurationError(
        f"{target}: {how_many} to an address with /webhooks/; say which with --hook, there are: {listed or 'none'}"
    )


def _address(hook: dict[str, Any]) -> str:
    """Return where a hook points, without what may be secret in it."""
    try:
        url = httpx.URL(str(mapping(hook.get("config")).get("url") or ""))
    except httpx.InvalidURL:
        return "an address that cannot be read"
    return str(url.copy_with(username=None, password=None, query=None, fragment=None))


async def _id_of_app_hook(client: ProviderClient, clock: Clock) -> int | None:
    """Find out the number of an app's hook, which only what was delivered says."""
    newest = _read(await request(client, "GET", "/app/hook/deliveries", params={"per_page": 1}, clock=clock))
    if not newest:
        return None
    whole = mapping(decoded(await request(client, "GET", f"/app/hook/deliveries/{newest[0].id}", clock=clock)))
    headers = mapping(mapping(whole.get("request")).get("headers"))
    number = next((str(value) for name, value in headers.items() if name.lower() == "x-github-hook-id"), "")
    if not (number.isascii() and number.isdigit()):
        raise ProviderError("GitHub does not say the number of the app's hook, so its deliveries cannot be told apart")
    return int(number)


async def pages(client: ProviderClient, hook: Hook, *, clock: Clock) -> AsyncGenerator[list[Attempt]]:
    """Read the log, the newest first, until it ends or whoever reads has enough.

    Raises:
        ProviderError: GitHub refused or did not answer, or its log does not end.
    """
    params = httpx.QueryParams(per_page=PER_PAGE)
    seen = {str(params)}
    for _ in range(MOST_PAGES):
        response = await request(client, "GET", f"{hook.path}/deliveries", params=params, clock=clock)
        attempts = _read(response)
        following = response.links.get("next", {}).get("url", "")
        yield attempts
        if not following:
            return
        try:
            # Only what it asks for is taken from the link: our token goes to no address that an answer names.
            params = httpx.URL(following).params
        except httpx.InvalidURL:
            raise ProviderError("GitHub's delivery log goes on at an address that cannot be read") from None
        if str(params) in seen:
            raise ProviderError("GitHub's delivery log leads back to a page that was read already")
        seen.add(str(params))
    raise ProviderError(f"GitHub's delivery log does not end: {MOST_PAGES} pages were read")


def _read(response: httpx.Response) -> list[Attempt]:
    try:
        return _PAGE.validate_python(decoded(response))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ProviderError(f"GitHub's delivery log cannot be read: {where}: {first['msg']}") from None


async def ask_again(client: ProviderClient, hook: Hook, attempt: int, *, clock: Clock) -> None:
    """Have GitHub deliver again what an attempt was about. It does so by itself, a little later.

    Where it limits the rate the error says how long; nothing is waited for here, because a claim is held.

    Raises:
        ProviderError: GitHub refused or did not answer.
    """
    path = f"{hook.path}/deliveries/{attempt}/attempts"
    await request(client, "POST", path, repeatable=True, patience=timedelta(0), clock=clock, timeout=ASK_TIMEOUT_S)
