"""The tunnel: what it passes on, where it goes on, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import os
import signal
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import respx
from click.testing import CliRunner
from consumers import SECRET, Stack, arrival, arrived, from_github, from_shortcut, served, stack, stories
from feeds import Deployed, Line, deployed, lined, senders
from gates import elsewhere, until
from processes import empty_database, started, webhooks
from starlette.applications import Starlette
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from test_sending import speaking

from webhooks import GitHub, Shortcut, StandardWebhooks
from webhooks.cli.saying import failing_in_lines, say
from webhooks.cli.stopping import ONE_SIGNAL_S, until_stopped
from webhooks.cli.tunnel import tunnel
from webhooks.errors import ConfigurationError, WebhooksError
from webhooks.migrate import migrate
from webhooks.sending import Answer, opened
from webhooks.signatures import sign
from webhooks.tunnel.bookmark import Bookmark, bookmark
from webhooks.tunnel.follower import Follower, Refused
from webhooks.tunnel.items import Arrived, Pruned, Standing
from webhooks.tunnel.relay import Incoming, Relay, Signer, Sleep, wait_s
from webhooks.tunnel.report import Report, lasted, named
from webhooks.tunnel.session import OnError, Stopped, carry
from webhooks.tunnel.stream import LASTED_S, Tries

HERE = "http://127.0.0.1:8000"
OTHER_SECRET = "another invented secret"
MOST_BODY_BYTES = 3 << 20


async def no_sleep(seconds: float) -> None:
    await asyncio.sleep(0)


def incoming(body: bytes = b"{}", *, source: str = "github", **more: Any) -> Incoming:
    headers = (("content-type", "application/json"), ("x-github-event", "push"), ("x-hub-signature-256", "sha256=00"))
    return Incoming(source=source, headers=headers, body=body, id=7, **more)


# ---- the place on disk


async def test_a_place_is_found_again_by_the_same_tunnel_and_by_no_other(tmp_path: Path) -> None:
    async with bookmark(tmp_path, "https://a", ["github", "shortcut"], HERE) as kept:
        assert kept.cursor is None
        kept.keep("one")
        kept.keep("two")
    async with bookmark(tmp_path, "https://a", ["shortcut", "github"], HERE) as again:
        assert again.cursor == "two"
        assert datetime.fromisoformat(again.kept_at or "") <= datetime.now(UTC)
    for other in (("https://b", ["github", "shortcut"], HERE), ("https://a", [], HERE), ("https://a", ["github"], "x")):
        async with bookmark(tmp_path, *other) as another:
            assert another.cursor is None


async def test_a_place_is_written_while_the_tunnel_runs(tmp_path: Path) -> None:
    async with bookmark(tmp_path, "https://a", [], HERE) as kept:
        kept.keep("one")
        await until(lambda: kept.path.exists() and json.loads(kept.path.read_text())["cursor"] == "one")
        assert stat.S_IMODE(kept.path.stat().st_mode) == 0o600


async def test_two_tunnels_do_not_share_a_place(tmp_path: Path) -> None:
    async with bookmark(tmp_path, "https://a", [], HERE):
        with pytest.raises(ConfigurationError, match="another tunnel"):
            async with bookmark(tmp_path, "https://a", [], HERE):
                pass


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"cursor": 3}', '{"cursor": ""}', "[" * 100_000]
    + [json.dumps({"cursor": cursor}) for cursor in ("c" * 1025, "c" * 200_000, "a\nb", "é")],
    ids=lambda content: content[:20],
)
async def test_a_place_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path, content: str) -> None:
    async with bookmark(tmp_path, "https://a", [], HERE) as kept:
        path = kept.path
    path.write_text(content)

    with pytest.raises(ConfigurationError, match="--since"):
        async with bookmark(tmp_path, "https://a", [], HERE):
            pass


async def test_a_write_that_is_cut_short_leaves_the_place_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bookmark(tmp_path, "https://a", [], HERE) as kept:
        kept.keep("one")
    kept = Bookmark(kept.path, {})
    kept.keep("two")

    def no_room(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", no_room)
        with pytest.raises(OSError, match="No space"):
            kept.write()

    assert Bookmark(kept.path, {}).cursor == "one"


async def test_a_place_that_cannot_be_written_ends_the_tunnel(tmp_path: Path) -> None:
    with pytest.raises(WebhooksError, match="cannot be kept"):
        async with bookmark(tmp_path, "https://a", [], HERE) as kept:
            kept.path.with_suffix(".new").mkdir()
            kept.keep("one")
            await until(lambda: kept._failure is not None)
            kept.path.with_suffix(".new").rmdir()
            kept.keep("two")


@pytest.mark.parametrize("ending", [None, Stopped("refused here")])
async def test_a_full_disk_at_the_end_is_told_with_the_file_and_hides_no_other_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Stopped | None
) -> None:
    def no_room(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(WebhooksError) as told:
        async with bookmark(tmp_path, "https://a", [], HERE) as kept:
            kept.keep("one")
            if ending is not None:
                raise ending
    assert isinstance(told.value, ConfigurationError if ending is None else Stopped)
    lines = [str(told.value), *getattr(told.value, "__notes__", [])]
    assert f"{kept.path}: No space left on device; make room" in lines[-1]
    assert lines[:-1] == ([] if ending is None else ["refused here"])


async def test_that_the_place_cannot_be_kept_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be kept") as told:
        async with bookmark(tmp_path, "https://a", [], HERE) as kept:
            kept.path.with_suffix(".new").mkdir()
            kept.keep("one")
            await until(lambda: kept._failure is not None)
            kept.keep("two")
    assert getattr(told.value, "__notes__", []) == []


async def test_a_lock_that_cannot_be_made_is_told_with_the_file(tmp_path: Path) -> None:
    async with bookmark(tmp_path, "https://a", [], HERE) as kept:
        lock = kept.path.with_suffix(".lock")
    lock.unlink()
    lock.mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot be kept in .*lock: Is a directory"):
        async with bookmark(tmp_path, "https://a", [], HERE):
            pass


async def test_a_tunnel_told_to_stop_still_says_what_it_could_not_do_at_the_end() -> None:
    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            raise ConfigurationError("the place cannot be kept")

    with pytest.raises(ConfigurationError, match="cannot be kept"):
        await until_stopped(work())


async def test_a_signal_that_is_sent_twice_cuts_nothing_short_and_a_second_one_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`timeout`, for one, sends each signal to us, and then to our group."""
    undone: list[str] = []

    async def work(*, undoing: asyncio.Event, forever: bool) -> None:
        try:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            undoing.set()
            await asyncio.sleep(60 if forever else 1.5 * ONE_SIGNAL_S)
            undone.append("undone")

    await until_stopped(work(undoing=asyncio.Event(), forever=False))
    assert undone == ["undone"]

    async def again(undoing: asyncio.Event) -> None:
        await undoing.wait()
        await asyncio.sleep(1.5 * ONE_SIGNAL_S)  # no signal is told from a copy of the first any sooner
        os.kill(os.getpid(), signal.SIGINT)

    undoing = asyncio.Event()
    impatient = asyncio.create_task(again(undoing))
    with pytest.raises(click.Abort):
        await until_stopped(work(undoing=undoing, forever=True))
    await impatient
    assert undone == ["undone"]
    assert (
        capsys.readouterr().err
        == "cut short: a hook that is still there is removed by the next webhooks tunnel --via\n"
    )


