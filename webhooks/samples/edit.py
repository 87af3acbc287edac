"""Change one value of a parsed body, as `--set path=value` says."""

from __future__ import annotations

import json
import re
from typing import Any

from webhooks.nesting import loads
from webhooks.sources.reading import is_array, is_object

# A name, a place in a list, or a name in quotes where it holds what would separate or end it.
_PART = re.compile(r'\[(\d+)\]|\["((?:[^"\\]|\\.)*)"\]|([^.\[\]=]+)')


def change(body: Any, assignment: str) -> None:
    """Set one value, in place.

    Args:
        body: a parsed JSON value.
        assignment: such as ``actions.0.id=123``, ``actions[0].id=123`` or ``labels["a.b"]=null``: field names and
            places in lists. The value is JSON, or else a text. A last field that is not there yet is added; a place
            just past a list's end is appended.

    Raises:
        ValueError: there is no such place; the message names the part of the path that leads nowhere.
    """
    parts, text = _parsed(assignment)
    try:
        value = loads(text)
    except ValueError:
        value = text
    *above, last = parts
    inside, so_far = body, ""
    for part in above:
        so_far = f"{so_far}.{part}" if so_far else part
        inside = _child(inside, part, so_far)
    if is_object(inside):
        inside[last] = value
    elif is_array(inside) and last.isdecimal() and int(last) <= len(inside):
        inside[int(last) : int(last) + 1] = [value]
    else:
        raise ValueError(f"there is no {'.'.join(parts)}: {_described(inside, so_far)}")


def _parsed(assignment: str) -> tuple[list[str], str]:
    """Split an assignment into the parts of its path, and its value."""
    parts: list[str] = []
    place = 0
    while found := _PART.match(assignment, place):
        number, quoted, name = found.groups()
        parts.append(json.loads(f'"{quoted}"') if quoted is not None else number or name)
        place = found.end()
        if assignment[place : place + 1] == "=":
            return parts, assignment[place + 1 :]
        if assignment[place : place + 1] == ".":
            place += 1
    raise ValueError(f"{assignment!r}: write it as path=value, such as actions.0.id=123 or actions[0].id=123")


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
