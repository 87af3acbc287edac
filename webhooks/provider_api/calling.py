"""One call: waits where the provider asks for that, repeats what is harmless to repeat, and else says what to do."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx
import structlog

from webhooks.errors import ProviderError
from webhooks.provider_api.answers import asked_to_wait, complaint
from webhooks.provider_api.clients import ProviderClient

log = structlog.get_logger(__name__)

TRIES = 4
MOST_REDIRECTS = 3
FIRST_RETRY_S = 0.5
PATIENCE = timedelta(minutes=5)
HARMLESS_TO_REPEAT = frozenset({"GET", "HEAD", "PUT", "DELETE"})
# The request was not sent.
NOTHING_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)


@dataclass(frozen=True, slots=True)
class Clock:
    """The time and how to wait, so that a test need not.

    Args:
        now: returns seconds since 1970.
        sleep: waits so many seconds.
    """

    now: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


CLOCK = Clock()


async def request(
    client: ProviderClient,
    method: str,
    path: str,
    *,
    repeatable: bool | None = None,
    patience: timedelta = PATIENCE,
    clock: Clock = CLOCK,
    **arguments: Any,
) -> httpx.Response:
    """Make a call, and return its successful answer.

    Where the provider limits the rate, it waits as long as it is asked to, and asks again. Where it answers with a 5xx
    or not at all, a call that is harmless to repeat is repeated three times. Redirects are followed on the same host.

    Args:
        client: whose address and token are used.
        method: the HTTP method.
        path: below the client's base URL, or a whole address on the same host.
        repeatable: whether a second call does no harm; None goes by the method.
        patience: the longest to wait in all where the rate is limited.
        clock: the time and how to wait.
        **arguments: httpx's own, such as `json` or `params`.

    Raises:
        ProviderError: it was not done, or nobody knows whether it was; the message says what to do.
    """
    harmless = method.upper() in HARMLESS_TO_REPEAT if repeatable is None else repeatable
    failures = pauses = redirects = 0
    waited = timedelta()
    while True:
        try:
            response = await client.request(method, path, **arguments)
        except httpx.RequestError as error:
            failures += 1
            if failures >= TRIES or not (harmless or isinstance(error, NOTHING_SENT)):
                raise ProviderError(_unanswered(client, method, error)) from None
            await clock.sleep(_back_off_s(failures))
            continue
        if response.is_success:
            return response
        if redirects < MOST_REDIRECTS and (elsewhere := _same_host(client, response)):
            redirects += 1
            path, arguments = elsewhere, {**arguments, "params": None}
            continue
        wait = asked_to_wait(response, clock.now(), pauses)
        if wait is not None and (harmless or response.status_code != 503):
            if waited + wait > patience:
                raise ProviderError(complaint(client, response, wait), status=response.status_code, retry_after=wait)
            pauses, waited = pauses + 1, waited + wait
            log.warning("asked to wait", provider=client.provider, seconds=round(wait.total_seconds()))
            await clock.sleep(wait.total_seconds())
            continue
        failures += 1
        if failures >= TRIES or not (harmless and response.is_server_error):
            raise ProviderError(complaint(client, response), status=response.status_code)
        await clock.sleep(_back_off_s(failures))


def _back_off_s(failures: int) -> float:
    return FIRST_RETRY_S * 2.0**failures * random.uniform(0.5, 1)


def _same_host(client: ProviderClient, response: httpx.Response) -> str | None:
    """Return where a redirect leads, if it may be followed: our token goes to no other host."""
    if not response.has_redirect_location:
        return None
    if response.request.method not in ("GET", "HEAD") and response.status_code not in (307, 308):
        return None
    try:
        there = response.url.join(response.headers["location"])
    except httpx.InvalidURL:
        return None
    here = client.base_url
    return str(there) if (there.scheme, there.host, there.port) == (here.scheme, here.host, here.port) else None


def _unanswered(client: ProviderClient, method: str, error: httpx.RequestError) -> str:
    cause = str(error) or type(error).__name__
    done = method in ("GET", "HEAD") or isinstance(error, NOTHING_SENT)
    told = f"{client.provider} does not answer at {client.base_url.host} ({cause}): is {client.api_variable} right?"
    return told if done else f"{told} Nobody knows whether it was done."
