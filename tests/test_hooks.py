"""Hooks at GitHub and Shortcut: made, reused, removed, and found again after a kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import respx
from channels import Server
from click.testing import CliRunner
from consumers import digest, from_github, served
from gates import until
from processes import SECRETS, Process, serving, started, webhooks

from webhooks import Consumer, Event, GitHub, Shortcut, Transaction
from webhooks.cli.hooks import hooks
from webhooks.cli.stopping import ONE_SIGNAL_S
from webhooks.errors import ConfigurationError, ProviderError
from webhooks.hooks import Target, Wanted, events_for, hook_secrets, parsed, record, registered, source_of, tidied
from webhooks.hooks.left_behind import Entry, left_behind, recorded
from webhooks.hooks.target import same_address
from webhooks.serve.secrets import read_secrets
from webhooks.settings import Settings

REPOSITORY = Target("github", "acme/shop")
SHORTCUT = Target("shortcut")
URL = "https://one.example.com/webhooks/github"
GITHUB = "https://api.github.com/repos/acme/shop/hooks"
WORKSPACE = "https://api.app.shortcut.com/api/v3/integrations/webhook"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", github_token="a-token", shortcut_token="another-token")


@pytest.fixture
def api() -> Iterator[respx.MockRouter]:
    """The providers; a call that a test did not foresee fails."""
    with respx.mock(assert_all_called=False) as router:
        yield router


@pytest.fixture
def told() -> list[str]:
    return []


def hook(id: int = 12, url: str = URL, events: tuple[str, ...] = ("push",)) -> dict[str, Any]:
    return {
        "type": "Repository",
        "id": id,
        "name": "web",
        "active": True,
        "events": list(events),
        "config": {"url": url, "content_type": "json", "insecure_ssl": "0", "secret": "********"},
        "last_response": {"code": 202, "status": "active", "message": "OK"},
    }


def wanted(target: Target = REPOSITORY, url: str = URL) -> Wanted:
    return Wanted(target, url, ("issues", "push"), "fresh", "lasting")


def on_record(settings: Settings) -> list[Entry]:
    return recorded(settings.home)


def killed(settings: Settings, target: Target, *steps: tuple[str, str | None], url: str = URL) -> None:
    """Leave a record as a process does that is killed after these steps."""
    script = (
        "import sys, json, os, signal\nfrom pathlib import Path\nfrom webhooks.hooks import record, Target\n"
        "home, provider, repository, url, steps = json.loads(sys.argv[1])\n"
        "with record(Path(home), Target(provider, repository), provider, url, secret='of the dead') as kept:\n"
        "    [kept.note(state, id) for state, id in steps]\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    said = json.dumps([str(settings.home), target.provider, target.repository, url, steps])
    ended = subprocess.run([sys.executable, "-c", script, said], timeout=30, check=False)
    assert ended.returncode == -signal.SIGKILL


# Targets


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("shortcut", SHORTCUT),
        ("github:acme/shop", REPOSITORY),
        ("github:acme/shop.js_2", Target("github", "acme/shop.js_2")),
        ("github:acme/shop,events=push", Target("github", "acme/shop", ("push",))),
        ("github:acme/shop,events=issues,pull_request", Target("github", "acme/shop", ("issues", "pull_request"))),
        ("github:acme/shop,events=*", Target("github", "acme/shop", ("*",))),
        ("github:acme/shop,events=push,push", Target("github", "acme/shop", ("push",))),
    ],
)
def test_a_target_is_read_as_it_is_written(text: str, target: Target) -> None:
    assert parsed(text) == target


@pytest.mark.parametrize(
    "text",
    [
        "",
        "github",
        "github:acme",
        "github:acme/shop/hooks",
        "github:../user",
        "github:acme/shop?x",
        "github:acme/shop,push",
        "github:acme/shop,events=",
        "github:acme/shop,events=issues.opened",
        "shortcut,events=push",
        "gitlab:acme/shop",
    ],
)
def test_a_target_that_is_none_is_refused_with_how_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"write it as|name events as|leave the rest out"):
        parsed(text)


def consumer(*sources: GitHub | Shortcut) -> Consumer:
    return Consumer(gates=[], sources=sources)


def test_the_source_is_the_one_of_that_name_or_the_only_one_of_that_kind() -> None:
    usual, other = GitHub(), GitHub("internal")
    assert source_of(REPOSITORY, consumer(usual, other, Shortcut())) is usual
    assert source_of(REPOSITORY, consumer(other)) is other
    assert source_of(REPOSITORY, consumer(usual, other), "internal") is other
    for sources, named in [((Shortcut(),), None), ((GitHub("a"), GitHub("b")), None), ((usual,), "shortcut")]:
        with pytest.raises(ConfigurationError, match="--source names one"):
            source_of(REPOSITORY, consumer(*sources), named)


def test_a_hook_subscribes_to_what_the_consumer_handles_and_never_to_ping() -> None:
    github = GitHub()
    assert events_for(REPOSITORY, github) == ("*",)
    for name in ("pull_request.closed", "pull_request.opened", "issues.labeled", "ping"):

        @github.on(name)
        async def handle(event: Event, tx: Transaction) -> None: ...

    assert events_for(REPOSITORY, github) == ("issues", "pull_request")
    assert events_for(parsed("github:acme/shop,events=push"), github) == ("push",)


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (URL, True),
        ("HTTPS://One.Example.com:443/webhooks/github/", True),
        ("http://one.example.com/webhooks/github", False),
        ("https://one.example.com/webhooks/GitHub", False),
        ("https://two.example.com/webhooks/github", False),
        ("http://[", False),
        (None, False),
    ],
)
def test_addresses_are_the_same_where_a_request_to_them_is(one: str | None, same: bool) -> None:
    assert same_address(one, URL) is same


# A hook for the time of a tunnel


async def test_a_hook_is_made_with_its_secret_and_removed_at_the_end(
    api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    with record(settings.home, REPOSITORY, "github", URL, secret="fresh") as kept:
        api.get(GITHUB).respond(json=[hook(1, "https://other.example.com/")])
        made = api.post(GITHUB).respond(201, json=hook())
        gone = api.delete(f"{GITHUB}/12").respond(204)
        async with registered(settings, wanted(), kept, told.append) as found:
            assert (found.hook.id, found.reused) == ("12", False)
            assert [(entry.state, entry.id) for entry in on_record(settings)] == [("made", "12")]
            assert not gone.called
        assert gone.called
    sent = json.loads(made.calls.last.request.content)
    assert sent["events"] == ["issues", "push"]
    assert sent["config"] == {"url": URL, "content_type": "json", "secret": "fresh", "insecure_ssl": "0"}
    assert made.calls.last.request.headers["authorization"] == "Bearer a-token"
    assert on_record(settings) == []
    assert told == ["removed the hook 12 at github:acme/shop"]


async def test_it_is_on_record_before_the_provider_is_asked(
    api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    seen: list[str] = []

    def create(request: httpx.Request) -> httpx.Response:
        seen.extend(entry.state for entry in on_record(settings))
        return httpx.Response(201, json=hook())

    with record(settings.home, REPOSITORY, "github", URL) as kept:
        api.get(GITHUB).respond(json=[])
        api.post(GITHUB).mock(side_effect=create)
        api.delete(f"{GITHUB}/12").respond(204)
        async with registered(settings, wanted(), kept, told.append):
            pass
    assert seen == ["asked"]


@pytest.mark.parametrize("ending", [KeyboardInterrupt, asyncio.CancelledError, RuntimeError])
async def test_it_is_removed_however_the_block_ends(
    ending: type[BaseException], api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    api.get(GITHUB).respond(json=[])
    api.post(GITHUB).respond(201, json=hook())
    gone = api.delete(f"{GITHUB}/12").respond(204)
    with pytest.raises(ending), record(settings.home, REPOSITORY, "github", URL) as kept:
        async with registered(settings, wanted(), kept, told.append):
            raise ending
    assert gone.called
    assert on_record(settings) == []


async def test_one_that_sends_here_already_is_reused_and_stays(
    api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    with record(settings.home, REPOSITORY, "github", URL, secret="fresh") as kept:
        api.get(GITHUB).respond(json=[hook(url=URL + "/")])
        made, gone = api.post(GITHUB).respond(201), api.delete(f"{GITHUB}/12").respond(204)
        changed = api.patch(f"{GITHUB}/12").respond(json=hook(events=("issues", "push")))
        async with registered(settings, wanted(), kept, told.append) as found:
            assert (found.hook.id, found.reused) == ("12", True)
    sent = json.loads(changed.calls.last.request.content)
    # It stays, so what it sends besides stays, and its secret is one that the receiver knows then as well.
    assert sent["add_events"] == ["issues", "push"]
    assert "events" not in sent
    assert sent["config"]["secret"] == "lasting"
    assert not made.called
    assert not gone.called
    assert on_record(settings) == []


async def test_one_past_the_first_page_is_found(api: respx.MockRouter, settings: Settings, told: list[str]) -> None:
    others = [hook(id, f"https://{id}.example.com/") for id in range(100, 200)]
    with record(settings.home, REPOSITORY, "github", URL) as kept:
        api.get(GITHUB, params={"page": 1}).respond(json=others)
        api.get(GITHUB, params={"page": 2}).respond(json=[hook()])
        api.patch(f"{GITHUB}/12").respond(json=hook())
        made = api.post(GITHUB)
        async with registered(settings, wanted(), kept, told.append) as found:
            assert found.reused
        assert not made.called


async def test_what_an_unanswered_call_may_have_made_is_looked_for_and_removed(
    api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    api.get(GITHUB).mock(side_effect=[httpx.Response(200, json=[]), httpx.Response(200, json=[hook()])])
    api.post(GITHUB).mock(side_effect=httpx.ReadTimeout("no answer"))
    gone = api.delete(f"{GITHUB}/12").respond(204)
    with record(settings.home, REPOSITORY, "github", URL) as kept, pytest.raises(ProviderError):
        async with registered(settings, wanted(), kept, told.append):
            pytest.fail("there is no hook")
    assert gone.called
    assert on_record(settings) == []


async def test_a_refusal_leaves_nothing_on_record(api: respx.MockRouter, settings: Settings, told: list[str]) -> None:
    look = api.get(GITHUB).respond(json=[])
    api.post(GITHUB).respond(422, json={"message": "Validation Failed"})
    with record(settings.home, REPOSITORY, "github", URL) as kept, pytest.raises(ProviderError, match="Validation"):
        async with registered(settings, wanted(), kept, told.append):
            pytest.fail("there is no hook")
    assert len(look.calls) == 1
    assert on_record(settings) == []


async def test_one_that_cannot_be_removed_now_is_removed_at_the_next_start(
    api: respx.MockRouter, settings: Settings, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api.get(GITHUB).respond(json=[])
    api.post(GITHUB).respond(201, json=hook())
    api.delete(f"{GITHUB}/12").respond(403, json={"message": "Forbidden"})
    with record(settings.home, REPOSITORY, "github", URL) as kept:
        async with registered(settings, wanted(), kept, told.append):
            pass
    assert "is still at github:acme/shop" in told[-1]
    assert [entry.id for entry in on_record(settings)] == ["12"]
    gone = api.delete(f"{GITHUB}/12").respond(204)
    await tidied(settings, told.append)
    assert gone.called
    assert on_record(settings) == []


async def test_without_a_token_the_setting_is_named_and_nothing_is_kept(tmp_path: Path, told: list[str]) -> None:
    bare = Settings(home=tmp_path)
    for target, name in ((REPOSITORY, "WEBHOOKS_GITHUB_TOKEN"), (SHORTCUT, "WEBHOOKS_SHORTCUT_TOKEN")):
        with record(bare.home, target, "github", URL) as kept, pytest.raises(ConfigurationError, match=name):
            async with registered(bare, wanted(target), kept, told.append):
                pytest.fail("there is no hook")
    assert on_record(bare) == []


# Left behind by a kill


@pytest.mark.parametrize("target", [REPOSITORY, SHORTCUT], ids=str)
async def test_a_hook_of_a_killed_process_is_removed_at_the_next_start(
    target: Target, api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    killed(settings, target, ("asked", None), ("made", "77"))
    where = GITHUB if target is REPOSITORY else WORKSPACE
    gone = api.delete(f"{where}/77").respond(204)
    await tidied(settings, told.append)
    assert gone.called
    assert told == [f"an earlier tunnel left the hook 77 at {target}: removed"]
    assert on_record(settings) == []


async def test_one_made_by_a_call_whose_answer_was_not_kept_is_known_by_its_address(
    api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    killed(settings, REPOSITORY, ("asked", None))
    api.get(GITHUB).respond(json=[hook(5, "https://other.example.com/"), hook(78)])
    gone = api.delete(f"{GITHUB}/78").respond(204)
    await tidied(settings, told.append)
    assert gone.called
    assert on_record(settings) == []


async def test_a_lasting_hook_at_the_same_address_is_not_taken_for_what_was_left_behind(
    api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    killed(settings, REPOSITORY, ("asked", None))
    killed(settings, REPOSITORY, ("lasting", "78"))
    api.get(GITHUB).respond(json=[hook(78)])
    gone = api.delete(f"{GITHUB}/78").respond(204)
    await tidied(settings, told.append)
    assert not gone.called
    assert [entry.state for entry in on_record(settings)] == ["lasting"]


async def test_one_that_was_there_before_is_not_taken_for_what_was_left_behind(
    api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    killed(settings, REPOSITORY, ("asked", None))
    [path] = (settings.home / "hooks").glob("*.jsonl")
    path.write_bytes(path.read_bytes() + b'{"state": "asked", "before": ["12"]}\n')
    api.get(GITHUB).respond(json=[hook(12), hook(78)])
    theirs, ours = api.delete(f"{GITHUB}/12").respond(204), api.delete(f"{GITHUB}/78").respond(204)
    await tidied(settings, told.append)
    assert (theirs.called, ours.called) == (False, True)
    assert on_record(settings) == []


async def test_of_several_that_it_may_have_made_none_is_removed_and_a_person_is_told(
    api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    killed(settings, REPOSITORY, ("asked", None))
    api.get(GITHUB).respond(json=[hook(12), hook(78)])
    gone = api.delete(url__startswith=GITHUB).respond(204)
    await tidied(settings, told.append)
    assert not gone.called
    assert "12, 78" in told[0]


async def test_what_was_there_before_or_is_on_another_record_survives_a_call_without_an_answer(
    api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    killed(settings, REPOSITORY, ("lasting", "78"))
    # The one that is there is gone when it is to be changed, as GitHub says, and there again afterwards.
    api.get(GITHUB).mock(
        side_effect=[httpx.Response(200, json=[hook(12)]), httpx.Response(200, json=[hook(12), hook(78)])]
    )
    api.patch(f"{GITHUB}/12").respond(404)
    seen: list[tuple[str, ...]] = []

    def unanswered(request: httpx.Request) -> httpx.Response:
        seen.extend(entry.before for entry in on_record(settings) if entry.state == "asked")
        raise httpx.ReadTimeout("no answer")

    api.post(GITHUB).mock(side_effect=unanswered)
    gone = api.delete(url__startswith=GITHUB).respond(204)
    target = parsed("github:acme/shop,events=push")
    with record(settings.home, target, "github", URL) as kept, pytest.raises(ProviderError):
        async with registered(settings, wanted(target), kept, told.append):
            pytest.fail("there is no hook")
    assert seen == [("12",)]
    assert not gone.called
    assert [entry.state for entry in on_record(settings)] == ["lasting"]


async def test_one_that_a_living_tunnel_reuses_is_removed_when_that_has_ended(
    api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    api.get(GITHUB).respond(json=[])
    api.post(GITHUB).respond(201, json=hook())
    gone = api.delete(f"{GITHUB}/12").respond(204)
    with record(settings.home, REPOSITORY, "github", URL) as other:
        with record(settings.home, REPOSITORY, "github", URL) as kept:
            async with registered(settings, wanted(), kept, told.append):
                other.note("reused", "12")
        await tidied(settings, told.append)
        assert not gone.called
        assert "another record names it" in told[-1]
    await tidied(settings, told.append)
    assert gone.called
    assert on_record(settings) == []


@pytest.mark.parametrize("state", ["made", "lasting"])
async def test_what_was_made_and_is_lasting_since_is_left(
    state: str, api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    killed(settings, REPOSITORY, ("asked", None), ("made", "77"))
    killed(settings, REPOSITORY, (state, "77"))
    gone = api.delete(f"{GITHUB}/77").respond(204)
    await tidied(settings, told.append)
    # Two dead ones do not keep each other's.
    assert gone.called is (state == "made")
    assert [entry.state for entry in on_record(settings)] == ([] if state == "made" else ["lasting"])


async def test_where_shortcut_did_not_say_an_id_a_person_is_told_where_to_look(
    settings: Settings, told: list[str]
) -> None:
    killed(settings, SHORTCUT, ("asked", None))
    await tidied(settings, told.append)
    assert URL in told[0]
    assert "Integrations" in told[0]
    assert on_record(settings) == []


@pytest.mark.usefixtures("api")
async def test_one_that_is_somebody_elses_is_left_alone(settings: Settings, told: list[str]) -> None:
    killed(settings, REPOSITORY, ("reused", "12"))
    killed(settings, REPOSITORY)  # before anything was asked
    await tidied(settings, told.append)
    assert told == []
    assert on_record(settings) == []


async def test_one_that_is_gone_already_is_forgotten(
    api: respx.MockRouter, settings: Settings, told: list[str]
) -> None:
    killed(settings, REPOSITORY, ("made", "77"))
    api.delete(f"{GITHUB}/77").respond(404, json={"message": "Not Found"})
    await tidied(settings, told.append)
    assert "gone already" in told[0]
    assert on_record(settings) == []


async def test_one_that_cannot_be_seen_to_now_stays_on_record(settings: Settings, told: list[str]) -> None:
    killed(settings, REPOSITORY, ("made", "77"))
    await tidied(Settings(home=settings.home), told.append)
    assert "WEBHOOKS_GITHUB_TOKEN" in told[0]
    assert [entry.id for entry in on_record(settings)] == ["77"]


@pytest.mark.usefixtures("api")
async def test_the_hook_of_a_living_tunnel_is_not_touched(settings: Settings, told: list[str]) -> None:
    with record(settings.home, REPOSITORY, "github", URL) as kept:
        kept.note("made", "77")
        await tidied(settings, told.append)
        assert told == []
        assert [entry.id for entry in on_record(settings)] == ["77"]
    with left_behind(settings.home) as found:
        assert [entry.id for entry in found] == ["77"]
        with left_behind(settings.home) as again:  # two that start at once do not both see to it
            assert again == []


def test_a_line_cut_short_takes_nothing_of_the_others_with_it(settings: Settings) -> None:
    killed(settings, REPOSITORY, ("asked", None), ("made", "77"))
    [path] = (settings.home / "hooks").glob("*.jsonl")
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for cut in range(1, len(last)):
        path.write_bytes(whole[:-cut])
        found = on_record(settings)
        assert [(entry.state, entry.url) for entry in found] in ([("asked", URL)], [("made", URL)])
    path.write_bytes(b"\xff not a record\n[]\n")
    assert on_record(settings) == []


def test_a_record_can_be_read_by_its_owner_alone(settings: Settings) -> None:
    with record(settings.home, REPOSITORY, "github", URL, secret="fresh"):
        [path] = (settings.home / "hooks").iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700


# The secret of a hook, and the receiver


def test_a_receiver_for_developing_takes_the_secret_of_a_hook_as_long_as_it_is_on_record(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", "own")
    in_force = read_secrets(consumer(GitHub()), settings, dev=True).in_force
    assert in_force["github"] == ("own",)
    with record(settings.home, REPOSITORY, "github", URL, secret="fresh"):
        assert in_force["github"] == ("own", "fresh")
        with record(settings.home, SHORTCUT, "shortcut", URL, secret="of another source"):
            assert in_force["github"] == ("own", "fresh")
    assert in_force["github"] == ("own",)
    assert hook_secrets(settings.home) == {}


def test_two_hooks_within_a_tick_of_the_file_systems_clock_are_both_taken(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", "own")
    in_force = read_secrets(consumer(GitHub()), settings, dev=True).in_force
    with record(settings.home, REPOSITORY, "github", URL, secret="one"):
        folder = settings.home / "hooks"
        moment = folder.stat().st_mtime_ns
        assert in_force["github"] == ("own", "one")
        with record(settings.home, REPOSITORY, "github", URL, secret="two"):
            os.utime(folder, ns=(moment, moment))
            assert set(in_force["github"]) == {"own", "one", "two"}


def test_any_other_receiver_does_not(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB", "own")
    with record(settings.home, REPOSITORY, "github", URL, secret="fresh"):
        assert read_secrets(consumer(GitHub()), settings, dev=False).in_force["github"] == ("own",)


# The command


class Provider:
    """A stand-in for GitHub and Shortcut on a socket: what it was asked, and the hooks it has."""

    def __init__(self) -> None:
        self.hooks: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.secrets: list[str] = []
        self.says_id = True
        self.slow_s = 0.0
        self.refuses: int | None = None
        self.at_making: Callable[[], object] = lambda: None
        self.refuses_making: int | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        await asyncio.sleep(self.slow_s)
        method, path = scope["method"], scope["path"]
        self.asked.append((method, path))
        status, answer = self.answered(method, path, json.loads(body) if body else None)
        content = b"" if answer is None else json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def answered(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        last = path.rpartition("/")[2]
        if path.endswith(("/hooks", "/integrations/webhook")):
            return self.whole(method, path, body)
        if last not in self.hooks:
            return 404, {"message": "Not Found"}
        if method == "DELETE":
            del self.hooks[last]
            return 204, None
        if method == "PATCH":
            self.secrets.append(body["config"].pop("secret"))
            self.hooks[last]["events"] = body.get("events") or self.hooks[last]["events"]
            self.hooks[last]["config"] |= body["config"]
        return 200, self.hooks[last]

    def whole(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if self.refuses is not None:
            return self.refuses, {"message": "Resource not accessible by personal access token"}
        if method == "GET":
            return 200, list(self.hooks.values())
        self.at_making()
        if self.refuses_making is not None:
            return self.refuses_making, {"message": "no"}
        id = str(len(self.asked) + 100)
        if "webhook_url" in body:
            self.secrets.append(body["secret"])
            self.hooks[id] = {"id": id, "webhook_url": body["webhook_url"], "disabled": False}
            return (201, {"id": id}) if self.says_id else (204, None)
        self.secrets.append(body["config"].pop("secret"))
        self.hooks[id] = {**hook(int(id)), "events": body["events"], "config": body["config"]}
        return 201, self.hooks[id]


@pytest.fixture
async def provider() -> Any:
    standing_in = Provider()
    async with served(standing_in) as port:
        yield standing_in, f"http://127.0.0.1:{port}"


async def ran(cwd: Path, api: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    given = {"GITHUB_API": api, "SHORTCUT_API": api, "WEBHOOKS_GITHUB_TOKEN": "t", "WEBHOOKS_SHORTCUT_TOKEN": "t"}
    return await asyncio.to_thread(webhooks, cwd, "hooks", *arguments, **given, **variables)


async def test_the_command_makes_lists_and_removes_a_hook_of_github(provider: Any, tmp_path: Path) -> None:
    standing_in, api = provider
    base = ("--url", "https://hooks.example.com")
    made = await ran(tmp_path, api, "create", "github:acme/shop", *base, WEBHOOKS_SECRET_GITHUB="own")
    assert made.returncode == 0, made.stderr
    assert "https://hooks.example.com/webhooks/github" in made.stdout
    assert standing_in.secrets == ["own"]
    kept = dict(standing_in.hooks)
    refused = await ran(tmp_path, api, "create", "github:acme/shop", *base)
    assert refused.returncode == 1
    assert "set WEBHOOKS_SECRET_GITHUB to the receiver's secret, or" in refused.stderr
    assert (standing_in.hooks, len(standing_in.secrets)) == (kept, 1)
    again = await ran(tmp_path, api, "create", "github:acme/shop", *base, "--new-secret", "--json")
    said = json.loads(again.stdout)
    assert said["changed"] is True
    assert said["secret"] == standing_in.secrets[-1] != "own"
    assert len(standing_in.hooks) == 1
    # On record, so that it is not taken for what a killed tunnel left behind.
    assert [(entry.state, entry.id) for entry in recorded(tmp_path / ".webhooks")] == [("lasting", said["id"])]
    listed = await ran(tmp_path, api, "list", "github:acme/shop")
    assert said["id"] in listed.stdout
    assert "https://hooks.example.com/webhooks/github" in listed.stdout
    unasked = await ran(tmp_path, api, "delete", "github:acme/shop", said["id"])
    assert unasked.returncode != 0
    assert len(standing_in.hooks) == 1
    gone = await ran(tmp_path, api, "delete", "github:acme/shop", said["url"], "--yes")
    assert gone.returncode == 0, gone.stderr
    assert standing_in.hooks == {}
    assert recorded(tmp_path / ".webhooks") == []
    missing = await ran(tmp_path, api, "delete", "github:acme/shop", "12345", "--yes")
    assert missing.returncode == 1
    assert "has no hook 12345" in missing.stderr
    none = await ran(tmp_path, api, "list", "github:acme/shop", "--json")
    assert json.loads(none.stdout) == []


async def test_a_hook_is_removed_by_what_it_was_made_with_and_only_when_a_person_agrees(
    provider: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing_in, api = provider
    base = "https://hooks.example.com"
    for target in ("github:acme/shop", "shortcut"):
        made = await ran(tmp_path, api, "create", target, "--url", base)
        assert made.returncode == 0, made.stderr
        assert "it sends every event to " in made.stdout or target != "shortcut"
        assert "a new secret, which is shown only now" in made.stdout
        kept = dict(standing_in.hooks)
        unasked = await ran(tmp_path, api, "delete", target, base)
        assert (unasked.returncode, "nobody to ask: --yes" in unasked.stderr) == (2, True)
        monkeypatch.setenv("GITHUB_API", api)
        monkeypatch.setenv("SHORTCUT_API", api)
        monkeypatch.setenv("WEBHOOKS_GITHUB_TOKEN", "t")
        monkeypatch.setenv("WEBHOOKS_SHORTCUT_TOKEN", "t")
        monkeypatch.setenv("WEBHOOKS_HOME", str(tmp_path / ".webhooks"))
        declined = await asyncio.to_thread(CliRunner().invoke, hooks, ["delete", target, base], input="n\n")
        assert declined.exit_code == 1
        assert f"nothing was removed: the hook {next(iter(kept))} stays" in declined.output
        assert standing_in.hooks == kept
        agreed = await asyncio.to_thread(CliRunner().invoke, hooks, ["delete", target, base], input="y\n")
        assert agreed.exit_code == 0, agreed.output
        assert standing_in.hooks == {}


async def test_an_address_that_several_hooks_send_to_removes_none(provider: Any, tmp_path: Path) -> None:
    standing_in, api = provider
    for name in ("github", "hub"):
        number = str(len(standing_in.hooks))
        standing_in.hooks[number] = hook(int(number), f"https://hooks.example.com/webhooks/{name}")
    ended = await ran(tmp_path, api, "delete", "github:acme/shop", "https://hooks.example.com", "--yes")
    assert (ended.returncode, "2 hooks at github:acme/shop send to" in ended.stderr) == (1, True)
    assert len(standing_in.hooks) == 2
    none = await ran(tmp_path, api, "delete", "github:acme/shop", "", "--yes")
    assert none.returncode == 1
    assert len(standing_in.hooks) == 2


async def test_the_command_finds_its_own_hooks_of_shortcut_again(provider: Any, tmp_path: Path) -> None:
    standing_in, api = provider
    base = ("--url", "https://hooks.example.com/")
    made = await ran(tmp_path, api, "create", "shortcut", *base)
    assert made.returncode == 0, made.stderr
    assert f"WEBHOOKS_SECRET_SHORTCUT={standing_in.secrets[0]}" in made.stdout
    [first] = standing_in.hooks
    refused = await ran(tmp_path, api, "create", "shortcut", *base)
    assert refused.returncode == 1
    assert list(standing_in.hooks) == [first]
    again = await ran(tmp_path, api, "create", "shortcut", *base, "--new-secret")
    assert again.returncode == 0, again.stderr
    [second] = standing_in.hooks
    assert second != first
    listed = json.loads((await ran(tmp_path, api, "list", "shortcut", "--json")).stdout)
    assert [one["id"] for one in listed] == [second]
    gone = await ran(tmp_path, api, "delete", "shortcut", "https://hooks.example.com/webhooks/shortcut", "--yes")
    assert gone.returncode == 0, gone.stderr
    assert standing_in.hooks == {}
    assert recorded(tmp_path / ".webhooks") == []


async def test_the_command_keeps_the_secret_and_says_which_events_a_hook_sent_before(
    provider: Any, tmp_path: Path
) -> None:
    standing_in, api = provider
    for events in ("issues", "push"):
        place = (f"github:acme/shop,events={events}", "--url", "https://hooks.example.com")
        made = await ran(tmp_path, api, "create", *place, WEBHOOKS_SECRET_GITHUB="own")
        assert made.returncode == 0, made.stderr
    assert "it sends push to https://hooks.example.com/webhooks/github; it sent issues before" in made.stdout
    assert standing_in.secrets == ["own", "own"]
    [only] = standing_in.hooks.values()
    assert only["events"] == ["push"]


@pytest.mark.parametrize("target", ["github:acme/shop", "shortcut"])
async def test_where_no_record_can_be_kept_no_hook_is_made(target: str, provider: Any, tmp_path: Path) -> None:
    """Its secret would be known to nobody."""
    standing_in, api = provider
    (tmp_path / ".webhooks").mkdir()
    (tmp_path / ".webhooks" / "hooks").write_text("in the way")
    made = await ran(tmp_path, api, "create", target, "--url", "https://hooks.example.com")
    assert (made.returncode, "cannot keep a record" in made.stderr) == (1, True)
    assert standing_in.hooks == {}


@pytest.mark.parametrize("status", [403, 500])
async def test_what_another_makes_after_a_call_that_failed_is_not_tidied_away(
    status: int, provider: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lasting address is the same for all: the hook that is there later may be anybody's."""
    standing_in, api = provider
    base = "https://hooks.example.com"
    standing_in.refuses_making = status
    failed = await ran(tmp_path, api, "create", "github:acme/shop", "--url", base)
    assert failed.returncode == 1
    assert standing_in.hooks == {}
    standing_in.hooks["177"] = hook(177, f"{base}/webhooks/github")
    monkeypatch.setenv("GITHUB_API", api)
    monkeypatch.setenv("WEBHOOKS_GITHUB_TOKEN", "t")
    monkeypatch.setenv("WEBHOOKS_HOME", str(tmp_path / ".webhooks"))
    await tidied(Settings.load(), print)
    assert list(standing_in.hooks) == ["177"]


