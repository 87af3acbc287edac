"""What each source reads out of what its provider sends: keys, events, and bodies nobody should send."""

from __future__ import annotations

import base64
import hmac
import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from webhooks.delivery import Event, Headers, RawEvent
from webhooks.errors import ConfigurationError, Refused, Unreadable
from webhooks.signatures import sign
from webhooks.sources import GitHub, Shortcut, Source, StandardWebhooks

PAYLOADS = Path(__file__).parent / "payloads"
ADA = "56d8a839-1c52-437f-b981-c3a15a11d6d4"
GRACE = "6380d4da-0ae7-4ca5-a7f4-59ba335b4460"
SOURCES: list[Source] = [Shortcut(bot_member_id=ADA), GitHub(), StandardWebhooks()]


def shortcut_events(body: Any, source: Shortcut | None = None) -> list[RawEvent]:
    return (source or Shortcut()).events((), body)


def shipped(provider: str, name: str) -> Any:
    return json.loads((PAYLOADS / provider / f"{name}.json").read_bytes())


def reason(source: Source, headers: Headers, body: bytes) -> str:
    with pytest.raises(Unreadable) as raised:
        source.read(headers, body)
    return str(raised.value)


# ---- shipped payloads -----------------------------------------------------------------------------------------------
SHORTCUT_NAMES = {
    "v1_automation_update": ["story.update"],
    "v1_bulk_update": ["workspace2.bulk-update", "story.update", "story.update", "story.update"],
    "v1_epic_update_state_change": ["epic.update"],
    "v1_story_comment_create": ["story-comment.create", "story.update"],
    "v1_story_create": ["story.create"],
    "v1_story_delete": ["story.delete"],
    "v1_story_task_create": ["story-task.create", "story.update"],
    "v1_story_update_completed": ["story.update"],
    "v1_story_update_label_add_new_label": ["story.update", "label.create"],
    "v1_story_update_state_change": ["story.update"],
    "v1_vcs_pull_request_no_member": ["pull-request.open", "branch.create", "story.update", "story.update"],
    "v2_interaction_assigned": ["v2.assigned"],
    "v2_interaction_mentioned": ["v2.mentioned"],
    "v2_observer_no_changes_key": ["v2.story.update"],
    "v2_validation": [],
}
SHORTCUT_STORIES = {
    "v1_automation_update": [16927],
    "v1_bulk_update": [None, 17001, 17002, 17003],
    "v1_epic_update_state_change": [None],
    "v1_story_comment_create": [16927, 16927],
    "v1_story_create": [16950],
    "v1_story_delete": [16950],
    "v1_story_task_create": [16927, 16927],
    "v1_story_update_label_add_new_label": [16927, None],
    "v1_vcs_pull_request_no_member": [None, None, 16927, 16928],  # the pull request belongs to both
    "v2_interaction_assigned": [16927],
    "v2_interaction_mentioned": [16927],
    "v2_observer_no_changes_key": [16927],
}


