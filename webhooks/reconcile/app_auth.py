"""How a GitHub App says that it is itself: a token signed with its private key, made anew every few minutes.

Source: GitHub, "Generating a JSON Web Token (JWT) for a GitHub App": RS256, at most ten minutes, issued a minute in the
past because clocks differ.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Generator
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from webhooks.errors import ConfigurationError
from webhooks.settings import Settings

VALID_FOR_S = 540
BACKDATED_S = 60
USED_FOR_S = 300
KEY = "WEBHOOKS_GITHUB_APP_KEY_FILE"


class AppAuth(httpx.Auth):
    """Authenticates each request as an app.

    Args:
        app_id: the app's id, or its client id.
        key: its private key.
        now: returns seconds since 1970.
    """

    def __init__(self, app_id: str, key: RSAPrivateKey, now: Callable[[], float] = time.time) -> None:
        self._app_id, self._key, self._now = app_id, key, now
        self._token, self._made_at = "", float("-inf")

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        """Put the token into the request, a new one where the last one is old."""
        now = self._now()
        if not 0 <= now - self._made_at < USED_FOR_S:
            self._token, self._made_at = self._signed(int(now)), now
        request.headers["Authorization"] = f"Bearer {self._token}"
        yield request

    def _signed(self, now: int) -> str:
        claims = {"iat": now - BACKDATED_S, "exp": now + VALID_FOR_S, "iss": self._app_id}
        signed = f"{_part({'alg': 'RS256', 'typ': 'JWT'})}.{_part(claims)}"
        return f"{signed}.{_encoded(self._key.sign(signed.encode(), PKCS1v15(), hashes.SHA256()))}"


def app_auth(settings: Settings) -> AppAuth:
    """Return how the app of `WEBHOOKS_GITHUB_APP_ID` authenticates.

    Raises:
        ConfigurationError: there is no app, or its key cannot be read.
    """
    if settings.github_app_id is None or settings.github_app_key_file is None:
        raise ConfigurationError(f"set WEBHOOKS_GITHUB_APP_ID and {KEY}: an app's log is read as the app")
    return AppAuth(settings.github_app_id, _private_key(settings.github_app_key_file))


def _private_key(path: Path) -> RSAPrivateKey:
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigurationError(f"{KEY}: cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigurationError(f"{KEY}: {path} holds no private key in PEM form without a password") from None
    if not isinstance(key, RSAPrivateKey):
        raise ConfigurationError(f"{KEY}: {path} holds no RSA key, which the keys of GitHub Apps are")
    return key


def _part(value: object) -> str:
    return _encoded(json.dumps(value, separators=(",", ":")).encode())


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
