"""Programs that put the receiver on the internet, as executables on the PATH that say what the real ones say; and the
probe that shows where an address leads."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from consumers import SECRET, from_shortcut, served, stack, stories
from gates import until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from webhooks import Consumer, GitHub, Shortcut, StandardWebhooks
from webhooks.errors import ConfigurationError
from webhooks.tunnel import presence, probe
from webhooks.tunnel import running as run_of_a_program
from webhooks.tunnel.exposing import exposed
from webhooks.tunnel.presence import missing
from webhooks.tunnel.probe import NotReached, is_probe, made, reached, takes
from webhooks.tunnel.programs import Program, cloudflared, ngrok, ssh
from webhooks.tunnel.running import ProgramFailed, running

LOCAL = "http://127.0.0.1:8000"
ADDRESS = "https://four-random-words-here.trycloudflare.com"

# What the real programs say, in the order in which they say it.
CLOUDFLARED = f"""\
2026-06-12T10:00:00Z INF Thank you for trying Cloudflare Tunnel. Doing so, without a Cloudflare account, is a quick way
2026-06-12T10:00:00Z INF Requesting new quick Tunnel on trycloudflare.com...
2026-06-12T10:00:03Z INF +--------------------------------------------------------------------------------------------+
2026-06-12T10:00:03Z INF |  Your quick Tunnel has been created! Visit it at (it may take some time to be reachable):  |
2026-06-12T10:00:03Z INF |  {ADDRESS}                                         |
2026-06-12T10:00:03Z INF +--------------------------------------------------------------------------------------------+
2026-06-12T10:00:03Z INF Registered tunnel connection connIndex=0 ip=198.41.200.13 location=fra08 protocol=quic
"""
NGROK = """\
t=2026-06-12T10:00:00+0000 lvl=info msg="open config file" path=/home/somebody/.config/ngrok/ngrok.yml err=nil
t=2026-06-12T10:00:00+0000 lvl=info msg="starting web service" obj=web addr=127.0.0.1:4040 allow_hosts=[]
t=2026-06-12T10:00:00+0000 lvl=info msg="client session established" obj=tunnels.session
t=2026-06-12T10:00:00+0000 lvl=info msg="started tunnel" obj=tunnels name=command_line addr=http://127.0.0.1:8000 \
url=https://zookeeper-pronto-ship.ngrok-free.dev
"""
LOCALHOST_RUN = """\
===============================================================================
Welcome to localhost.run!
Follow your favourite reverse tunnel at https://twitter.com/localhost_run.
To set up and manage custom domains go to:
https://admin.localhost.run/
** your connection id is 3a5a6f8e-0f1c, please mention it if you send me a message about an issue. **
authenticated as anonymous user
da7941d39b603e.lhr.life tunneled with tls termination, https://da7941d39b603e.lhr.life
"""
SERVEO = "\x1b[32mForwarding HTTP traffic from https://relego.serveo.net\x1b[0m\r\nPress g to start a GUI session.\r\n"
PINGGY = """\
You are not authenticated.
Your tunnel will expire in 60 minutes. Upgrade to Pinggy Pro to get unrestricted tunnels. https://dashboard.pinggy.io