async def test_what_another_makes_after_a_call_that_was_killed_is_not_tidied_away(
    provider: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing_in, api = provider
    standing_in.slow_s = 2.0
    given = {"GITHUB_API": api, "WEBHOOKS_GITHUB_TOKEN": "t"}
    ways = ("create", "github:acme/shop", "--url", "https://hooks.example.com")
    with started(tmp_path, "hooks", *ways, name="hooks", **given) as process:
        await until(lambda: recorded(tmp_path / ".webhooks"))
        process.signal(signal.SIGKILL)
        await asyncio.to_thread(process.ends)
    standing_in.slow_s = 0.0
    standing_in.hooks["177"] = hook(177, "https://hooks.example.com/webhooks/github")
    monkeypatch.setenv("GITHUB_API", api)
    monkeypatch.setenv("WEBHOOKS_GITHUB_TOKEN", "t")
    monkeypatch.setenv("WEBHOOKS_HOME", str(tmp_path / ".webhooks"))
    await tidied(Settings.load(), print)
    assert "177" in standing_in.hooks


async def test_a_hook_that_the_provider_refuses_leaves_no_record_of_it(provider: Any, tmp_path: Path) -> None:
    _, api = provider
    made = await ran(tmp_path, api, "create", "shortcut", "--url", f"https://hooks.example.com/{'x' * 2048}")
    assert (made.returncode, "2048 characters" in made.stderr) == (1, True)


async def test_a_hook_whose_id_shortcut_keeps_to_itself_is_said_to_be_removable_by_hand_only(
    provider: Any, tmp_path: Path
) -> None:
    standing_in, api = provider
    standing_in.says_id = False
    made = await ran(tmp_path, api, "create", "shortcut", "--url", "https://hooks.example.com")
    assert made.returncode == 0, made.stderr
    assert "by hand only" in made.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("list", "gitlab:acme/shop"), "write it as github:OWNER/REPO"),
        (("create", "shortcut", "--url", "hooks.example.com"), "is no address to send to"),
        (("delete", "shortcut", "../../stories/1", "--yes"), "has no hook ../../stories/1"),
        (("list", "github:acme/shop,events=push"), "name github:acme/shop; events= goes with create"),
        ((), "Missing command"),
    ],
)
async def test_a_mistake_is_one_line(arguments: tuple[str, ...], said: str, provider: Any, tmp_path: Path) -> None:
    _, api = provider
    ended = await ran(tmp_path, api, *arguments)
    assert ended.returncode != 0
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


