"""Bytes stay the bytes they were: from a socket into the inbox, into a file, back into an inbox, and on to another.

With real receivers on sockets, the command as a person calls it, and one that is interrupted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import psycopg
import pytest
from consumers import SECRET, Request, Stack, from_github, from_shortcut, served, stack
from gates import until
from processes import environment, started, webhooks
from psycopg.sql import SQL, Identifier
from replays import Applied, pushed, settled

MIB = 1 << 20
LIMIT = 26 * MIB
FORM = "application/x-www-form-urlencoded"
BODIES = {
    "CRLF": b'{\r\n  "a": 1\r\n}\r\n',
    "a byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "bad UTF-8": b'{"a": "\xff\xfe\x00"}',
    "twice a key, twenty digits, an escape": (
        b'{\n   "a": 2,\n  "id": 12345678901234567890, "f": 1.0, "e": "\\u00e9", "a": 3\n}'
    ),
    "NUL, half of a pair, no number": b'{"t": "a\\u0000b", "s": "\\ud83d", "n": NaN}',
    "not JSON": b"\x00\x01\x02 plain",
    "a form": b"x=1&payload=" + quote_plus('{"action": "opened", "e": "\u00e9 +&="}').encode(),
    "25 MiB": b'{"a": "' + b"0123456789abcdef" * (25 * MIB // 16) + b'"}',
}
VARIABLES = {"WEBHOOKS_SECRET_SHORTCUT": SECRET, "WEBHOOKS_SECRET_GITHUB": SECRET}


def requests() -> list[Request]:
    """Each body once; case 1 among them from Shortcut as well, and case 20, a form."""
    content_types = {"a form": f"{FORM}; charset=UTF-8"}
    sent = [
        from_github(body, guid=f"guid-{place}", content_type=content_types.get(name, "application/json"))
        for place, (name, body) in enumerate(BODIES.items())
    ]
    return [*sent, from_shortcut(BODIES["twice a key, twenty digits, an escape"])]


def digests(several: list[Request]) -> list[str]:
    return [hashlib.sha256(request.body).hexdigest() for request in several]


async def stored(running: Stack) -> list[dict[str, Any]]:
    return await running.sql(
        "SELECT encode(sha256(body), 'hex') AS sha256, source, dedup_key, headers, origin FROM deliveries ORDER BY id"
    )


@pytest.fixture
def other_url(database_url: str, template: str, server_url: str) -> Iterator[str]:
    """A second database with the current schema and no rows."""
    from urllib.parse import urlsplit

    name = f"{template}_other_{urlsplit(database_url).path[-8:]}"
    with psycopg.connect(server_url, autocommit=True) as admin:
        admin.execute(SQL("CREATE DATABASE {} TEMPLATE {}").format(Identifier(name), Identifier(template)))
    try:
        yield urlsplit(server_url)._replace(path=f"/{name}").geturl()
    finally:
        with psycopg.connect(server_url, autocommit=True) as admin:
            admin.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))


@asynccontextmanager
async def receiving(url: str, *, work: bool = False) -> AsyncGenerator[tuple[Stack, str]]:
    """A consumer with its receiver on a socket."""
    async with (
        stack(url, Applied().consumer(), work=work, most_bytes=LIMIT) as running,
        served(running.receiver) as port,
    ):
        yield running, f"http://127.0.0.1:{port}"


async def ran(cwd: Path, url: str, *arguments: str) -> Any:
    done = await asyncio.to_thread(webhooks, cwd, *arguments, DATABASE_URL=url, **VARIABLES)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.invariant(12)
async def test_a_body_is_the_same_from_receipt_through_export_and_import_and_on_to_another_receiver(
    tmp_path: Path, database_url: str, other_url: str
) -> None:
    several = requests()
    expected = digests(several)
    file = tmp_path / "deliveries.ndjson"
    async with receiving(database_url) as (first, base), receiving(other_url) as (second, other_base):
        import httpx

        async with httpx.AsyncClient(timeout=60) as client:
            for request in several:
                answer = await client.post(base + request.path, headers=request.headers, content=request.body)
                assert answer.status_code == 202
        received = await stored(first)
        assert [row["sha256"] for row in received] == expected

        await ran(tmp_path, database_url, "export", "--output", str(file))
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["sha256"] for line in lines] == expected
        assert [line["headers"] for line in lines] == [row["headers"] for row in received]

        report = json.loads((await ran(tmp_path, other_url, "replay", "--file", str(file), "--yes", "--json")).stdout)
        assert report["report"]["counts"] == {"accepted": len(several)}
        imported = await stored(second)
        assert sorted(row["sha256"] for row in imported) == sorted(expected)
        assert {row["origin"] for row in imported} == {"replay"}

        for out_of in (["--file", str(file)], ["--all"]):
            await second.sql("TRUNCATE deliveries")
            done = await ran(tmp_path, database_url, "replay", *out_of, "--to", other_base, "--yes", "--json")
            assert json.loads(done.stdout)["report"]["counts"] == {"accepted": len(several)}
            passed_on = await stored(second)
            for row in passed_on:
                del row["origin"]
            for row in received:
                row.pop("origin", None)
            in_order = sorted(passed_on, key=lambda row: (row["source"], row["dedup_key"]))
            assert in_order == sorted(received, key=lambda row: (row["source"], row["dedup_key"]))

            again = await ran(tmp_path, database_url, "replay", *out_of, "--to", other_base, "--yes", "--json")
            assert json.loads(again.stdout)["report"]["counts"] == {"duplicate": len(several)}


async def test_a_replay_through_the_command_runs_in_the_worker_of_another_process(
    tmp_path: Path, database_url: str
) -> None:
    applied = Applied()
    async with stack(database_url, applied.consumer()) as running:
        for _ in range(3):
            assert (await running.send(from_github(pushed()))).status_code == 202
        await settled(running.pool)
        first, *_ = ids = [row["id"] for row in await running.deliveries()]

        await ran(tmp_path, database_url, "replay", str(first))
        await until(lambda: len(applied.deliveries) == 4)
        assert applied.deliveries[-1] == first

        dry = await ran(tmp_path, database_url, "replay", "--event", "push")
        assert "3 deliveries, and nothing was done; do it with --yes" in dry.stdout
        assert "runs again" in dry.stdout
        await settled(running.pool)
        assert len(applied.deliveries) == 4

        await ran(tmp_path, database_url, "replay", "--event", "push", "--as", "new", "--yes")
        await until(lambda: len(applied.deliveries) == 7)
        await settled(running.pool)
        assert not set(applied.deliveries[4:]) & set(ids)


async def test_an_interrupted_replay_says_how_to_go_on_and_the_rest_is_done_then(
    tmp_path: Path, database_url: str, other_url: str
) -> None:
    async with receiving(database_url) as (first, _), receiving(other_url) as (second, base):
        for number in range(20):
            assert (await first.send(from_github(pushed(n=number), guid=f"guid-{number}"))).status_code == 202
        arguments = ("replay", "--all", "--to", base, "--yes", "--concurrency", "1")
        variables = {"DATABASE_URL": database_url, **VARIABLES}
        with started(tmp_path, *arguments, "--rate", "10", name="replay", **variables) as process:
            await until(lambda: arrived(second, 3), 60)
            process.signal(signal.SIGINT)
            assert await asyncio.to_thread(process.ends, 60) == 130
        said = process.log.splitlines()[-1]
        assert said.startswith("interrupted; go on with the same command and --after ")
        go_on = said.partition("command and ")[2].split()
        count = len(await second.deliveries())
        assert count < 20

        await first.send(from_github(pushed(), guid="later"))
        done = await ran(tmp_path, database_url, *arguments, *go_on, "--json")

        assert json.loads(done.stdout)["report"]["counts"] == {"accepted": 20 - count}
        keys = [row["dedup_key"] for row in await second.deliveries()]
        assert keys == [f"101:guid-{number}" for number in range(20)]


async def arrived(running: Stack, count: int) -> bool:
    return len(await running.deliveries()) >= count


async def test_an_interrupted_import_goes_on_at_its_place(tmp_path: Path, database_url: str, other_url: str) -> None:
    file = tmp_path / "deliveries.ndjson"
    async with receiving(database_url) as (first, _), stack(other_url, Applied().consumer(), work=False) as second:
        for number in range(10):
            await first.send(from_github(pushed(n=number), guid=f"guid-{number}"))
        await ran(tmp_path, database_url, "export", "--output", str(file))
        arguments = ("replay", "--file", str(file), "--yes", "--concurrency", "1")
        variables = {"DATABASE_URL": other_url, **VARIABLES}
        with started(tmp_path, *arguments, "--limit", "9", "--rate", "5", name="replay", **variables) as process:
            await until(lambda: arrived(second, 3), 60)
            process.signal(signal.SIGINT)
            assert await asyncio.to_thread(process.ends, 60) == 130
        go_on = process.log.rpartition("command and ")[2].split()
        place = int(go_on[1])
        assert go_on == ["--after", str(place), "--limit", str(9 - place)]
        assert len(await second.deliveries()) == place < 9

        done = await ran(tmp_path, other_url, *arguments, "--limit", "9", *go_on, "--json")
        assert json.loads(done.stdout)["report"]["counts"] == {"accepted": 9 - place}


async def test_a_receiver_that_is_away_ends_the_replay_and_the_place_to_go_on_from_is_before_it(
    tmp_path: Path, database_url: str, other_url: str
) -> None:
    async with stack(other_url, Applied().consumer(), work=False) as second:
        async with receiving(database_url) as (first, _):
            for number in range(6):
                await first.send(from_github(pushed(n=number), guid=f"guid-{number}"))
            async with served(second.receiver) as port:
                base = f"http://127.0.0.1:{port}"
            arguments = ("replay", "--all", "--to", base, "--yes")
            done = await asyncio.to_thread(webhooks, tmp_path, *arguments, DATABASE_URL=database_url, **VARIABLES)
        assert done.returncode == 1
        assert "the receiver does not take deliveries: " in done.stderr
        assert "; nothing was done: go on with the same command and --up-to " in done.stderr
        assert await second.deliveries() == []


async def test_lines_go_through_a_pipe_from_one_to_the_other(tmp_path: Path, database_url: str, other_url: str) -> None:
    """`webhooks export | webhooks replay --file - --yes`"""
    import subprocess
    import sys

    async with receiving(database_url) as (first, _), stack(other_url, Applied().consumer(), work=False) as second:
        for number in range(5):
            await first.send(from_github(pushed(n=number), guid=f"guid-{number}"))

        def piped() -> subprocess.CompletedProcess[bytes]:
            run = [sys.executable, "-m", "webhooks"]
            with subprocess.Popen(
                [*run, "export"],
                cwd=tmp_path,
                env=environment(DATABASE_URL=database_url),
                stdout=subprocess.PIPE,
            ) as export:
                return subprocess.run(
                    [*run, "replay", "--file", "-", "--yes", "--json"],
                    cwd=tmp_path,
                    env=environment(DATABASE_URL=other_url, **VARIABLES),
                    stdin=export.stdout,
                    capture_output=True,
                    timeout=60,
                    check=False,
                )

        done = await asyncio.to_thread(piped)
        assert json.loads(done.stdout)["report"]["counts"] == {"accepted": 5}
        assert len(await second.deliveries()) == 5
