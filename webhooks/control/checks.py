"""Who may use the control plane.

With a token, whoever presents it, and nobody else, programs of this machine included. Without one, only a program on
this machine that no proxy or tunnel speaks for; `Host` and `Origin` are checked then, so that no web page can reach it
through the browser of somebody here, its name pointed at this machine or not.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

Lines = Sequence[tuple[bytes, bytes]]

ALWAYS_ALLOWED = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""What anybody may ask: a supervisor asks without a token, by address or any name, from wherever it is. Whoever may not
ask anything else learns that we run, and by the names of what is checked whether we are ready."""
FORWARDED = frozenset(
    {
        b"forwarded",
        b"via",
        b"x-real-ip",
        b"x-client-ip",
        b"x-cluster-client-ip",
        b"x-original-forwarded-for",
        b"x-envoy-external-address",
        b"x-amzn-trace-id",
        b"x-azure-clientip",
        b"x-azure-fdid",
        b"x-arr-log-id",
        b"x-appengine-user-ip",
        b"x-cloud-trace-context",
        b"true-client-ip",
        b"cf-connecting-ip",
        b"cf-ray",
        b"cdn-loop",
        b"fastly-client-ip",
        b"fly-client-ip",
        b"ngrok-auth-user-email",
    }
)
"""What proxies, balancers and tunnels add, by their own documentation. One that adds nothing cannot be told."""
FORWARDED_PREFIX = b"x-forwarded-"
TRUSTED = "webhooks.trusted"
_AUTHORITY = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
_SCHEME = re.compile(r"^https?://")


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    error: str


def refusal(lines: Lines, peer: str | None, token: str | None, hosts: Collection[str]) -> Refusal | None:
    """Decide about one request; None lets it pass.

    Args:
        lines: its header lines, names in lower case.
        peer: the address it comes from.
        token: what must be presented, where one is set.
        hosts: the names under which the control plane may be asked, in lower case and without port.
    """
    if token is not None and _presented(lines, token):
        # Nobody else's page can know it, so that neither the name nor the origin matters: Prometheus asks by address.
        return None
    named = _values(lines, b"host")
    if len(named) != 1 or _host(named[0]) not in hosts:
        return Refusal(421, "unknown host: name it in WEBHOOKS_CONTROL_HOSTS")
    if any(_host(_SCHEME.sub("", origin)) not in hosts for origin in _values(lines, b"origin")):
        return Refusal(403, "asked by a page of another origin")
    if token is not None:
        return Refusal(401, "present the token: Authorization: Bearer")
    if any(name in FORWARDED or name.startswith(FORWARDED_PREFIX) for name, _ in lines):
        return Refusal(403, "forwarded by a proxy: set WEBHOOKS_CONTROL_TOKEN and present it")
    if not is_loopback(peer):
        return Refusal(403, "asked from another machine: set WEBHOOKS_CONTROL_TOKEN and present it")
    return None


def _presented(lines: Lines, token: str) -> bool:
    presented = _values(lines, b"authorization")
    scheme, _, given = presented[0].partition(" ") if len(presented) == 1 else ("", "", "")
    right = hmac.compare_digest(given.strip().encode("latin-1"), token.encode("utf-8", "surrogateescape"))
    return right and scheme.lower() == "bearer"


def _values(lines: Lines, name: bytes) -> list[str]:
    return [value.decode("latin-1") for given, value in lines if given == name]


def _host(text: str) -> str | None:
    """Return the name or address of `host:port`, in lower case; None for what is nothing of the kind."""
    found = _AUTHORITY.fullmatch(text)
    return None if found is None else (found[1] or found[2]).lower()


def is_loopback(peer: str | None) -> bool:
    """Say whether an address is this machine's own; a name, or no address at all, is not."""
    try:
        address = ip_address(peer or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def is_trusted(scope: Scope) -> bool:
    """Say whether who asks for what anybody may ask could ask for the rest as well."""
    return bool(scope.get(TRUSTED, False))


def _is_open(scope: Scope) -> bool:
    # The methods that our own route answers: no other route is reached this way.
    return scope["type"] == "http" and scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")


class Checks:
    """Middleware that refuses who may not ask.

    Args:
        app: what is asked.
        token: what must be presented, where one is set.
        hosts: further names under which it may be asked.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._token = token
        self._hosts = ALWAYS_ALLOWED | {host.strip("[]").lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        refused = refusal(scope["headers"], client[0] if client else None, self._token, self._hosts)
        if _is_open(scope):
            await self._app({**scope, TRUSTED: refused is None}, receive, send)
        elif refused is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refused.error})
        else:
            headers = {"www-authenticate": "Bearer"} if refused.status == 401 else None
            answer = JSONResponse({"error": refused.error}, refused.status, headers)
            await answer(scope, receive, send)
