"""Why a request was refused, in sentences for a person, worked out from what was kept of it. Pure.

What is likely is tried: another secret, another spelling of the signature, another way to write the body. A guess that
the request's own signature confirms is certain. No sentence ever holds a secret, or a signature computed from one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from webhooks import respelling, rewriting, signatures
from webhooks.delivery import Headers
from webhooks.errors import ConfigurationError, Refused, Unreadable
from webhooks.senders import SIGNATURES, TOKENS, named
from webhooks.signatures import Recipe
from webhooks.source_secrets import secret_variable
from webhooks.sources.reading import first, moment, read_json

_FORM = "application/x-www-form-urlencoded"
_SHA1 = Recipe(header="x-hub-signature", prefix="sha1=", digest="sha1")
_HUB = Recipe(header="x-hub-signature", prefix="sha256=")
_SVIX = ("svix-signature",)


@dataclass(frozen=True, slots=True)
class Other:
    """Another source of the consumer, for which the request may have been meant."""

    name: str
    recipe: Recipe
    secrets: Sequence[str] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a refused request.

    Args:
        source: the name in its URL.
        recipe: how that source's provider signs.
        cause: the named cause.
        headers: the header lines kept of it.
        body: the bytes as received; None where they were not kept.
        body_bytes: how many came.
        received_at: unix seconds, as the request was verified.
        secrets: those of the source today.
        previous: those that it had before.
        made: the one that `serve --dev` made for it, where it is not among them.
        others: the other sources.
    """

    source: str
    recipe: Recipe
    cause: str
    headers: Headers
    body: bytes | None
    body_bytes: int
    received_at: float
    secrets: Sequence[str] = field(repr=False)
    previous: Sequence[str] = field(default=(), repr=False)
    made: Sequence[str] = field(default=(), repr=False)
    others: Sequence[Other] = ()

    @property
    def expected(self) -> str:
        """The provider's signature header, for a person."""
        provider = SIGNATURES.get(self.recipe.header)
        return f"{provider}'s ({named(self.recipe.header)})" if provider else named(self.recipe.header)


def hints(evidence: Evidence) -> list[str]:
    """Return what can be said about a refused request, the likeliest first; never nothing."""
    found = [*_size(evidence)]
    if evidence.body is None:
        return found or [f"its {evidence.body_bytes} bytes were too many to keep, so nothing can be tried on them"]
    if _fits(evidence.recipe, evidence.headers, evidence.body, evidence.secrets):
        return [*found, *_right(evidence)]
    found += _secret_missing(evidence)
    found += _wrong_address(evidence)
    found += _header(evidence)
    budget = rewriting.Budget()
    trials = _trials(evidence, evidence.body, budget)
    confirmed = next((t.told for t in trials if _fits(t.recipe, t.headers, t.body, t.secrets)), None)
    found += [confirmed] if confirmed else [*_appearance(evidence, evidence.body)]
    if not found:
        short = ", and not everything was tried on a body so long or so deeply nested" if budget.left_out else ""
        found.append(
            f"nothing that was tried fits{short}: most likely the secret here ({secret_variable(evidence.source)}) "
            "is not the one that the provider signs with; set it anew on both sides"
        )
    return found + _clock(evidence)


def _fits(recipe: Recipe, headers: Headers, body: bytes, secrets: Sequence[str]) -> bool:
    """Say whether one of the secrets makes the signature right, whatever its age."""
    try:
        signatures.verify(replace(recipe, tolerance_s=None), headers, body, secrets, 0)
    except Refused:
        return False
    return True


def _right(evidence: Evidence) -> list[str]:
    clock = _clock(evidence)
    if clock:
        return ["the signature is right", *clock]
    return ["it verifies with the secret of today: webhooks rejections reverify accepts it"]


def _size(evidence: Evidence) -> Iterator[str]:
    if evidence.cause == "body_too_large":
        yield f"the body is longer than WEBHOOKS_MAX_BODY_MIB allows; {evidence.body_bytes} bytes of it were read"
    declared = first(evidence.headers, "content-length") or ""
    length = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 16 else 0
    if length > evidence.body_bytes and evidence.cause != "body_too_large":
        yield (
            f"the body was cut: Content-Length says {length}, {evidence.body_bytes} bytes arrived; look at "
            "the proxy or the network between the provider and you"
        )
    elif evidence.cause == "body_too_slow":
        yield f"the body did not end in time; {evidence.body_bytes} bytes of it arrived"