# ---- posting


@dataclass
class Said:
    """What a person was told."""

    lines: list[str] = field(default_factory=list[str])

    def __call__(self, text: str) -> None:
        self.lines.append(text)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@asynccontextmanager
async def relaying(retries: int = 3, signer: Signer | None = None) -> AsyncIterator[tuple[Relay, Said]]:
    said = Said()
    async with opened(HERE) as client:
        yield Relay(client, HERE, retries=retries, tell=said, signer=signer, sleep=no_sleep), said


@respx.mock(base_url=HERE)
async def test_a_receiver_that_is_away_is_waited_for_however_often(respx_mock: respx.MockRouter) -> None:
    away = [httpx.ConnectError("refused"), httpx.Response(503, json={"error": "unavailable"}), httpx.ReadError("cut")]
    route = respx_mock.post("/webhooks/github").mock(side_effect=[*away * 10, httpx.Response(202, json={})])
    async with relaying(retries=0) as (relay, said):
        answer = await relay.post(incoming())

    assert answer.status == 202
    assert route.call_count == 31
    assert len(said.lines) == 2, "it is said once that it is away, and once that it is back"
    assert said.lines[0] == f"{HERE} is away, waiting for it: refused"
    assert "again" in said.lines[1]


@pytest.mark.parametrize(("status", "retries"), [(500, 2), (502, 2), (401, 3), (404, 1), (413, 0), (307, 2), (302, 0)])
async def test_a_refused_delivery_is_posted_again_as_often_as_was_said(status: int, retries: int) -> None:
    async with relaying(retries) as (relay, _), respx.mock(base_url=HERE) as router:
        route = router.post("/webhooks/github").mock(
            return_value=httpx.Response(status, json={"error": "no"}, headers={"location": "http://127.0.0.1:9/"})
        )
        answer = await relay.post(incoming())

    assert answer.status == status
    assert route.call_count == retries + 1


@respx.mock(base_url=HERE)
async def test_time_away_uses_up_no_retries(respx_mock: respx.MockRouter) -> None:
    answers = [500, 503, 503, 500, 503, 500, 200]
    respx_mock.post("/webhooks/github").mock(side_effect=[httpx.Response(status, json={}) for status in answers])
    async with relaying(retries=3) as (relay, _):
        assert (await relay.post(incoming())).status == 200