http://rnabc-1-2-3-4.a.free.pinggy.link
https://rnabc-1-2-3-4.a.free.pinggy.link
"""
FORWARDED = """\
OpenSSH_9.2p1 Debian-2+deb12u10, OpenSSL 3.0.20 7 Apr 2026
debug1: Connecting to box.example.com [192.0.2.7] port 22.
debug1: remote forward success for: listen 9000, connect 127.0.0.1:8000
"""
WITH_A_CHILD = """\
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({!r}, "w").write(str(child.pid))
"""


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of programs, the only one on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def install(bin: Path, name: str, script: str) -> None:
    """Put a program on the PATH. It notes its arguments and process beside itself."""
    path = bin / name
    path.write_text(
        f"#!{sys.executable}\nimport json, os, signal, subprocess, sys, time\n"
        f"open({str(bin / (name + '.ran'))!r}, 'w').write(json.dumps([os.getpid(), sys.argv[1:]]))\n{script}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def saying(text: str, then: str = "time.sleep(60)", stream: str = "stderr") -> str:
    return f"sys.{stream}.write({text!r}); sys.{stream}.flush()\n{then}"


def ran(bin: Path, name: str) -> tuple[int, list[str]]:
    pid, arguments = json.loads((bin / f"{name}.ran").read_text())
    return pid, arguments


def quiet(text: str) -> None:
    """Nobody is told."""


def failed(error: ProgramFailed) -> list[str]:
    """All that a failure says."""
    return [str(error), *error.__notes__]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# The address


@pytest.mark.parametrize(
    ("program", "said", "address"),
    [
        (cloudflared(LOCAL), CLOUDFLARED, ADDRESS),
        (ngrok(LOCAL), NGROK, "https://zookeeper-pronto-ship.ngrok-free.dev"),
        (ssh(LOCAL, "nokey@localhost.run"), LOCALHOST_RUN, "https://da7941d39b603e.lhr.life"),
        (ssh(LOCAL, "serveo.net"), SERVEO, "https://relego.serveo.net"),
        (ssh(LOCAL, "free@a.pinggy.io"), PINGGY, "https://rnabc-1-2-3-4.a.free.pinggy.link"),
        (ssh(LOCAL, "box", port=9000, public="https://dev.example.com"), FORWARDED, "https://dev.example.com"),
    ],
    ids=["cloudflared", "ngrok", "localhost.run", "serveo.net", "pinggy", "own server"],
)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_the_address_is_found_in_what_the_program_says(
    program: Program, said: str, address: str, stream: str, bin: Path
) -> None:
    install(bin, program.name, saying(said, stream=stream))
    async with running(program, quiet, within_s=20) as started:
        assert started.url == address
        assert ran(bin, program.name)[1] == list(program.arguments)


async def test_only_the_receivers_port_is_given_to_the_program() -> None:
    for program in (cloudflared(LOCAL), ngrok(LOCAL)):
        assert [argument for argument in program.arguments if "127.0.0.1" in argument] == [LOCAL]
    assert "80:127.0.0.1:8000" in ssh(LOCAL, "serveo.net").arguments
    assert "9000:[::1]:8001" in ssh("http://[::1]:8001", "serveo.net", port=9000).arguments
    # A configuration of the user's could open more than that.
    assert cloudflared(LOCAL).arguments[1:3] == ("--config", os.devnull)


async def test_an_address_that_is_cut_while_it_is_written_is_taken_whole(bin: Path) -> None:
    script = (
        f"for part in {ADDRESS[:30]!r}, {ADDRESS[30:] + chr(10)!r}:\n  sys.stdout.write(part); sys.stdout.flush()\n"
    )
    install(bin, "cloudflared", script + "  time.sleep(0.2)\ntime.sleep(60)")
    async with running(cloudflared(LOCAL), quiet, within_s=20) as started:
        assert started.url == ADDRESS


# What goes wrong


@pytest.mark.parametrize(
    ("program", "how"),
    [
        (cloudflared(LOCAL), "developers.cloudflare.com"),
        (ngrok(LOCAL), "ngrok.com/download"),
        (ssh(LOCAL, "serveo.net"), "OpenSSH"),
    ],
    ids=["cloudflared", "ngrok", "ssh"],
)
async def test_a_program_that_is_missing_is_named_with_how_to_get_it(program: Program, how: str, bin: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{program.name} is not installed.*{how}"):
        async with running(program, quiet):
            pytest.fail("there is no program")


async def test_a_program_that_ends_is_told_with_its_last_words(bin: Path) -> None:
    words = "ERROR:  authentication failed: Usage of ngrok requires a verified account and authtoken.\n"
    install(bin, "ngrok", saying(words, "sys.exit(1)"))
    with pytest.raises(ProgramFailed) as ended:
        async with running(ngrok(LOCAL), quiet, within_s=20):
            pytest.fail("there is no tunnel")
    assert failed(ended.value) == [
        "ngrok ended by itself at its start, with exit status 1",
        "it said last:",
        f"  {words.strip()}",
        "should that not tell why: ngrok needs an account's token: ngrok config add-authtoken",
    ]


async def test_the_address_of_a_service_itself_is_no_address_of_ours(bin: Path) -> None:
    refused = 'failed to request quick Tunnel: Post "https://api.trycloudflare.com/tunnel": dial tcp: no such host\n'
    install(bin, "cloudflared", saying(refused, "sys.exit(1)"))
    with pytest.raises(ProgramFailed, match="no such host"):
        async with running(cloudflared(LOCAL), quiet, within_s=20):
            pytest.fail("there is no tunnel")
    assert ssh(LOCAL, "localhost.run").address("https://localhost.run/") is None


async def test_a_program_that_says_no_address_in_time_is_ended(bin: Path) -> None:
    install(bin, "ssh", saying("Welcome\n"))
    with pytest.raises(ProgramFailed, match="ssh gave no address within 1 s") as ended:
        async with running(ssh(LOCAL, "box.example.com"), quiet, within_s=1):
            pytest.fail("there is no address")
    assert failed(ended.value)[1:3] == ["it said last:", "  Welcome"]
    assert "--public" in failed(ended.value)[3]
    assert gone(ran(bin, "ssh")[0])


async def test_an_address_that_a_person_knows_is_taken_once_the_port_is_forwarded(bin: Path) -> None:
    """Until then whatever listens there may be another tunnel, and this one may still be refused the port."""
    refused = "Error: remote port forwarding failed for listen port 9000\n"
    install(bin, "ssh", saying(FORWARDED.replace("success", "failure") + refused, "sys.exit(255)"))
    program = ssh(LOCAL, "box.example.com", port=9000, public="https://dev.example.com")
    with pytest.raises(ProgramFailed) as ended:
        async with running(program, quiet, within_s=20):
            pytest.fail("the port is somebody else's")
    assert failed(ended.value)[2:-1] == [
        "  OpenSSH_9.2p1 Debian-2+deb12u10, OpenSSL 3.0.20 7 Apr 2026",
        f"  {refused.strip()}",
    ]
    assert "-N" in program.arguments


@pytest.mark.parametrize("host", ["box", "me@box.example.com", "ssh://me@box.example.com:2222"])
def test_a_server_is_written_as_ssh_takes_it(host: str) -> None:
    assert ssh(LOCAL, host).arguments[-1] == host


async def test_the_forward_is_that_of_this_ssh_and_not_of_one_that_serves_many() -> None:
    arguments = ssh(LOCAL, "box").arguments
    assert {"ControlMaster=no", "ControlPath=none"} <= set(arguments)


async def test_an_address_that_changes_is_told(bin: Path) -> None:
    later = LOCALHOST_RUN.replace("da7941d39b603e", "0f1c3a5a6f8e")
    go_on = bin / "go on"
    wait = f"while not os.path.exists({str(go_on)!r}): time.sleep(0.01)"
    install(bin, "ssh", saying(LOCALHOST_RUN * 2, f"{wait}\n{saying(later)}"))
    told: list[str] = []
    async with running(ssh(LOCAL, "nokey@localhost.run"), told.append, within_s=20) as started:
        go_on.touch()
        await until(lambda: len(told) == 2)
        assert started.url == "https://da7941d39b603e.lhr.life"
    assert "another address now, https://0f1c3a5a6f8e.lhr.life" in told[1]


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=touch x", "", "a b", "$(touch x)", "ssh://-oProxyCommand=x", "ssh://"]
)
def test_what_is_no_server_is_not_given_to_ssh(host: str) -> None:
    with pytest.raises(ConfigurationError, match="is no server"):
        ssh(LOCAL, host)


async def test_a_program_that_dies_later_is_told_with_how(bin: Path) -> None:
    install(bin, "cloudflared", saying(CLOUDFLARED + "2026 ERR lost it\n", "sys.stdin.read(); sys.exit(3)"))
    async with running(cloudflared(LOCAL), quiet, within_s=20) as started:
        os.kill(ran(bin, "cloudflared")[0], signal.SIGKILL)
        end = await asyncio.wait_for(started.ended, 20)
        assert (end.status, end.said[-1]) == (-9, "2026 ERR lost it")
        assert failed(started.failed("while it was open"))[0] == (
            "cloudflared ended by itself while it was open, killed by signal 9"
        )


async def test_output_without_end_neither_stops_the_program_nor_fills_the_memory(bin: Path) -> None:
    flood = (
        "open(sys.argv[0] + '.through', 'w') if [sys.stdout.write('x' * 300000 + chr(10)) for _ in range(20)] else 0"
    )
    install(bin, "cloudflared", saying(CLOUDFLARED, f"{flood}\nsys.stdout.flush()\ntime.sleep(60)", "stdout"))
    async with running(cloudflared(LOCAL), quiet, within_s=20) as started:
        await until(lambda: (bin / "cloudflared.through").exists(), within_s=20)
        assert not started.ended.done()


# The end


async def test_the_whole_group_of_a_program_is_ended_with_the_block(bin: Path) -> None:
    child = WITH_A_CHILD.format(str(bin / "child"))
    install(bin, "cloudflared", child + saying(CLOUDFLARED))
    async with running(cloudflared(LOCAL), quiet, within_s=20):
        pid, inner = ran(bin, "cloudflared")[0], int((bin / "child").read_text())
        assert os.getpgid(pid) == os.getpgid(inner) == pid != os.getpgid(0)
    await until(lambda: gone(pid) and gone(inner))


async def test_what_a_program_leaves_when_it_dies_is_ended_too(bin: Path) -> None:
    child = WITH_A_CHILD.format(str(bin / "child"))
    install(bin, "cloudflared", child + saying(CLOUDFLARED, "sys.exit(1)"))
    with pytest.raises(ProgramFailed):
        async with running(cloudflared(LOCAL), quiet, within_s=20) as started:
            await started.ended
            raise started.failed("later")
    await until(lambda: gone(int((bin / "child").read_text())))


async def test_a_program_that_ignores_being_asked_is_killed(bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_of_a_program, "END_WITHIN_S", 0.3)
    install(bin, "cloudflared", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + saying(CLOUDFLARED))
    started_at = time.monotonic()
    async with running(cloudflared(LOCAL), quiet, within_s=20):
        pid = ran(bin, "cloudflared")[0]
    assert gone(pid)
    assert time.monotonic() - started_at < 15


async def test_a_program_and_what_it_started_end_when_the_tunnel_is_killed(bin: Path) -> None:
    """The program on the PATH may only be what starts the real one, as npm's are."""
    child = WITH_A_CHILD.format(str(bin / "child"))
    install(bin, "cloudflared", child + saying(CLOUDFLARED))
    script = (
        "import asyncio, os, signal\nfrom webhooks.tunnel.programs import cloudflared\n"
        "from webhooks.tunnel.running import running\n"
        f"async def main():\n  async with running(cloudflared({LOCAL!r}), print):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    ended = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    await until(lambda: gone(ran(bin, "cloudflared")[0]) and gone(int((bin / "child").read_text())))


async def test_a_program_that_ignores_being_asked_ends_though_nobody_waits_for_that(bin: Path) -> None:
    """Ctrl-C a second time: its end is not waited for, and it is ended all the same."""
    install(bin, "cloudflared", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + saying(CLOUDFLARED))
    up, before = asyncio.Event(), set(psutil.Process().children())

    async def tunnel() -> None:
        async with running(cloudflared(LOCAL), quiet, within_s=20):
            up.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(tunnel())
    await up.wait()
    pid = ran(bin, "cloudflared")[0]
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.2)
    assert task.done()
    assert not gone(pid)
    await until(lambda: set(psutil.Process().children()) <= before)
    assert gone(pid)