@pytest.mark.parametrize("path", sorted((PAYLOADS / "shortcut").glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_shortcut_payload_yields_its_events(path: Path) -> None:
    events = shortcut_events(Shortcut().read((), path.read_bytes()))
    assert [event.name for event in events] == SHORTCUT_NAMES[path.stem]
    if path.stem in SHORTCUT_STORIES:
        assert [event.data["story_id"] for event in events] == SHORTCUT_STORIES[path.stem]
    assert all(event.occurred_at is not None and event.occurred_at.tzinfo is UTC for event in events)


@pytest.mark.parametrize("path", sorted((PAYLOADS / "github").glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_github_payload_yields_its_event(path: Path) -> None:
    event, _, action = path.stem.partition("__")
    action = next((known for known in ("created", "edited", "revoked") if action.startswith(known)), action)
    expected = f"{event}.{action}" if event not in {"ping", "push", "status", "delete"} else event
    headers = (("x-github-event", event), ("content-type", "application/json"))
    body = GitHub().read(headers, path.read_bytes())
    (found,) = GitHub().events(headers, body)
    assert found.name == expected
    assert found.data == body == json.loads(path.read_bytes())


# ---- Shortcut -------------------------------------------------------------------------------------------------------
def labels_added(data: dict[str, Any]) -> set[str]:
    """What a handler's model would compute: the names of the labels an event adds to its story."""
    ids = {*data.get("label_ids", []), *data.get("changes", {}).get("label_ids", {}).get("adds", [])}
    return {known["name"] for known in data["references"] if known["entity_type"] == "label" and known["id"] in ids}


def test_a_label_created_in_the_same_body_can_be_named() -> None:
    update, created = shortcut_events(shipped("shortcut", "v1_story_update_label_add_new_label"))
    assert labels_added(update.data) == {"brand new"}
    assert created.data["name"] == "brand new"


def test_the_labels_of_a_new_story_can_be_named() -> None:
    (event,) = shortcut_events(shipped("shortcut", "v1_story_create"))
    assert labels_added(event.data) == {"ready-for-bot"}


def test_an_event_carries_its_entry_and_what_the_body_says_of_all() -> None:
    comment, _ = shortcut_events(shipped("shortcut", "v1_story_comment_create"))
    assert comment.data["text"].startswith("[@ada]")
    assert comment.data["changed_at"] == "2026-06-12T10:00:00.004Z"
    assert comment.data["member_id"] == GRACE
    assert comment.data["references"] == []
    assert comment.occurred_at == datetime(2026, 6, 12, 10, 0, 0, 4000, UTC)
    assert comment.ignored is None


def test_a_change_made_by_no_member_says_so() -> None:
    for bot in (ADA, None, ""):
        events = shortcut_events(shipped("shortcut", "v1_vcs_pull_request_no_member"), Shortcut(bot_member_id=bot))
        assert [event.data["member_id"] for event in events] == [None] * 4
        assert [event.ignored for event in events] == [None] * 4
    (nameless,) = shortcut_events({"actions": [story(7)], "member_id": ""}, Shortcut(bot_member_id=""))
    assert nameless.ignored is None


@pytest.mark.parametrize(
    ("payload", "bot", "ignored"),
    [
        ("v1_story_comment_create", GRACE, True),
        ("v1_story_comment_create", ADA, False),
        ("v2_interaction_mentioned", ADA, True),
        ("v2_interaction_mentioned", GRACE, False),
        ("v1_story_comment_create", None, False),
        ("v1_story_comment_create", "", False),
    ],
)
def test_what_our_own_bot_did_is_set_aside_with_that_reason(payload: str, bot: str | None, ignored: bool) -> None:
    events = shortcut_events(shipped("shortcut", payload), Shortcut(bot_member_id=bot))
    assert events
    expected = f"made by our own bot (member {bot})" if ignored else None
    assert [event.ignored for event in events] == [expected] * len(events)


COMMENT = {"id": 5, "entity_type": "story-comment", "action": "create"}
LINK = "https://app.shortcut.com/acme/story/7#activity-5"


def story(number: object, **rest: object) -> dict[str, object]:
    return {"id": number, "entity_type": "story", "action": "update", **rest}


@pytest.mark.parametrize(
    ("entry", "others", "expected"),
    [
        pytest.param(COMMENT, [], None, id="nothing says"),
        pytest.param(COMMENT, [story(7)], 7, id="the only story"),
        pytest.param(COMMENT, [story(7), story(7)], 7, id="the only story, twice"),
        pytest.param(COMMENT, [story(7), story(8)], None, id="two stories, neither names it"),
        pytest.param(COMMENT, [story(7), story(8, changes={"comment_ids": {"adds": [4, 5]}})], 8, id="one names it"),
        pytest.param(COMMENT, [story(7), story(8, changes={"comment_ids": {"removes": [5]}})], 8, id="one loses it"),
        pytest.param(COMMENT, [story(7), story(8, comment_ids=[5])], 8, id="a new story lists it"),
        pytest.param(COMMENT, [story(7), story(8, changes={"task_ids": {"adds": [5]}})], None, id="names a task"),
        pytest.param(
            COMMENT, [story(n, changes={"comment_ids": {"adds": [5]}}) for n in (7, 8)], None, id="both name it"
        ),
        pytest.param({**COMMENT, "app_url": LINK}, [story(8), story(9)], 7, id="its own link"),
        pytest.param({**COMMENT, "app_url": LINK}, [story(8)], 7, id="its own link before a neighbour"),
        pytest.param({**COMMENT, "app_url": "https://app.shortcut.com/acme/epic/7"}, [], None, id="an epic's link"),
        pytest.param({**COMMENT, "app_url": f"https://x/story/{'1' * 30}"}, [], None, id="no such number"),
        pytest.param({**COMMENT, "story_id": 9}, [story(7)], 9, id="its own field"),
        pytest.param({**COMMENT, "id": None}, [story(7), story(8, comment_ids=[None])], None, id="no id"),
        pytest.param({**COMMENT, "entity_type": "epic"}, [story(7)], None, id="an epic is not a story's"),
        pytest.param({**COMMENT, "entity_type": "label"}, [story(7)], None, id="a label is not a story's"),
        pytest.param({**COMMENT, "entity_type": "story-link"}, [story(7)], None, id="a link has two stories"),
        pytest.param({**COMMENT, "entity_type": "branch"}, [story(7)], 7, id="a branch of the only story"),
        pytest.param(
            {**COMMENT, "entity_type": "pull-request"},
            [story(7, changes={"pull_request_ids": {"adds": [5]}}), story(8)],
            7,
            id="a pull request",
        ),
        pytest.param(story("x"), [], None, id="a story without a number"),
        pytest.param(story(True), [], None, id="a story numbered true"),
        pytest.param(story(10**4000), [], None, id="a story numbered past any database"),
    ],
)
def test_an_event_gets_a_story_only_where_exactly_one_can_be_meant(
    entry: dict[str, object], others: list[dict[str, object]], expected: int | None
) -> None:
    for actions in ([entry, *others], [*others, entry]):
        events = shortcut_events({"version": "v1", "actions": actions})
        assert events[actions.index(entry)].data["story_id"] == expected


def test_v2_changes_are_a_list_and_arrive_as_one() -> None:
    body = shipped("shortcut", "v2_observer_no_changes_key")
    body["actions"][0]["changes"] = [{"attribute": "labels", "adds": [1], "removes": []}]
    (event,) = shortcut_events(body)
    assert event.data["changes"] == [{"attribute": "labels", "adds": [1], "removes": []}]
    assert event.data["member_id"] == ADA
    assert event.data["changed_at"] == "2026-09-20T12:00:01.000Z"


def test_a_v2_trigger_on_something_else_than_a_story_has_no_story() -> None:
    body = shipped("shortcut", "v2_interaction_assigned")
    body["trigger"]["entity_type"] = "epic"
    assert shortcut_events(body)[0].data["story_id"] is None


def test_a_version_nobody_knows_is_not_taken_for_a_known_one() -> None:
    assert shortcut_events({"version": "v3", "actions": [story(7)]}) == []
    assert [event.name for event in shortcut_events({"actions": [story(7)]})] == ["story.update"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"type":"validation"}', True),
        (b' { "type" : "validation" }\n', True),
        (b'{"type":"validation","actions":[]}', False),
        (b'{"type":"other"}', False),
        (b'{"type":"validation"', False),
        (b'{"type":"validation"}' + b" " * 2000, False),
        (b"[]", False),
        (b"", False),
        (b"\xff", False),
    ],
)
def test_only_the_validation_ping_is_answered_without_being_stored(body: bytes, expected: bool) -> None:
    assert Shortcut().answered((), body) is expected
    assert GitHub().answered((), body) is False


# ---- GitHub ---------------------------------------------------------------------------------------------------------
JSON_TEXT = '{"action":"opened","title":"a+b & c=d 😊"}'
JSON_VALUE = {"action": "opened", "title": "a+b & c=d 😊"}
FORM = "application/x-www-form-urlencoded"


def github_headers(body: bytes, content_type: str, event: str = "issues") -> Headers:
    signature = hmac.digest(b"secret", body, "sha256").hex()
    return (
        ("content-type", content_type),
        ("x-github-event", event),
        ("x-hub-signature-256", f"sha256={signature}"),
    )


@pytest.mark.parametrize("content_type", [FORM, f"{FORM}; charset=UTF-8", f"{FORM.upper()} ;boundary=x"])
@pytest.mark.parametrize(
    "body",
    [
        "payload=" + quote(JSON_TEXT),
        "payload=" + quote_plus(JSON_TEXT),
        "first=1&payload=" + quote_plus(JSON_TEXT) + "&last=%FF",
        "payload=" + JSON_TEXT.replace("+", "%2B").replace("&", "%26").replace(" ", "+"),
    ],
)
def test_a_form_is_verified_over_its_bytes_and_routed_like_json(body: str, content_type: str) -> None:
    raw = body.encode()
    headers = github_headers(raw, content_type)
    source = GitHub()
    source.verify(headers, raw, ["secret"], 0)
    assert source.read(headers, raw) == JSON_VALUE
    assert [event.name for event in source.events(headers, source.read(headers, raw))] == ["issues.opened"]


def test_a_form_signed_over_its_decoded_json_is_refused() -> None:
    form = ("payload=" + quote(JSON_TEXT)).encode()
    with pytest.raises(Refused, match="bad_signature"):
        GitHub().verify(github_headers(JSON_TEXT.encode(), FORM), form, ["secret"], 0)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "without the field payload"),
        (b"other=1", "without the field payload"),
        (b"Payload=%7B%7D", "without the field payload"),
        (b"payload", "empty"),
        (b"payload=%FF", "not UTF-8"),
        (b"payload=%7B", "not JSON"),
    ],
)
def test_a_form_that_cannot_be_read_says_why(body: bytes, expected: str) -> None:
    assert expected in reason(GitHub(), github_headers(body, FORM), body)


