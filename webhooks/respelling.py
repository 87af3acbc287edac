"""How else a secret or a signature may be written: what a person got wrong, or something on the way changed. Pure.

As in `rewriting`, nothing here decides anything: a guess only explains.
"""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from webhooks.delivery import Headers
from webhooks.senders import named
from webhooks.signatures import Encoding, Recipe
from webhooks.source_secrets import UNSEEN
from webhooks.sources.reading import first

_UNSEEN = dict.fromkeys(map(ord, UNSEEN))
_FORMS: tuple[tuple[Literal["NFC", "NFD", "NFKC"], str], ...] = (
    ("NFC", "composed"),
    ("NFD", "decomposed"),
    ("NFKC", "in their compatible forms"),
)
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+")
_DIGESTS: tuple[Literal["sha1", "sha256", "sha512"], ...] = ("sha1", "sha256", "sha512")


def other_secrets(recipe: Recipe, secrets: Sequence[str]) -> Iterator[tuple[str, Recipe, str]]:
    """Yield other ways to read the secrets, each with words that complete "the signature is right …"."""
    text, decoded = replace(recipe, key_form="text"), replace(recipe, key_form="base64")
    for secret in secrets:
        if recipe.key_form == "base64":
            bare = secret.removeprefix("whsec_")
            yield "if the secret is taken as it is written, not decoded from base64", text, secret
            yield "if the secret is taken without whsec_ and not decoded from base64", text, bare
            continue
        if len(secret) > 2 and secret[0] == secret[-1] and secret[0] in "\"'":
            yield "if the quotes around the secret here are dropped", recipe, secret[1:-1]
        for form, what in _FORMS:
            normal = unicodedata.normalize(form, secret)
            if normal != secret:
                yield f"if the letters with marks in the secret here are written {what} ({form})", recipe, normal
        if secret != secret.strip():
            yield "if the white space around the secret here is dropped", recipe, secret.strip()
        if (seen := secret.translate(_UNSEEN)) != secret:
            yield "if what cannot be seen inside the secret here is taken out", recipe, seen
        for what, more in (("newline", "\n"), ("CRLF", "\r\n"), ("space", " ")):
            yield f"with a {what} after the secret: the provider's has one at its end", recipe, secret + more
        yield "with a space before the secret: the provider's begins with one", recipe, " " + secret
        for quote in "\"'":
            yield "with quotes around the secret: the provider's has them", recipe, f"{quote}{secret}{quote}"
        yield "if the secret is decoded from base64 first", decoded, secret
        yield "if the secret is taken without whsec_", text, secret.removeprefix("whsec_")
        if _HEX.fullmatch(secret):
            yield "if the secret is decoded from hex first", decoded, base64.b64encode(bytes.fromhex(secret)).decode()
    for comma in (",", ", "):
        if len(secrets) > 1:
            told = "if the secrets are one, with a comma in it: the variable is cut at commas, so use its _FILE"
            yield told, recipe, comma.join(secrets)


def other_spellings(recipe: Recipe, headers: Headers) -> Iterator[tuple[str, Recipe, Headers]]:
    """Yield the headers as another sender, or something on the way, would have written them."""
    written = first(headers, recipe.header)
    if written is None:
        if recipe.header == "webhook-signature":
            renamed = tuple((name.replace("svix-", "webhook-", 1), value) for name, value in headers)
            yield (
                "the signature is right, but its headers have Svix's names (svix-signature, …), and webhook-signature "
                "and its kin are expected: have the provider send those",
                *(recipe, renamed),
            )
        return

    def with_value(value: str) -> Headers:
        return tuple((name, value if name == recipe.header else given) for name, given in headers)

    if recipe.encoding == "hex":
        yield (
            "the signature is hex in upper case, and right but for that: something rewrites the header",
            *(recipe, with_value(written.lower())),
        )
    yield (
        f"{named(recipe.header)} has white space or quotes around its value; it is right without them",
        *(recipe, with_value(written.strip(" \t\"'"))),
    )
    if recipe.prefix and recipe.separator is None:
        yield (
            f"the signature is right, but lacks the {recipe.prefix} before it",
            *(recipe, with_value(recipe.prefix + written)),
        )
    prefix, equals, bare = written.partition("=")
    if not recipe.prefix and equals:
        yield f"the signature is right, but has {prefix[:10]}= before it", recipe, with_value(bare)
    other: Encoding = "base64" if recipe.encoding == "hex" else "hex"
    yield (
        f"the signature is right, but written in {other}, and {recipe.encoding} is expected",
        *(replace(recipe, encoding=other), headers),
    )
    for digest in _DIGESTS:
        for before in {recipe.prefix, f"{digest}="}:
            told = (
                f"the signature is right, but made with HMAC-{digest.upper()}, and {recipe.digest.upper()} is expected"
            )
            if digest != recipe.digest:
                yield told, replace(recipe, digest=digest, prefix=before), headers