# A real tunnel, killed


class Tunnels:
    """Tunnels to one receiver for developing, over a stand-in for ssh; its public address is its own."""

    def __init__(self, directory: Path, receiver: str, api: str) -> None:
        self.directory, self.receiver, self.pid = directory, receiver, directory / "ssh.pid"
        ssh = directory / "bin" / "ssh"
        ssh.parent.mkdir()
        note = f"open({str(self.pid)!r}, 'w').write(str(os.getpid()))"
        forwarded = "print('debug1: remote forward success for: listen 80', flush=True)"
        ssh.write_text(f"#!{sys.executable}\nimport os, time\n{note}\n{forwarded}\ntime.sleep(120)\n")
        ssh.chmod(0o700)
        path = f"{ssh.parent}:{os.environ['PATH']}"
        self.variables = {**SECRETS, "GITHUB_API": api, "WEBHOOKS_GITHUB_TOKEN": "t", "PATH": path}
        self.count = 0

    @asynccontextmanager
    async def started(self, *more: str) -> AsyncIterator[Process]:
        """Start one, and wait until it is ready."""
        self.count += 1
        ways = ("--via", "ssh", "box", "--public", self.receiver, "--to", self.receiver, *more)
        with started(self.directory, "tunnel", *ways, name=f"tunnel{self.count}", **self.variables) as process:
            await asyncio.to_thread(process.says, "Ctrl-C ends it")
            yield process

    def program_is_gone(self) -> bool:
        return not psutil.pid_exists(int(self.pid.read_text()))

    async def delivered(self, secret: str) -> int:
        """Post a delivery signed with a secret, and return the receiver's answer."""
        request = from_github(b"{}", event="issues", signature=f"sha256={digest(b'{}', secret)}")
        async with httpx.AsyncClient() as client:
            answer = await client.post(self.receiver + request.path, content=request.body, headers=request.headers)
        return answer.status_code


