"""Verification: the published vectors, the inputs that broke other systems, and anything at all."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from webhooks.delivery import Headers
from webhooks.errors import ConfigurationError, Refused, Unreadable
from webhooks.signatures import Recipe, check_secret, new_secret, sign, verify
from webhooks.sources import GitHub, Shortcut, Source, StandardWebhooks

VECTORS = Path(__file__).parent / "vectors"
SOURCES: dict[str, Source] = {"shortcut": Shortcut(), "github": GitHub(), "standard_webhooks": StandardWebhooks()}
CAUSES = {"missing_header": "missing_signature", "stale": "stale_timestamp"}  # the vectors' words for ours
STANDARD, PLAIN = StandardWebhooks.recipe, Shortcut.recipe

NOW = 1_700_000_000
BODY = b'{"type":"invoice.paid"}'
SHARED = "whsec_" + base64.b64encode(b"k" * 32).decode()
STRIPE_LIKE = Recipe(
    header="signature", prefix="v1=", separator=",", timestamp_field="t=", signed="{timestamp}.{body}", digest="sha1"
)
SLACK_LIKE = Recipe(header="signature", prefix="v0=", signed="v0:{timestamp}:{body}", timestamp_header="time")
ZENDESK_LIKE = Recipe(
    header="signature",
    encoding="base64",
    signed="{timestamp}{body}",
    timestamp_header="time",
    timestamp_format="rfc3339",
)
MILLISECONDS = Recipe(
    header="signature", signed="{timestamp}{body}", timestamp_header="time", timestamp_format="milliseconds"
)
ALL_RECIPES = [PLAIN, GitHub.recipe, STANDARD, STRIPE_LIKE, SLACK_LIKE, ZENDESK_LIKE, MILLISECONDS]


def cause(recipe: Recipe, headers: Headers, body: bytes, secrets: list[str], now: float = NOW) -> str | None:
    try:
        verify(recipe, headers, body, secrets, now)
    except Refused as refused:
        return refused.cause
    return None


def replaced(headers: Headers, name: str, value: str) -> Headers:
    return tuple((given, value if given == name else old) for given, old in headers)


def vectors() -> list[Any]:
    found = [vector for provider in SOURCES for vector in json.loads((VECTORS / f"{provider}.json").read_text("utf-8"))]
    assert len(found) == 77
    return [pytest.param(vector, id=vector["id"]) for vector in found]


@pytest.mark.parametrize("vector", vectors())
def test_every_vector_is_judged_identified_and_named_as_published(vector: dict[str, Any]) -> None:
    source = SOURCES[vector["provider"]]
    lines: list[list[str]] = vector.get("headers_list") or [list(line) for line in vector["headers"].items()]
    headers = tuple((name.lower(), value) for name, value in lines)
    body = base64.b64decode(vector["body_b64"]) * vector.get("body_repeat", 1)
    secrets = [vector["secret"]] if isinstance(vector["secret"], str) else vector["secret"] or []
    found = cause(source.recipe, headers, body, secrets, vector["now"])
    if vector["expect"] == "invalid":
        assert found == CAUSES.get(vector["reason"], vector["reason"])
        return
    assert found is None
    assert source.answered(headers, body) is (vector["expect"] == "challenge")
    key = source.dedup_key(headers, body)
    given = dict(headers)
    if vector["provider"] == "github" and "x-github-delivery" in given:
        assert vector.get("dedup_key", given["x-github-delivery"]) == given["x-github-delivery"]
        assert key == f"{given['x-github-hook-id']}:{given['x-github-delivery']}"  # the guid alone names the event
    else:
        assert key == vector.get("dedup_key", "sha256:" + hashlib.sha256(body).hexdigest())
    if "event_type" in vector:
        assert source.events(headers, source.read(headers, body))[0].name == vector["event_type"]


# ---- case 5 of the inputs that broke other systems: hostile headers -------------------------------------------------
GOOD_HEX = hmac.digest(b"secret", BODY, "sha256").hex()
GITHUB_HEADERS = [
    pytest.param(("sha256=\xe9" + GOOD_HEX[1:],), "malformed_header", id="not ASCII"),
    pytest.param(("sha256=",), "malformed_header", id="prefix alone"),
    pytest.param(("SHA256=" + GOOD_HEX,), "malformed_header", id="prefix in capitals"),
    pytest.param(("sha256=" + GOOD_HEX, "sha256=" + GOOD_HEX), "duplicate_header", id="twice"),
    pytest.param(("a" * 10_240,), "malformed_header", id="10 kB"),
    pytest.param(("sha256=" + "a" * 10_240,), "malformed_header", id="10 kB of hex"),
    pytest.param(("sha256= " + GOOD_HEX,), "malformed_header", id="a space before"),
    pytest.param(
        ("sha256=" + " ".join(GOOD_HEX[i : i + 2] for i in range(0, 64, 2)),), "malformed_header", id="spaced"
    ),
    pytest.param(("sha256=" + GOOD_HEX.translate({ord("0") + i: 0xFF10 + i for i in range(10)}),), "malformed_header"),
    pytest.param(("sha256=" + "0" * 64,), "bad_signature", id="zeros"),
    pytest.param((), "missing_signature", id="none"),
    pytest.param(("",), "missing_signature", id="empty"),
    pytest.param(("sha256=" + GOOD_HEX,), None, id="good"),
]


@pytest.mark.parametrize(("values", "expected"), GITHUB_HEADERS)
def test_a_hostile_signature_header_is_refused_with_its_cause(values: tuple[str, ...], expected: str | None) -> None:
    headers = tuple(("x-hub-signature-256", value) for value in values)
    assert cause(GitHub.recipe, headers, BODY, ["secret"]) == expected


GOOD_ENTRY = dict(sign(STANDARD, BODY, SHARED, now=NOW, id="msg_1"))["webhook-signature"]
WRONG_ENTRY = "v1," + base64.b64encode(b"x" * 32).decode()
LISTS = [
    (f"garbage {GOOD_ENTRY}", None),
    (f"v1,abc {GOOD_ENTRY}", None),
    (f"{WRONG_ENTRY}  {GOOD_ENTRY}", None),  # two spaces
    (f" {GOOD_ENTRY} ", None),
    (f"v2,{GOOD_ENTRY[3:]} {GOOD_ENTRY}", None),
    (f"{GOOD_ENTRY},x {WRONG_ENTRY}", "bad_signature"),
    (f"{GOOD_ENTRY},x", "malformed_header"),
    (f"v2,{GOOD_ENTRY[3:]}", "malformed_header"),
    (f"garbage {WRONG_ENTRY}", "bad_signature"),
    (GOOD_ENTRY[3:], "malformed_header"),
    (GOOD_ENTRY.rstrip("="), "malformed_header"),
    ("v1,\xe9", "malformed_header"),
    ("   ", "malformed_header"),
    (" ".join([WRONG_ENTRY] * 31 + [GOOD_ENTRY]), None),
    (" ".join([WRONG_ENTRY] * 32 + [GOOD_ENTRY]), "malformed_header"),  # more than any sender lists
]


@pytest.mark.parametrize(("written", "expected"), LISTS)
def test_one_right_signature_of_a_list_is_enough(written: str, expected: str | None) -> None:
    headers = replaced(sign(STANDARD, BODY, SHARED, now=NOW, id="msg_1"), "webhook-signature", written)
    assert cause(STANDARD, headers, BODY, [SHARED]) == expected


def test_a_list_is_refused_where_the_provider_sends_one_signature() -> None:
    headers = (("payload-signature", f"{'0' * 64}, {GOOD_HEX}"),)
    assert cause(PLAIN, headers, BODY, ["secret"]) == "malformed_header"


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_every_signed_header_must_be_there_once(name: str) -> None:
    headers = sign(STANDARD, BODY, SHARED, now=NOW, id="msg_1")
    assert cause(STANDARD, headers, BODY, [SHARED]) is None
    without = tuple(line for line in headers if line[0] != name)
    assert cause(STANDARD, without, BODY, [SHARED]) == "missing_signature"
    twice = (*headers, *(line for line in headers if line[0] == name))
    assert cause(STANDARD, twice, BODY, [SHARED]) == "duplicate_header"


# ---- secrets --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [["old", "new"], ["new", "old"], ["x", "old", "y"]])
def test_any_of_several_secrets_will_do_while_one_is_rotated(order: list[str]) -> None:
    headers = sign(PLAIN, BODY, "old", now=NOW)
    assert cause(PLAIN, headers, BODY, order) is None
    assert cause(PLAIN, headers, BODY, ["new", "newer"]) == "bad_signature"


@pytest.mark.parametrize("secrets", [[], [""], ["", ""], ["\ud83d"]])
def test_without_a_usable_secret_nothing_is_authentic(secrets: list[str]) -> None:
    forged = (("payload-signature", hmac.digest(b"", BODY, "sha256").hex()),)
    assert cause(PLAIN, forged, BODY, secrets) == "no_secret"


def test_a_lone_string_is_one_secret_and_not_one_a_character() -> None:
    guessed = sign(PLAIN, BODY, "s", now=NOW)
    with pytest.raises(Refused, match="bad_signature"):
        verify(PLAIN, guessed, BODY, "secret", NOW)
    verify(PLAIN, sign(PLAIN, BODY, "secret", now=NOW), BODY, "secret", NOW)


def test_an_unusable_secret_does_not_hide_a_usable_one() -> None:
    headers = sign(STANDARD, BODY, SHARED, now=NOW, id="msg_1")
    assert cause(STANDARD, headers, BODY, ["whsec_???", "whpk_AAAA", SHARED]) is None


@pytest.mark.parametrize(
    ("secret", "why"),
    [
        ("", "not empty"),
        ("whsec_", "not empty"),
        ("whsec_???", "base64"),
        ("whsec_abcde", "base64"),
        ("whpk_AAAA", "32-byte"),
        ("whsk_" + SHARED[6:], "private key"),
    ],
)
def test_a_secret_that_cannot_work_is_explained_on_start_without_being_shown(secret: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as raised:
        check_secret(STANDARD, secret)
    assert not secret[6:] or secret[6:] not in str(raised.value)


def test_a_secret_that_looks_encoded_is_used_as_it_is_written_where_the_provider_does_so() -> None:
    literal = hmac.digest(SHARED.encode(), BODY, "sha256").hex()
    assert cause(PLAIN, (("payload-signature", literal),), BODY, [SHARED]) is None


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a_new_secret_signs_what_it_verifies(recipe: Recipe) -> None:
    secret = new_secret(recipe)
    check_secret(recipe, secret)
    assert secret != new_secret(recipe)
    assert cause(recipe, sign(recipe, BODY, secret, now=NOW, id="msg_1"), BODY, [secret]) is None


# ---- Ed25519 --------------------------------------------------------------------------------------------------------
PRIVATE = Ed25519PrivateKey.from_private_bytes(b"p" * 32)
PUBLIC = "whpk_" + base64.b64encode(PRIVATE.public_key().public_bytes_raw()).decode()


def test_a_public_key_checks_its_own_signatures_and_no_other_scheme() -> None:
    made = base64.b64encode(PRIVATE.sign(b"msg_1.%d." % NOW + BODY)).decode()
    headers = replaced(sign(STANDARD, BODY, SHARED, now=NOW, id="msg_1"), "webhook-signature", f"v1a,{made}")
    assert cause(STANDARD, headers, BODY, [PUBLIC]) is None
    assert cause(STANDARD, headers, BODY, [SHARED, PUBLIC]) is None
    assert cause(STANDARD, headers, BODY + b" ", [PUBLIC]) == "bad_signature"
    assert cause(STANDARD, headers, BODY, [SHARED]) == "bad_signature"
    keyed_with_the_public_key = sign(STANDARD, BODY, "whsec_" + PUBLIC.removeprefix("whpk_"), now=NOW, id="msg_1")
    assert cause(STANDARD, keyed_with_the_public_key, BODY, [PUBLIC]) == "bad_signature"


def test_a_public_key_cannot_sign() -> None:
    with pytest.raises(ConfigurationError, match="public key"):
        sign(STANDARD, BODY, PUBLIC, now=NOW, id="msg_1")


# ---- the signed time (case 12) --------------------------------------------------------------------------------------
def signed_at(written: str) -> Headers:
    """Headers whose time is whatever text, signed over exactly that."""
    raw = hmac.digest(b"k" * 32, f"msg_1.{written}.".encode("latin-1") + BODY, "sha256")
    entry = "v1," + base64.b64encode(raw).decode()
    return (("webhook-id", "msg_1"), ("webhook-timestamp", written), ("webhook-signature", entry))


@pytest.mark.parametrize(
    "written", ["nan", "1700000000.9", "-1", "1_700", "+1700000000", " 1700000000", "1" * 16, "\xb2"]
)
def test_a_time_that_is_not_plain_digits_is_malformed_even_when_signed(written: str) -> None:
    assert cause(STANDARD, signed_at(written), BODY, [SHARED]) == "malformed_header"


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [
        (0, None),
        (300, None),
        (-300, None),
        (301, "stale_timestamp"),
        (-301, "stale_timestamp"),
        (4 * 3600, "stale_timestamp"),
        (-4 * 3600, "stale_timestamp"),
    ],
)
def test_a_signed_time_may_differ_by_five_minutes_either_way(age_s: int, expected: str | None) -> None:
    headers = signed_at(str(NOW - age_s))
    assert cause(STANDARD, headers, BODY, [SHARED]) == expected
    assert cause(STANDARD, headers, BODY, [SHARED], now=NOW - age_s) is None  # judged as of its receipt


def test_an_old_and_unsigned_time_is_a_bad_signature_because_nothing_vouches_for_its_age() -> None:
    headers = replaced(signed_at(str(NOW)), "webhook-timestamp", str(NOW - 4 * 3600))
    assert cause(STANDARD, headers, BODY, [SHARED]) == "bad_signature"


def test_an_id_cannot_borrow_from_the_time_beside_it() -> None:
    headers = sign(STANDARD, b"5.tail", SHARED, now=NOW, id="msg_1")
    moved = replaced(replaced(headers, "webhook-id", f"msg_1.{NOW}"), "webhook-timestamp", "5")
    assert cause(STANDARD, moved, b"tail", [SHARED], now=5) == "malformed_header"


@pytest.mark.parametrize("identity", ["msg.1a", "evt_2.live", "a.b.c", "msg_1.", ".msg", "2024.x"])
def test_an_id_may_hold_full_stops_where_no_part_of_it_passes_for_the_time(identity: str) -> None:
    assert cause(STANDARD, sign(STANDARD, BODY, SHARED, now=NOW, id=identity), BODY, [SHARED]) is None


@pytest.mark.parametrize("identity", ["msg.1", f"msg.{NOW}", "a.5.b", "1.2.3", "msg.1.", "x.000000000000001"])
def test_an_id_whose_part_passes_for_the_time_is_refused(identity: str) -> None:
    headers = sign(STANDARD, BODY, SHARED, now=NOW, id=identity)
    assert cause(STANDARD, headers, BODY, [SHARED]) == "malformed_header"


@given(st.text("ab.15", min_size=1, max_size=8), st.text("ab.15{", max_size=12), st.data())
def test_no_rightly_signed_request_can_be_cut_into_another(identity: str, tail: str, data: st.DataObject) -> None:
    """Whatever is signed, at most one reading of the same bytes is accepted."""
    body = tail.encode()
    signed = sign(STANDARD, body, SHARED, now=NOW, id=identity)
    signature = dict(signed)["webhook-signature"]
    text = f"{identity}.{NOW}.{tail}"
    stops = [place for place, letter in enumerate(text) if letter == "."]
    readings = 0
    for first, second in combinations(stops, 2):
        cut = (text[:first], text[first + 1 : second], text[second + 1 :].encode())
        headers = (("webhook-id", cut[0]), ("webhook-timestamp", cut[1]), ("webhook-signature", signature))
        now = float(cut[1]) if cut[1].isdigit() else NOW
        readings += cause(STANDARD, headers, cut[2], [SHARED], now=now) is None
    assert readings <= 1


@pytest.mark.parametrize("secret", [SHARED.rstrip("="), f"v1,{SHARED}", SHARED.removeprefix("whsec_").rstrip("=")])
def test_a_secret_is_taken_as_dashboards_show_it(secret: str) -> None:
    check_secret(STANDARD, secret)
    assert cause(STANDARD, sign(STANDARD, BODY, SHARED, now=NOW, id="msg_1"), BODY, [secret]) is None


def test_an_id_that_no_header_can_hold_is_malformed() -> None:
    headers = replaced(sign(STANDARD, BODY, SHARED, now=NOW, id="msg_1"), "webhook-id", "msg_ł")
    assert cause(STANDARD, headers, BODY, [SHARED]) == "malformed_header"


# ---- the knobs of providers to come ---------------------------------------------------------------------------------
def test_a_time_among_the_signatures_is_found_and_must_be_there_once() -> None:
    digest = hmac.digest(b"secret", b"%d." % NOW + BODY, "sha1").hex()
    expectations = {
        f"t={NOW},v1={digest}": None,
        f"v1={digest},v0=00,t={NOW}": None,
        f"t={NOW},v1={'0' * 40},v1={digest}": None,
        f"t={NOW}, v1={digest}": None,
        f"t={NOW},t={NOW},v1={digest}": "malformed_header",
        f"t=17,t=00000000,v1={digest}": "malformed_header",  # not to be read as one time
        f"v1={digest}": "malformed_header",
        f"t={NOW},v0={digest}": "malformed_header",
        f"t={NOW + 1},v1={digest}": "bad_signature",
    }
    found = {text: cause(STRIPE_LIKE, (("signature", text),), BODY, ["secret"]) for text in expectations}
    assert found == expectations
    assert sign(STRIPE_LIKE, BODY, "secret", now=NOW) == (("signature", f"t={NOW},v1={digest}"),)
    assert (
        cause(STRIPE_LIKE, (("signature", f"t={NOW},v1={digest}"),), BODY, ["secret"], NOW + 301) == "stale_timestamp"
    )


@pytest.mark.parametrize(
    ("recipe", "time", "signed"),
    [
        (SLACK_LIKE, f"{NOW}", f"v0:{NOW}:".encode()),
        (ZENDESK_LIKE, "2023-11-14T22:13:20Z", b"2023-11-14T22:13:20Z"),
        (MILLISECONDS, f"{NOW}000", f"{NOW}000".encode()),
    ],
)
def test_a_time_in_a_header_of_its_own_is_written_and_read_as_the_provider_does(
    recipe: Recipe, time: str, signed: bytes
) -> None:
    raw = hmac.digest(b"secret", signed + BODY, "sha256")
    text = base64.b64encode(raw).decode() if recipe.encoding == "base64" else recipe.prefix + raw.hex()
    headers = (("signature", text), ("time", time))
    assert sign(recipe, BODY, "secret", now=NOW) == headers
    assert cause(recipe, headers, BODY, ["secret"], NOW + 300) is None
    assert cause(recipe, headers, BODY, ["secret"], NOW + 301) == "stale_timestamp"
    for malformed in ("2023-13-14T22:13:20Z", "2023-11-14T22:13:20", "20231114T221320Z", "9" * 16):
        assert cause(recipe, replaced(headers, "time", malformed), BODY, ["secret"]) == "malformed_header"


def test_a_recipe_without_a_tolerance_takes_a_signed_time_of_any_age() -> None:
    recipe = Recipe(header="s", signed="{timestamp}.{body}", timestamp_header="t", tolerance_s=None)
    headers = sign(recipe, BODY, "secret", now=1)
    assert cause(recipe, headers, BODY, ["secret"]) is None
    assert cause(recipe, replaced(headers, "t", "2"), BODY, ["secret"]) == "bad_signature"


# ---- bodies (cases 3 and 4) -----------------------------------------------------------------------------------------
def test_a_body_cut_anywhere_inside_an_emoji_is_the_same_body_when_put_together() -> None:
    body = '{"title":"ok 😊"}'.encode()
    headers = sign(PLAIN, body, "secret", now=NOW)
    emoji = body.index(b"\xf0")
    for cut in range(emoji, emoji + 5):
        chunks = [body[:cut], body[cut:]]
        assert cause(PLAIN, headers, b"".join(chunks), ["secret"]) is None
        assert Shortcut().read(headers, b"".join(chunks)) == {"title": "ok 😊"}


def test_the_signature_is_over_the_bytes_whether_or_not_they_can_be_read() -> None:
    emoji, marked, broken = '{"t":"😊"}'.encode(), b'\xef\xbb\xbf{"t":1}', b'{"t":"\xff"}'
    for body in (emoji, marked, broken):
        headers = sign(PLAIN, body, "secret", now=NOW)
        assert cause(PLAIN, headers, body, ["secret"]) is None
    assert Shortcut().read((), emoji) == {"t": "😊"}
    assert Shortcut().read((), marked) == {"t": 1}
    with pytest.raises(Unreadable, match="not UTF-8"):
        Shortcut().read((), broken)


# ---- anything at all ------------------------------------------------------------------------------------------------
NAMES = st.sampled_from(sorted({name for recipe in ALL_RECIPES for name in recipe.headers}))
TOKENS = st.sampled_from(["v1,", "v1a,", "v1=", "t=", "sha256=", " ", ",", "=", ".", GOOD_HEX, GOOD_ENTRY, str(NOW)])
VALUES = st.one_of(st.text(max_size=80), st.lists(TOKENS | st.text(max_size=3), max_size=8).map("".join))
SECRETS = st.one_of(st.sampled_from([SHARED, PUBLIC, "whpk_", "whsec_", "whsk_x", "secret"]), st.text(max_size=20))


@settings(max_examples=400, deadline=None)
@given(
    recipe=st.sampled_from(ALL_RECIPES),
    headers=st.lists(st.tuples(NAMES, VALUES), max_size=6),
    body=st.binary(max_size=50),
    secrets=st.lists(SECRETS, max_size=3),
    now=st.floats(allow_nan=False) | st.integers(0, 2**40),
)
def test_whatever_arrives_nothing_but_refused_escapes(
    recipe: Recipe, headers: list[tuple[str, str]], body: bytes, secrets: list[str], now: float
) -> None:
    known = {
        "missing_signature",
        "malformed_header",
        "duplicate_header",
        "bad_signature",
        "stale_timestamp",
        "no_secret",
    }
    assert cause(recipe, tuple(headers), body, secrets, now) in known | {None}


@settings(max_examples=100, deadline=None)
@given(recipe=st.sampled_from(ALL_RECIPES), body=st.binary(max_size=50), at=st.integers(0, 50), bit=st.integers(0, 7))
def test_a_body_changed_by_one_bit_is_refused(recipe: Recipe, body: bytes, at: int, bit: int) -> None:
    headers = sign(recipe, body, SHARED, now=NOW, id="msg_1")
    assert cause(recipe, headers, body, [SHARED]) is None
    changed = bytearray(body or b"\0")
    changed[at % len(changed)] ^= 1 << bit
    assert cause(recipe, headers, bytes(changed), [SHARED]) == "bad_signature"
