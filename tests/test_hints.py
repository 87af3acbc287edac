"""Every hint on a request that really went wrong in that way, and no hint that gives a secret away."""

from __future__ import annotations

import base64
import gzip
import hashlib
import hmac
import json
import tracemalloc
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from webhooks import GitHub, Shortcut, StandardWebhooks
from webhooks.delivery import Headers
from webhooks.hints import Evidence, Other, hints, span
from webhooks.rewriting import MOST_JSON_BYTES, MOST_UNZIPPED_BYTES, MOST_WRITTEN_BYTES, Budget, guesses
from webhooks.signatures import Recipe, sign
from webhooks.tunnel import message

NOW = 1_800_000_000.0
SECRET = "an invented secret"
OTHERS = "the other source's secret"
STANDARD = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
SENT = json.dumps(
    {"id": "a", "title": "é <b> & ü", "url": "https://example.org/x", "z": [1.50, 2], "b": {"y": 1, "x": None}}
).encode()
GITHUB = Other("github", GitHub.recipe, (OTHERS,))


def mac(body: bytes, secret: str = SECRET, digest: str = "sha256") -> str:
    return hmac.new(secret.encode(), body, digest).hexdigest()


def evidence(
    headers: Sequence[tuple[str, str]],
    body: bytes | None,
    *,
    recipe: Recipe = Shortcut.recipe,
    source: str = "shortcut",
    cause: str = "bad_signature",
    secrets: Sequence[str] = (SECRET,),
    **more: Any,
) -> Evidence:
    size = len(body) if body is not None else more.pop("body_bytes")
    given: dict[str, Any] = {"received_at": NOW, "body_bytes": size, **more}
    return Evidence(
        source=source, recipe=recipe, cause=cause, headers=tuple(headers), body=body, secrets=secrets, **given
    )


def told(case: Evidence) -> str:
    """All hints as one text, which never holds what nobody may see."""
    found = hints(case)
    assert found
    text = "\n".join(found)
    secrets = [*case.secrets, *case.previous, *case.made, *(s for other in case.others for s in other.secrets)]
    for secret in secrets:
        assert not secret.strip() or secret.strip() not in text
        for body in (case.body or b"", SENT):
            raw = hmac.digest(secret.encode(), body, hashlib.sha256)
            assert raw.hex() not in text.lower()
            assert base64.b64encode(raw).decode() not in text
    return text


def signed(body: bytes, secret: str = SECRET) -> Headers:
    return (("content-type", "application/json"), ("payload-signature", mac(body, secret)))


# Bodies


def written(**how: Any) -> bytes:
    return json.dumps(json.loads(SENT), **how).encode()


