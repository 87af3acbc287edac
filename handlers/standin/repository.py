"""The stand-in's repository: a bare one on disk, where branches are pushed to and merged in."""

from __future__ import annotations

import asyncio
from pathlib import Path

from handlers.checkout import git, temporary_directory

MAIN = "main"
README = "# Hello World\n\nThe patch flow's playground: each merged story leaves a note in `notes/`.\n"
WHO = {
    "GIT_AUTHOR_NAME": "stand-in",
    "GIT_AUTHOR_EMAIL": "stand-in@localhost",
    "GIT_COMMITTER_NAME": "stand-in",
    "GIT_COMMITTER_EMAIL": "stand-in@localhost",
}


class Repository:
    """A bare repository at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._merging = asyncio.Lock()

    async def prepare(self) -> None:
        """Make it, with a first commit, unless it is there already."""
        if await self.commit_of(MAIN) is not None:
            return
        await git("init", "--quiet", "--bare", str(self.path), cwd=self.path.parent)
        await git("symbolic-ref", "HEAD", f"refs/heads/{MAIN}", cwd=self.path)
        async with temporary_directory() as directory:
            await git("init", "--quiet", cwd=directory)
            (directory / "README.md").write_text(README)
            await git("add", "README.md", cwd=directory)
            await git("commit", "--quiet", "--message=Say hello", cwd=directory, environment=WHO)
            await git("push", "--quiet", str(self.path), f"HEAD:refs/heads/{MAIN}", cwd=directory)

    async def commit_of(self, branch: str) -> str | None:
        """The commit that `branch` is at; None when there is no such branch, or no repository yet."""
        if not self.path.exists():
            return None
        listed = await git("for-each-ref", "--format=%(objectname)", f"refs/heads/{branch}", cwd=self.path)
        return listed or None

    async def merge(self, branch: str, title: str) -> str:
        """Merge `branch` into main, delete it, and return the merge's commit; once, however often it is asked for.

        Raises:
            CommandFailed: the two do not go together.
        """
        async with self._merging, temporary_directory() as directory:
            await git("clone", "--quiet", "--branch", MAIN, str(self.path), ".", cwd=directory)
            subject = f"Merge {branch}: {title}"
            done = await git("log", "--format=%H", "--fixed-strings", f"--grep={subject}", MAIN, cwd=directory)
            if await self.commit_of(branch) is None and done:
                return done.split("\n")[0]  # merged before, by a stand-in that was killed before it could say so
            message = f"--message={subject}"
            await git("merge", "--quiet", "--no-ff", message, f"origin/{branch}", cwd=directory, environment=WHO)
            await git("push", "--quiet", "origin", f"HEAD:refs/heads/{MAIN}", cwd=directory)
            await git("push", "--quiet", "origin", f":refs/heads/{branch}", cwd=directory)
            return await git("rev-parse", "HEAD", cwd=directory)

    async def show(self, commit: str) -> str:
        return await git("show", commit, cwd=self.path)