async def test_what_guards_a_program_is_gone_with_it(bin: Path) -> None:
    install(bin, "cloudflared", saying(CLOUDFLARED))
    before = set(psutil.Process().children())
    async with running(cloudflared(LOCAL), quiet, within_s=20):
        assert len(set(psutil.Process().children()) - before) == 2
    assert set(psutil.Process().children()) <= before


# The probe

SHORTCUT = Shortcut()


@asynccontextmanager
async def receiver(database_url: str, *, secret: str = SECRET) -> AsyncIterator[tuple[str, Any]]:
    """A receiver on a socket, and the parts behind it."""
    consumer = Consumer(gates=[], sources=[Shortcut(), GitHub(), StandardWebhooks("acme")])
    secrets = {"shortcut": [secret], "acme": ["whsec_" + "A" * 43 + "="]}
    async with stack(database_url, consumer, work=False, secrets=secrets) as parts, served(parts.receiver) as port:
        yield f"http://127.0.0.1:{port}", parts


@pytest.mark.parametrize("source", [SHORTCUT, GitHub(), StandardWebhooks("acme")], ids=lambda source: source.name)
async def test_a_probe_is_answered_by_the_same_receiver_and_stored_by_none(source: Any, database_url: str) -> None:
    secret = SECRET if source.name != "acme" else "whsec_" + "A" * 43 + "="
    async with receiver(database_url) as (url, parts):
        await reached(url, url, source, secret, within_s=0)
        assert await takes(url, source, secret)
        assert await parts.deliveries() == []


