"""How providers sign, written down as data, and the one function that checks it.

A `Recipe` says where a provider puts its signature and what it signs; `verify` and `sign` follow it. Both are pure:
bytes, headers, secrets and *now* go in; nothing, new headers or `Refused` comes out.

The order of the checks is part of the design: the headers are parsed strictly, then every listed signature is
compared with every secret in constant time, and only then is the signed time believed enough to be looked at.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets as randomness
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from webhooks.delivery import Headers
from webhooks.errors import ConfigurationError, Refused

Encoding = Literal["hex", "base64"]
TimestampFormat = Literal["seconds", "milliseconds", "rfc3339"]

_DIGEST_BYTES = {"sha1": 20, "sha256": 32, "sha512": 64}
_ED25519_BYTES = 64
# A sender lists one signature a secret it rotates. A bound keeps an unauthenticated request from buying thousands of
# Ed25519 checks with one long header.
_MOST_ENTRIES = 32
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+")
_DIGITS = re.compile(r"[0-9]{1,15}")
_RFC3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?(?:Z|[+-][0-9]{2}:[0-9]{2})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one provider signs. Header names are in lower case.

    Args:
        header: the header that carries the signature, or a list of them.
        prefix: what stands before the digest (``sha256=``, ``v0=``, ``v1,``). In a list, an entry with another
            prefix belongs to another version of the scheme and is passed over.
        public_key_prefix: the same for Ed25519 signatures, where the provider has them beside its HMAC.
        encoding: how the signature's bytes are written.
        digest: the hash under the HMAC.
        signed: what is signed, with ``{id}``, ``{timestamp}`` and ``{body}`` filled in: the first two as the headers
            give them, the last as the bytes received.
        key_form: ``text`` uses the secret's own bytes, even where it looks encoded; ``base64`` decodes it, after an
            optional ``whsec_``. A ``whpk_`` secret is an Ed25519 public key where `public_key_prefix` is set.
        separator: what stands between the entries of a list of signatures; None: the header holds exactly one.
        id_header: the header that fills ``{id}``.
        timestamp_header: the header that fills ``{timestamp}``.
        timestamp_field: instead of a header of its own, the prefix of the signature header's entry that holds the
            timestamp (``t=``).
        timestamp_format: how it is written.
        tolerance_s: how many seconds it may differ from now, either way; None: however many.
    """

    header: str
    prefix: str = ""
    public_key_prefix: str | None = None
    encoding: Encoding = "hex"
    digest: Literal["sha1", "sha256", "sha512"] = "sha256"
    signed: str = "{body}"
    key_form: Literal["text", "base64"] = "text"
    separator: str | None = None
    id_header: str | None = None
    timestamp_header: str | None = None
    timestamp_field: str | None = None
    timestamp_format: TimestampFormat = "seconds"
    tolerance_s: int | None = 300

    @property
    def headers(self) -> frozenset[str]:
        """Every header that verifying looks at, and that must be kept for verifying again later."""
        named = (self.header, self.id_header, self.timestamp_header)
        return frozenset(name for name in named if name is not None)

    @property
    def timed(self) -> bool:
        """Whether a time is sent with the signature."""
        return self.timestamp_header is not None or self.timestamp_field is not None


@dataclass(frozen=True, slots=True)
class _Presented:
    """What a request claims: its signatures, and what they are said to cover besides the body."""

    digests: tuple[bytes, ...]  # as written, so that only the spelling the provider uses is right
    public_key_signatures: tuple[bytes, ...]
    id: str
    timestamp: str


def verify(recipe: Recipe, headers: Headers, body: bytes, secrets: Sequence[str], now: float) -> None:
    """Return if one listed signature of the body is right under one of the secrets.

    Args:
        recipe: how the provider signs.
        headers: the header lines as received.
        body: the bytes as received.
        secrets: all secrets in force; several while one is rotated. One that cannot be used is passed over here;
            `check_secret` says so on start.
        now: unix seconds, against which a signed time is held.

    Raises:
        Refused: with the named cause. Nothing else, whatever the input.
    """
    # A lone string is a sequence of strings too: each of its characters would be a secret that anybody can guess.
    configured = (secrets,) if isinstance(secrets, str) else secrets
    keys: list[bytes | Ed25519PublicKey] = []
    for secret in configured:
        with suppress(ConfigurationError):
            keys.append(_key(recipe, secret))
    if not keys:
        raise Refused("no_secret")
    presented = _presented(recipe, headers)
    signed_at = _seconds(recipe, presented.timestamp)
    message = _message(recipe, presented.id, presented.timestamp, body)
    if not _any_right(recipe, keys, presented, message):
        raise Refused("bad_signature")
    if signed_at is not None and recipe.tolerance_s is not None and abs(now - signed_at) > recipe.tolerance_s:
        raise Refused("stale_timestamp")


