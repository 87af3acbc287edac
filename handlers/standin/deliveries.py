"""Sends webhooks the way the two providers do: their headers, their signatures, and a new id for each event."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import uuid
from pathlib import Path
from typing import Any

import httpx
import structlog

from handlers.calls import tls

log = structlog.get_logger(__name__)

HOOK_ID = "3200"
TRIES = 5


async def send_shortcut(body: dict[str, Any]) -> None:
    """Send a v1 event. Source: developer.shortcut.com/api/webhook/v1."""
    content = json.dumps(body, ensure_ascii=False).encode()
    signature = sign("shortcut", content)
    await _post("shortcut", content, {"Payload-Signature": signature} if signature else {})


async def send_github(event: str, body: dict[str, Any]) -> None:
    """Send an event of a repository's hook. Source: docs.github.com, "Webhook events and payloads"."""
    content = json.dumps(body, ensure_ascii=False).encode()
    headers = {
        "X-GitHub-Event": event,
        "X-GitHub-Delivery": str(uuid.uuid4()),
        "X-GitHub-Hook-ID": HOOK_ID,
        "User-Agent": "GitHub-Hookshot/standin",
    }
    if signature := sign("github", content):
        headers["X-Hub-Signature-256"] = f"sha256={signature}"
    await _post("github", content, headers)


def sign(source: str, content: bytes) -> str | None:
    """The HMAC-SHA-256 under the receiver's secret for `source`, in hex; None where it has none."""
    name = f"WEBHOOKS_SECRET_{source.upper()}"
    secret = os.environ.get(name, "").split(",")[0].strip()
    if not secret and (file := os.environ.get(f"{name}_FILE")):
        secret = Path(file).read_text().removesuffix("\n").removesuffix("\r")
    return hmac.new(secret.encode(), content, hashlib.sha256).hexdigest() if secret else None


async def _post(source: str, content: bytes, headers: dict[str, str]) -> None:
    """Post until it is taken. GitHub itself would give up at once; the receiver here may be starting."""
    url = os.environ.get("WEBHOOKS_RECEIVER_URL", "http://127.0.0.1:8000").rstrip("/") + f"/webhooks/{source}"
    answer = "no connection"
    async with httpx.AsyncClient(timeout=10, verify=tls()) as http:
        for attempt in range(TRIES):
            await asyncio.sleep(attempt)
            try:
                response = await http.post(
                    url, content=content, headers={"Content-Type": "application/json", **headers}
                )
            except httpx.TransportError as error:
                answer = str(error) or type(error).__name__
                continue
            if response.is_success:
                return
            answer = f"{response.status_code} {response.text[:200]}"
            if response.is_client_error:
                break
    log.warning("the stand-in's delivery was not taken", url=url, answer=answer)
