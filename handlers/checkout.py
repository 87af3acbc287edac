"""Short-lived checkouts of the repository, each of one commit in a directory of its own.

Only the one commit is fetched, so a large history costs nothing. No remote is configured in the checkout, and the
token only ever stands in the environment of the git that talks to it: a drafter finds neither.
"""

from __future__ import annotations

import asyncio
import base64
import shutil
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from email.utils import parseaddr
from pathlib import Path

from handlers.runner import run
from handlers.settings import Settings, needed, settings

GIT_LIMIT = timedelta(minutes=5)
# Neither a person's hooks nor a key that asks for a passphrase: nobody is there, and a commit must come out the same.
GIT = ("git", "-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false", "-c", "core.autocrlf=false")


async def git(
    *arguments: str,
    cwd: Path,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    limit: timedelta = GIT_LIMIT,
) -> str:
    """Run git in `cwd` and return what it printed, without the white space around it."""
    variables = {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", **(environment or {})}
    return (await run([*GIT, *arguments], cwd=cwd, stdin=stdin, environment=variables, timeout=limit)).decode().strip()


@asynccontextmanager
async def temporary_directory() -> AsyncGenerator[Path]:
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="patch-"))
    try:
        yield directory
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


@asynccontextmanager
async def checkout(revision: str) -> AsyncGenerator[Path]:
    """A directory with the files of `revision` (a branch, or a commit's full id) of the repository."""
    now = settings()
    async with temporary_directory() as directory:
        await git("init", "--quiet", cwd=directory)
        fetch = ("fetch", "--quiet", "--depth", "1", "--no-tags", remote(now), revision)
        await git(*fetch, cwd=directory, environment=credentials(now))
        await git("checkout", "--quiet", "--detach", "FETCH_HEAD", cwd=directory)
        yield directory


async def head(directory: Path) -> str:
    return await git("rev-parse", "HEAD", cwd=directory)


async def check_applies(directory: Path, diff: str, commit: str) -> None:
    """Make sure that `diff` applies to `commit`, whatever the drafter has done to the files meanwhile.

    Raises:
        CommandFailed: it does not.
    """
    environment = {"GIT_INDEX_FILE": str(directory / ".git" / "index-of-the-check")}
    await git("read-tree", commit, cwd=directory, environment=environment)
    await git("apply", "--check", "--cached", cwd=directory, stdin=diff.encode(), environment=environment)


async def commit(directory: Path, diff: str, message: str, at: datetime) -> str:
    """Apply `diff` and commit it; the same arguments in the same place make the same commit, and so the same id."""
    name, address = parseaddr(settings().author)
    date = f"{int(at.timestamp())} +0000"
    person = {
        "GIT_AUTHOR_NAME": name,
        "GIT_AUTHOR_EMAIL": address,
        "GIT_AUTHOR_DATE": date,
        "GIT_COMMITTER_NAME": name,
        "GIT_COMMITTER_EMAIL": address,
        "GIT_COMMITTER_DATE": date,
    }
    await git("apply", "--index", cwd=directory, stdin=diff.encode())
    await git("commit", "--quiet", "--file=-", cwd=directory, stdin=message.encode(), environment=person)
    return await head(directory)


async def push(directory: Path, branch: str) -> None:
    """Push HEAD as `branch`. The same commit again changes nothing; other commits there are never overwritten.

    Raises:
        CommandFailed: the remote refused, or could not be reached.
    """
    now = settings()
    await git("push", "--quiet", remote(now), f"HEAD:refs/heads/{branch}", cwd=directory, environment=credentials(now))


def remote(now: Settings) -> str:
    """What git fetches from and pushes to: an URL, or the absolute path of a directory.

    Raises:
        Escalate: neither `PATCH_REPOSITORY` nor `PATCH_GITHUB_REPOSITORY` is set.
    """
    if now.repository is not None:
        local = Path(now.repository).expanduser()
        return str(local.resolve()) if local.exists() else now.repository
    name = needed(now.github_repository, "PATCH_GITHUB_REPOSITORY", "owner/name, the repository to patch")
    return f"https://github.com/{name}.git"


def credentials(now: Settings) -> dict[str, str]:
    """The environment that lets git in: our token, for GitHub's own host and no other.

    Raises:
        Escalate: the repository is GitHub's, and there is no token.
    """
    token = now.github_token
    if now.repository is None:
        token = needed(token, "WEBHOOKS_GITHUB_TOKEN", "git fetches and pushes with it")
    if token is None:
        return {}
    basic = base64.b64encode(f"x-access-token:{token.get_secret_value()}".encode()).decode()
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "http.https://github.com/.extraHeader",
        "GIT_CONFIG_VALUE_0": f"Authorization: Basic {basic}",
    }