def sign(recipe: Recipe, body: bytes, secret: str, *, now: float, id: str = "") -> Headers:
    """Make the headers with which a provider would send this body.

    Args:
        recipe: how the provider signs.
        body: the bytes to be sent.
        secret: one secret; not a public key, with which nothing can be signed.
        now: unix seconds.
        id: the delivery's id, where the recipe signs one.

    Raises:
        ConfigurationError: the secret cannot sign.
    """
    key = _key(recipe, secret)
    if isinstance(key, Ed25519PublicKey):
        raise ConfigurationError("a whpk_ secret is a public key: it checks signatures and cannot make them")
    timestamp = _written_time(recipe.timestamp_format, now)
    message = _message(recipe, id, timestamp, body)
    entry = recipe.prefix + _digest(recipe, key, message).decode("ascii")
    if recipe.timestamp_field is not None:
        entry = f"{recipe.timestamp_field}{timestamp}{recipe.separator or ''}{entry}"
    lines = ((recipe.header, entry), (recipe.id_header, id), (recipe.timestamp_header, timestamp))
    return tuple((name, value) for name, value in lines if name is not None)


def check_secret(recipe: Recipe, secret: str) -> None:
    """Raise `ConfigurationError`, without naming the secret, if it cannot be used with this recipe."""
    _key(recipe, secret)


def new_secret(recipe: Recipe) -> str:
    """Make a random secret in the form the provider uses."""
    if recipe.key_form == "base64":
        return "whsec_" + base64.b64encode(randomness.token_bytes(32)).decode("ascii")
    return randomness.token_hex(32)


def _key(recipe: Recipe, secret: str) -> bytes | Ed25519PublicKey:
    if recipe.public_key_prefix is not None and secret.startswith("whpk_"):
        public = _decoded("base64", _padded(secret.removeprefix("whpk_")))
        if public is None or len(public) != 32:
            raise ConfigurationError("a whpk_ secret must be the base64 of a 32-byte Ed25519 public key")
        return Ed25519PublicKey.from_public_bytes(public)
    if recipe.public_key_prefix is not None and secret.startswith("whsk_"):
        raise ConfigurationError("a whsk_ secret is the sender's private key; configure its whpk_ public key instead")
    if recipe.key_form == "base64":
        # Some dashboards show it as its signatures are written, with the version before it.
        key = _decoded("base64", _padded(secret.removeprefix("v1,").removeprefix("whsec_")))
        if not key:
            raise ConfigurationError("the secret must be base64, with or without whsec_ before it, and not empty")
        return key
    try:
        key = secret.encode("utf-8", "surrogateescape")  # bytes of the environment that are not UTF-8 arrive so
    except UnicodeEncodeError:
        raise ConfigurationError("the secret is not text that can be written as UTF-8") from None
    if not key:
        raise ConfigurationError("the secret is empty")
    return key


