"""One call of an agent about one issue, and what its answer means for the attempt that made it.

=================================  ===================================================================================
2xx, or exit code 0, with JSON     the result
408, 425, 429                      `NotDone(retry_after=…)`: the attempt waits that long, uncharged
any other 4xx, a redirect          `Refused`: a person has to look, so the issue escalates
no connection                      `NotDone`: it certainly did not happen
5xx, too late, not JSON, too long  `AgentFailed`: nobody knows how much was done; another attempt asks again
=================================  ===================================================================================

Every call carries the attempt's idempotency key, the same for all attempts: `Idempotency-Key`, or `IDEMPOTENCY_KEY` in
a command's environment. An agent that honours it may be asked twice and works once.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
from pydantic import BaseModel

from handlers.agents import Agent, HttpAdapter, ProcessAdapter
from handlers.calls import not_done_if_unsent, pause, tls
from handlers.issues import Issue
from handlers.runner import run
from handlers.texts import json_text
from webhooks import Claim, NotDone

MAX_ANSWER_BYTES = 1024 * 1024
CONNECT_WITHIN_S = 5.0
SLACK = timedelta(seconds=10)
"""On top of an agent's own limit: a command's process group may take a while to die."""

BUSY = frozenset({408, 425, 429})
# A proxy of the environment is not for agents on this machine.
LOCAL = ("all://localhost", "all://127.0.0.1", "all://[::1]")


class AgentFailed(Exception):
    """The agent did not come to a result; it may have done part of the work."""


class Refused(NotDone):
    """The agent said that it will not do this, however often it is asked."""


class About(BaseModel):
    """What an effect's record is known by. Other columns, such as the priority, may change between two attempts."""

    id: int
    title: str
    body: str


@asynccontextmanager
async def agents_http() -> AsyncGenerator[httpx.AsyncClient]:
    """The client of one run; how many calls are made at once is up to the agents' settings."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    timeouts = httpx.Timeout(None, connect=CONNECT_WITHIN_S)
    async with httpx.AsyncClient(verify=tls(), limits=limits, timeout=timeouts, mounts=dict.fromkeys(LOCAL)) as http:
        yield http


class Call:
    """A call that is about to be made; `ask` makes it, as an effect of the claim."""

    def __init__(
        self, agent: Agent, http: httpx.AsyncClient, claim: Claim[Issue], *, repository: str | None = None
    ) -> None:
        self._agent = agent
        self._http = http
        self._key = claim.idempotency_key("agent")
        told: dict[str, Any] = claim.row.model_dump(mode="json")
        if repository is not None:  # where GitHub's issue is now; the company's id is what it was first called
            told["repository"] = repository
        told |= {"attempt": claim.attempt, "claim": claim.claim_seq, "idempotency_key": self._key}
        self._told = json.dumps(told, ensure_ascii=False).encode()

    async def ask(self, about: About) -> str:
        """Call the agent and return its result as JSON text.

        Raises:
            NotDone: it certainly did not happen.
            AgentFailed: it went wrong, and nobody knows how far it got.
            CommandFailed: the same, of a command.
        """
        adapter = self._agent.adapter
        answer = await (self._post(adapter) if isinstance(adapter, HttpAdapter) else self._run(adapter))
        try:
            return json_text(answer)
        except ValueError as error:
            raise AgentFailed(f"the answer is not JSON ({error}): {answer[:200]!r}") from None

    async def _post(self, adapter: HttpAdapter) -> bytes:
        url = str(adapter.url)
        try:
            with not_done_if_unsent(url):
                async with (
                    asyncio.timeout(adapter.timeout_s),
                    self._http.stream("POST", url, content=self._told, headers=self._headers(adapter)) as response,
                ):
                    body = await _capped(response)
        except TimeoutError:
            raise AgentFailed(f"{url} did not answer within {adapter.timeout_s:g} s") from None
        except httpx.TransportError as error:
            raise AgentFailed(f"the connection to {url} broke: {str(error) or type(error).__name__}") from error
        if response.is_success:
            return body
        complaint = f"{url} answered {response.status_code}: {_said(response, body)}"
        if response.is_server_error:
            raise AgentFailed(complaint)
        if response.status_code in BUSY:
            # All three ask for patience; where the answer says not how long, it is as long as a 429 means.
            raise NotDone(complaint, retry_after=pause(429, response.headers, datetime.now(UTC)))
        raise Refused(complaint)

    def _headers(self, adapter: HttpAdapter) -> dict[str, str]:
        headers = dict(adapter.headers)
        if adapter.token_env is not None:
            token = os.environ.get(adapter.token_env)
            if not token:
                raise Refused(f"set {adapter.token_env}: agent {self._agent.id} is called with it")
            headers["Authorization"] = f"Bearer {token}"
        return headers | {"Content-Type": "application/json", "Idempotency-Key": self._key}

    async def _run(self, adapter: ProcessAdapter) -> bytes:
        return await run(
            adapter.command,
            stdin=self._told,
            cwd=adapter.cwd,
            environment={"IDEMPOTENCY_KEY": self._key},
            timeout=timedelta(seconds=adapter.timeout_s),
            max_output_bytes=MAX_ANSWER_BYTES,
        )


async def _capped(response: httpx.Response) -> bytes:
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise AgentFailed(f"{response.url} answered with more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _said(response: httpx.Response, body: bytes) -> str:
    """What an answer other than a result says: where it points to, or how it begins."""
    if response.is_redirect:
        return f"it has moved to {response.headers['location']}"
    return body[:500].decode(errors="replace").strip() or response.reason_phrase