async def test_another_receiver_with_the_same_secret_is_told_apart(database_url: str) -> None:
    async with receiver(database_url) as (ours, _), receiver(database_url) as (other, _):
        with pytest.raises(NotReached, match="another receiver with the same secret"):
            await reached(other, ours, SHORTCUT, SECRET, within_s=0)


async def test_whoever_cannot_sign_learns_nothing_from_a_probe(database_url: str) -> None:
    async with receiver(database_url) as (url, _), httpx.AsyncClient() as client:
        right, wrong = made(SHORTCUT, SECRET, 0), made(SHORTCUT, "another secret", 0)
        delivery = from_shortcut(stories(1), signature="0" * 64)
        refused = await client.post(f"{url}/webhooks/shortcut", content=wrong.body, headers=list(wrong.headers))
        plain = await client.post(f"{url}/webhooks/shortcut", content=delivery.body, headers=delivery.headers)
        assert (refused.status_code, refused.json()) == (plain.status_code, plain.json())
        # Two answers to one probe are equal, answers to two are not: one that was overheard is of no use for the next.
        first, again, next = [
            (await client.post(f"{url}/webhooks/shortcut", content=one.body, headers=list(one.headers))).json()["probe"]
            for one in (right, right, made(SHORTCUT, SECRET, 0))
        ]
        assert first == again != next


