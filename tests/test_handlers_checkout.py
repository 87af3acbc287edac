"""Drafting and pushing against a real repository on disk."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from handlers.checkout import checkout, credentials, git, remote
from handlers.models import PatchSession, Story
from handlers.patch_effects import push_patch, run_drafter
from handlers.runner import CommandFailed, inherited
from handlers.settings import settings
from webhooks import Escalate

STORY = Story(id=5, name="Retry failed exports", description="They fail at night.")
DIFF = "--- a/hello.txt\n+++ b/hello.txt\n@@ -1 +1 @@\n-hello\n+good night\n"


class Upstream:
    """A bare repository with one file on main, and what a test wants to know of it."""

    def __init__(self, path: Path) -> None:
        self.path = path / "upstream.git"
        work = path / "work"
        self.git("init", "-q", "--bare", str(self.path), cwd=path)
        self.git("init", "-q", str(work), cwd=path)
        (work / "hello.txt").write_text("hello\n")
        self.work = work
        self.commit("first")

    def commit(self, message: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        self.git("add", ".", cwd=self.work)
        self.git(*who, "commit", "-q", "--allow-empty", "-m", message, cwd=self.work)
        self.git("push", "-q", str(self.path), "HEAD:refs/heads/main", cwd=self.work)
        return self.git("rev-parse", "HEAD", cwd=self.work)

    def git(self, *arguments: str, cwd: Path | None = None) -> str:
        command = ["git", *arguments]
        return subprocess.check_output(command, cwd=cwd or self.path, env=inherited(os.environ), text=True).strip()


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upstream:
    upstream = Upstream(tmp_path)
    monkeypatch.setenv("PATCH_REPOSITORY", str(upstream.path))
    return upstream


Drafter = Callable[[str], None]


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drafter:
    """Configures a drafter that runs the given Python program."""
    file = tmp_path / "a drafter.py"
    monkeypatch.setenv("PATCH_DRAFTER", shlex.join([sys.executable, str(file)]))

    def written(program: str) -> None:
        file.write_text(program)

    return written


def prints(diff: str) -> str:
    return f"print({diff!r}, end='')"


def session(patch: str | None, base_commit: str | None) -> PatchSession:
    opened_at = datetime(2026, 6, 12, 10, tzinfo=UTC)
    return PatchSession(sc_id=5, title="Retry", patch=patch, base_commit=base_commit, opened_at=opened_at)


# ---- drafting


async def test_the_drafter_reads_the_story_in_a_checkout_and_its_diff_is_taken(
    upstream: Upstream, drafter: Drafter
) -> None:
    drafter(
        "import json, pathlib, sys\n"
        "story = json.load(sys.stdin)\n"
        "before = pathlib.Path('hello.txt').read_text()\n"
        "after = '/'.join([story['name'], story['question'], story['answer']])\n"
        "print(f'--- a/hello.txt\\n+++ b/hello.txt\\n@@ -1 +1 @@\\n-{before}+{after}')"
    )
    draft = await run_drafter(STORY, "Which colour?", "Green")
    assert draft.diff.endswith("\n-hello\n+Retry failed exports/Which colour?/Green\n")
    assert draft.base_commit == upstream.git("rev-parse", "main")


async def test_a_diff_may_stand_in_prose_and_lack_its_last_line_end(upstream: Upstream, drafter: Drafter) -> None:
    drafter(prints("Here is the patch:\n\n" + DIFF.rstrip("\n")))
    assert (await run_drafter(STORY, None, None)).diff.endswith("+good night\n")


async def test_a_drafter_that_changed_the_files_itself_still_proposes_its_diff(
    upstream: Upstream, drafter: Drafter
) -> None:
    drafter(f"open('hello.txt', 'w').write('good night\\n')\n{prints(DIFF)}")
    assert (await run_drafter(STORY, None, None)).diff == DIFF


async def test_nothing_of_the_checkout_is_left(upstream: Upstream, drafter: Drafter, tmp_path: Path) -> None:
    drafter(f"import os\nopen({str(tmp_path / 'where')!r}, 'w').write(os.getcwd())\n{prints(DIFF)}")
    await run_drafter(STORY, None, None)
    where = Path((tmp_path / "where").read_text())
    assert where.name.startswith("patch-")
    assert list(where.parent.glob(where.name)) == []


@pytest.mark.parametrize("program", ["", "print()", "print('  ')"])
async def test_a_drafter_with_nothing_to_propose_is_for_a_person(
    upstream: Upstream, drafter: Drafter, program: str
) -> None:
    drafter(program)
    with pytest.raises(Escalate, match="printed no diff"):
        await run_drafter(STORY, None, None)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (prints(DIFF.replace("-hello", "-goodbye")), "patch does not apply"),
        (prints("I could not find the bug.\n"), "No valid patches"),
        (prints(DIFF.replace("hello.txt", "../outside.txt")), r"\.\./outside\.txt"),
        (prints(DIFF.replace("hello.txt", ".git/config")), r"\.git/config"),
        (f"import sys; sys.stdout.buffer.write({DIFF.replace('night', 'nächt').encode('latin-1')!r})", "not UTF-8"),
        (prints(DIFF.replace("night", "n\0ght")), "NUL"),
        ("import sys; sys.exit('the model is overloaded')", r"exited with code 1:\nthe model is overloaded"),
    ],
)
async def test_a_drafter_that_fails_says_how(upstream: Upstream, drafter: Drafter, program: str, says: str) -> None:
    drafter(program)
    with pytest.raises(CommandFailed, match=says):
        await run_drafter(STORY, None, None)


async def test_without_a_drafter_a_person_is_told_the_setting(upstream: Upstream) -> None:
    with pytest.raises(Escalate, match=r"^set PATCH_DRAFTER: "):
        await run_drafter(STORY, None, None)


async def test_a_branch_that_is_not_there_is_named(
    upstream: Upstream, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCH_BASE_BRANCH", "trunk")
    with pytest.raises(CommandFailed, match="trunk"):
        await run_drafter(STORY, None, None)


# ---- pushing


async def test_pushing_again_makes_the_same_commit_though_the_base_has_moved_on(upstream: Upstream) -> None:
    base = upstream.git("rev-parse", "main")
    first = await push_patch(session(DIFF, base))
    upstream.commit("meanwhile")
    assert await push_patch(session(DIFF, base)) == first
    assert upstream.git("rev-parse", "patch/sc-5") == first
    assert upstream.git("rev-parse", "patch/sc-5^") == base
    assert upstream.git("show", "patch/sc-5:hello.txt") == "good night"
    assert upstream.git("log", "-1", "--format=%an <%ae> %aI %cI %s", "patch/sc-5") == (
        "patch flow <patch-flow@localhost> 2026-06-12T10:00:00+00:00 2026-06-12T10:00:00+00:00 Retry [sc-5]"
    )


async def test_commits_that_a_person_added_to_the_branch_are_not_overwritten(upstream: Upstream) -> None:
    base = upstream.git("rev-parse", "main")
    upstream.commit("a person's work")
    upstream.git("branch", "patch/sc-5", "main")
    with pytest.raises(CommandFailed, match="rejected"):
        await push_patch(session(DIFF, base))
    assert upstream.git("rev-parse", "patch/sc-5") == upstream.git("rev-parse", "main")


@pytest.mark.parametrize(("patch", "base"), [(None, "a" * 40), (DIFF, None)])
async def test_a_session_without_a_patch_cannot_be_pushed(
    upstream: Upstream, patch: str | None, base: str | None
) -> None:
    with pytest.raises(Escalate, match="the session has no patch"):
        await push_patch(session(patch, base))


async def test_neither_hooks_nor_signing_of_the_machine_touch_the_commit(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await push_patch(session(DIFF, upstream.git("rev-parse", "main")))
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "pre-commit").write_text("#!/bin/sh\nexit 1\n")
    (hooks / "pre-commit").chmod(0o755)
    config = tmp_path / "gitconfig"
    config.write_text(f"[core]\nhooksPath = {hooks}\n[commit]\ngpgSign = true\n[user]\nname = somebody else\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    assert await push_patch(session(DIFF, upstream.git("rev-parse", "main"))) == expected


async def test_a_repository_that_we_are_run_from_is_left_alone(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(upstream.work / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(upstream.work / ".git" / "index"))
    async with checkout("main") as directory:
        assert Path(await git("rev-parse", "--absolute-git-dir", cwd=directory)).parent.name == directory.name


# ---- where, and with which key


def test_the_repository_is_github_s_where_none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCH_GITHUB_REPOSITORY", "acme/widgets")
    assert remote(settings()) == "https://github.com/acme/widgets.git"
    monkeypatch.delenv("PATCH_GITHUB_REPOSITORY")
    with pytest.raises(Escalate, match=r"^set PATCH_GITHUB_REPOSITORY"):
        remote(settings())


def test_a_directory_is_meant_from_here_and_an_address_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clone").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATCH_REPOSITORY", "clone")
    assert remote(settings()) == str((tmp_path / "clone").resolve())
    monkeypatch.setenv("PATCH_REPOSITORY", "git@github.com:acme/widgets.git")
    assert remote(settings()) == "git@github.com:acme/widgets.git"


def test_our_token_is_for_github_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Escalate, match=r"^set WEBHOOKS_GITHUB_TOKEN: "):
        credentials(settings())
    monkeypatch.setenv("PATCH_REPOSITORY", "/srv/widgets.git")
    assert credentials(settings()) == {}
    monkeypatch.setenv("WEBHOOKS_GITHUB_TOKEN", "secret")
    assert credentials(settings()) == {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "http.https://github.com/.extraHeader",
        "GIT_CONFIG_VALUE_0": "Authorization: Basic eC1hY2Nlc3MtdG9rZW46c2VjcmV0",
    }


async def test_the_drafter_finds_neither_the_token_nor_the_remote(
    upstream: Upstream, drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEBHOOKS_GITHUB_TOKEN", "secret")
    seen = tmp_path / "seen"
    drafter(
        "import os, pathlib\n"
        f"seen = open({str(seen)!r}, 'w')\n"
        "print(dict(os.environ), file=seen)\n"
        "print(pathlib.Path('.git/config').read_text(), file=seen)\n"
        f"{prints(DIFF)}"
    )
    await run_drafter(STORY, None, None)
    assert "[core]" in seen.read_text()
    for kept_from_it in ("extraHeader", "secret", "[remote", str(upstream.path)):
        assert kept_from_it not in seen.read_text()
