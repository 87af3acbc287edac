"""Change one value of a parsed body, as `--set path=value` says."""

from __future__ import annotations

import json
from typing import Any

from webhooks.sources.reading import is_array, is_object


def change(body: Any, assignment: str) -> None:
    """Set one value, in place.

    Args:
        body: a parsed JSON value.
        assignment: such as ``actions.0.id=123``: field names and places in lists, joined by dots. The value is JSON,
            or else a text. A last field that is not there yet is added; a place just past a list's end is appended.

    Raises:
        ValueError: there is no such place; the message names the part of the path that leads nowhere.
    """
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise ValueError(f"{assignment!r}: write it as path=value, such as actions.0.id=123")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    *above, last = path.split(".")
    inside, so_far = body, ""
    for part in above:
        so_far = f"{so_far}.{part}" if so_far else part
        inside = _child(inside, part, so_far)
    if is_object(inside):
        inside[last] = value
    elif is_array(inside) and last.isdecimal() and int(last) <= len(inside):
        inside[int(last) : int(last) + 1] = [value]
    else:
        raise ValueError(f"there is no {path}: {_described(inside, so_far)}")


def _child(inside: Any, part: str, so_far: str) -> Any:
    if is_object(inside) and part in inside:
        return inside[part]
    if is_array(inside) and part.isdecimal() and int(part) < len(inside):
        return inside[int(part)]
    raise ValueError(f"there is no {so_far}: {_described(inside, so_far.rpartition('.')[0])}")


def _described(inside: Any, path: str) -> str:
    name = path or "the body"
    if is_object(inside):
        return f"{name} has {', '.join(inside) or 'no fields'}"
    if is_array(inside):
        return f"{name} is a list of {len(inside)}, its places are counted from 0"
    return f"{name} is neither an object nor a list"
