"""Taking out of a delivery what nobody else should see."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote_plus, unquote_to_bytes

from jsonpath import JSONPath, JSONPathError

from webhooks.delivery import Headers
from webhooks.errors import ConfigurationError, Unreadable
from webhooks.selection.paths import compiled
from webhooks.sources import Source
from webhooks.sources.reading import first, is_array, is_object, read_json

FORM = "application/x-www-form-urlencoded"
INSTEAD = "[redacted]"


@dataclass(frozen=True, slots=True)
class Taken:
    """A delivery without what was taken out, and how much that was: values of its body, and header lines."""

    headers: Headers
    body: bytes
    values: int = 0
    lines: int = 0


@dataclass(frozen=True, slots=True)
class Redaction:
    """What is taken out.

    Args:
        headers: the names of header lines, in lower case, that are dropped.
        paths: where in a body a value is replaced by an empty one of its kind, a text by `[redacted]`.
        salt: what an id that is taken out is digested with. Nobody has it, so that nobody can try ids.
    """

    headers: frozenset[str] = frozenset()
    paths: tuple[JSONPath, ...] = ()
    salt: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False, compare=False)

    @classmethod
    def read(cls, given: Sequence[str]) -> Redaction:
        """Read `header:NAME` and `$.path`.

        Raises:
            ConfigurationError: one is neither.
        """
        headers: set[str] = set()
        paths: list[JSONPath] = []
        for text in given:
            if text.lower().startswith("header:") and text[7:].strip():
                headers.add(text[7:].strip().lower())
            elif text.startswith("$"):
                paths.append(compiled(text))
            else:
                raise ConfigurationError(f"{text!r} cannot be redacted: write header:NAME, or a path such as $.sender")
        return cls(frozenset(headers), tuple(paths))

    def __bool__(self) -> bool:
        return bool(self.headers or self.paths)

    def applied(self, source: Source | None, headers: Headers, body: bytes) -> Taken:
        """Return a delivery's headers and body without it. A body in which nothing was found stays byte for byte.

        Where what is signed is changed the signature is dropped, because it would be wrong. Where the text that is
        taken out is the delivery's id, another that is as unique stands there: deliveries stay deliveries of their own.

        Raises:
            Unreadable: the body cannot be read, and so what is in it cannot be taken out.
        """
        kept = tuple(line for line in headers if line[0] not in self.headers)
        lines = len(headers) - len(kept)
        changed, values = self._body(source, headers, body) if self.paths else (None, 0)
        if source is None and changed is not None:
            raise Unreadable("its source is not in this consumer, so nobody knows which header signs what was changed")
        if source is not None and (changed is not None or self.headers & source.recipe.headers):
            kept = tuple(line for line in kept if line[0] != source.recipe.header)
        return Taken(kept, body if changed is None else changed, values, lines)

    def _body(self, source: Source | None, headers: Headers, body: bytes) -> tuple[bytes | None, int]:
        parsed = read_json(body) if source is None else source.read(headers, body)
        try:
            nodes = [node for path in self.paths for node in path.finditer(parsed)]
        except (JSONPathError, RecursionError):
            raise Unreadable("nested past looking through") from None
        is_form = (first(headers, "content-type") or "").partition(";")[0].strip().lower() == FORM
        # What a repeated key hides is looked for by nobody who reads the body, and so nobody knows whether it may stay.
        repeated = _repeats_a_key(_payload(body) if is_form else body)
        if not nodes and not repeated:
            return None, 0
        values = len({tuple(node.parts) for node in nodes})  # two paths may lead to one
        identity = None if source is None else source.identity(headers, body)
        for node in nodes:
            if node.parent is None:
                parsed = _empty(parsed)
                continue
            inside: Any = node.parent.obj
            part = node.parts[-1]
            value = inside[part]
            inside[part] = self._another(value) if value == identity and isinstance(value, str) else _empty(value)
        written = json.dumps(parsed, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        return _in_its_form(written) if is_form else written, values

    def _another(self, identity: str) -> str:
        digest = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), key=self.salt, digest_size=16)
        return f"{INSTEAD} {digest.hexdigest()}"


def _empty(value: Any) -> Any:
    """Return a value of the same kind that says nothing, so that what reads it still can."""
    if isinstance(value, str):
        return INSTEAD
    if isinstance(value, bool) or value is None:
        return None if value is None else False
    if is_array(value) or is_object(value):
        return type(value)()
    return 0


def _repeats_a_key(body: bytes) -> bool:
    """Whether an object in a body that can be read holds a key twice: the last one is what everybody reads."""
    found = False

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        read = dict(pairs)
        found = found or len(read) < len(pairs)
        return read

    json.loads(body.decode("utf-8-sig", "surrogatepass"), object_pairs_hook=noted)
    return found


def _payload(body: bytes) -> bytes:
    """Return the payload of a form.

    Raises:
        Unreadable: it has none, or other fields beside it.
    """
    fields = [field.partition(b"=") for field in body.split(b"&")]
    if not any(name == b"payload" for name, _, _ in fields):
        raise Unreadable("a form without the field payload")
    if len(fields) > 1:
        raise Unreadable("a form with other fields beside its payload, in which nothing is looked for")
    return unquote_to_bytes(fields[0][2].replace(b"+", b" "))


def _in_its_form(written: bytes) -> bytes:
    """Put a payload back into the form that it came in."""
    return b"payload=" + quote_plus(written).encode("ascii")
