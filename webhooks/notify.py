"""Telling somebody of rows that were escalated: `notifications` as a gated table, and the POST of each.

A line is written by the very statement that escalates (see `Statements`), where `WEBHOOKS_NOTIFY_URL` is set; a worker
without that setting leaves it to one that has it. It is sent as Standard Webhooks has it
(https://www.standardwebhooks.com), with the idempotency key as `webhook-id`, so that whoever is told twice can see that
it is the same.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import httpx

from webhooks.errors import ConfigurationError, NotDone, WebhooksError
from webhooks.gate import Gate
from webhooks.signatures import check_secret, sign
from webhooks.sources import StandardWebhooks
from webhooks.statements import NOTIFICATION_ATTEMPTS

if TYPE_CHECKING:
    from webhooks.claim import Claim
    from webhooks.settings import Settings

MOST_OF_AN_ANSWER = 200
CALL_TIMEOUT_S = 15.0
EFFECT_TIMEOUT = timedelta(seconds=30)
RECIPE = StandardWebhooks.recipe
LONGEST_WAIT = timedelta(hours=1)
# Older than that it is no news: the setting had been taken away, and is back.
NEWS_FOR = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Notification:
    """A row's escalation: which row, what it was in, after how many attempts, why, and when."""

    id: int
    table_name: str
    key: str
    phase: str
    attempts_made: int
    reason: str | None
    escalated_at: datetime


notifications: Gate[Notification] = Gate("notifications", key="id", row=Notification)
notifications.phase(
    "pending",
    claimed="notifying",
    done=("notified", "dropped"),
    timeout=timedelta(minutes=1),
    max_attempts=NOTIFICATION_ATTEMPTS,
)


class NotAccepted(WebhooksError):
    """Whoever is to be told did not say that they were."""


def check_settings(settings: Settings) -> None:
    """Refuse to start with somebody to tell and nothing to sign with.

    Raises:
        ConfigurationError: the message names the variable.
    """
    if settings.notify_url is None:
        return
    if settings.notify_secret is None:
        raise ConfigurationError("WEBHOOKS_NOTIFY_URL is set, so set WEBHOOKS_NOTIFY_SECRET: whsec_ and base64")
    try:
        check_secret(RECIPE, settings.notify_secret)
        sign(RECIPE, b"", settings.notify_secret, now=0, id="x")
    except ConfigurationError as error:
        raise ConfigurationError(f"WEBHOOKS_NOTIFY_SECRET: {error}") from None


async def notify(settings: Settings, claim: Claim[Notification]) -> None:
    """Send one notification, unless it is too old to be of use.

    Raises:
        ConfigurationError: nobody is to be told.
        NotDone: it certainly did not arrive.
        NotAccepted: it was not accepted, or no answer came: it is sent again, as the same.
    """
    url, secret = settings.notify_url, settings.notify_secret
    if url is None or secret is None:
        raise ConfigurationError("WEBHOOKS_NOTIFY_URL or WEBHOOKS_NOTIFY_SECRET is not set")
    if claim.lease_until - claim.row.escalated_at > NEWS_FOR:
        await claim.complete("dropped")
        return
    id = claim.idempotency_key("post")

    # Neither the address nor the secret is an argument: a new one must not look like another call.
    async def post(body: str) -> int:
        return await _post(url, secret, id, body.encode())

    await claim.once("post", post, content(claim.row), retry_safe=True, timeout=EFFECT_TIMEOUT)
    await claim.complete("notified")


def content(told: Notification) -> str:
    """Return the body: the same on every attempt."""
    row = f"{told.table_name}:{told.key}"
    data = {
        "row": row,
        "table": told.table_name,
        "key": told.key,
        "phase": told.phase,
        "attempts": told.attempts_made,
        "reason": told.reason,
        "look": f"webhooks why {row}",
    }
    envelope = {"type": "row.escalated", "timestamp": told.escalated_at.isoformat(), "data": data}
    return json.dumps(envelope, ensure_ascii=False)


async def _post(url: str, secret: str, id: str, body: bytes) -> int:
    headers = {"content-type": "application/json", "user-agent": "webhooks"}
    headers |= dict(sign(RECIPE, body, secret, now=time.time(), id=id))
    try:
        async with (
            httpx.AsyncClient(timeout=CALL_TIMEOUT_S) as http,
            http.stream("POST", url, content=body, headers=headers) as answer,
        ):
            said = "" if answer.is_success else await _beginning(answer)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.UnsupportedProtocol) as error:
        raise NotDone(f"no connection to WEBHOOKS_NOTIFY_URL: {error}") from error
    except httpx.HTTPError as error:
        raise NotAccepted(f"no answer from WEBHOOKS_NOTIFY_URL: {type(error).__name__}: {error}") from error
    if answer.is_success:
        return answer.status_code
    said = f"WEBHOOKS_NOTIFY_URL answered {answer.status_code}: {said}"
    if answer.status_code == 429:
        raise NotDone(said, retry_after=_wait(answer.headers.get("retry-after")))
    if answer.is_client_error:
        raise NotDone(said)
    raise NotAccepted(said)


async def _beginning(answer: httpx.Response) -> str:
    """Read what an answer says, of a long or packed one no more than its first bytes as they came."""
    async for part in answer.aiter_raw(MOST_OF_AN_ANSWER):
        return part.decode("utf-8", "replace")
    return ""


def _wait(retry_after: str | None) -> timedelta | None:
    """Read the seconds of `Retry-After`; of a date, or nonsense, nothing, so that the usual back-off holds."""
    if retry_after is None or not (retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 7):
        return None
    return min(timedelta(seconds=int(retry_after)), LONGEST_WAIT)
