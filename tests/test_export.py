"""Deliveries out of the inbox as lines, and what is taken out of them on the way."""

from __future__ import annotations

import base64
import json
import re
from typing import Any
from urllib.parse import parse_qs, quote_plus, unquote_to_bytes

import pytest
from consumers import SECRET, arrival, arrived, from_github, from_shortcut, stack, stories
from replays import Applied, ended, github, prune, pushed, split

from webhooks import GitHub, Pool, Shortcut, StandardWebhooks
from webhooks.captures.lines import read
from webhooks.delivery import Headers
from webhooks.errors import ConfigurationError, Refused, Unreadable
from webhooks.replay import Export, Redaction, export
from webhooks.replay.redaction import FORM
from webhooks.selection import Selection, chosen
from webhooks.sources import Source

SOURCES: dict[str, Source] = {source.name: source for source in (GitHub(), Shortcut(), StandardWebhooks("shop"))}
SIGNED = tuple((name.lower(), value) for name, value in from_github(b"{}", guid="one").headers)


async def lines(pool: Pool, *redact: str, **filters: Any) -> tuple[list[dict[str, Any]], Export]:
    written: list[bytes] = []

    async def write(line: bytes) -> None:
        written.append(line)

    async with pool.transaction() as tx:
        scope = await chosen(tx, Selection(**filters), "original")
    done = await export(pool, SOURCES, scope, Redaction.read(redact), write)
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in written)
    return [json.loads(line) for line in written], done


def body(line: dict[str, Any]) -> bytes:
    return base64.b64decode(line["body_base64"])


async def test_what_was_received_is_written_whatever_became_of_it(pool: Pool) -> None:
    push, dead = await github(pool, b'{"a":1}\r\n\xff', pushed())
    await ended(pool, push, "ignored", event="push", reason="none of ours")
    await ended(pool, dead, "dead", event="push")
    parent, _ = await split(pool, 7, 8)

    written, done = await lines(pool)

    assert [line["id"] for line in written] == [push, dead, parent]
    assert (done.lines, done.redacted, done.left_out, done.after) == (3, 0, {}, parent)
    first = written[0]
    assert (first["version"], first["source"], first["event"], first["origin"]) == (1, "github", "push", "received")
    assert first["headers"] == [["x-github-event", "push"]]
    assert body(first) == b'{"a":1}\r\n\xff'
    assert "redacted" not in first


async def test_a_pruned_delivery_is_left_out_and_named(pool: Pool) -> None:
    gone, whole = await github(pool, pushed(), pushed())
    await prune(pool, gone)

    written, done = await lines(pool)

    assert [line["id"] for line in written] == [whole]
    assert done.left_out == {gone: "its body was pruned"}


async def test_a_redacted_delivery_is_marked_and_is_accepted_again_signed_anew(database_url: str) -> None:
    applied = Applied()
    async with stack(database_url, applied.consumer(), work=False) as running:
        await running.send(from_github(pushed(email="ann@example.com"), guid="one"))
        [line], done = await lines(running.pool, "$.email", "header:user-agent")

    assert done.redacted == 1
    assert line["redacted"] is True
    assert json.loads(body(line)) == {"repository": {"full_name": "acme/app"}, "email": "[redacted]"}
    assert line["dedup_key"] == "101:one"
    names = [name for name, _ in line["headers"]]
    assert "x-hub-signature-256" not in names
    assert "user-agent" not in names
    assert read(json.dumps(line).encode(), place=1, name="").fault is None


async def test_a_body_without_what_is_to_be_taken_out_stays_byte_for_byte_with_its_signature(pool: Pool) -> None:
    exact = b'{ "a" : 1 }\r\n'
    [id] = await arrived(pool, arrival(exact, source="github"))

    [line], done = await lines(pool, "$.email")

    assert (line["id"], body(line), done.redacted) == (id, exact, 0)
    assert "redacted" not in line


async def test_a_body_that_cannot_be_read_is_left_out_rather_than_written_whole(pool: Pool) -> None:
    secret, empty, whole = await github(pool, b'{"email": "ann@example.com"', b"", pushed(email="ann@example.com"))

    written, done = await lines(pool, "$.email")

    assert [line["id"] for line in written] == [whole]
    assert done.left_out.keys() == {secret, empty}
    assert "cannot be read" in done.left_out[secret]
    everything, _ = await lines(pool, "header:user-agent")
    assert len(everything) == 3