async def test_a_delivery_whose_answer_breaks_off_was_taken_and_that_is_said() -> None:
    async with speaking(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{") as (base, asked), opened(base) as client:
        said = Said()
        answer = await Relay(client, base, retries=3, tell=said, sleep=no_sleep).post(incoming())
        Report(said, {}).passed(incoming(), answer)
    assert len(asked) == 1
    assert "→ 200 accepted (by its status; its answer could not be read: peer closed connection" in said.text


@pytest.mark.parametrize("failures", [1, 2, 3, 8, 10_000])
def test_waits_grow_up_to_a_limit_and_are_never_the_same(failures: int) -> None:
    waits = {wait_s(failures, 0.5, 30) for _ in range(20)}

    assert len(waits) > 1
    longest = min(0.5 * 2 ** min(failures - 1, 20), 30)
    assert all(longest / 2 <= wait <= longest for wait in waits)


async def test_a_delivery_is_signed_anew_for_every_try() -> None:
    standard = StandardWebhooks("acme")
    secret = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
    times = iter([1000.0, 2000.0])
    signer = Signer({"acme": standard}, lambda name: secret, now=lambda: next(times))
    old = sign(standard.recipe, b"{}", secret, now=1, id="msg_1")
    async with relaying(signer=signer) as (relay, _), respx.mock(base_url=HERE) as router:
        route = router.post("/webhooks/acme").mock(side_effect=[httpx.Response(503), httpx.Response(202, json={})])
        await relay.post(Incoming(source="acme", headers=(("content-type", "text/x"), *old), body=b"{}"))

    sent = [call.request.headers for call in route.calls]
    assert [headers["webhook-timestamp"] for headers in sent] == ["1000", "2000"]
    assert [headers["webhook-id"] for headers in sent] == ["msg_1", "msg_1"]
    assert all(headers["content-type"] == "text/x" for headers in sent)


def test_a_source_that_is_not_known_here_cannot_be_signed_for() -> None:
    with pytest.raises(ConfigurationError, match="github"):
        Signer({}, lambda name: SECRET).headers(incoming())


# ---- from end to end


@dataclass
class Ends:
    """A deployed consumer, a line to it, and a consumer here."""

    there: Deployed
    line: Line
    url: str
    here: Stack
    to: str
    said: Said
    home: Path
    names: dict[str, Any] = field(default_factory=dict[str, Any])

    @asynccontextmanager
    async def tunnel(self, after: str | None = "all", *, wait: bool = True, **options: Any) -> AsyncIterator[Any]:
        """A tunnel that runs for the block."""
        async with self.carrying(after, **options) as work:
            task = asyncio.create_task(work)
            try:
                yield task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    @asynccontextmanager
    async def carrying(
        self,
        after: str | None = "all",
        *,
        sources: tuple[str, ...] = (),
        on_error: OnError = "stop",
        retries: int = 0,
        token: str | None = None,
        silent_s: float = 20,
        signer: Signer | None = None,
    ) -> AsyncIterator[Any]:
        async with (
            bookmark(self.home, self.url, sources, self.to) as kept,
            httpx.AsyncClient(trust_env=False) as remote,
            opened(self.to) as local,
        ):
            start = after or kept.cursor or "now"
            follower = Follower(
                remote,
                self.url,
                sources,
                start,
                token=token,
                tell=self.said,
                most_body_bytes=30 << 20,
                silent_s=silent_s,
                sleep=short_sleep,
            )
            relay = Relay(local, self.to, retries=retries, tell=self.said, signer=signer, sleep=short_sleep)
            yield carry(follower, relay, kept, Report(self.said, senders().sources), on_error)

    async def arrived(self, count: int, said: Callable[[], str] | None = None) -> list[dict[str, Any]]:
        """What has arrived here, once so many were not only stored but told of."""
        await until(lambda: (said() if said else self.said.text).count(", delivery ") >= count)
        return await self.here.deliveries()


async def short_sleep(seconds: float) -> None:
    await asyncio.sleep(seconds / 50)


@asynccontextmanager
async def local_consumer(server_url: str, secret: str = SECRET) -> AsyncIterator[tuple[Stack, int]]:
    with empty_database(server_url) as url:
        async with await elsewhere(url) as connection:
            await migrate(connection)
        secrets = dict.fromkeys(senders().sources, (secret,))
        async with (
            stack(url, senders(), work=False, most_bytes=30 << 20, secrets=secrets) as here,
            served(here.receiver) as port,
        ):
            yield here, port


@pytest.fixture
async def make(database_url: str, server_url: str, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Makes the two ends; with what the deployed one or the local one is to have."""
    async with AsyncExitStack() as ending:

        async def made(secret: str = SECRET, **settings: Any) -> Ends:
            there = await ending.enter_async_context(deployed(database_url, poll_s=0.1, **settings))
            line, url = await ending.enter_async_context(lined(there.port))
            here, port = await ending.enter_async_context(local_consumer(server_url, secret))
            return Ends(there, line, url, here, f"http://127.0.0.1:{port}", Said(), tmp_path)

        yield made


FORM = b"payload=%7B%22action%22%3A+%22opened%22%2C+%22n%22%3A+1.0%7D&other=%C3%A9+x"
EXACT = [
    from_shortcut(b'{\n   "a": 2,\n  "id": 12345678901234567890, "f": 1.0, "e": "\\u00e9", "a": 3\n}'),
    from_github(FORM, event="pull_request", content_type="application/x-www-form-urlencoded; charset=UTF-8"),
    from_github('{"title":"ok 😊"}\r\n'.encode()),
    from_github(b"\xef\xbb\xbf{}"),
    from_github(b"\xff\x00\r\n"),
    from_github(b"", event="ping"),
    from_shortcut(b" [1] ", source="shortcut"),
]


@pytest.mark.invariant(12)
async def test_every_delivery_arrives_byte_for_byte_and_with_its_signature_valid(make: Callable[..., Any]) -> None:
    ends = await make()
    for request in EXACT:
        assert (await ends.there.stack.send(request)).status_code == 202
    async with ends.tunnel():
        found = await ends.arrived(len(EXACT))

    there = await ends.there.stack.deliveries()
    kept = ("source", "dedup_key", "headers", "body")
    assert [[row[name] for name in kept] for row in found] == [[row[name] for name in kept] for row in there]
    assert [bytes(row["body"]) for row in found] == [request.body for request in EXACT]
    assert "application/x-www-form-urlencoded; charset=UTF-8" in dict(found[1]["headers"]).values()
    assert ends.said.text.count("→ 202 accepted") == len(EXACT)


async def test_a_body_of_twenty_five_mebibytes_passes(make: Callable[..., Any]) -> None:
    ends = await make(most_bytes=26 << 20)
    body = b'{"a": "' + os.urandom(1 << 20).hex().encode() * 12 + b'"}'
    await ends.there.stack.send(from_github(body))
    async with ends.tunnel():
        [row] = await ends.arrived(1)

    assert hashlib.sha256(bytes(row["body"])).digest() == hashlib.sha256(body).digest()


async def test_a_connection_cut_at_any_byte_loses_nothing_and_keeps_the_order(make: Callable[..., Any]) -> None:
    """At the beginning, inside a frame, inside a body, between frames: what is not whole is not passed on."""
    ends = await make()
    for number in range(25):
        await ends.there.stack.send(from_github(f'{{"number": {number}, "text": "é😊"}}'.encode()))
    async with ends.tunnel():
        for cut_after in (1, 40, 150, 300, 450, 611, 700, 999, 1200, 2000):
            ends.line.cut_after(cut_after)
            before = ends.line.opened
            await until(lambda before=before: ends.line.opened > before or ends.line._cut_at is None)
        found = await ends.arrived(25)

    assert [json.loads(bytes(row["body"]))["number"] for row in found] == list(range(25))
    assert ends.line.opened > 5


async def test_it_goes_on_where_it_left_off_and_says_how_many_wait_and_since_when(make: Callable[..., Any]) -> None:
    ends = await make()
    await ends.there.stack.send(from_github(b'{"n": 1}'))
    async with ends.tunnel():
        await ends.arrived(1)
    for number in (2, 3):
        await ends.there.stack.send(from_github(f'{{"n": {number}}}'.encode()))
    told = len(ends.said.lines)
    async with ends.tunnel(None):
        found = await ends.arrived(3)

    assert [json.loads(bytes(row["body"]))["n"] for row in found] == [1, 2, 3]
    assert ends.said.lines[told].startswith("2 waiting, the first since")
    assert ends.said.text.count("duplicate") == 0


async def test_the_first_time_it_starts_with_what_comes_now(make: Callable[..., Any]) -> None:
    ends = await make()
    await ends.there.stack.send(from_github(b'{"n": 1}'))
    async with ends.tunnel(None):
        await until(lambda: "nothing is waiting" in ends.said.text)
        await ends.there.stack.send(from_github(b'{"n": 2}'))
        [row] = await ends.arrived(1)
    assert bytes(row["body"]) == b'{"n": 2}'

    # What comes while it is away, though nothing had come before, waits for it all the same.
    ends.there.stack.told.clear()
    await ends.there.stack.send(from_github(b'{"n": 3}'))
    async with ends.tunnel(None):
        assert len(await ends.arrived(2)) == 2


async def test_a_place_is_kept_though_nothing_came(make: Callable[..., Any]) -> None:
    ends = await make()
    async with ends.tunnel(None):
        await until(lambda: "nothing is waiting" in ends.said.text)
    await ends.there.stack.send(from_github(b'{"n": 1}'))
    async with ends.tunnel(None):
        assert len(await ends.arrived(1)) == 1


@pytest.mark.parametrize("silent_s", [0.5])
async def test_a_connection_that_died_without_a_word_is_noticed_by_its_silence(
    make: Callable[..., Any], silent_s: float
) -> None:
    """A laptop that slept finds a connection that its system believes in. Nothing comes over it any more."""
    ends = await make(keep_alive_s=0.1)
    async with ends.tunnel("now", silent_s=silent_s):
        await until(lambda: "nothing is waiting" in ends.said.text)
        ends.line.freeze()
        await ends.there.stack.send(from_github(b"{}"))
        await until(lambda: ends.line.opened >= 2)
        ends.line.thaw()
        await ends.arrived(1)

    assert "trying again" in ends.said.text


async def test_a_quiet_feed_is_not_taken_for_a_dead_connection(make: Callable[..., Any]) -> None:
    ends = await make(keep_alive_s=0.05)
    async with ends.tunnel("now", silent_s=1):
        await until(lambda: "nothing is waiting" in ends.said.text)
        before = ends.line.passed
        await until(lambda: ends.line.passed > before + 40 * len(": keep-alive"))
        assert ends.line.opened == 1


async def test_a_deployed_consumer_that_restarts_is_waited_for(make: Callable[..., Any], database_url: str) -> None:
    ends = await make()
    async with ends.tunnel():
        await until(lambda: ends.line.opened == 1)
        ends.line.target = 1  # nobody is there
        ends.line.cut()
        await until(lambda: "trying again" in ends.said.text)
        async with deployed(database_url, poll_s=0.1) as restarted:
            await restarted.stack.send(from_github(b"{}"))
            ends.line.target = restarted.port
            await ends.arrived(1)


async def test_a_delivery_refused_here_stops_the_tunnel_before_it(make: Callable[..., Any]) -> None:
    ends = await make(secret=OTHER_SECRET)
    await ends.there.stack.send(from_github(b'{"n": 1}'))
    [row] = await ends.there.stack.deliveries()
    async with ends.carrying(retries=2) as work:
        with pytest.raises(Stopped) as stopped:
            await work

    message = "\n".join([str(stopped.value), *stopped.value.__notes__])
    for part in (f"github #{row['id']}", "401", "bad_signature", "--resign", "--on-error skip", "--since A"):
        assert part in message
    async with ends.carrying(None) as work:
        with pytest.raises(Stopped):
            await work
    assert await ends.here.deliveries() == []

    # What the message says of --since is so.
    behind = message.partition("--since ")[2].partition(";")[0]
    await ends.there.stack.send(from_github(b'{"n": 2}'))
    signer = Signer(senders().sources, lambda name: OTHER_SECRET)
    async with ends.tunnel(behind, signer=signer):
        [passed] = await ends.arrived(1)
    assert bytes(passed["body"]) == b'{"n": 2}'


async def test_refused_deliveries_can_be_left_out(make: Callable[..., Any]) -> None:
    ends = await make()
    there = ends.there.stack
    await arrived(there.pool, arrival(b"{}", source="github", key="unsigned"))
    await there.send(from_github(b'{"n": 2}'))
    async with ends.tunnel(on_error="skip"):
        [row] = await ends.arrived(1)

    assert bytes(row["body"]) == b'{"n": 2}'
    assert "skipped: missing_signature" in ends.said.text


async def test_a_body_pruned_there_is_told_and_passed_over(make: Callable[..., Any]) -> None:
    ends = await make()
    await ends.there.stack.send(from_github(b'{"n": 1}'))
    await ends.there.stack.sql("UPDATE deliveries SET body = NULL, headers = '[]', pruned_at = now()")
    await ends.there.stack.send(from_github(b'{"n": 2}'))
    async with ends.tunnel():
        await ends.arrived(1)

    assert "pruned there" in ends.said.text


async def test_signed_anew_it_is_taken_by_a_receiver_with_other_secrets(make: Callable[..., Any]) -> None:
    ends = await make(secret=OTHER_SECRET)
    for request in EXACT:
        await ends.there.stack.send(request)
    async with ends.tunnel(signer=Signer(senders().sources, lambda name: OTHER_SECRET)):
        found = await ends.arrived(len(EXACT))

    assert [bytes(row["body"]) for row in found] == [request.body for request in EXACT]


async def test_only_the_sources_asked_for_are_passed_on(make: Callable[..., Any]) -> None:
    ends = await make()
    await ends.there.stack.send(from_shortcut(stories(1)))
    await ends.there.stack.send(from_github(b"{}"))
    async with ends.tunnel(sources=("github",)):
        await ends.arrived(1)
        await ends.there.stack.send(from_github(b"{}"))
        found = await ends.arrived(2)

    assert {row["source"] for row in found} == {"github"}


async def test_the_token_is_shown_and_never_told(make: Callable[..., Any]) -> None:
    ends = await make(control_token="a token that nobody may see")
    await ends.there.stack.send(from_github(b"{}"))
    async with ends.tunnel(token="a token that nobody may see"):
        await ends.arrived(1)
    async with ends.carrying(token="wrong-token") as work:
        with pytest.raises(Refused) as refused:
            await work

    assert "WEBHOOKS_TUNNEL_TOKEN" in str(refused.value)
    written_down = "".join(path.read_text() for path in (ends.home / "tunnel").iterdir())
    for text in (ends.said.text, str(refused.value), written_down):
        assert "token that nobody" not in text
        assert "wrong-token" not in text


# ---- who answers instead of a feed


@asynccontextmanager
async def answering(
    *answers: Response, sources: tuple[str, ...] = (), sleep: Sleep = no_sleep
) -> AsyncIterator[tuple[Follower, Said, list[str]]]:
    """A follower of somebody who gives these answers, the last one again and again."""
    waiting, asked = list(answers), list[str]()

    async def answer(request: Any) -> Response:
        asked.append(str(request.url.query))
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    said = Said()
    async with (
        served(Starlette(routes=[Route("/api/feed", answer)])) as port,
        opened(f"http://127.0.0.1:{port}") as http,
    ):
        url = f"http://127.0.0.1:{port}"
        follower = Follower(
            http, url, sources, "now", token=None, tell=said, most_body_bytes=MOST_BODY_BYTES, sleep=sleep
        )
        yield follower, said, asked


def hello(cursor: str, *more: str) -> Response:
    data = json.dumps({"waiting": 0, "waiting_since": None, "lag": {"held_back": 0, "seconds": 0}})
    text = f"id: {cursor}\nevent: hello\ndata: {data}\n\n" + "".join(more)
    return Response(text, media_type="text/event-stream")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (RedirectResponse("https://elsewhere.example/api/feed"), "elsewhere.example"),
        (Response("<html>", media_type="text/html"), "text/html"),
        (Response("<html>", 404), "404"),
        (JSONResponse({"error": "not_found"}, 404), "control plane"),
        (JSONResponse({"error": "there is no source x"}, 404), "no source x"),
        (JSONResponse({"error": "present the token"}, 401), "WEBHOOKS_TUNNEL_TOKEN"),
        (JSONResponse({"error": "restored"}, 409), "restored"),
    ],
)
async def test_what_waiting_does_not_mend_ends_it_at_once(answer: Response, said: str) -> None:
    async with answering(answer) as (follower, _, asked), aclosing(follower.items()) as items:
        with pytest.raises(Refused, match=said):
            await anext(items)

    assert len(asked) == 1, "a redirect is not followed, and nobody is asked twice"


async def test_what_waiting_mends_is_waited_for() -> None:
    answers = [Response("", 502), JSONResponse({"error": "unavailable"}, 503), Response("", 429), hello("c1")]
    async with answering(*answers) as (follower, said, _), aclosing(follower.items()) as items:
        assert await anext(items) == Standing("c1", 0, None, 0, 0.0)

    assert said.text.count("trying again") == 3


async def test_once_it_has_worked_a_strange_answer_is_somebody_in_between() -> None:
    login = Response("<html>log in", media_type="text/html")
    answers = [hello("c1"), login, Response("<html>", 404), RedirectResponse("http://login.example"), hello("c2")]
    async with answering(*answers) as (follower, _, asked), aclosing(follower.items()) as items:
        assert [(await anext(items)).cursor, (await anext(items)).cursor] == ["c1", "c2"]

    assert asked == ["after=now", *["after=c1"] * 4]


async def test_a_refusal_of_the_control_plane_ends_it_at_any_time() -> None:
    answers = [hello("c1"), JSONResponse({"error": "restored"}, 409)]
    async with answering(*answers) as (follower, _, _), aclosing(follower.items()) as items:
        await anext(items)
        with pytest.raises(Refused, match="restored"):
            await anext(items)


async def test_events_of_a_later_version_are_passed_over_and_broken_ones_are_not() -> None:
    later = 'id: c2\nevent: weather\ndata: {"rain": true}\n\n'
    delivery = {"id": 1, "source": "github", "event": None, "received_at": "2026-01-01T00:00:00+00:00", "headers": []}
    good = f"id: c3\nevent: delivery\ndata: {json.dumps({**delivery, 'body_base64': 'e30=', 'more': 1})}\n\n"
    broken = f"id: c4\nevent: delivery\ndata: {json.dumps({**delivery, 'body_base64': 'e3*0='})}\n\n"
    async with answering(hello("c1", later, good, broken)) as (follower, _, _), aclosing(follower.items()) as items:
        await anext(items)
        arrived_ = await anext(items)
        with pytest.raises(WebhooksError, match="cannot read"):
            await anext(items)

    assert isinstance(arrived_, Arrived)
    assert (arrived_.cursor, arrived_.delivery.body) == ("c3", b"{}")


async def test_an_event_that_is_not_whole_is_not_passed_on() -> None:
    told = '{"id": 1, "source": "github", "event": null, "received_at": "2026-01-01T00:00:00Z"}'
    cut = f"id: c2\nevent: pruned\ndata: {told}\n"
    answers = [hello("c1", cut), hello("c1", cut + "\n")]
    async with answering(*answers) as (follower, _, asked), aclosing(follower.items()) as items:
        found = [await anext(items) for _ in range(3)]

    assert [type(item) for item in found] == [Standing, Standing, Pruned]
    assert asked == ["after=now", "after=c1"]


# ---- what a feed says that cannot be


def framed(kind: str, data: object, cursor: str | None = "c2") -> str:
    text = data if isinstance(data, str) else json.dumps(data)
    return ("" if cursor is None else f"id: {cursor}\n") + f"event: {kind}\ndata: {text}\n\n"


def streamed(*frames: str) -> Response:
    return Response("".join(frames), media_type="text/event-stream")


LAG = {"held_back": 0, "seconds": 0}
GONE = {"id": 1, "source": "github", "event": None, "received_at": "2026-01-01T00:00:00+00:00"}
TOLD = {**GONE, "headers": [["content-type", "application/json"]], "body_base64": "e30="}


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (framed("hello", {"waiting": 3, "waiting_since": "2026-01-01T00:00:00", "lag": LAG}), "hello waiting_since"),
        (framed("hello", {"waiting": 3, "waiting_since": "0001-01-01T00:00:00Z", "lag": LAG}), "hello waiting_since"),
        (framed("hello", {"waiting": 3, "waiting_since": "9999-12-31T23:59:59Z", "lag": LAG}), "hello waiting_since"),
        (framed("hello", {"waiting": 3, "waiting_since": -1e11, "lag": LAG}), "hello waiting_since"),
        (framed("hello", {"waiting": 3, "waiting_since": 1.7e9, "lag": LAG}), "hello waiting_since"),
        (framed("hello", {"waiting": "3", "lag": LAG}), "hello waiting"),
        (framed("hello", {"waiting": -1, "lag": LAG}), "hello waiting"),
        (framed("hello", {"waiting": 10**30, "lag": LAG}), "hello waiting"),
        (framed("hello", f'{{"waiting": {"9" * 5000}, "lag": {{}}}}'), "hello"),
        (framed("hello", {"waiting": 3}), "hello lag"),
        (framed("position", {"lag": {"held_back": 10**30, "seconds": 0}}), "position lag.held_back"),
        (framed("position", '{"lag": {"held_back": 1, "seconds": NaN}}'), "position lag.seconds"),
        (framed("position", '{"lag": {"held_back": 1, "seconds": 1e999}}'), "position lag.seconds"),
        (framed("position", {"lag": {"held_back": 1, "seconds": -1}}), "position lag.seconds"),
        (framed("position", "[" * 100_000), "position JSON"),
        (framed("pruned", {**GONE, "received_at": "9999-12-31T23:59:59Z"}), "pruned received_at"),
        (framed("pruned", {**GONE, "received_at": "2026-01-01T00:00:00"}), "pruned received_at"),
        (framed("pruned", {**GONE, "id": -1}), "pruned id"),
        (framed("pruned", {**GONE, "source": ".."}), "pruned source"),
        *((framed("delivery", {**TOLD, "source": name}), "delivery source") for name in ("..", ".", "", "a/b", "a\n")),
        (framed("delivery", {**TOLD, "source": "x" * 5000}), "delivery source"),
        (framed("delivery", {**TOLD, "headers": [["a"]]}), "delivery headers.0"),
        (framed("delivery", {**TOLD, "headers": {"a": "b"}}), "delivery headers"),
        (framed("delivery", {**TOLD, "body_base64": "%%%"}), "delivery body_base64"),
        (framed("delivery", {**TOLD, "body_base64": "é"}), "delivery body_base64"),
        (framed("delivery", {**TOLD, "event": 5}), "delivery event"),
        (framed("delivery", "{nonsense"), "delivery JSON"),
        (framed("delivery", TOLD, None), "delivery cursor"),
        (framed("hello", {"lag": LAG}, None), "hello cursor"),
        (framed("delivery", TOLD, ""), "delivery cursor"),
        (framed("delivery", TOLD, "c" * 1025), "delivery cursor"),
        (framed("delivery", TOLD, "c" * 100_000), "delivery cursor"),
        (framed("delivery", TOLD, "c\x1b[2J"), "delivery cursor"),
        (framed("delivery", TOLD, "cé"), "delivery cursor"),
    ],
    ids=lambda text: text[:40] if text.startswith(("hello", "position", "pruned", "delivery")) else "",
)
async def test_what_a_feed_says_that_cannot_be_is_told_by_event_and_field_and_is_not_kept(
    frame: str, words: str, tmp_path: Path
) -> None:
    async with (
        answering(streamed(frame)) as (follower, said, _),
        opened(HERE) as client,
        bookmark(tmp_path, "https://a", [], HERE) as kept,
    ):
        relay = Relay(client, HERE, retries=0, tell=said)
        with pytest.raises(WebhooksError, match="cannot read") as told:
            await asyncio.wait_for(carry(follower, relay, kept, Report(said, {})), 20)
        assert kept.cursor is None
    kind, what = words.split(maxsplit=1) if " " in words else (words, "JSON")
    assert f"the feed sent a {kind} " in str(told.value)
    assert what in str(told.value)
    assert len(str(told.value)) < 400


async def test_a_source_that_was_not_asked_for_is_not_passed_on() -> None:
    for kind, data in (("delivery", TOLD), ("pruned", GONE)):
        answers = streamed(framed(kind, data), framed(kind, {**data, "source": "billing"}, "c3"))
        async with answering(answers, sources=("github",)) as (follower, _, _), aclosing(follower.items()) as items:
            assert (await anext(items)).cursor == "c2"
            with pytest.raises(WebhooksError, match="sent a delivery of billing, and only github was asked for"):
                await anext(items)


@pytest.mark.parametrize("part", [b"A" * (1 << 16), b"data: aaaaaaaa\n" * 4000, b": c\n" * 16_000])
async def test_an_event_without_end_is_broken_off_and_the_setting_is_named(part: bytes) -> None:
    async def long() -> AsyncIterator[bytes]:
        yield b"id: c2\nevent: delivery\ndata: "
        for _ in range((16 << 20) // len(part)):
            yield part

    answer = StreamingResponse(long(), media_type="text/event-stream")
    async with answering(answer) as (follower, _, asked), aclosing(follower.items()) as items, asyncio.timeout(20):
        with pytest.raises(WebhooksError, match=r"more than 5 MiB.*WEBHOOKS_MAX_BODY_MIB.*--since"):
            await anext(items)
    assert len(asked) == 1


async def test_the_longest_body_that_is_taken_fits_and_so_do_many_after_each_other() -> None:
    body = base64.b64encode(bytes(MOST_BODY_BYTES)).decode()
    frames = [framed("delivery", {**TOLD, "body_base64": body}, f"c{number}") for number in range(4)]
    async with answering(streamed(*frames)) as (follower, _, _), aclosing(follower.items()) as items:
        for _ in frames:
            item = await anext(items)
            assert isinstance(item, Arrived)
            assert len(item.delivery.body) == MOST_BODY_BYTES


async def test_what_is_packed_is_not_unpacked() -> None:
    """Half a megabyte may be half a gigabyte."""
    feed = gzip.compress(b"data: " + bytes(64 << 20))
    answer = Response(feed, media_type="text/event-stream", headers={"content-encoding": "gzip"})
    async with answering(answer) as (follower, _, _), aclosing(follower.items()) as items, asyncio.timeout(20):
        with pytest.raises(Refused, match=r"packed \(gzip\), which was not asked for"):
            await anext(items)
    error = gzip.compress(json.dumps({"error": "unpacked"}).encode())
    async with (
        answering(Response(error, 400, headers={"content-encoding": "gzip"})) as (follower, _, _),
        aclosing(follower.items()) as items,
    ):
        with pytest.raises(Refused, match=r"answers 400$"):
            await anext(items)


@pytest.mark.parametrize("charset", ["utf-16", "utf-7", "nonsense"])
async def test_a_stream_is_utf_8_whatever_it_says_of_itself(charset: str) -> None:
    answer = hello("c1")
    answer.headers["content-type"] = f"text/event-stream; charset={charset}"
    async with answering(answer) as (follower, _, _), aclosing(follower.items()) as items:
        assert (await anext(items)).cursor == "c1"


async def test_a_redirect_to_nowhere_is_a_redirect() -> None:
    answer = Response(status_code=302, headers={"location": "http://é..example"})
    async with answering(answer) as (follower, _, _), aclosing(follower.items()) as items:
        with pytest.raises(Refused, match=r"redirects to http://é\.\.example, which is not followed"):
            await anext(items)


async def test_a_connection_that_brings_nothing_is_made_again_later_and_later() -> None:
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    answers = [*[hello("c1")] * 8, hello("c1", framed("pruned", GONE)), hello("c2")]
    async with answering(*answers, sleep=note) as (follower, _, _), aclosing(follower.items()) as items:
        for _ in range(11):
            await anext(items)
    assert len(pauses) == 9
    assert pauses[6] >= 15, "half of the longest, at least"
    assert pauses[8] <= 0.5, "the one before brought something"


def test_a_connection_that_lasted_was_good_for_something() -> None:
    now = 0.0
    tries = Tries(1, 64, lambda: now)
    for _ in range(10):
        assert tries.pause_s() <= 64
    tries.connected()
    now += LASTED_S / 2
    assert tries.pause_s() >= 32
    tries.connected()
    now += LASTED_S
    assert tries.pause_s() <= 1
    now += LASTED_S
    assert tries.pause_s() > 0.9, "nothing was connected meanwhile"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "https://",
        "nothing",
        "https://user:password@x",
        "https://x/?a=b",
        "http://x:y",
        "http://[",
        "http://a\x7f",
    ],
)
async def test_an_address_that_is_none_is_refused_without_repeating_a_password(url: str) -> None:
    async with httpx.AsyncClient() as http:
        with pytest.raises(ConfigurationError) as refused:
            Follower(http, url, [], "now", token=None, tell=print, most_body_bytes=1)
    assert "password@" not in str(refused.value)


async def test_a_token_that_cannot_be_sent_is_refused_without_repeating_it() -> None:
    async with httpx.AsyncClient() as http:
        with pytest.raises(ConfigurationError) as refused:
            Follower(http, "https://x", [], "now", token="tök\n", tell=print, most_body_bytes=1)
    assert "tök" not in str(refused.value)


# ---- what is told


@pytest.mark.parametrize(
    ("delivery", "name"),
    [
        (incoming(b'{"action": "opened"}'), "push.opened"),
        (incoming(b"\xff"), "push"),
        (incoming(b"{}", source="elsewhere"), "push"),
        (incoming(b"{}", event="issues.closed"), "issues.closed"),
        (incoming(b"{}", event="x" * 100_000), "x" * 200),
        (Incoming(source="shortcut", headers=(), body=stories(1, 2)), "story.update"),
        (Incoming(source="shortcut", headers=(), body=b"{}"), "-"),
    ],
)
def test_a_delivery_is_named_as_far_as_that_is_cheap(delivery: Incoming, name: str) -> None:
    assert named({"github": GitHub(), "shortcut": Shortcut()}, delivery) == name


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"), (3600, "1 h"), (90_061, "1 d 1 h"), (-5, "0 s")],
)
def test_a_length_of_time_is_told_in_two_units(seconds: float, text: str) -> None:
    assert lasted(timedelta(seconds=seconds)) == text


def test_a_line_and_the_summary_say_what_became_of_each() -> None:
    said = Said()
    report = Report(said, {"github": GitHub()})
    new = Answer("accepted", 202, 9, None, None, 0.0123)
    report.passed(incoming(), new)
    report.passed(incoming(), Answer("duplicate", 200, 9, None, None, 0.001))
    report.skipped(incoming(), Answer("refused", 401, None, "bad_signature", None, 0.001))
    report.pruned("github", 3, datetime.now(UTC))
    report.standing(2, None, 3, 40.0)

    assert said.lines[0].endswith("github  push  #7 → 202 accepted, delivery 9 here  12 ms")
    assert said.lines[2].endswith("github  push  #7 → 401 skipped: bad_signature  1 ms")
    assert "a transaction is open" in said.lines[5]
    assert report.summary(2).startswith("passed on 2 (1 new, 1 were here already), 1 skipped, 1 pruned, in 0 s over 2")


FORGED = "push\r\n12:00:00\tgithub  push  #8 → 202 accepted\x1b[2J\u2028\u202e"
HARMLESS = "push\\r\\n12:00:00\\tgithub  push  #8 → 202 accepted\\x1b[2J\\u2028\\u202e"


@respx.mock(base_url=HERE)
async def test_what_others_wrote_begins_no_line_of_its_own_and_no_terminal_obeys_it(
    respx_mock: respx.MockRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sender, the receiver here, and the other end: whoever's words they are, a line stays a line."""
    report = Report(say, {})
    report.passed(incoming(event=FORGED), Answer("accepted", 202, 9, None, None, 0.001))
    report.skipped(incoming(source=FORGED), Answer("refused", 400, None, "no", None, 0.001))
    report.skipped(incoming(), Answer("refused", 400, None, FORGED, None, 0.001))
    report.pruned(FORGED, 3, datetime.now(UTC))
    away = httpx.Response(503, json={"error": FORGED, "reason": FORGED})
    respx_mock.post("/webhooks/github").mock(side_effect=[away, httpx.Response(202, json={})])
    async with opened(HERE) as client:
        await Relay(client, HERE, retries=0, tell=say, sleep=no_sleep).post(incoming())
    lines = capsys.readouterr().out.split("\n")[:-1]
    assert len(lines) == 6
    assert all(line.isprintable() for line in lines)
    assert all(HARMLESS in line for line in [lines[0], *lines[1:5]])

    with pytest.raises(click.ClickException) as told, failing_in_lines():
        raise Stopped(FORGED, FORGED)
    assert told.value.format_message() == f"{HARMLESS}\n  {HARMLESS}"


@pytest.mark.parametrize(
    ("answer", "signed_here", "advice"),
    [
        (JSONResponse({"error": "bad_signature"}, 401), False, "another secret than the deployed one: --resign"),
        (JSONResponse({"error": "bad_signature"}, 401), True, "are they set alike here?"),
        (JSONResponse({"error": "stale_timestamp"}, 401), False, "signed time is too old by now: --resign"),
        (JSONResponse({"error": "missing_signature"}, 401), False, "without a signature: --resign"),
        (JSONResponse({"error": "unknown_source"}, 404), False, "has no source github"),
        (Response("<html>", 404), False, "and not that of a control plane?"),
        (Response("<html>", 401), False, None),
    ],
)
async def test_what_to_do_about_a_refusal_is_told_where_its_cause_is_known(
    answer: Response, signed_here: bool, advice: str | None, tmp_path: Path
) -> None:
    async def refuse(request: Any) -> Response:
        return answer

    told = {"id": 1, "source": "github", "event": None, "received_at": "2026-01-01T00:00:00+00:00", "headers": []}
    delivery = f"id: c2\nevent: delivery\ndata: {json.dumps({**told, 'body_base64': 'e30='})}\n\n"
    signer = Signer({"github": GitHub()}, lambda name: SECRET) if signed_here else None
    async with (
        served(Starlette(routes=[Route("/webhooks/github", refuse, methods=["POST"])])) as port,
        answering(hello("c1", delivery)) as (follower, said, _),
        opened(HERE) as client,
        bookmark(tmp_path, "https://a", [], HERE) as kept,
    ):
        relay = Relay(client, f"http://127.0.0.1:{port}", retries=0, tell=said, signer=signer)
        with pytest.raises(Stopped) as stopped:
            await carry(follower, relay, kept, Report(said, {}))
    first, *rest = stopped.value.__notes__
    assert advice in first if advice is not None else first.startswith("started again")
    assert rest[-1].startswith("to leave it out: --since c2; ")


# ---- the command


def refused_by(*arguments: str) -> str:
    result = CliRunner().invoke(tunnel, arguments, standalone_mode=False)
    assert result.exception is not None
    message = result.exception
    return message.format_message() if hasattr(message, "format_message") else str(message)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("https://x", "--to", "http://example.com:8000"), "--allow-remote-target"),
        (("https://x", "--to", "http://192.168.1.7:8000"), "--allow-remote-target"),
        (("https://x", "--to", "http://0.0.0.0:8000"), "--allow-remote-target"),
        (("https://x", "--to", "http://127.0.0.1:8000@example.com"), "--allow-remote-target"),
        (("https://x", "--to", "http://localhost.example.com"), "--allow-remote-target"),
        (("https://x", "--to", "127.0.0.1:8000"), "http://HOST:PORT"),
        (("https://x", "--to", "http://127.0.0.1:8000/webhooks/source"), "base address"),
        (("https://x", "--since", "yesterday"), "1h"),
        (("https://x", "--since", "1h", "--follow-only"), "--follow-only"),
        (("https://x", "--on-error", "carry-on"), "skip"),
        ((), "control plane"),
        (("https://x/?a=\x1b[31m",), "?a=\\x1b[31m"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(arguments: tuple[str, ...], said: str) -> None:
    assert said.lower() in refused_by(*arguments).lower()


async def test_the_command_passes_on_until_it_is_told_to_stop_and_sums_up(make: Callable[..., Any]) -> None:
    """As a person runs it: everything waiting, Ctrl-C, then again from there; a second one beside it is refused."""
    ends = await make(control_token="right-token")
    for number in range(3):
        await ends.there.stack.send(from_github(f'{{"n": {number}}}'.encode()))
    arguments = ("tunnel", ends.url, "--to", ends.to, "--source", "github", "--app", "feeds_app:consumer")
    environment = {"WEBHOOKS_TUNNEL_TOKEN": "right-token", "WEBHOOKS_APP": "feeds_app:consumer"}
    (ends.home / "feeds_app.py").write_text("from feeds import senders\n\nconsumer = senders()\n")
    with started(ends.home, *arguments, "--since", "all", name="first", **environment) as first:
        await ends.arrived(3, lambda: first.output)
        second = await asyncio.to_thread(webhooks, ends.home, *arguments, **environment)
        first.signal(signal.SIGINT)
        assert await asyncio.to_thread(first.ends) == 0
    await ends.there.stack.send(from_github(b'{"n": 3}'))
    with started(ends.home, *arguments, name="again", **environment) as again:
        await ends.arrived(1, lambda: again.output)
        again.signal(signal.SIGTERM)
        assert await asyncio.to_thread(again.ends) == 0
    for number in (4, 5):
        await ends.there.stack.send(from_github(f'{{"n": {number}}}'.encode()))
    with started(ends.home, *arguments, "--follow-only", name="only", **environment) as only:
        await asyncio.to_thread(only.says, "nothing is waiting")
        await ends.there.stack.send(from_github(b'{"n": 6}'))
        found = await ends.arrived(1, lambda: only.output)

    assert [json.loads(bytes(row["body"]))["n"] for row in found] == [0, 1, 2, 3, 6]
    assert (second.returncode, "another tunnel" in second.stderr) == (1, True)
    assert "3 waiting" in first.output
    assert "passed on 3" in first.output
    assert "going on where it left off" in again.output
    assert "1 waiting" in again.output
    assert "passed on 1" in again.output
    assert "push" in first.output
    for process in (first, again, only):
        assert "right-token" not in process.output + process.log
        assert "Traceback" not in process.log


async def test_what_is_missing_here_is_said_at_the_start_and_waited_for(make: Callable[..., Any]) -> None:
    ends = await make()
    (ends.home / "feeds_app.py").write_text("from feeds import senders\n\nconsumer = senders()\n")
    nobody = ("--to", "http://127.0.0.1:1", "--app", "feeds_app:consumer")
    github = {"WEBHOOKS_SECRET_GITHUB": SECRET}
    with started(ends.home, "tunnel", ends.url, *nobody, "--resign", name="dead", **github) as process:
        await asyncio.to_thread(process.says, "nothing is waiting")
        assert "note: nothing listens at http://127.0.0.1:1: start the receiver with webhooks serve" in process.output
        assert "note: no secret of shortcut to sign with: set WEBHOOKS_SECRET_SHORTCUT" in process.output
        assert "no secret of github" not in process.output
        await ends.there.stack.send(from_github(b"{}"))
        await asyncio.to_thread(process.says, "is away, waiting for it: nothing listens there")
        process.signal(signal.SIGINT)
        assert await asyncio.to_thread(process.ends) == 0
    assert process.log == ""
    unknown = await asyncio.to_thread(webhooks, ends.home, "tunnel", ends.url, *nobody, "--resign", "--source", "none")
    assert (unknown.returncode, "there is no source 'none' here to sign for" in unknown.stderr) == (1, True)


async def test_the_command_stops_with_an_error_at_what_is_refused(make: Callable[..., Any]) -> None:
    ends = await make(secret=OTHER_SECRET)
    await ends.there.stack.send(from_github(b"{}"))
    arguments = ("tunnel", ends.url, "--to", ends.to, "--since", "all", "--retries", "0", "--app", "feeds_app:consumer")
    (ends.home / "feeds_app.py").write_text("from feeds import senders\n\nconsumer = senders()\n")

    stopped = await asyncio.to_thread(webhooks, ends.home, *arguments)
    unknown = await asyncio.to_thread(webhooks, ends.home, *arguments, "--resign")
    with started(ends.home, *arguments, "--resign", WEBHOOKS_SECRET_GITHUB=OTHER_SECRET) as resigning:
        await ends.arrived(1, lambda: resigning.output)
        await asyncio.to_thread(resigning.says, "signed anew")

    assert (stopped.returncode, unknown.returncode) == (1, 1)
    assert "stopped at github" in stopped.stderr
    assert "--resign" in stopped.stderr
    assert "WEBHOOKS_SECRET_GITHUB" in unknown.stderr
