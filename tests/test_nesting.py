"""How deep JSON of others may nest: a limit of ours, the same in every Python and wherever it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from webhooks import GitHub, Shortcut
from webhooks.captures import lines
from webhooks.errors import ProviderError, Unreadable
from webhooks.nesting import MOST_NESTED, TooDeep, check, loads
from webhooks.provider_api.answers import decoded
from webhooks.samples.edit import change
from webhooks.tunnel import message

FORM = (("content-type", "application/x-www-form-urlencoded"),)
KINDS: list[Callable[[int], bytes]] = [
    lambda depth: b"[" * depth + b"]" * depth,
    lambda depth: b'{"a":' * depth + b"1" + b"}" * depth,
    lambda depth: b'[{"a":' * (depth // 2) + b"[]" * (depth % 2) + b"1" * (1 - depth % 2) + b"}]" * (depth // 2),
    lambda depth: b'[ "]", ' * depth + b'"\\"]"' + b"]" * depth,
    lambda depth: b"[[],[[]]," * (depth - 2) + b"[[]]" + b"]" * (depth - 2),
]


def depth_of(value: object) -> int:
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(depth_of, inside), default=0)


def far_down(frames: int, call: Callable[[], Any]) -> Any:
    return call() if frames == 0 else far_down(frames - 1, call)


@pytest.mark.parametrize("kind", KINDS)
def test_what_nests_to_the_limit_is_read_and_one_deeper_is_not(kind: Callable[[int], bytes]) -> None:
    assert check(kind(MOST_NESTED)) == MOST_NESTED
    assert far_down(400, lambda: loads(kind(MOST_NESTED))) is not None
    with pytest.raises(TooDeep, match=f"nested deeper than {MOST_NESTED} arrays and objects"):
        loads(kind(MOST_NESTED + 1))


@pytest.mark.parametrize("text", [b"[" * 1_000_000, b'{"a":' * 1_000_000, b"[" * 951, b"]" + b"[" * 952])
def test_what_never_closes_is_too_deep_as_well(text: bytes) -> None:
    with pytest.raises(TooDeep):
        loads(text)


@pytest.mark.parametrize(
    "body",
    [b'["' + b"[" * 5_000 + b'"]', b'["' + b'\\"[' * 5_000 + b'"]', b'["\\\\", "' + b"{" * 5_000 + b'"]'],
    ids=["in a string", "behind quotes that are escaped", "behind a backslash that is escaped"],
)
def test_brackets_in_a_text_are_no_depth(body: bytes) -> None:
    assert loads(body) == json.loads(body)


TEXTS = st.text(st.sampled_from('[]{}"\\é😊 a'), max_size=8)
VALUES = st.recursive(
    st.none() | TEXTS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)
)


@given(VALUES, st.booleans(), st.integers(0, 2))
def test_the_depth_that_is_counted_is_the_one_that_is_read(value: Any, plain: bool, indent: int) -> None:
    padding: list[Any] = [[] for _ in range(300)]  # fewer brackets are not counted at all
    text = json.dumps([value, padding], ensure_ascii=plain, indent=indent or None)
    assert check(text) == check(text.encode()) == max(1 + depth_of(value), 3)
    assert loads(text) == [value, padding]


# ---- wherever it is read


@pytest.mark.parametrize("deeper", [False, True])
def test_every_reader_has_that_limit(deeper: bool) -> None:
    """One that wraps what it reads in objects of its own counts these, too."""

    def fits(read: Callable[[bytes], Any], around: int, error: type[Exception]) -> None:
        depth = MOST_NESTED - around + deeper
        body = b"[" * depth + b"]" * depth
        if deeper:
            with pytest.raises(error):
                read(body)
        else:
            read(body)

    fits(lambda body: Shortcut().read((), body), 0, Unreadable)
    fits(lambda body: GitHub().read(FORM, b"payload=" + body), 0, Unreadable)
    fits(
        lambda body: decoded(httpx.Response(200, content=body, request=httpx.Request("GET", "https://x/y"))),
        0,
        ProviderError,
    )
    fits(lambda body: message.read('{"body":' + body.decode() + "}"), 1, Unreadable)


def test_a_line_and_an_assignment_that_nest_too_deep_are_no_json() -> None:
    deep = b"[" * 5_000 + b"]" * 5_000
    assert lines.read(deep, place=1, name="line 1", ended=True).fault == "it is not JSON"
    body: dict[str, Any] = {}
    change(body, f"a={deep.decode()}")
    assert body == {"a": deep.decode()}