async def test_an_id_that_was_taken_out_is_not_in_the_key_either(database_url: str) -> None:
    applied = Applied()
    async with stack(database_url, applied.consumer(), work=False) as running:
        await running.send(from_github(pushed(), guid="the-guid"))
        [line], _ = await lines(running.pool, "header:X-GitHub-Delivery")
    assert "the-guid" not in json.dumps(line)
    assert line["dedup_key"].startswith("sha256:")


async def test_ids_that_were_taken_out_of_bodies_stay_apart_and_cannot_be_guessed(database_url: str) -> None:
    applied = Applied()
    async with stack(database_url, applied.consumer(), work=False) as running:
        for id in ("first-id", "second-id"):
            await running.send(from_shortcut(stories(7, id=id)))
        written, _ = await lines(running.pool, "$.id")
        again, _ = await lines(running.pool, "$.id")

    keys = [line["dedup_key"] for line in (*written, *again)]
    assert len(set(keys)) == 4
    for line, key in zip((*written, *again), keys, strict=True):
        assert re.fullmatch(r"\[redacted\] [0-9a-f]{32}", key)
        assert SOURCES["shortcut"].dedup_key((), body(line)) == key
        assert b"-id" not in body(line)


# ---- redaction itself


def redacted(*what: str, source: Source | None = None, headers: Headers = SIGNED, body: bytes) -> tuple[Headers, bytes]:
    taken = Redaction.read(what).applied(source or SOURCES["github"], headers, body)
    return taken.headers, taken.body


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("$.a", {"a": "x", "b": "x"}, {"a": "[redacted]", "b": "x"}),
        ("$.a", {"a": 5}, {"a": 0}),
        ("$.a", {"a": 1.5}, {"a": 0}),
        ("$.a", {"a": True}, {"a": False}),
        ("$.a", {"a": None}, {"a": None}),
        ("$.a", {"a": [1, 2]}, {"a": []}),
        ("$.a", {"a": {"b": 1}}, {"a": {}}),
        ("$..email", {"email": "x", "in": [{"email": "y"}]}, {"email": "[redacted]", "in": [{"email": "[redacted]"}]}),
        ("$.a[*]", {"a": ["x", 1]}, {"a": ["[redacted]", 0]}),
        ("$.a[?@.b=='x'].c", {"a": [{"b": "x", "c": "s"}, {"b": "y", "c": "s"}]}, None),
        ("$", {"a": 1}, {}),
    ],
)
def test_a_value_becomes_an_empty_one_of_its_kind(path: str, before: Any, after: Any) -> None:
    _, changed = redacted(path, body=json.dumps(before).encode())
    expected = after or {"a": [{"b": "x", "c": "[redacted]"}, {"b": "y", "c": "s"}]} if path != "$" else after
    assert json.loads(changed) == expected


def test_values_inside_of_one_another_can_both_be_taken_out() -> None:
    for order in (("$.a", "$.a.b"), ("$.a.b", "$.a"), ("$..*",)):
        _, changed = redacted(*order, body=b'{"a": {"b": "secret", "c": ["secret"]}}')
        assert b"secret" not in changed


def test_what_was_taken_out_is_counted_and_once_where_two_paths_lead_to_it() -> None:
    body = b'{"a": "x", "b": [{"a": "y"}, {"a": 1}], "c": 1}'
    taken = Redaction.read(("$.a", "$..a", "header:x-a")).applied(
        SOURCES["github"], (("x-a", "1"), *SIGNED, ("x-a", "2")), body
    )
    assert (taken.values, taken.lines) == (3, 2)
    nothing = Redaction.read(("$.z", "header:x-z")).applied(SOURCES["github"], SIGNED, body)
    assert (nothing.values, nothing.lines, nothing.body) == (0, 0, body)


def test_what_is_kept_keeps_its_meaning() -> None:
    _, changed = redacted("$.a", body='{"a":"x","n":12345678901234567890,"e":"é","s":"\\ud83d","f":NaN}'.encode())
    assert changed == b'{"a":"[redacted]","n":12345678901234567890,"e":"\xc3\xa9","s":"\xed\xa0\xbd","f":NaN}'
    assert GitHub().read((), changed)["s"] == "\ud83d"


def test_a_form_stays_a_form() -> None:
    form = b"payload=" + quote_plus('{"a": "secret", "b": "+&="}').encode()
    headers = (("content-type", "application/x-www-form-urlencoded; charset=UTF-8"), *SIGNED[1:])

    kept, changed = redacted("$.a", headers=headers, body=form)

    assert changed.startswith(b"payload=")
    assert json.loads(parse_qs(changed.decode())["payload"][0]) == {"a": "[redacted]", "b": "+&="}
    assert GitHub().read(kept, changed) == {"a": "[redacted]", "b": "+&="}
    assert "x-hub-signature-256" not in dict(kept)