def test_one_guid_is_one_delivery_a_hook_and_one_a_source() -> None:
    guid = ("x-github-delivery", "72d3162e-cc78-11e3-81ab-4c9367dc0958")
    source = GitHub()
    keys = {hook: source.dedup_key((guid, ("x-github-hook-id", hook)), b"{}") for hook in ("292430182", "441514450")}
    assert keys == {hook: f"{hook}:{guid[1]}" for hook in keys}
    assert source.dedup_key((guid, ("x-github-hook-id", "292430182")), b'{"other":1}') == keys["292430182"]
    assert source.dedup_key((guid,), b"{}") == guid[1]
    assert source.dedup_key((("x-github-hook-id", "1"),), b"{}") == source.dedup_key((), b"{}")
    assert source.dedup_key((), b"{}") != source.dedup_key((), b"[]")


def test_a_github_event_without_its_header_says_nothing() -> None:
    assert GitHub().events((), {"action": "opened"}) == []
    assert GitHub().events((("x-github-event", ""),), {"action": "opened"}) == []


@pytest.mark.parametrize("action", [7, None, "", ["opened"], True])
def test_an_action_that_is_no_word_is_no_part_of_the_name(action: object) -> None:
    (found,) = GitHub().events((("x-github-event", "issues"),), {"action": action})
    assert found.name == "issues"


