"""A signed question that tells whether an address on the internet leads to this very receiver.

That somebody answers `/healthz` there proves nothing, and neither does an answer to a signed delivery: another consumer
may hold the same secret. So a probe is a body that only a holder of a source's secret can sign. A receiver answers it
with a digest of it under a key of its own, new in every process, and stores nothing. The same probe is sent straight to
the receiver and through the public address; only the same process can give both answers. Whoever cannot sign learns no
more than from any other request with a bad signature.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

import httpx

from webhooks.delivery import Headers
from webhooks.errors import WebhooksError
from webhooks.sending import opened, target
from webhooks.signatures import sign
from webhooks.sources import Source
from webhooks.sources.reading import mapping
from webhooks.tunnel.reasons import why
from webhooks.tunnel.relay import Tell

FIELD = "webhooks_probe"
_BEGIN = f'{{"{FIELD}": "'.encode()
_LENGTH = len(_BEGIN) + 64 + len(b'"}')

ASK_EVERY_S = 1.0
# A name made a moment ago is often not known everywhere yet.
WITHIN_S = 60.0
ASK_WITHIN_S = 10.0
TELL_EVERY_S = 5.0
# Paths that only a control plane has.
PRIVATE = ("/metrics", "/api/status", "/readyz")


class NotReached(WebhooksError):
    """A public address does not lead to the receiver; the message says what was found instead."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A question, ready to be posted to `/webhooks/{source}`."""

    source: str
    headers: Headers
    body: bytes


def is_probe(body: bytes) -> bool:
    """Say whether a verified body is a probe; nothing else looks like one to the byte."""
    return len(body) == _LENGTH and body.startswith(_BEGIN)


def answer(key: bytes, body: bytes) -> str:
    """Return what the receiver with this key answers to a probe."""
    return hmac.digest(key, body, "sha256").hex()


def made(source: Source, secret: str, now: float) -> Probe:
    """Make a probe, new in every call.

    Args:
        source: whose secret signs it.
        secret: one that the receiver has.
        now: unix seconds.

    Raises:
        ConfigurationError: nothing can be signed with the secret.
    """
    body = json.dumps({FIELD: secrets.token_hex(32)}).encode()
    signed = sign(source.recipe, body, secret, now=now, id=f"probe_{secrets.token_hex(8)}")
    return Probe(source.name, (("content-type", "application/json"), *signed), body)


async def takes(base: str, source: Source, secret: str) -> bool:
    """Say whether the receiver at an address verifies with a secret.

    Raises:
        NotReached: no receiver of ours answers there.
    """
    async with opened(base) as client:
        status, found = await _ask(client, base, made(source, secret, time.time()))
    if status == 200 and isinstance(found.get("probe"), str):
        return True
    if status == 401:
        return False
    raise NotReached(f"{base} is no receiver of ours: it answered {status} to a signed probe")


async def reached(
    public: str,
    local: str,
    source: Source,
    secret: str,
    *,
    within_s: float = WITHIN_S,
    tell: Tell = lambda _: None,
) -> None:
    """Return once a public address is known to lead to the receiver, and to nothing private.

    Args:
        public: the base address on the internet.
        local: the receiver's own base address.
        source: one of the receiver's sources.
        secret: one of that source's.
        within_s: how long to go on asking.
        tell: called, every few seconds, with why it does not lead there yet.

    Raises:
        NotReached: it does not, or the receiver is not there.
        ConfigurationError: nothing can be signed with the secret.
    """
    begun = told = time.monotonic()
    async with opened(local) as here, opened(public) as there:
        while True:
            wrong = await _unlike(here, local, there, public, made(source, secret, time.time()))
            if wrong is None and (wrong := await _unsettled(there, public)) is None:
                return
            now = time.monotonic()
            if now + ASK_EVERY_S > begun + within_s:
                raise NotReached(f"{public} does not lead to the receiver at {local}: {wrong}")
            if now >= told + TELL_EVERY_S:
                tell(f"not yet, after {now - begun:.0f} s: {wrong}")
                told = now
            await asyncio.sleep(ASK_EVERY_S)


async def _unlike(
    here: httpx.AsyncClient, local: str, there: httpx.AsyncClient, public: str, probe: Probe
) -> str | None:
    """Return what is wrong, None when both ways lead to the same receiver."""
    status, own = await _ask(here, local, probe)
    if status == 401:
        raise NotReached(
            f"the receiver at {local} refuses a probe signed with the secret of {probe.source} that is known here "
            f"({own.get('error')}): start the tunnel with the settings, and in the directory, of the receiver"
        )
    if status != 200 or not isinstance(own.get("probe"), str):
        raise NotReached(f"{local} is no receiver of ours: it answered {status} to a signed probe")
    try:
        status, found = await _ask(there, public, probe)
    except NotReached as error:
        return str(error)
    if status == 200 and isinstance(found.get("probe"), str):
        same = hmac.compare_digest(str(own["probe"]).encode(), str(found["probe"]).encode())
        return None if same else "another receiver with the same secret answers there"
    return f"it answers {status} to a signed probe"


async def _ask(client: httpx.AsyncClient, base: str, probe: Probe) -> tuple[int, dict[str, Any]]:
    url = target(base, probe.source)
    try:
        response = await client.post(
            url, headers=list(probe.headers), content=probe.body, follow_redirects=False, timeout=ASK_WITHIN_S
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NotReached(f"no answer from {url}: {why(error)}") from None
    try:
        return response.status_code, mapping(response.json())
    except ValueError:
        return response.status_code, {}


async def _unsettled(there: httpx.AsyncClient, public: str) -> str | None:
    """Return what is wrong with the tunnel itself, None when it leads to the receiver and to nothing private.

    Raises:
        NotReached: the control plane can be reached through it.
    """
    for path in PRIVATE:
        url = public.rstrip("/") + path
        try:
            response = await there.get(url, follow_redirects=False, timeout=ASK_WITHIN_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"no answer from {url}: {why(error)}"
        if response.status_code >= 500:
            return f"{url} answers {response.status_code}"
        if response.status_code != 404:
            raise NotReached(
                f"{url} answers {response.status_code}, and only a control plane has that path: the tunnel is closed; "
                "let it lead to the receiver's port alone"
            )
    return None
