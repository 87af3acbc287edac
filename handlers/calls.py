"""One HTTP call to a provider, and what its answer means for the effect that made it.

==========================================  ==============================================================
no connection, 4xx, a redirect elsewhere    `NotDone`: it certainly did not happen, the next attempt calls again
429, GitHub's 403 for too many requests     `NotDone(retry_after=…)`: the phase waits that long, uncharged
5xx, a connection that broke while reading  any other error: nobody knows whether it happened
==========================================  ==============================================================

Nothing is tried again in here: one effect, one call. A redirect on the same host is followed, as GitHub answers where a
repository was renamed: by then nothing was done.
"""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

import httpx

from webhooks import NotDone

TIMEOUT = httpx.Timeout(20, connect=5)
RATE_LIMIT_PAUSE = timedelta(seconds=60)
"""How long a 429 without Retry-After asks to wait: Shortcut counts 200 requests a minute and names no time."""
LONGEST_PAUSE = timedelta(hours=1)
MOST_REDIRECTS = 3
NOTHING_SENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
)
"""What httpx raises before the first byte of a request has left: refused, too late, no such host, wrong certificate, no
way through a proxy. Whatever else it raises leaves open what became of the request."""


@cache
def tls() -> ssl.SSLContext:
    """What clients verify servers with: made once, because loading the authorities blocks the loop for a while."""
    return httpx.create_ssl_context()


@contextmanager
def not_done_if_unsent(where: str) -> Generator[None]:
    """Within it one request is made; where it certainly was not sent, that is told as `NotDone`."""
    try:
        yield
    except NOTHING_SENT as error:
        raise NotDone(f"no connection to {where}: {str(error) or type(error).__name__}") from error


class ProviderFailed(Exception):
    """The provider answered with a 5xx: it may or may not have done what was asked."""


async def call(http: httpx.AsyncClient, method: str, path: str, **arguments: Any) -> Any:
    """Make one call and return the parsed JSON of its answer.

    Args:
        http: a client whose base URL and headers are the provider's.
        method: the HTTP method.
        path: the path below the base URL.
        **arguments: httpx's own, such as ``json`` or ``params``.

    Raises:
        NotDone: the call certainly did not happen.
        ProviderFailed: the provider answered with a 5xx.
        httpx.TransportError: the connection broke after the request was sent.
    """
    with not_done_if_unsent(http.base_url.host):
        response = await http.request(method, path, **arguments)
        for _ in range(MOST_REDIRECTS):
            if (there := _elsewhere(http, response)) is None:
                break
            arguments.pop("params", None)  # they are part of the new address
            response = await http.request(method, there, **arguments)
    if response.is_success:
        return response.json()
    complaint = f"{http.base_url.host} answered {response.status_code} to {method} {path}: {_message(response)}"
    if response.is_server_error:
        raise ProviderFailed(complaint)
    raise NotDone(complaint, retry_after=pause(response.status_code, response.headers, datetime.now(UTC)))


def _elsewhere(http: httpx.AsyncClient, response: httpx.Response) -> httpx.URL | None:
    """Return where the same request is to be made instead; our token goes to no other host.

    Source: docs.github.com, "Best practices for using the REST API": a request is repeated as it was, at the new place.
    """
    if response.status_code not in (301, 302, 307, 308) or "location" not in response.headers:
        return None
    try:
        there = response.url.join(response.headers["location"])
    except httpx.InvalidURL:
        return None
    if (there.scheme, there.host, there.port) != (response.url.scheme, response.url.host, response.url.port):
        return None
    return there if there.query or not response.url.query else there.copy_with(query=response.url.query)


def pause(status_code: int, headers: Mapping[str, str], now: datetime) -> timedelta | None:
    """How long the provider asks us to wait before the next call; None where it does not.

    Sources: RFC 9110 §10.2.3 (Retry-After); GitHub, "Rate limits for the REST API" (403 or 429 with
    ``retry-after`` or ``x-ratelimit-remaining: 0`` and ``x-ratelimit-reset``).
    """
    asked = _retry_after(headers.get("retry-after", "").strip(), now)
    if asked is None and headers.get("x-ratelimit-remaining") == "0":
        asked = _until(headers.get("x-ratelimit-reset", ""), now)
    if asked is None and status_code == 429:
        asked = RATE_LIMIT_PAUSE
    if status_code not in (403, 429):
        return None
    return None if asked is None else min(max(asked, timedelta(seconds=1)), LONGEST_PAUSE)


def _retry_after(value: str, now: datetime) -> timedelta | None:
    if re.fullmatch(r"[0-9]{1,9}", value):
        return timedelta(seconds=int(value))
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)) - now


def _until(epoch_seconds: str, now: datetime) -> timedelta | None:
    if not re.fullmatch(r"[0-9]{1,12}", epoch_seconds):
        return None
    return timedelta(seconds=math.ceil(int(epoch_seconds) - now.timestamp()))


def _message(response: httpx.Response) -> str:
    """What the provider says went wrong: its own words where they are JSON, else the beginning of the body."""
    try:
        body = response.json()
        said = [body["message"], *(str(error) for error in body.get("errors") or ())]
        return "; ".join(said)[:500]
    except (ValueError, LookupError, TypeError, AttributeError):
        return response.text[:500].strip() or response.reason_phrase