@pytest.mark.parametrize(
    ("event", "payload", "expected"),
    [
        ("pull_request", "pull_request__closed", datetime(2019, 5, 15, 15, 21, 18, tzinfo=UTC)),
        ("issue_comment", "issue_comment__created", datetime(2019, 5, 15, 15, 20, 21, tzinfo=UTC)),
        ("issues", "issues__opened", datetime(2019, 5, 15, 15, 20, 18, tzinfo=UTC)),
        ("push", "push__branch", datetime.fromtimestamp(1557933657, UTC)),
        ("status", "status", datetime(2019, 5, 15, 15, 20, 55, tzinfo=UTC)),
        ("workflow_run", "workflow_run__completed", datetime(2021, 12, 16, 19, 37, 22, tzinfo=UTC)),
        ("ping", "ping__organization", None),
        ("meta", "meta__deleted", None),
    ],
)
def test_an_event_of_github_occurred_when_its_subject_last_changed(
    event: str, payload: str, expected: datetime | None
) -> None:
    (found,) = GitHub().events((("x-github-event", event),), shipped("github", payload))
    assert found.occurred_at == expected


def test_a_deleted_comment_does_not_say_when_it_was_deleted() -> None:
    body = {**shipped("github", "issue_comment__created"), "action": "deleted"}
    (found,) = GitHub().events((("x-github-event", "issue_comment"),), body)
    assert found.occurred_at is None


