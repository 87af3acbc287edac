"""What an answer of a provider means: how long to stay away, and what to tell a person. Pure.

Sources: GitHub, "Rate limits for the REST API" (403 or 429, with `retry-after`, or `x-ratelimit-remaining: 0` and
`x-ratelimit-reset`, or neither: then a minute, and longer each time); RFC 9110 §10.2.3. Shortcut answers 429 past 200
requests a minute and names no time.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from webhooks.errors import ProviderError
from webhooks.nesting import loads
from webhooks.provider_api.clients import ProviderClient
from webhooks.sources.reading import mapping, sequence

UNNAMED_PAUSE = timedelta(seconds=60)
LEAST_PAUSE = timedelta(seconds=1)
LONGEST_SAID = 300
SCOPES = "admin:repo_hook for a repository, admin:org_hook for an organization"


def asked_to_wait(response: httpx.Response, now: float, pauses: int = 0) -> timedelta | None:
    """Return how long the provider asks us to stay away; None where the answer is no matter of the rate.

    Args:
        response: an answer that is no success.
        now: seconds since 1970.
        pauses: how often this call was asked to wait already; a wait that nobody names is doubled each time.
    """
    headers, status = response.headers, response.status_code
    if status not in (403, 429, 503):
        return None
    asked = _retry_after(headers.get("retry-after", "").strip(), now)
    if status == 503:
        return asked
    if asked is None and headers.get("x-ratelimit-remaining") == "0":
        asked = _until(headers.get("x-ratelimit-reset", ""), now)
    if asked is None and (status == 429 or "rate limit" in said(response).lower()):
        asked = UNNAMED_PAUSE * 2**pauses
    return asked


def _retry_after(value: str, now: float) -> timedelta | None:
    if re.fullmatch(r"[0-9]{1,9}", value):
        return max(timedelta(seconds=int(value)), LEAST_PAUSE)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now
    return max(timedelta(seconds=math.ceil(seconds)), LEAST_PAUSE)


def _until(epoch_seconds: str, now: float) -> timedelta | None:
    if not re.fullmatch(r"[0-9]{1,11}", epoch_seconds):
        return None
    return max(timedelta(seconds=math.ceil(int(epoch_seconds) - now)), LEAST_PAUSE)


def decoded(response: httpx.Response) -> Any:
    """Return the JSON of a successful answer.

    Raises:
        ProviderError: it is no JSON, so something other than the provider answered.
    """
    try:
        return loads(response.content)
    except ValueError:
        where = f"{response.request.method} {response.request.url.path}"
        raise ProviderError(f"{response.request.url.host} answered {where} with something that is not JSON") from None


def said(response: httpx.Response) -> str:
    """Return what the provider says went wrong: its own words where they are JSON, else how the body begins."""
    try:
        body = mapping(loads(response.content))
    except ValueError:
        body = {}
    words = [body.get("message"), *(_fault(error) for error in sequence(body.get("errors")))]
    text = "; ".join(word for word in words if isinstance(word, str) and word) or response.text.strip()
    return "".join(character if character.isprintable() else " " for character in text)


def _fault(error: object) -> object:
    fault = mapping(error)
    return fault.get("message") or " ".join(str(fault[key]) for key in ("field", "code") if key in fault) or error


def complaint(client: ProviderClient, response: httpx.Response, wait: timedelta | None = None) -> str:
    """Return what to tell a person of an answer that is no success: what was asked, what came back, what to do.

    Args:
        client: whose answer it is.
        response: the answer.
        wait: how long it asks us to stay away.
    """
    asked = f"{response.request.method} {response.request.url.path}"
    words = said(response)
    if client.secret:
        words = words.replace(client.secret, "…")
    words = words[:LONGEST_SAID]
    told = f"{client.provider} answered {response.status_code} to {asked}"
    return f"{told}{f' ({words})' if words else ''}: {_advice(client, response, wait)}"


def _advice(client: ProviderClient, response: httpx.Response, wait: timedelta | None) -> str:
    status = response.status_code
    needs = f"; it needs {SCOPES}" if client.provider == "GitHub" else ""
    if wait is not None:
        return f"it limits the rate; run it again in {wait}"
    if status == 401:
        return f"it does not accept {client.variable}: set one that is valid"
    if status == 403:
        return f"what {client.variable} holds may not do that{needs}"
    if status == 404:
        return f"there is no such thing, or {client.variable} may not see it{needs}"
    if response.is_redirect:
        return f"it is elsewhere now, {_elsewhere(response)}: name it by its new name, or mend {client.api_variable}"
    if response.is_server_error:
        return f"{client.provider} has trouble; try again later"
    return "it was refused as it stands"


def _elsewhere(response: httpx.Response) -> str:
    try:
        return str(response.url.join(response.headers.get("location", "")).copy_with(query=None, fragment=None))
    except httpx.InvalidURL:
        return "at an address that cannot be read"