async def test_a_delivery_that_is_nearly_a_probe_is_stored(database_url: str) -> None:
    body = made(SHORTCUT, SECRET, 0).body
    async with receiver(database_url) as (_, parts):
        for near in (body + b" ", body.replace(b": ", b":"), b'{"webhooks_probe": "x"}', b"[" + body + b"]"):
            assert not is_probe(near)
            assert (await parts.send(from_shortcut(near))).status_code == 202
        assert len(await parts.deliveries()) == 4


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ASK_EVERY_S", 0.05)


async def forwarding(request: Request) -> PlainTextResponse:
    """A tunnel that works from the third request on."""
    request.app.state.asked += 1
    if request.app.state.asked < 3:
        return PlainTextResponse("error code: 1033", 530)
    async with httpx.AsyncClient() as client:
        there = await client.request(
            request.method,
            request.app.state.to + request.url.path,
            content=await request.body(),
            headers=[line for line in request.headers.items() if line[0] not in ("host", "content-length")],
        )
    return PlainTextResponse(there.text, there.status_code)


@asynccontextmanager
async def tunnel_to(url: str, *routes: Route) -> AsyncIterator[str]:
    app = Starlette(routes=[*routes, Route("/{path:path}", forwarding, methods=["GET", "POST"])])
    app.state.to, app.state.asked = url, 0
    async with served(app) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.usefixtures("impatient")
async def test_an_address_that_is_not_known_everywhere_yet_is_asked_again(database_url: str) -> None:
    async with receiver(database_url) as (url, _), tunnel_to(url) as public:
        await reached(public, url, SHORTCUT, SECRET, within_s=20)


