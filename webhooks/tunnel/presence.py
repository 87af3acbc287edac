"""Whether a receiver is there, asked before anything comes that it should take."""

from __future__ import annotations

import httpx

from webhooks.sending import opened
from webhooks.tunnel.reasons import why

ASK_WITHIN_S = 5.0


async def missing(base: str, meanwhile: str | None = None) -> str | None:
    """Return what seems to be wrong with a receiver and what to do about it, None where nothing does.

    Args:
        base: its base address.
        meanwhile: what is to be said besides where nobody answers.
    """
    until_then = "" if meanwhile is None else f"; {meanwhile}"
    try:
        url, timeout = f"{base.rstrip('/')}/healthz", httpx.Timeout(ASK_WITHIN_S)
        async with opened(base) as client, client.stream("GET", url, follow_redirects=False, timeout=timeout) as answer:
            status = answer.status_code  # what it says besides is of no interest, and might be long
    except httpx.ConnectError:
        return f"nothing listens at {base}: start the receiver with webhooks serve --dev{until_then}"
    except httpx.HTTPError as error:
        return f"{base} does not answer ({why(error)}): is it held up, by a breakpoint perhaps?{until_then}"
    if status != 200:
        return f"what answers at {base} seems to be no receiver of webhooks: GET /healthz gave {status}"
    return None