@pytest.mark.parametrize("more", [b"&x=secret", b"&payload=%7B%22a%22%3A%22secret%22%7D"])
def test_a_form_in_whose_other_fields_nothing_is_looked_for_is_not_written(more: bytes) -> None:
    form = b"payload=" + quote_plus('{"a": "secret"}').encode() + more
    headers = (("content-type", "application/x-www-form-urlencoded"), *SIGNED[1:])
    with pytest.raises(Unreadable):
        redacted("$.a", headers=headers, body=form)


def test_a_body_whose_signature_nobody_here_knows_is_not_changed() -> None:
    with pytest.raises(Unreadable, match="not in this consumer"):
        Redaction.read(("$.a",)).applied(None, SIGNED, b'{"a": "secret"}')


def test_a_header_goes_with_all_its_lines_and_the_signature_stays_if_it_still_fits() -> None:
    headers = (("x-a", "1"), *SIGNED, ("x-a", "2"))
    kept, body = redacted("header:X-A", headers=headers, body=b"{}")
    assert (kept, body) == (SIGNED, b"{}")
    GitHub().verify(kept, body, [SECRET], 0)


def test_a_signature_that_covers_a_header_goes_with_it() -> None:
    shop = SOURCES["shop"]
    headers = (("webhook-id", "msg_1"), ("webhook-timestamp", "1"), ("webhook-signature", "v1,abc"))
    kept, _ = redacted("header:webhook-id", source=shop, headers=headers, body=b"{}")
    assert kept == (("webhook-timestamp", "1"),)


@pytest.mark.parametrize("body", [b"", b"\xff", b"{", b"payload"])
def test_nothing_is_taken_out_of_what_cannot_be_read(body: bytes) -> None:
    with pytest.raises(Unreadable):
        redacted("$.a", body=body)
    assert redacted("header:x", body=body) == (SIGNED, body)


@pytest.mark.parametrize("what", ["email", "header:", "header: ", "$.[", "Header"])
def test_what_cannot_be_taken_out_is_refused(what: str) -> None:
    with pytest.raises(ConfigurationError):
        Redaction.read([what])


def test_the_shortcut_id_in_the_body_may_stay() -> None:
    request = from_shortcut(stories(7, id="an-id"))
    headers = tuple((name.lower(), value) for name, value in request.headers)
    kept, changed = redacted("$.actions[*].name", source=SOURCES["shortcut"], headers=headers, body=request.body)
    assert SOURCES["shortcut"].dedup_key(kept, changed) == "an-id"
    with pytest.raises(Refused, match="missing_signature"):
        SOURCES["shortcut"].verify(kept, changed, [SECRET], 0)


@pytest.mark.parametrize(
    ("body", "rest"),
    [
        (b'{"email": "a@example.com", "email": null}', {"email": None}),
        (b'{"a": {"email": "a@example.com"}, "a": {}}', {"a": {}}),
        (b'{"a": {"email": "a@example.com"}, "a": 1}', {"a": 1}),
        (b'{"list": [{"email": "a@example.com", "email": "b@example.com"}]}', {"list": [{"email": "[redacted]"}]}),
    ],
)
@pytest.mark.parametrize("form", [False, True])
def test_a_value_that_a_repeated_key_hides_does_not_stay(body: bytes, rest: object, form: bool) -> None:
    sent = b"payload=" + quote_plus(body).encode() if form else body
    headers = (("content-type", FORM if form else "application/json"), *SIGNED)
    taken = Redaction.read(("$..email",)).applied(SOURCES["github"], headers, sent)
    assert b"example.com" not in taken.body
    assert b"example.com" not in unquote_to_bytes(taken.body)
    read = unquote_to_bytes(taken.body.partition(b"=")[2].replace(b"+", b" ")) if form else taken.body
    assert json.loads(read) == rest


def test_a_form_with_another_field_is_not_exported_as_if_it_had_been_looked_through() -> None:
    body = b"payload=%7B%7D&payload=%7B%22email%22%3A%22a%40example.com%22%7D"
    with pytest.raises(Unreadable, match="other fields beside its payload"):
        Redaction.read(("$..email",)).applied(SOURCES["github"], (("content-type", FORM), *SIGNED), body)
