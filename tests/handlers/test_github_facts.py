"""What is known of an issue, as a value: the order in which it was heard makes no difference."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.github_facts import Facts, Word
from handlers.issues import PRIORITIES

NOON = datetime(2026, 6, 12, 12, tzinfo=UTC)

times = st.integers(0, 3).map(lambda second: NOON + timedelta(seconds=second))
words = st.builds(Word, times, st.sampled_from("ab"), st.sampled_from("xy"), st.just(""), st.sampled_from(PRIORITIES))
facts = st.builds(Facts, st.none() | words, st.none() | times, st.none() | times, st.none() | times)


@given(facts, facts, facts)
def test_what_is_known_does_not_depend_on_the_order_or_on_repetitions(one: Facts, two: Facts, three: Facts) -> None:
    assert one.and_(two) == two.and_(one)
    assert one.and_(two).and_(three) == one.and_(two.and_(three))
    assert one.and_(one) == one
    assert Facts().and_(one) == one


@pytest.mark.parametrize(
    ("closed", "reopened", "gone", "ended"),
    [
        (None, None, None, False),
        (1, None, None, True),
        (None, 1, None, False),
        (1, 2, None, False),
        (2, 1, None, True),
        (1, 1, None, True),  # a second is all that GitHub says: work that costs money does not begin by a guess
        (None, None, 1, True),
        (1, 2, 0, True),
    ],
)
def test_when_nothing_is_to_be_done_any_more(
    closed: int | None, reopened: int | None, gone: int | None, ended: bool
) -> None:
    closed_at, reopened_at, gone_at = (
        None if second is None else NOON + timedelta(seconds=second) for second in (closed, reopened, gone)
    )
    assert Facts(None, closed_at, reopened_at, gone_at).ended is ended


def test_of_two_words_of_one_second_the_higher_priority_counts() -> None:
    for place, higher in enumerate(PRIORITIES):
        for lower in PRIORITIES[place + 1 :]:
            one, two = Word(NOON, "a", "t", "", higher), Word(NOON, "b", "u", "", lower)
            assert Facts(one).and_(Facts(two)).word == one
            later = Word(NOON + timedelta(seconds=1), "b", "u", "", lower)
            assert Facts(one).and_(Facts(later)).word == later