@pytest.fixture
async def tunnels(provider: Any, database_url: str, tmp_path: Path) -> AsyncIterator[Tunnels]:
    with serving(tmp_path, database_url, "--dev") as receiver:
        yield Tunnels(tmp_path, receiver.receiver, provider[1])


REGISTER = ("--register", "github:acme/shop,events=issues")


async def test_the_hook_of_a_tunnel_that_was_killed_is_removed_when_it_starts_again(
    provider: Any, tunnels: Tunnels
) -> None:
    github, _ = provider
    async with tunnels.started(*REGISTER) as tunnel:
        [first] = github.hooks
        assert github.hooks[first]["config"]["url"] == f"{tunnels.receiver}/webhooks/github"
        assert github.hooks[first]["events"] == ["issues"]
        [secret] = github.secrets
        assert secret not in SECRETS.values()
        assert await tunnels.delivered(secret) == 202
        tunnel.signal(signal.SIGKILL)
        assert tunnel.ends() == -signal.SIGKILL
    assert list(github.hooks) == [first]
    # Until it is removed it goes on sending, and what it sends is not lost.
    assert await tunnels.delivered(secret) == 202
    async with tunnels.started(*REGISTER) as tunnel:
        assert f"an earlier tunnel left the hook {first} at github:acme/shop: removed" in tunnel.output
        [second] = github.hooks
        assert second != first
        assert await tunnels.delivered(secret) == 401
        assert await tunnels.delivered(github.secrets[-1]) == 202


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
async def test_a_tunnel_that_is_stopped_removes_its_hook_and_its_program(
    number: signal.Signals, provider: Any, tunnels: Tunnels
) -> None:
    github, _ = provider
    async with tunnels.started(*REGISTER) as tunnel:
        assert len(github.hooks) == 1
        [id] = github.hooks
        github.slow_s = 2.0  # longer than a stop is patient with what it cancelled
        for _ in range(2):  # as `timeout` does: once to us, once to our group
            tunnel.signal(number)
        assert await asyncio.to_thread(tunnel.ends) == 0
        assert tunnel.output.splitlines()[-2:] == [
            f"removed the hook {id} at github:acme/shop",
            f"ended ssh: {tunnels.receiver} leads here no more",
        ]
        assert tunnel.log == ""
    assert github.hooks == {}
    assert tunnels.program_is_gone()
    assert recorded(tunnels.directory / ".webhooks") == []
    assert await tunnels.delivered(github.secrets[-1]) == 401