def _presented(recipe: Recipe, headers: Headers) -> _Presented:
    written = _only(headers, recipe.header)
    identity = "" if recipe.id_header is None else _only(headers, recipe.id_header)
    timestamps = [] if recipe.timestamp_header is None else [_only(headers, recipe.timestamp_header)]
    if reads_two_ways(recipe, identity):
        raise Refused("malformed_header")

    entries = [written]
    if recipe.separator is not None:
        entries = [entry.strip(" ") for entry in written.split(recipe.separator, _MOST_ENTRIES)]
        if len(entries) > _MOST_ENTRIES:
            raise Refused("malformed_header")
    digests: list[bytes] = []
    public_key_signatures: list[bytes] = []
    for entry in entries:
        if recipe.timestamp_field is not None and entry.startswith(recipe.timestamp_field):
            timestamps.append(entry.removeprefix(recipe.timestamp_field))
        elif recipe.public_key_prefix is not None and entry.startswith(recipe.public_key_prefix):
            raw = _decoded(recipe.encoding, entry.removeprefix(recipe.public_key_prefix))
            if raw is not None and len(raw) == _ED25519_BYTES:
                public_key_signatures.append(raw)
        elif entry.startswith(recipe.prefix):
            text = entry.removeprefix(recipe.prefix)
            raw = _decoded(recipe.encoding, text)
            if raw is not None and len(raw) == _DIGEST_BYTES[recipe.digest]:
                digests.append(text.encode("ascii"))
    if not (digests or public_key_signatures) or len(timestamps) != int(recipe.timed):
        raise Refused("malformed_header")
    return _Presented(tuple(digests), tuple(public_key_signatures), identity, "".join(timestamps))


def reads_two_ways(recipe: Recipe, identity: str) -> bool:
    """Say whether the signed text could be cut elsewhere: a part of the id read as the time, the time as the body.

    Somebody who has one rightly signed request could make another of it by moving the full stops between id, time and
    body. That takes a part of the id, between full stops, which would pass for a time.

    Args:
        recipe: how the provider signs.
        identity: the id as the request gives it.
    """
    if "{id}." not in recipe.signed or "." not in identity:
        return False
    if recipe.timestamp_format == "rfc3339":
        return True  # a time has a full stop of its own
    return any(_DIGITS.fullmatch(part) for part in identity.split(".")[1:])


def _padded(text: str) -> str:
    """Return base64 with the padding that some who show a secret leave out."""
    return text + "=" * (-len(text) % 4)


def _only(headers: Headers, name: str) -> str:
    values = [value for given, value in headers if given == name]
    if len(values) > 1:
        raise Refused("duplicate_header")  # two readers of the request could believe different ones
    if not values or not values[0]:
        raise Refused("missing_signature")
    return values[0]


def _decoded(encoding: Encoding, text: str) -> bytes | None:
    if encoding == "hex":
        return bytes.fromhex(text) if _HEX.fullmatch(text) else None
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None


def _seconds(recipe: Recipe, timestamp: str) -> float | None:
    """Read the claimed time; its form is checked before the signature, its age after."""
    if not recipe.timed:
        return None
    if recipe.timestamp_format == "rfc3339":
        if _RFC3339.fullmatch(timestamp):
            try:
                return datetime.fromisoformat(timestamp).timestamp()
            except (ValueError, OverflowError):
                pass
    elif _DIGITS.fullmatch(timestamp):
        return int(timestamp) / (1000 if recipe.timestamp_format == "milliseconds" else 1)
    raise Refused("malformed_header")


def _written_time(format: TimestampFormat, now: float) -> str:
    if format == "rfc3339":
        return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return str(int(now * 1000)) if format == "milliseconds" else str(int(now))


def _message(recipe: Recipe, id: str, timestamp: str, body: bytes) -> bytes:
    if recipe.signed == "{body}":
        return body  # not copied: it may be 25 MB
    around = (part.format(id=id, timestamp=timestamp) for part in recipe.signed.split("{body}"))
    try:
        return body.join(part.encode("latin-1") for part in around)
    except UnicodeEncodeError:
        raise Refused("malformed_header") from None


def _any_right(recipe: Recipe, keys: Sequence[bytes | Ed25519PublicKey], presented: _Presented, message: bytes) -> bool:
    # No early exit: the time taken says nothing about which secret or which signature was right.
    right = False
    for key in keys:
        if isinstance(key, bytes):
            expected = _digest(recipe, key, message)
            for given in presented.digests:
                right |= hmac.compare_digest(expected, given)
        else:
            for given in presented.public_key_signatures:
                right |= _public_key_agrees(key, given, message)
    return right


def _digest(recipe: Recipe, key: bytes, message: bytes) -> bytes:
    raw = hmac.digest(key, message, recipe.digest)
    return raw.hex().encode("ascii") if recipe.encoding == "hex" else base64.b64encode(raw)


def _public_key_agrees(key: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True