@pytest.mark.parametrize(
    ("sent", "arrived", "said"),
    [
        (SENT, written(separators=(",", ":")), "re-serialised with spaces"),
        (written(separators=(",", ":")), SENT, "re-serialised compactly"),
        (written(sort_keys=True), SENT, "re-serialised with sorted keys and spaces, with non-ASCII escaped"),
        (written(sort_keys=True, separators=(",", ":"), ensure_ascii=False), SENT, "re-serialised with sorted keys"),
        (written(indent=2), SENT, "re-serialised indented by two, with non-ASCII escaped"),
        (SENT, written(ensure_ascii=False), "re-serialised with non-ASCII escaped"),
        (written(ensure_ascii=False), SENT, "re-serialised with non-ASCII unescaped"),
        (SENT.replace(b"/", b"\\/"), SENT, "re-serialised with / escaped"),
        (SENT, SENT.replace(b"/", b"\\/"), "re-serialised with / unescaped"),
        (
            SENT.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026"),
            SENT,
            "with <, > and & esc",
        ),
        (SENT, SENT + b"\n", "when the trailing newline is dropped"),
        (SENT + b"\n", SENT, "when a trailing newline is added"),
        (SENT, SENT + b"\r\n", "when the trailing line end (CRLF) is dropped"),
        (b'{\r\n"a": 1\r\n}', b'{\n"a": 1\n}', "CRLF instead of LF"),
        (b'{\n"a": 1\n}', b'{\r\n"a": 1\r\n}', "LF instead of CRLF"),
        (SENT, b"\xef\xbb\xbf" + SENT, "without the byte order mark"),
        ('{"t":"é"}'.encode(), '{"t":"é"}'.encode().decode("latin-1").encode(), "latin-1"),
        ('{"t":"é"}'.encode(), '{"t":"é"}'.encode("latin-1"), "latin-1"),
        (SENT, b"payload=" + quote_plus(SENT).encode(), "over the JSON inside the form"),
        (b"payload=" + quote(SENT, safe="").encode(), SENT, "over the form that it came in"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_body_that_was_rewritten_on_the_way_is_recognised(sent: bytes, arrived: bytes, said: str) -> None:
    assert sent != arrived
    text = told(evidence(signed(sent), arrived))
    assert said in text
    assert "nothing that was tried fits" not in text


@pytest.mark.parametrize("key", ["\u00e9", "😊", "\ud83d"])
def test_escapes_of_every_kind_of_character_are_undone_and_done(key: str) -> None:
    plain = json.dumps({"t": key}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    escaped = json.dumps({"t": key}).encode()
    assert "with non-ASCII escaped" in told(evidence(signed(escaped), plain))
    assert "with non-ASCII unescaped" in told(evidence(signed(plain), escaped))


def test_numbers_and_repeated_keys_survive_another_layout() -> None:
    sent = b'{"a": 12345678901234567890, "f": 1.0, "e": 1e400, "a": 3}'
    assert "with spaces" in told(evidence(signed(sent), sent.replace(b" ", b"")))


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_body_that_was_signed_before_is_recognised(encoding: str) -> None:
    packed = gzip.compress(SENT) if encoding == "gzip" else zlib.compress(SENT)
    headers = (*signed(SENT), ("content-encoding", encoding))
    assert f"uncompressed bytes, and the body came compressed ({encoding})" in told(evidence(headers, packed))


def test_a_small_body_that_unpacks_to_gigabytes_is_not_unpacked() -> None:
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(b"\0" * (1 << 20)) for _ in range(200)) + packer.flush()
    headers = (*signed(SENT), ("content-encoding", "deflate"))
    tracemalloc.start()
    try:
        budget = Budget()
        assert max(len(sent) for _, sent in guesses(headers, packed, budget)) < 2 * len(packed)
        assert budget.left_out
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST_UNZIPPED_BYTES < 200 << 20
    finally:
        tracemalloc.stop()
    assert "it came compressed" in told(evidence(headers, packed))


def test_a_body_that_was_cut_says_how_much_is_missing() -> None:
    headers = (*signed(SENT), ("content-length", str(len(SENT))))
    assert f"Content-Length says {len(SENT)}, 20 bytes arrived" in told(evidence(headers, SENT[:20]))
    slow = evidence(headers, None, body_bytes=7, cause="body_too_slow")
    assert f"Content-Length says {len(SENT)}, 7 bytes arrived" in told(slow)
    assert "cut" not in told(evidence((*signed(SENT), ("content-length", "x")), SENT))


def test_a_body_that_was_not_kept_says_so() -> None:
    assert "longer than WEBHOOKS_MAX_BODY_MIB" in told(evidence((), None, body_bytes=10**8, cause="body_too_large"))
    assert "too many to keep" in told(evidence(signed(SENT), None, body_bytes=2 << 20))
    assert "did not end in time; 9 bytes" in told(evidence((), None, body_bytes=9, cause="body_too_slow"))


def test_json_that_breaks_off_and_an_empty_body_are_noticed() -> None:
    assert "cannot be read (not JSON" in told(evidence(signed(SENT), SENT[:-1]))
    assert "the body is empty" in told(evidence(signed(SENT), b""))


# Secrets


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (SECRET, f'"{SECRET}"', "quotes around the secret here are dropped"),
        (SECRET, f"{SECRET} ", "white space around the secret here is dropped"),
        ("caf\u00e9", "cafe\u0301", "written composed (NFC)"),
        ("cafe\u0301", "caf\u00e9", "written decomposed (NFD)"),
        (SECRET, f"{SECRET[:3]}\u200b{SECRET[3:]}", "what cannot be seen inside the secret here is taken out"),
        (SECRET, f"{SECRET[:3]}\u00a0{SECRET[3:]}", "what cannot be seen inside the secret here is taken out"),
        (SECRET, f"{SECRET}\n", "white space around the secret here is dropped"),
        (f"{SECRET}\n", SECRET, "with a newline after the secret"),
        (f"{SECRET}\r\n", SECRET, "with a CRLF after the secret"),
        (f"'{SECRET}'", SECRET, "with quotes around the secret"),
        ("plain key", base64.b64encode(b"plain key").decode(), "decoded from base64 first"),
        ("plain key", b"plain key".hex(), "decoded from hex first"),
        ("c2VjcmV0", "whsec_c2VjcmV0", "without whsec_"),
    ],
)
def test_a_secret_that_is_written_in_another_way_is_recognised(theirs: str, ours: str, said: str) -> None:
    text = told(evidence(signed(SENT, theirs), SENT, secrets=(ours,)))
    assert said in text
    assert "WEBHOOKS_SECRET_SHORTCUT" in text


def test_an_id_with_a_number_between_full_stops_is_named_and_no_other_header() -> None:
    recipe = StandardWebhooks.recipe
    headers = sign(recipe, SENT, "whsec_c2VjcmV0", now=NOW, id="msg.17")
    case = evidence(headers, SENT, recipe=recipe, source="standard_webhooks", cause="malformed_header", secrets=())
    text = told(replace(case, secrets=("whsec_c2VjcmV0",)))
    assert "Webhook-Id has a number between full stops ('msg.17')" in text
    assert "Webhook-Signature" not in text


def test_a_secret_with_a_comma_that_was_cut_in_two_is_recognised() -> None:
    assert "cut at commas" in told(evidence(signed(SENT, "left4,right4"), SENT, secrets=("left4", "right4")))


def test_a_whsec_secret_that_the_sender_does_not_decode_is_recognised() -> None:
    headers = sign(replace(StandardWebhooks.recipe, key_form="text"), SENT, STANDARD, now=NOW, id="m")
    case = evidence(headers, SENT, recipe=StandardWebhooks.recipe, source="acme", secrets=(STANDARD,))
    assert "not decoded from base64" in told(case)


def test_the_previous_secret_the_one_of_dev_and_that_of_another_source_are_named() -> None:
    headers = signed(SENT, "an older one")
    assert "WEBHOOKS_SECRET_SHORTCUT_PREVIOUS" in told(evidence(headers, SENT, previous=("x", "an older one")))
    assert "serve --dev made" in told(evidence(headers, SENT, made=("an older one",)))
    assert "the secret of `github`" in told(evidence(signed(SENT, OTHERS), SENT, others=(GITHUB,)))


def test_no_secret_and_one_that_cannot_be_used_are_named() -> None:
    assert "set WEBHOOKS_SECRET_SHORTCUT" in told(evidence(signed(SENT), SENT, secrets=(), cause="no_secret"))
    headers = sign(StandardWebhooks.recipe, SENT, STANDARD, now=NOW, id="m")
    case = evidence(headers, SENT, recipe=StandardWebhooks.recipe, source="acme", secrets=("%%",), cause="no_secret")
    assert "WEBHOOKS_SECRET_ACME: the secret must be base64" in told(case)


# Headers


def hub(value: str) -> Headers:
    return (("content-type", "application/json"), ("x-github-event", "push"), ("x-hub-signature-256", value))


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        (hub("sha256=" + mac(SENT).upper()), "hex in upper case"),
        (hub("SHA256=" + mac(SENT).upper()), "hex in upper case"),
        (hub(mac(SENT)), "lacks the sha256= before it"),
        (hub(f'"sha256={mac(SENT)}"'), "white space or quotes around its value"),
        (hub("sha256=" + base64.b64encode(bytes.fromhex(mac(SENT))).decode()), "written in base64"),
        (hub("sha1=" + mac(SENT, digest="sha1")), "made with HMAC-SHA1"),
        (hub("sha512=" + mac(SENT, digest="sha512")), "made with HMAC-SHA512"),
        ([("x-hub-signature", "sha1=" + mac(SENT, digest="sha1"))], "SHA-1 only (X-Hub-Signature) (it is right"),
        ([("x-hub-signature", "sha1=" + "0" * 40)], "SHA-1 only (X-Hub-Signature): set the hook's secret"),
        ([("x-hub-signature", "sha256=" + mac(SENT))], "how Jira and Bitbucket sign"),
        ([("x-github-event", "push")], "no signature came (GitHub sent it)"),
        ([*hub("sha256=" + mac(SENT)), *hub("sha256=" + mac(SENT))], "came 2 times, with the same value"),
        ([*hub("sha256=" + mac(SENT)), *hub("sha256=0")], "came 2 times, with different values"),
        (hub("sha256=xyz"), "is not as the provider writes it"),
    ],
)
def test_a_signature_that_is_written_in_another_way_is_recognised(headers: Headers, said: str) -> None:
    present = any(name == "x-hub-signature-256" for name, _ in headers)
    cause = "malformed_header" if present else "missing_signature"
    assert said in told(evidence(headers, SENT, recipe=GitHub.recipe, source="github", cause=cause))