@pytest.mark.usefixtures("impatient")
async def test_an_address_that_leads_nowhere_is_told_with_what_it_answers(database_url: str) -> None:
    async def nowhere(request: Request) -> PlainTextResponse:
        return PlainTextResponse("no tunnel here", 404)

    everything = Route("/{path:path}", nowhere, methods=["GET", "POST"])
    async with receiver(database_url) as (url, _), tunnel_to(url, everything) as public:
        with pytest.raises(NotReached, match=r"does not lead to the receiver.*answers 404"):
            await reached(public, url, SHORTCUT, SECRET, within_s=0.2)
        with pytest.raises(NotReached, match="no answer from"):
            await reached("http://127.0.0.1:1", url, SHORTCUT, SECRET, within_s=0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("status", [200, 401, 403, 421])
async def test_an_address_that_leads_to_the_control_plane_too_is_refused(status: int, database_url: str) -> None:
    async def status_of_everything(request: Request) -> JSONResponse:
        return JSONResponse({"phases": []}, status)

    async with receiver(database_url) as (url, _), tunnel_to(url, Route("/api/status", status_of_everything)) as public:
        with pytest.raises(NotReached, match="only a control plane has that path"):
            await reached(public, url, SHORTCUT, SECRET, within_s=20)


async def test_a_receiver_with_another_secret_is_told_before_anything_is_opened(database_url: str, bin: Path) -> None:
    install(bin, "cloudflared", saying(CLOUDFLARED))
    async with receiver(database_url, secret="its own") as (url, _):
        assert not await takes(url, SHORTCUT, SECRET)
        with pytest.raises(NotReached, match="start the tunnel with the settings, and in the dir"):
            async with exposed(cloudflared(url), url, SHORTCUT, SECRET, quiet):
                pytest.fail("nothing is reachable")
    with pytest.raises(NotReached, match=r"nothing listens at http://127\.0\.0\.1:1: start the receiver"):
        async with exposed(cloudflared(LOCAL), "http://127.0.0.1:1", SHORTCUT, SECRET, quiet):
            pytest.fail("nothing is there")
    assert not (bin / "cloudflared.ran").exists()


@pytest.mark.usefixtures("impatient")
async def test_a_program_that_dies_while_it_is_probed_is_not_waited_for(database_url: str, bin: Path) -> None:
    install(bin, "ssh", saying(FORWARDED + "bind: Permission denied\n", "sys.exit(255)"))
    public = "http://127.0.0.1:1"
    async with receiver(database_url) as (url, _):
        with pytest.raises(ProgramFailed) as ended:
            async with exposed(ssh(url, "box", public=public), url, SHORTCUT, SECRET, quiet):
                pytest.fail("nothing is reachable")
    assert failed(ended.value)[0] == "ssh ended by itself while its address was probed, with exit status 255"
    assert failed(ended.value)[-2] == "  bind: Permission denied"


@pytest.mark.usefixtures("impatient")
async def test_the_receiver_is_exposed_for_the_block(database_url: str, bin: Path) -> None:
    async with receiver(database_url) as (url, parts), tunnel_to(url) as public:
        install(bin, "ssh", saying(FORWARDED))
        told: list[str] = []
        async with exposed(ssh(url, "box", public=public), url, SHORTCUT, SECRET, told.append) as started:
            delivery = from_shortcut(stories(7))
            async with httpx.AsyncClient() as client:
                there = f"{started.url}/webhooks/shortcut"
                answer = await client.post(there, content=delivery.body, headers=delivery.headers)
            assert answer.status_code == 202
            pid = ran(bin, "ssh")[0]
        assert gone(pid)
        [row] = await parts.deliveries()
        assert bytes(row["body"]) == delivery.body
    assert told == [
        f"started ssh, process {pid}",
        f"it gave {public}",
        f"probing whether that leads to {url}, for 60 s at most",
        f"ended ssh: {public} leads here no more",
    ]


@pytest.mark.usefixtures("impatient")
async def test_why_an_address_does_not_lead_here_yet_is_told_until_it_does(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "TELL_EVERY_S", 0.0)
    told: list[str] = []
    async with receiver(database_url) as (url, _), tunnel_to(url) as public:
        await reached(public, url, SHORTCUT, SECRET, within_s=20, tell=told.append)
    assert [line.partition(" s: ")[2] for line in told] == ["it answers 530 to a signed probe"] * 2


async def test_a_program_that_takes_its_time_is_told_with_its_last_line(
    bin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_of_a_program, "TELL_EVERY_S", 0.2)
    wait = f"\nwhile not os.path.exists({str(bin / 'go')!r}): time.sleep(0.02)\n"
    install(bin, "cloudflared", saying("Requesting new quick Tunnel\n", wait + saying(CLOUDFLARED)))
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if "Requesting" in text:
            (bin / "go").touch()

    async with running(cloudflared(LOCAL), tell, within_s=20) as started:
        assert started.url == ADDRESS
    assert told[0].startswith("started cloudflared, process ")
    assert "cloudflared gave no address yet, after 0 s; its last line: Requesting new quick Tunnel" in told
    assert told[-1] == f"ended cloudflared: {ADDRESS} leads here no more"


# Whether a receiver is there at all


async def test_a_receiver_that_is_there_misses_nothing_and_one_that_is_not_is_told(database_url: str) -> None:
    async with receiver(database_url) as (url, parts):
        assert await missing(url) is None
        assert await parts.deliveries() == []
    told = await missing("http://127.0.0.1:1", "they wait")
    assert told == "nothing listens at http://127.0.0.1:1: start the receiver with webhooks serve --dev; they wait"


async def test_somebody_else_at_the_receivers_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(Starlette()) as port:
        told = await missing(f"http://127.0.0.1:{port}", "they wait")
    assert told is not None
    assert told.endswith("seems to be no receiver of webhooks: GET /healthz gave 404")


async def test_a_receiver_that_is_held_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "ASK_WITHIN_S", 0.2)

    over = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        over.set()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await missing(url) == (
            f"{url} does not answer (it said nothing in time): is it held up, by a breakpoint perhaps?"
        )
        await over.wait()