def _secret_missing(evidence: Evidence) -> Iterator[str]:
    for secret in evidence.secrets:
        try:
            signatures.check_secret(evidence.recipe, secret)
        except ConfigurationError as error:
            yield f"{secret_variable(evidence.source)}: {error}"
        else:
            return
    if not evidence.secrets:
        yield f"the source has no secret here: set {secret_variable(evidence.source)} to the provider's"


def _wrong_address(evidence: Evidence) -> Iterator[str]:
    """Notice another provider's request, and which of our sources it fits."""
    if first(evidence.headers, evidence.recipe.header) is None:
        yield from _meant_for_another(evidence)
    content_type = (first(evidence.headers, "content-type") or "").partition(";")[0].strip().lower()
    # A mere form is what `curl -d` sends whatever the body is.
    is_form = evidence.body is None or evidence.body.startswith(b"payload=") or b"&payload=" in evidence.body
    if content_type == _FORM and is_form and not _is_hub(evidence.recipe):
        yield (
            "this is GitHub's form encoding, sent to a source that expects JSON: in the hook's settings choose the "
            "content type application/json, or give it the URL of a GitHub source"
        )


def _meant_for_another(evidence: Evidence) -> Iterator[str]:
    recipe = evidence.recipe
    for other in evidence.others:
        if _fits(other.recipe, evidence.headers, evidence.body or b"", other.secrets):
            yield (
                f"this is a request for the source `{other.name}`, rightly signed: give the provider the URL "
                f"/webhooks/{other.name}"
            )
            return
    # What the source's own provider may send as well says nothing.
    own = {*recipe.headers, *([_SHA1.header] if _is_hub(recipe) else ()), *(_SVIX if _is_standard(recipe) else ())}
    for name, _ in evidence.headers:
        provider = SIGNATURES.get(name) or TOKENS.get(name)
        if provider and name not in own:
            yield (
                f"this request carries the signature header of {provider} ({named(name)}), but this URL expects "
                f"{evidence.expected}: does the provider have the URL of another source?"
            )
            return


def _header(evidence: Evidence) -> Iterator[str]:
    """Say what is wrong with the headers that carry the signature."""
    recipe, headers = evidence.recipe, evidence.headers
    for name in sorted(recipe.headers):
        values = [value for given, value in headers if given == name]
        if len(values) > 1:
            same = "with the same value" if len(set(values)) == 1 else "with different values"
            yield f"{named(name)} came {len(values)} times, {same}: a proxy between the provider and you adds it again"
            return
    identity = None if recipe.id_header is None else first(headers, recipe.id_header)
    if recipe.id_header is not None and identity is not None and signatures.reads_two_ways(recipe, identity):
        yield (
            f"{named(recipe.id_header)} has a number between full stops ({identity[:60]!r}), which could be read as "
            "the time that is signed: such a request is not accepted; have the provider send other ids"
        )
        return
    written = first(headers, recipe.header)
    if written is not None:
        missing = [named(name) for name in sorted(recipe.headers) if first(headers, name) is None]
        if missing:
            yield f"{' and '.join(missing)} is signed along with the body, and did not come: a proxy drops it"
        return
    hub = first(headers, _SHA1.header)
    if hub is not None and _is_hub(recipe):
        if hub.startswith(_HUB.prefix):
            yield "X-Hub-Signature with SHA-256 is how Jira and Bitbucket sign; a GitHub source does not accept it"
            return
        right = _fits(_SHA1, headers, evidence.body or b"", evidence.secrets)
        known = " (it is right, so the secret is the same here and there)" if right else ""
        yield (
            f"SHA-1 only (X-Hub-Signature){known}: set the hook's secret anew, so that X-Hub-Signature-256 is sent; an "
            "old GitHub Enterprise Server has to be updated"
        )
    elif not any(name in SIGNATURES or name in TOKENS for name, _ in headers):
        from_github = " (GitHub sent it)" if first(headers, "x-github-event") else ""
        yield (
            f"no signature came{from_github}: set a secret for the hook at the provider, or see whether a proxy drops "
            f"the header {named(recipe.header)}"
        )