# ---- Standard Webhooks ----------------------------------------------------------------------------------------------
def test_a_standard_webhook_is_named_by_its_type() -> None:
    body = {"type": "invoice.paid", "timestamp": "2026-01-02T03:04:05+01:00", "data": {"id": 1}}
    (event,) = StandardWebhooks().events((), body)
    assert (event.name, event.data) == ("invoice.paid", body)
    assert event.occurred_at == datetime(2026, 1, 2, 2, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize("body", [{"type": ""}, {"type": 7}, {"type": None}, {"data": 1}, [], None])
def test_a_standard_webhook_without_a_type_says_nothing(body: object) -> None:
    assert StandardWebhooks().events((), body) == []


# ---- keys -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("given_id", ["x" * 201, "é", "a\u0000b", "a\nb", " a", "\ud83d", "sha256:" + "0" * 64])
def test_an_id_unfit_to_be_a_key_is_replaced_by_its_digest(given_id: str) -> None:
    key = Shortcut().dedup_key((), json.dumps({"id": given_id}).encode())
    assert key.startswith("sha256:")
    assert len(key) == 71
    assert key != given_id
    assert key == Shortcut().dedup_key(
        (), json.dumps({"actions": [], "id": given_id}).encode()
    )  # of the id, not the body


def test_an_id_of_two_hundred_printable_characters_is_a_key() -> None:
    assert Shortcut().dedup_key((), json.dumps({"id": "x" * 200}).encode()) == "x" * 200


@pytest.mark.parametrize("body", [b'{"id":7}', b'{"id":null}', b'{"id":""}', b"{}", b"[]", b"\xff", b"", b"[" * 9000])
def test_without_an_id_the_bytes_are_the_key(body: bytes) -> None:
    others = {Shortcut().dedup_key((), other) for other in (body + b" ", b" " + body)}
    key = Shortcut().dedup_key((), body)
    assert key.startswith("sha256:")
    assert key not in others
    assert key == Shortcut().dedup_key((("content-type", "x"),), body)


# ---- case 10: bodies nobody should send -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "body",
    [b'{"t":"a\\u0000b"}', b'{"t":"\\ud83d"}', b'{"n":NaN}', b'{"n":1e400}', b"null", b"[]", b'"x"', b'{"a":1,"a":2}'],
)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_odd_json_is_read_as_python_reads_it(source: Source, body: bytes) -> None:
    assert repr(source.read((), body)) == repr(json.loads(body))
    assert isinstance(source.events((("x-github-event", "push"),), source.read((), body)), list)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b'{"t":"\xff"}', "not UTF-8: byte 0xff at position 6"),
        ("é".encode("utf-16"), "not UTF-8"),
        (b"{", "not JSON"),
        (b"   ", "not JSON"),
        (b"[" * 2000 + b"]" * 2000, "nested past reading"),
        (b"[" * 200_000, "nested past reading"),
        (b'{"n":' + b"9" * 5000 + b"}", "integer too long"),
    ],
)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_a_body_that_cannot_be_read_says_why_and_still_has_a_key(source: Source, body: bytes, expected: str) -> None:
    assert expected in reason(source, (), body)
    assert source.dedup_key((), body).startswith("sha256:")
    assert source.answered((), body) is False


WORDS = st.sampled_from(
    ["v1", "v2", "story", "story-comment", "label", "create", "update", "assigned", "2026-01-01T00:00:00Z", "x"]
)
ENTRY_KEYS = ["id", "entity_type", "action", "changes", "comment_ids", "adds", "app_url", "story_id"]
BODY_KEYS = ["version", "actions", "trigger", "type", "actor", "references", "changed_at", "member_id", "timestamp"]
KEYS = st.sampled_from([*ENTRY_KEYS, *BODY_KEYS, "pull_request", "updated_at"])
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS, st.text(max_size=5))
ANY_JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6), max_leaves=30
)
BODIES = ANY_JSON | st.fixed_dictionaries({"version": st.sampled_from(["v1", "v2"]), "actions": st.lists(ANY_JSON)})


def changed_everywhere(value: Any, odd: Any) -> Iterator[Any]:
    """The value with one of its parts, at any depth, replaced by something odd."""
    yield odd
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        for other in changed_everywhere(part, odd):
            copy = value.copy()
            copy[key] = other
            yield copy


@pytest.mark.parametrize("odd", [None, [], {}, "x", "", 7, -1.5, True, [[]], [{}], {"adds": 7}], ids=repr)
@pytest.mark.parametrize("payload", sorted(SHORTCUT_NAMES))
def test_a_shortcut_body_with_any_part_odd_yields_events_or_none_and_never_an_error(payload: str, odd: Any) -> None:
    known = {*itertools.chain.from_iterable(SHORTCUT_NAMES.values())}
    for body in changed_everywhere(shipped("shortcut", payload), odd):
        for event in shortcut_events(body):
            assert event.name in known or (isinstance(odd, str) and odd in event.name.split("."))
            assert type(event.data["story_id"]) in (int, type(None))


@settings(max_examples=300, deadline=None)
@given(source=st.sampled_from(SOURCES), body=BODIES, event=st.text(max_size=10))
def test_any_json_at_all_yields_events_or_none_and_never_an_error(source: Source, body: Any, event: str) -> None:
    for found in source.events((("x-github-event", event),), body):
        assert found.name
        assert found.occurred_at is None or found.occurred_at.tzinfo is UTC