async def test_a_second_signal_cuts_the_end_short_and_says_what_is_left(provider: Any, tunnels: Tunnels) -> None:
    github, _ = provider
    async with tunnels.started(*REGISTER) as tunnel:
        [id] = github.hooks
        github.slow_s = 60.0
        tunnel.signal(signal.SIGINT)
        await asyncio.sleep(1.5 * ONE_SIGNAL_S)  # no signal is told from a copy of the first any sooner
        tunnel.signal(signal.SIGINT)
        assert await asyncio.to_thread(tunnel.ends) == 130
        assert tunnel.log == "cut short: a hook that is still there is removed by the next webhooks tunnel --via\n"
    assert tunnels.program_is_gone()
    github.slow_s = 0.0
    async with tunnels.started(*REGISTER) as tunnel:
        assert f"an earlier tunnel left the hook {id} at github:acme/shop: " in tunnel.output
        assert id not in github.hooks


async def test_a_tunnel_whose_program_dies_removes_its_hook_and_says_why(provider: Any, tunnels: Tunnels) -> None:
    github, _ = provider
    async with tunnels.started(*REGISTER) as tunnel:
        os.kill(int(tunnels.pid.read_text()), signal.SIGKILL)
        assert await asyncio.to_thread(tunnel.ends) == 1
        assert tunnel.log.splitlines() == [
            "webhooks: ssh ended by itself while the tunnel was open, killed by signal 9",
            "  it said nothing",
        ]
    assert github.hooks == {}