def test_a_prefix_that_the_provider_does_not_write_is_recognised() -> None:
    assert "has sha256= before it" in told(evidence((("payload-signature", "sha256=" + mac(SENT)),), SENT))


@pytest.mark.parametrize(
    ("name", "provider"),
    [
        ("webhook-signature", "Standard Webhooks"),
        ("stripe-signature", "Stripe"),
        ("x-slack-signature", "Slack"),
        ("linear-signature", "Linear"),
        ("x-hub-signature-256", "GitHub"),
        ("x-gitlab-token", "GitLab"),
        ("clubhouse-signature", "its old header"),
    ],
)
def test_another_providers_request_is_recognised_by_its_header(name: str, provider: str) -> None:
    text = told(evidence(((name, "whatever"),), SENT, cause="missing_signature"))
    assert f"the signature header of {provider}" in text or provider in text
    assert "this URL expects Shortcut's (Payload-Signature)" in text


def test_a_request_for_another_source_is_sent_there() -> None:
    headers = hub("sha256=" + mac(SENT, OTHERS))
    text = told(evidence(headers, SENT, cause="missing_signature", others=(GITHUB,)))
    assert "a request for the source `github`, rightly signed" in text
    assert "/webhooks/github" in text


def test_githubs_form_is_recognised_where_json_is_expected() -> None:
    headers = [("content-type", "application/x-www-form-urlencoded; charset=UTF-8"), *hub("sha256=0")[1:]]
    text = told(evidence(headers, b"payload=%7B%7D", cause="missing_signature"))
    assert "GitHub's form encoding, sent to a source that expects JSON" in text
    # The content type alone is what curl sends whatever the body is.
    assert "form encoding" not in told(evidence(headers, b'{"id": "x"}', cause="bad_signature"))
    at_home = evidence(headers, b"payload=%7B%7D", recipe=GitHub.recipe, source="github")
    assert "form encoding" not in told(at_home)