class _Trial(NamedTuple):
    """One thing exchanged for another, and what that means if the signature is right then."""

    told: str
    recipe: Recipe
    headers: Headers
    body: bytes
    secrets: Sequence[str]


def _trials(evidence: Evidence, body: bytes, budget: rewriting.Budget) -> Iterator[_Trial]:
    recipe, headers, secrets = evidence.recipe, evidence.headers, evidence.secrets
    variable = secret_variable(evidence.source)
    told = (
        f"it is signed with the previous secret ({variable}_PREVIOUS): give {variable} both, separated by a comma, "
        "until the provider signs with the new one"
    )
    yield _Trial(told, recipe, headers, body, evidence.previous)
    told = f"it is signed with the secret that webhooks serve --dev made for this source, and {variable} is another"
    yield _Trial(told, recipe, headers, body, evidence.made)
    for other in evidence.others:
        told = (
            f"it is signed with the secret of `{other.name}`: give the hook this source's own, or {variable} that one"
        )
        yield _Trial(told, recipe, headers, body, other.secrets)
    for how, read_as, secret in respelling.other_secrets(recipe, secrets):
        yield _Trial(f"the signature is right {how} ({variable})", read_as, headers, body, (secret,))
    for told, read_as, sent in respelling.other_spellings(recipe, headers):
        yield _Trial(told, read_as, sent, body, secrets)
    for how, guess in rewriting.guesses(headers, body, budget):
        yield _Trial(f"the signature is right {how}", recipe, headers, guess, secrets)


def _appearance(evidence: Evidence, body: bytes) -> Iterator[str]:
    """Say what looks odd, where nothing was confirmed."""
    encoding = first(evidence.headers, "content-encoding")
    if encoding is not None and encoding.lower() != "identity":
        yield f"it came compressed (Content-Encoding: {encoding[:40]}); was it signed before that?"
    if not body:
        yield "the body is empty: did something between the provider and you read it already?"
        return
    content_type = first(evidence.headers, "content-type") or ""
    if "json" in content_type.lower() and encoding is None:
        try:
            read_json(body)
        except Unreadable as error:
            yield f"it says that it is JSON and cannot be read ({error}): it may have been cut or changed on the way"
    written = first(evidence.headers, evidence.recipe.header)
    identity = first(evidence.headers, evidence.recipe.id_header or "")
    told = identity is not None and signatures.reads_two_ways(evidence.recipe, identity)
    if evidence.cause == "malformed_header" and written is not None and not told and not _clock(evidence):
        form = f"{evidence.recipe.prefix}… in {evidence.recipe.encoding}"
        yield f"{named(evidence.recipe.header)} is not as the provider writes it, which is {form}"


def _clock(evidence: Evidence) -> list[str]:
    """Compare the time that the request says with the time of its receipt."""
    recipe = evidence.recipe
    if recipe.timestamp_header is None or recipe.tolerance_s is None:
        return []
    written = first(evidence.headers, recipe.timestamp_header)
    if written is None:
        return []
    name = named(recipe.timestamp_header)
    digits = written.isascii() and written.isdigit() and len(written) <= 15
    if recipe.timestamp_format == "rfc3339":
        read = moment(written)
        signed_at = None if read is None else read.timestamp()
    else:
        signed_at = int(written) / (1000 if recipe.timestamp_format == "milliseconds" else 1) if digits else None
    if signed_at is None:
        return [f"{name} is no time as the provider writes it: {written[:40]!r}"]
    ahead = signed_at - evidence.received_at
    if abs(ahead) <= recipe.tolerance_s:
        return []
    if recipe.timestamp_format == "seconds" and abs(signed_at / 1000 - evidence.received_at) < 86_400:
        return [f"{name} is in milliseconds, and seconds are expected"]
    which = "later" if ahead > 0 else "earlier"
    return [
        f"the clock differs by {span(abs(ahead))}: {name} is that much {which} than the receipt here, and "
        f"{recipe.tolerance_s} s are allowed; is a clock wrong, or did it wait somewhere on the way?"
    ]


def span(seconds: float) -> str:
    """Return a length of time for a person, in its two largest units."""
    left, parts = round(seconds), list[str]()
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


def _is_hub(recipe: Recipe) -> bool:
    return recipe.header == "x-hub-signature-256"


def _is_standard(recipe: Recipe) -> bool:
    return recipe.header == "webhook-signature"