async def test_a_channel_is_followed_before_a_hook_sends_to_it_and_what_that_signs_is_found_again(
    provider: Any, tunnels: Tunnels
) -> None:
    """GitHub sends a ping as soon as a hook is made, and a channel keeps nothing."""
    github, api = provider
    channel = Server()
    channel.slow_s = 1.0
    github.at_making = lambda: followers.append(len(channel.followers))
    followers: list[int] = []
    async with served(channel) as port:
        address = f"http://127.0.0.1:{port}/channel"
        ways = ("--via", "smee", address, "--to", tunnels.receiver, *REGISTER)
        variables = {**tunnels.variables, "GITHUB_API": api}
        with started(tunnels.directory, "tunnel", *ways, name="tunnel", **variables) as tunnel:
            await asyncio.to_thread(tunnel.says, "registered the hook")
            body = json.dumps({"zen": "é", "hook_id": 1}, indent=2).encode()
            signature = f"sha256={digest(body, github.secrets[-1])}"
            request = from_github(body, event="issues", signature=signature)
            async with httpx.AsyncClient() as client:
                await client.post(address, content=request.body, headers=request.headers)
            await asyncio.to_thread(tunnel.says, "→ 202 accepted")
            assert "were found again" in tunnel.output
            tunnel.signal(signal.SIGINT)
            assert await asyncio.to_thread(tunnel.ends) == 0
    assert followers == [1]
    assert github.hooks == {}