def test_svixs_names_are_recognised() -> None:
    given = sign(StandardWebhooks.recipe, SENT, STANDARD, now=NOW, id="m")
    headers = tuple((name.replace("webhook-", "svix-"), value) for name, value in given)
    case = evidence(
        headers, SENT, recipe=StandardWebhooks.recipe, source="acme", secrets=(STANDARD,), cause="missing_signature"
    )
    text = told(case)
    assert "Svix's names" in text
    assert "another source" not in text


def test_a_signed_header_that_was_dropped_is_named() -> None:
    given = sign(StandardWebhooks.recipe, SENT, STANDARD, now=NOW, id="m")
    headers = tuple(line for line in given if line[0] != "webhook-id")
    case = evidence(headers, SENT, recipe=StandardWebhooks.recipe, secrets=(STANDARD,), cause="missing_signature")
    assert "Webhook-Id is signed along with the body, and did not come" in told(case)


# The clock


def standard(at: float, timestamp: str | None = None) -> Evidence:
    given = sign(StandardWebhooks.recipe, SENT, STANDARD, now=at, id="m")
    headers = tuple((name, timestamp if timestamp and name == "webhook-timestamp" else value) for name, value in given)
    return evidence(
        headers, SENT, recipe=StandardWebhooks.recipe, source="acme", secrets=(STANDARD,), cause="stale_timestamp"
    )


