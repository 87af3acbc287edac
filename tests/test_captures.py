"""Deliveries out of files: every form is read back byte for byte, and what is broken says where and why."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from webhooks import GitHub, Shortcut, StandardWebhooks
from webhooks.captures import Capture, captures, files, written
from webhooks.captures.lines import read
from webhooks.delivery import Headers, RawEvent
from webhooks.errors import ConfigurationError, UnknownName
from webhooks.sources import Source

SOURCES: dict[str, Source] = {source.name: source for source in (GitHub(), Shortcut(), StandardWebhooks("shop"))}
HEADERS = (("content-type", "application/json"), ("x-twice", "1"), ("x-twice", "caf\xe9"))
AT = datetime(2026, 6, 12, 10, 0, 0, 123456, tzinfo=UTC)
BODIES = {
    "CRLF": b'{"a": 1}\r\n\r\n',
    "a byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "a repeated key": b'{"a": 2, "a": 3}',
    "twenty digits": b'{"id": 12345678901234567890, "f": 1.0}',
    "an escape": b'{"e": "\\u00e9"}',
    "nothing": b"",
    "no JSON": b"payload=%7B%7D&x=1",
    "NUL": b'{"t": "a\\u0000b"}\x00',
}


def line(body: bytes, **changes: Any) -> bytes:
    facts = {"id": 5, "source": "github", "dedup_key": "1:a", "event": "push", "origin": "received", "received_at": AT}
    text = written(facts, HEADERS, body, redacted=False)
    return json.dumps({**json.loads(text), **changes}).encode() if changes else text


async def every(path: Path | None, **how: Any) -> list[Capture]:
    return [capture async for capture in captures(path, SOURCES, **how)]


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_line_is_read_back_as_it_was_written(body: bytes) -> None:
    text = line(body)

    assert b"\n" not in text
    assert text.isascii()
    back = read(text, place=3, name="line 3")
    assert back == Capture(
        place=3, name="line 3", source="github", event="push", headers=HEADERS, body=body, received_at=AT
    )
    assert json.loads(text)["sha256"] == hashlib.sha256(body).hexdigest()
    assert "redacted" not in json.loads(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b'{"version": 1, "body_ba', "it is not JSON"),
        (b"[1]", "no line of an export"),
        (b"{}", "no line of an export"),
        (line(b"x", version=2), "version 2"),
        (line(b"x", body_base64="%%%"), "not base64"),
        (line(b"x", body_base64=5), "not base64"),
        (line(b"x", body_base64=base64.b64encode(b"y").decode()), "the body was changed"),
        (line(b"x", headers=[["a"]]), "lacks headers"),
        (line(b"x", headers={"a": "b"}), "lacks headers"),
        (line(b"x", source=None), "it lacks headers, source"),
        (line(b"x", received_at="soon"), "received_at"),
        (line(b"x", received_at="2026-01-01T00:00:00"), "received_at"),
        (b"[" * 5000, "not JSON"),
    ],
)
def test_a_line_that_is_broken_says_how(text: bytes, fault: str) -> None:
    back = read(text, place=1, name="line 1")
    assert fault in (back.fault or "")
    assert back.body == b""


async def test_an_export_is_read_line_by_line_and_a_broken_line_does_not_end_it(tmp_path: Path) -> None:
    file = tmp_path / "deliveries.ndjson"
    file.write_bytes(b"\n".join([line(b"one"), b"", line(b"two")[:-20], line(b"three", event="star.created")]))

    found = await every(file)

    assert [(capture.place, capture.body, capture.fault is None) for capture in found] == [
        (1, b"one", True),
        (2, b"", False),
        (3, b"three", True),
    ]
    assert found[1].name == f"line 3 of {file}"
    assert [capture.body for capture in await every(file, event="STAR")] == [b"", b"three"]
    assert [capture.body for capture in await every(file, source="shortcut")] == [b""]


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
async def test_lines_are_found_wherever_a_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(files, "CHUNK", size)
    bodies = [*BODIES.values(), b"z" * 3000]
    file = tmp_path / "deliveries.ndjson"
    file.write_bytes(b"\n".join(line(body) for body in bodies) + b"\n")

    assert [capture.body for capture in await every(file)] == bodies


@pytest.mark.parametrize("end", [b"\r\n", b"\n"], ids=["CRLF", "LF"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_captured_request_has_its_lines_and_its_exact_body(tmp_path: Path, end: bytes, body: bytes) -> None:
    head = [b"POST /webhooks/github HTTP/1.1", b"X-GitHub-Event: push", b"x-twice: 1", b"X-Twice:  caf\xe9 "]
    file = tmp_path / "request.http"
    file.write_bytes(end.join([*head, b"Content-Length: %d" % len(body), b"", b""]) + body + b"\n")

    [capture] = await every(file)

    assert (capture.source, capture.body, capture.fault) == ("github", body, None)
    assert capture.headers[:3] == (("x-github-event", "push"), ("x-twice", "1"), ("x-twice", "caf\xe9"))
    assert capture.received_at is None


async def test_the_request_line_may_be_missing_and_a_given_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "request.txt"
    file.write_bytes(b"x-github-event: push\n\nbody")
    [bare] = await every(file)
    [given] = await every(file, source="github")
    file.write_bytes(b"POST https://example.com/behind/webhooks/shop?x=1\nx-a: 1\n\n{}")
    [whole] = await every(file)

    assert (bare.source, given.source, whole.source) == ("", "github", "shop")
    assert [capture.body for capture in (bare, given, whole)] == [b"body", b"body", b"{}"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"x-a: 1\nx-b: 2", "no empty line"),
        (b"x-a: 1\n folded\n\nbody", "line 2 is no header"),
        (b"just words\n\nbody", "line 1 is no header"),
        (b"x-a: 1\ncontent-length: 10\n\n12345", "cut short: 5 of 10 bytes"),
        (b"payload=%7B%7D", "no empty line"),
        (b"content-length: " + b"9" * 5000 + b"\n\n{}", "5000 digits"),
    ],
)
async def test_a_request_that_is_broken_says_how(tmp_path: Path, content: bytes, fault: str) -> None:
    file = tmp_path / "request"
    file.write_bytes(content)
    [capture] = await every(file)
    assert fault in (capture.fault or "")


async def test_a_byte_order_mark_before_a_file_hides_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deliveries"
    for size in (files.CHUNK, 1):
        monkeypatch.setattr(files, "CHUNK", size)
        for before in (b"", b"\r\n"):
            file.write_bytes(files.MARK + before + line(b"one") + b"\r\n" + line(b"two") + b"\r\n")
            assert [(found.body, found.fault) for found in await every(file)] == [(b"one", None), (b"two", None)]
    file.write_bytes(files.MARK + b"POST /webhooks/github\r\nx-a: 1\r\n\r\n{}")
    [found] = await every(file)
    assert (found.source, found.body, found.fault) == ("github", b"{}", None)
    file.write_bytes(files.MARK + b"\r\n")
    with pytest.raises(ConfigurationError, match="there is nothing in"):
        await every(file)


async def test_a_body_longer_than_said_is_not_cut(tmp_path: Path) -> None:
    file = tmp_path / "request"
    file.write_bytes(b"content-length: 2\n\n{}and more")
    [capture] = await every(file)
    assert capture.body == b"{}and more"


async def test_a_directory_holds_payloads_named_by_event(tmp_path: Path) -> None:
    (tmp_path / "push__branch.json").write_bytes(b'{"ref": 1}\r\n')
    (tmp_path / "pull_request__closed.json").write_bytes(b'\xef\xbb\xbf{"action": "closed"}')
    (tmp_path / "star.json").write_bytes(b'{"action": "created"}')
    (tmp_path / "NOTICE.md").write_text("not a delivery")
    (tmp_path / "of_another.http").write_bytes(b"POST /webhooks/shop\nx-a: 1\n\nbody")

    found = await every(tmp_path, source="github")

    assert [(capture.place, dict(capture.headers).get("x-github-event")) for capture in found] == [
        (1, None),
        (2, "pull_request"),
        (3, "push"),
        (4, "star"),
    ]
    assert found[2].body == b'{"ref": 1}\r\n'
    github = SOURCES["github"]
    assert [event.name for event in github.events(found[1].headers, github.read(found[1].headers, found[1].body))] == [
        "pull_request.closed"
    ]


async def test_a_payload_has_the_same_id_whenever_it_is_read_and_another_event_another(tmp_path: Path) -> None:
    file = tmp_path / "push.json"
    file.write_bytes(b"{}")
    [first] = await every(file, source="github")
    [second] = await every(file, source="github")
    [other] = await every(file, source="github", event="star.created")

    assert dict(first.headers)["x-github-delivery"] == dict(second.headers)["x-github-delivery"]
    assert dict(first.headers)["x-github-delivery"] != dict(other.headers)["x-github-delivery"]
    assert dict(other.headers)["x-github-event"] == "star"


async def test_a_payload_of_nobody_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "push.json"
    file.write_bytes(b"{}")
    with pytest.raises(ConfigurationError, match="say whose it is with --source; there are: github, shortcut, shop"):
        await every(file)
    for content in (b"{}", b"x-a: 1\n\nbody"):
        file.write_bytes(content)
        with pytest.raises(UnknownName, match=r"no source 'githob'; did you mean github\? There are: github, shop"):
            await every(file, source="githob")


@pytest.mark.parametrize("size", [60, 200, 330])
async def test_an_export_that_is_cut_in_its_first_line_is_no_payload(tmp_path: Path, size: int) -> None:
    file = tmp_path / "push.json"
    file.write_bytes(line(b"x" * 300)[:size])
    for source in ("github", None):
        [capture] = await every(file, source=source)
        assert (capture.name, capture.fault) == (
            f"line 1 of {file}",
            "it is cut short: the file ends in the middle of it",
        )


async def test_an_export_that_is_cut_later_says_which_line_and_one_that_was_damaged_too(tmp_path: Path) -> None:
    file = tmp_path / "deliveries.ndjson"
    file.write_bytes(line(b"one") + b"\n\n" + line(b"two")[:-9])
    assert [(capture.name, capture.fault) for capture in await every(file)][1:] == [
        (f"line 3 of {file}", "it is cut short: the file ends in the middle of it")
    ]
    file.write_bytes(line(b"one")[:-9] + b"\n" + line(b"two"))
    first, second = await every(file)
    assert (first.name, first.fault, second.fault) == (f"line 1 of {file}", "it is not JSON", None)


async def test_a_payload_that_begins_like_an_export_is_one_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "push.json"
    file.write_bytes(b'{"version": 1, "id": 2, "source": "shop"}')
    [capture] = await every(file, source="github")
    assert (capture.fault, capture.source) == (None, "github")


@pytest.mark.parametrize("content", [b'{"a": 1', b"[1,", b'{"a": "\xff"}', b'{"a": 1}\n{"b": 2}\n', b"[" * 100_000])
async def test_a_payload_that_its_source_could_not_read_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "push.json"
    file.write_bytes(content)
    for source in ("github", "SHORTCUT", None):
        [capture] = await every(file, source=source)
        assert (capture.fault or "").startswith("it cannot be read as a payload: ")


class Lines(Source):
    """A source whose bodies are not JSON, though they begin like it."""

    recipe = GitHub.recipe

    def read(self, headers: Headers, body: bytes) -> Any:
        return body.splitlines()

    def events(self, headers: Headers, body: Any) -> list[RawEvent]:
        return []


async def test_what_a_payload_has_to_be_is_for_its_source_to_say(tmp_path: Path) -> None:
    file = tmp_path / "lines.json"
    file.write_bytes(b'{"a": 1}\n{"b": 2}\n')
    [capture] = [found async for found in captures(file, {"lines": Lines("lines")}, source="lines")]
    assert (capture.fault, capture.body) == (None, b'{"a": 1}\n{"b": 2}\n')


@pytest.mark.parametrize("content", [b"hello", b"hello\nyou\n\n", b"payload=%7B%7D", b"\x1f\x8b\x08"])
async def test_what_is_nothing_known_says_what_could_be_known(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "hello.json"
    file.write_bytes(content)
    [capture] = await every(file, source="github")
    assert (capture.fault or "").startswith(
        "it is neither JSON nor a line of webhooks export, and as a captured request "
    )


async def test_a_filter_that_nothing_in_an_export_passes_is_told_what_there_is(tmp_path: Path) -> None:
    file = tmp_path / "deliveries.ndjson"
    file.write_bytes(line(b"one") + b"\n" + line(b"two", event="star.created, star.deleted") + b"\n")

    with pytest.raises(
        UnknownName, match=r"holds nothing of a source 'githob'; did you mean github\? There are: github"
    ):
        await every(file, source="GitHob")
    with pytest.raises(UnknownName, match=r"has 'star.creatd' in its .* did you mean star.created\? There are: star"):
        await every(file, event="star.creatd")
    with pytest.raises(UnknownName, match="holds nothing of a source 'shop'"):
        await every(tmp_path, source="shop")
    assert len(await every(file, source="GITHUB", event="star")) == 1
    (tmp_path / "other.ndjson").write_bytes(line(b"three", source="shop") + b"\n")
    assert [capture.body for capture in await every(tmp_path, source="shop")] == [b"three"]
    assert await every(tmp_path, source="shop", event="star") == []


@pytest.mark.parametrize("content", [b"", b"\n \n"])
async def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "empty"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="there is nothing in"):
        await every(file)


async def test_a_directory_without_deliveries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"holds no file that ends in \.json"):
        await every(tmp_path)


async def test_standard_input_is_read_while_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first delivery is there before the second one is written, and the pipe is left as it was."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "r") as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        os.write(writing, line(b"one") + b"\n")
        found = captures(None, SOURCES)

        first = await asyncio.wait_for(anext(found), 10)
        threading.Thread(target=lambda: (os.write(writing, line(b"two")), os.close(writing))).start()
        rest = [capture async for capture in found]

        assert first.body == b"one"
        assert [capture.body for capture in rest] == [b"two"]
        assert os.get_blocking(reading)