async def test_what_a_token_may_not_do_is_told_before_anything_is_opened(provider: Any, tunnels: Tunnels) -> None:
    github, _ = provider
    github.refuses = 403
    ways = ("--via", "ssh", "box", "--public", tunnels.receiver, "--to", tunnels.receiver, *REGISTER)
    with started(tunnels.directory, "tunnel", *ways, name="tunnel", **tunnels.variables) as tunnel:
        assert await asyncio.to_thread(tunnel.ends) == 1
    assert "403" in tunnel.log
    assert not tunnels.pid.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--via", "ngrok", "--register", "shortcut", "--register", "shortcut"), "names the same place twice"),
        (("--via", "ssh", "box", "--public", "dev.example.com"), "is no address"),
        (("--via", "ssh"), "--via ssh nokey@localhost.run"),
        (("--via", "smee"), "--via smee URL"),
        (("--via", "ngrok", "https://x.example.com"), "takes no address"),
        (("--via", "ngrok", "--resign"), "nothing is signed on the way"),
        (("--via", "ngrok", "--since", "1h"), "go with a deployed consumer"),
        (("--via", "ngrok", "--public", "https://x.example.com"), "go with --via ssh"),
        (("--via", "ngrok", "--to", "http://192.0.2.1:8000"), "another machine"),
        (("--via", "smee", "https://smee.example/x"), "Name one with --source"),
        (("--via", "ssh", "box", "--source", "github", "--source", "gitlab"), "there is no source 'gitlab'"),
        (("https://control.example.com", "--register", "shortcut"), "go with --via"),
        ((), "or a way with --via"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_go_together_is_said_in_one_line(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    ended = webhooks(tmp_path, "tunnel", *arguments, **SECRETS)
    assert ended.returncode != 0
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