@pytest.mark.parametrize(("off", "said"), [(-4 * 3600, "4 h: Webhook-Timestamp is that much earlier"), (600, "later")])
def test_a_clock_that_differs_says_by_how_much(off: float, said: str) -> None:
    text = told(standard(NOW + off))
    assert "the signature is right" in text
    assert "the clock differs by" in text
    assert said in text


def test_a_time_in_milliseconds_and_one_that_is_none_are_recognised() -> None:
    assert "is in milliseconds" in told(standard(NOW * 1000))
    assert "is no time as the provider writes it: '1700000000.9'" in told(standard(NOW, "1700000000.9"))


def test_what_verifies_today_says_what_to_do() -> None:
    assert "webhooks rejections reverify accepts it" in told(evidence(signed(SENT), SENT))


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (59, "59 s"), (3600, "1 h"), (3725, "1 h 2 min"), (90_061, "1 d 1 h")]
)
def test_a_length_of_time_is_told_in_its_two_largest_units(seconds: float, words: str) -> None:
    assert span(seconds) == words


# Whatever comes


def test_a_wrong_secret_is_what_is_left() -> None:
    text = told(evidence(signed(SENT, "somebody's"), SENT))
    assert "nothing that was tried fits: most likely the secret here (WEBHOOKS_SECRET_SHORTCUT)" in text


NAMES = ["payload-signature", "x-hub-signature-256", "x-hub-signature", "webhook-signature", "webhook-id"]
NAMES += ["webhook-timestamp", "content-type", "content-encoding", "content-length", "svix-signature"]
RECIPES: list[Recipe] = [Shortcut.recipe, GitHub.recipe, StandardWebhooks.recipe]


@settings(max_examples=150, deadline=None, database=None)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.text(max_size=40) | st.just(mac(SENT))), max_size=6),
    st.binary(max_size=60) | st.sampled_from([b"[" * 5000, b'{"a":"\\ud83d"}', b'"\\', SENT]),
    st.sampled_from(RECIPES),
    st.lists(st.text(max_size=12) | st.just(STANDARD), max_size=2),
)
def test_whatever_was_kept_there_is_an_answer_and_never_an_exception(
    headers: list[tuple[str, str]], body: bytes, recipe: Recipe, secrets: list[str]
) -> None:
    found = hints(evidence(headers, body, recipe=recipe, secrets=secrets, others=(GITHUB,)))
    assert found
    assert all(isinstance(sentence, str) and sentence for sentence in found)


# What is long, or made to be dear


