"""The part of GitHub's REST API that the flow uses. Source: docs.github.com/rest/pulls/pulls."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
from pydantic import TypeAdapter

from handlers.calls import TIMEOUT, call, tls
from handlers.models import PullRequest
from handlers.settings import needed, settings

_PULL_REQUESTS = TypeAdapter(list[PullRequest])
LONGEST_TITLE = 256


@asynccontextmanager
async def github_http(purpose: str, user_agent: str) -> AsyncGenerator[httpx.AsyncClient]:
    """A connection with our token.

    Raises:
        Escalate: there is no token; it says what it is for.
    """
    now = settings()
    token = needed(now.github_token, "WEBHOOKS_GITHUB_TOKEN", purpose)
    headers = {
        "Authorization": f"Bearer {token.get_secret_value()}",
        "Accept": "application/vnd.github+json",
        "X-GitHub-Api-Version": "2022-11-28",
        "User-Agent": user_agent,
    }
    async with httpx.AsyncClient(base_url=now.github_api, headers=headers, timeout=TIMEOUT, verify=tls()) as http:
        yield http


@asynccontextmanager
async def github_api() -> AsyncGenerator[GitHubApi]:
    """A client with our token, for our repository.

    Raises:
        Escalate: there is no token, or no repository is named.
    """
    async with github_http("the pull request is opened with it", "webhooks-patch-flow") as http:
        name = settings().github_repository
        yield GitHubApi(http, needed(name, "PATCH_GITHUB_REPOSITORY", "owner/name, where pull requests are opened"))


class GitHubApi:
    """One method a call; what they raise is said in `handlers.calls`."""

    def __init__(self, http: httpx.AsyncClient, repository: str) -> None:
        self._http = http
        self._owner = repository.split("/")[0]
        self._pulls = f"/repos/{repository}/pulls"

    async def pull_requests(self, branch: str) -> list[PullRequest]:
        """The pull requests from `branch` of the repository itself, open and closed, the newest first."""
        params = {"head": f"{self._owner}:{branch}", "state": "all"}
        return _PULL_REQUESTS.validate_python(await call(self._http, "GET", self._pulls, params=params))

    async def open_pull_request(self, *, title: str, body: str, branch: str, base: str) -> PullRequest:
        proposal = {"title": title[:LONGEST_TITLE], "body": body, "head": branch, "base": base}
        return PullRequest.model_validate(await call(self._http, "POST", self._pulls, json=proposal))