@settings(max_examples=300, deadline=None)
@given(
    source=st.sampled_from(SOURCES),
    body=st.binary(max_size=60) | st.text(max_size=20).map(str.encode),
    values=st.lists(st.text(max_size=250), min_size=3, max_size=3),
)
def test_any_bytes_at_all_have_a_fit_key_and_are_read_or_unreadable(
    source: Source, body: bytes, values: list[str]
) -> None:
    headers = tuple(zip(("webhook-id", "x-github-delivery", "x-github-hook-id"), values, strict=True))
    key = source.dedup_key(headers, body)
    assert 0 < len(key) <= 200
    assert key.isascii()
    assert key.isprintable()
    assert source.answered(headers, body) is False
    for content_type in ("application/json", FORM):
        with suppress(Unreadable):
            source.read((("content-type", content_type),), body)


@pytest.mark.parametrize(
    "time", ["", "yesterday", "2026-01-01T00:00:00", "9999-12-31T23:59:59-23:59", "\ud83d", 1e9, [], True, 10**40]
)
def test_a_time_that_cannot_be_placed_is_none(time: object) -> None:
    (event,) = StandardWebhooks().events((), {"type": "x", "timestamp": time})
    assert event.occurred_at is None


# ---- what is kept ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_the_headers_kept_are_enough_to_verify_again_and_hold_no_credentials(source: Source) -> None:
    secret = "whsec_" + base64.b64encode(b"k" * 32).decode()
    sent = (
        ("host", "example.com"),
        ("authorization", "Bearer x"),
        ("cookie", "a=b"),
        ("content-type", "application/json"),
        *sign(source.recipe, b"{}", secret, now=5, id="msg_1"),
        ("x-forwarded-for", "192.0.2.1"),
    )
    kept = source.keep(sent)
    source.verify(kept, b"{}", [secret], 5)
    assert {name for name, _ in kept} == {"content-type", *source.recipe.headers}
    assert kept == tuple(line for line in sent if line in kept)


def test_a_delivery_of_github_keeps_what_says_what_it_is() -> None:
    sent = (("x-github-event", "push"), ("x-github-delivery", "g"), ("x-github-hook-id", "1"), ("x-other", "x"))
    assert GitHub().keep(sent) == sent[:3]


# ---- handlers and names ---------------------------------------------------------------------------------------------
class Paid(BaseModel):
    type: str


async def apply(event: Event[Any], tx: Any) -> None:
    """Do nothing; only its registration is looked at."""


async def apply_otherwise(event: Event[Any], tx: Any) -> None:
    """Do nothing; only its registration is looked at."""


def test_a_handler_is_registered_for_its_event_and_left_as_it_is() -> None:
    source = StandardWebhooks("billing")
    assert source.on("invoice.paid", model=Paid)(apply) is apply
    source.on("invoice.voided")(apply)
    assert source.handlers["invoice.paid"].function is apply
    assert {name: handler.model for name, handler in source.handlers.items()} == {
        "invoice.paid": Paid,
        "invoice.voided": None,
    }


def test_a_second_handler_for_one_event_is_an_error_that_names_both() -> None:
    source = Shortcut()
    source.on("story.update")(apply)
    with pytest.raises(ConfigurationError, match=r"story\.update.*apply and .*apply_otherwise"):
        source.on("story.update")(apply_otherwise)
    assert source.handlers["story.update"].function is apply
    Shortcut("other").on("story.update")(apply_otherwise)


@pytest.mark.parametrize("name", ["", "Shortcut", "a/b", "a b", "9", "é", "a" * 51, "a\n"])
def test_a_name_that_cannot_stand_in_a_url_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot name a source"):
        Shortcut(name)


def test_a_source_that_does_not_say_how_its_provider_signs_is_refused() -> None:
    class Unsigned(Source):
        def events(self, headers: Headers, body: Any) -> list[RawEvent]:
            return []

    with pytest.raises(ConfigurationError, match="Unsigned has no recipe"):
        Unsigned("unsigned")


def test_the_events_of_one_pull_request_can_be_ordered_by_their_own_time_however_they_arrive() -> None:
    names = ("pull_request__opened", "pull_request__synchronize", "pull_request__closed")
    bodies = [shipped("github", name) for name in names]
    for second, body in enumerate(bodies):
        body["pull_request"]["updated_at"] = f"2026-01-01T00:00:0{second}Z"
    for order in itertools.permutations(bodies):
        events = [GitHub().events((("x-github-event", "pull_request"),), body)[0] for body in order]
        by_time = sorted(events, key=lambda event: event.occurred_at or datetime.min.replace(tzinfo=UTC))
        assert [event.name.partition(".")[2] for event in by_time] == ["opened", "synchronize", "closed"]
