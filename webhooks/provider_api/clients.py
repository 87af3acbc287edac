"""A client for each provider: its address, our token, its time-outs."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import cache

import httpx

from webhooks.errors import ConfigurationError
from webhooks.settings import Settings

TIMEOUT = httpx.Timeout(20, connect=5)


class ProviderClient(httpx.AsyncClient):
    """An httpx client that knows whose it is, for what an error tells a person.

    Attributes:
        provider: `GitHub` or `Shortcut`.
        variable: the setting that holds what it authenticates with.
        api_variable: the setting that holds its address.
        secret: what must not be shown, None where there is no fixed one.
    """

    provider: str
    variable: str
    api_variable: str
    secret: str | None


@asynccontextmanager
async def github_client(settings: Settings, *, auth: httpx.Auth | None = None) -> AsyncGenerator[ProviderClient]:
    """Open a client for GitHub's REST API, with `WEBHOOKS_GITHUB_TOKEN`.

    Args:
        settings: the environment.
        auth: authenticates each request instead of the token, as a GitHub App does.

    Raises:
        ConfigurationError: there is no token, or it cannot be one.
    """
    headers = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28"}
    secret = None
    if auth is None:
        secret = _token("WEBHOOKS_GITHUB_TOKEN", settings.github_token, "a token with the scope admin:repo_hook")
        headers["Authorization"] = f"Bearer {secret}"
    async with _client(settings.github_api, headers, auth) as client:
        client.provider, client.api_variable, client.secret = "GitHub", "GITHUB_API", secret
        client.variable = "WEBHOOKS_GITHUB_TOKEN" if auth is None else "WEBHOOKS_GITHUB_APP_KEY_FILE"
        yield client


@asynccontextmanager
async def shortcut_client(settings: Settings) -> AsyncGenerator[ProviderClient]:
    """Open a client for Shortcut's REST API v3, with `WEBHOOKS_SHORTCUT_TOKEN`.

    Raises:
        ConfigurationError: there is no token, or it cannot be one.
    """
    secret = _token("WEBHOOKS_SHORTCUT_TOKEN", settings.shortcut_token, "an API token of a member of the workspace")
    async with _client(settings.shortcut_api, {"Shortcut-Token": secret}, None) as client:
        client.provider, client.api_variable, client.secret = "Shortcut", "SHORTCUT_API", secret
        client.variable = "WEBHOOKS_SHORTCUT_TOKEN"
        yield client


def _token(variable: str, value: str | None, wanted: str) -> str:
    if value is None:
        raise ConfigurationError(f"set {variable}: {wanted}")
    # httpx would complain of the header later, and show what is in it.
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ConfigurationError(f"{variable} holds a character that no token has: was a space or a line end copied?")
    return value


@cache
def _tls() -> ssl.SSLContext:
    """Return what servers are verified with: made once, because loading the authorities blocks the loop for a while."""
    return httpx.create_ssl_context()


def _client(base_url: str, headers: dict[str, str], auth: httpx.Auth | None) -> ProviderClient:
    common = {"User-Agent": "webhooks", **headers}
    return ProviderClient(base_url=base_url, headers=common, auth=auth, timeout=TIMEOUT, verify=_tls())