def nested(leaf: str, size: int, depth: int = 900) -> bytes:
    """An array in an array, and so on, around as many leaves as fit: indented, it is a thousand times as long."""
    leaves = ",".join([leaf] * ((size - 2 * depth) // len(f"{leaf},".encode())))
    return f"{'[' * depth}{leaves}{']' * depth}".encode()


HOSTILE = [
    nested('"/<é"', 255_000),
    nested('"/<é"', 1_000_000),
    nested("1", 1_000_000),
    nested("1E9", 1_000_000, depth=1),
    b'["' + b"<" * 1_000_000 + b'"]',
    b'["' + b"\\\\" * 500_000 + b'"]',
]


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: f"{body[899:906].decode(errors='replace')} {len(body)}")
def test_guessing_at_a_body_that_is_made_to_be_dear_writes_and_holds_no_more_than_it_may(body: bytes) -> None:
    tracemalloc.start()
    try:
        assert sum(len(sent) for _, sent in guesses((), body, Budget())) <= MOST_WRITTEN_BYTES
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST_WRITTEN_BYTES
    finally:
        tracemalloc.stop()


def test_what_indenting_would_make_many_times_as_long_is_not_indented_and_all_else_is_tried() -> None:
    body = nested('{"é":1,"a":2}', 20_000)
    budget = Budget()
    tried = [how for how, _ in guesses((), body, budget)]
    assert budget.left_out
    assert not any("indented" in how for how in tried)
    assert any("with sorted keys and spaces, with non-ASCII escaped" in how for how in tried)
    assert "nothing that was tried fits, and not everything was tried" in told(evidence(signed(b"{}"), body))


def test_a_short_body_that_nests_a_little_is_tried_in_every_way() -> None:
    budget = Budget()
    assert any("indented by four" in how for how, _ in guesses((), nested("1", 500, depth=20), budget))
    assert not budget.left_out


LONG: list[dict[str, Any]] = [{"url": "https://example.org/é?<b>", "n": n, "a": [n]} for n in range(14_000)]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"separators": (",", ":"), "ensure_ascii": False}, "re-serialised compactly:"),
        ({"ensure_ascii": True}, "re-serialised with non-ASCII escaped:"),
        ({"sort_keys": True, "ensure_ascii": False}, "re-serialised with sorted keys and spaces:"),
        ({"indent": 2, "ensure_ascii": False}, "re-serialised indented by two:"),
    ],
)
def test_the_likelier_ways_are_tried_on_the_longest_body_too(how: dict[str, Any], said: str) -> None:
    arrived = json.dumps(LONG, ensure_ascii=False).encode()
    assert MOST_JSON_BYTES * 0.8 < len(arrived) < MOST_JSON_BYTES
    assert said in told(evidence(signed(json.dumps(LONG, **how).encode()), arrived))


def test_a_long_body_is_tried_in_fewer_ways_than_a_short_one() -> None:
    short, long, longer = (json.dumps(items).encode() for items in (LONG[:5], LONG[:13_000], LONG * 2))
    assert len(long) < MOST_JSON_BYTES < len(longer)
    ways = [sum("re-serialised" in how for how, _ in guesses((), body, Budget())) for body in (longer, long, short)]
    assert 0 == ways[0] < 10 < ways[1] < ways[2] < 250


def test_what_a_channel_tells_is_guessed_at_for_less_than_a_refused_request_is() -> None:
    class Counting(GitHub):
        tried = 0

        def verify(self, headers: Headers, body: bytes, secrets: Sequence[str], now: float) -> None:
            self.tried += len(body)
            super().verify(headers, body, secrets, now)

    source, body = Counting(), nested('"/<é"', 255_000)
    told = json.dumps(dict(hub("sha256=" + "0" * 64)))[:-1].encode() + b',"body":' + body + b"}"
    assert message.as_sent(source, message.read(told.decode()), [SECRET], 0) is None
    assert 2 * len(body) < source.tried <= len(body) + message.MOST_WRITTEN_BYTES < MOST_WRITTEN_BYTES
