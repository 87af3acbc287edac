"""Events as the bytes that are kept with each of them: what is read again is what was written, and grows with it."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from consumers import stories
from hypothesis import given
from hypothesis import strategies as st

from webhooks import Shortcut
from webhooks.delivery import RawEvent
from webhooks.inbox import parts

AT = datetime(2026, 6, 12, 10, 0, 0, 123456, tzinfo=UTC)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def again(events: list[RawEvent]) -> list[RawEvent]:
    kept = parts.written(events)
    return [parts.read(own, kept.shared) for own in kept.own if own is not None]


@given(st.lists(st.dictionaries(st.text(), VALUES, max_size=4), min_size=1, max_size=4), VALUES)
def test_events_are_read_as_they_were_written(own: list[dict[str, Any]], common: Any) -> None:
    events = [RawEvent(f"e.{place}", {**data, "common": common}, AT) for place, data in enumerate(own)]
    assert again(events) == events


@pytest.mark.parametrize("value", ["\x00", "\ud83d", 10**400, math.inf, -0.0, "é😊", {"": {}}, [[]], True, None])
def test_whatever_json_holds_is_kept_exactly(value: object) -> None:
    [event, _] = again([RawEvent("e", {"value": value}), RawEvent("e", {"value": 1})])
    assert (event.data["value"], type(event.data["value"])) == (value, type(value))
    [event, _] = again([RawEvent("e", {"value": value}), RawEvent("e", {"value": value})])
    assert event.data["value"] == value


def test_nan_is_kept_as_what_it_is() -> None:
    [event] = again([RawEvent("e", {"value": math.nan})])
    assert math.isnan(event.data["value"])


def test_what_events_have_in_common_is_kept_once() -> None:
    def length(count: int) -> int:
        body = json.loads(stories(*range(1, count + 1)))
        body["references"] = [{"id": id, "entity_type": "story", "name": f"story {id}"} for id in range(1, count + 1)]
        events = Shortcut().events((), body)
        kept = parts.written(events)
        assert [parts.read(own, kept.shared) for own in kept.own if own is not None] == events
        return len(kept.shared or b"") + sum(len(own or b"") for own in kept.own)

    assert length(400) < 12 * length(40)


def test_a_value_that_is_merely_equal_stays_with_its_event_and_what_is_changed_reaches_no_other() -> None:
    events = again([RawEvent("e", {"list": [1], "both": both}) for both in [["x"]] * 2])
    events[0].data["both"].append("mine")
    assert [event.data for event in events] == [{"list": [1], "both": ["x", "mine"]}, {"list": [1], "both": ["x"]}]


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", AT])
def test_data_that_is_no_json_is_not_kept(value: object) -> None:
    events = [RawEvent("e", {"value": value}), RawEvent("e", {"value": value})]
    assert parts.written(events) == parts.Parts(None, [None, None])
