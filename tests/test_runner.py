"""The command runner: real processes, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import uvloop

from handlers.runner import CommandFailed, inherited, run

LONG = timedelta(seconds=30)


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


# A command with a grandchild. Both hold the write end of a named pipe: its end is the end of both.
FAMILY = """
import signal, subprocess, sys, time
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pipe = open(sys.argv[1], "wb", 0)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[pipe.fileno()])
pipe.write(b"both are here")
time.sleep(float(sys.argv[3]))
"""


class Family:
    """The read end of `FAMILY`'s pipe."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "pipe"
        os.mkfifo(self.path)
        self._file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self._file, True)

    def command(self, manners: str, seconds: int) -> list[str]:
        return python(FAMILY, str(self.path), manners, str(seconds))

    async def here(self) -> None:
        assert await self._next() == b"both are here"

    async def gone(self) -> None:
        assert await self._next() == b""

    async def _next(self) -> bytes:
        readable, _, _ = await asyncio.to_thread(select.select, [self._file], [], [], 20)
        assert readable, "they are still running, and say nothing"
        return os.read(self._file, 100)

    def close(self) -> None:
        os.close(self._file)


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    family = Family(tmp_path)
    yield family
    family.close()


async def test_what_goes_in_comes_out_however_much_larger_than_a_pipe_it_is() -> None:
    story = os.urandom(3 * 1024 * 1024)
    echo = python("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())")
    assert await run(echo, stdin=story, timeout=LONG) == story


async def test_a_command_that_does_not_read_its_input_is_no_fault() -> None:
    assert await run(python("print('done')"), stdin=b"x" * 1_000_000, timeout=LONG) == b"done\n"


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_command_may_be_gone_before_its_input_is_written(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def many() -> None:
        for size in (0, 1, 1_000_000) * 30:
            assert await run(["true"], stdin=b"x" * size, timeout=LONG) == b""

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(many())


async def test_no_shell_sees_the_arguments() -> None:
    program = "import sys; print(sys.argv[1:])"
    assert await run(python(program, "$HOME; echo `id` > x", "*"), timeout=LONG) == b"['$HOME; echo `id` > x', '*']\n"


async def test_it_runs_where_it_is_told_to(tmp_path: Path) -> None:
    where = await run(
        python("import os, sys; print(os.path.samefile('.', sys.argv[1]))", str(tmp_path)), cwd=tmp_path, timeout=LONG
    )
    assert where == b"True\n"


async def test_a_failure_says_its_code_and_the_last_of_what_it_complained_about() -> None:
    program = "import sys; sys.stderr.write('x' * 100_000 + '\\nthe model is overloaded\\n'); sys.exit(3)"
    with pytest.raises(CommandFailed, match=r"exited with code 3:\n(?s:.*)the model is overloaded$") as failure:
        await run(python(program), timeout=LONG)
    assert len(str(failure.value)) < 5_000


async def test_a_failure_by_signal_says_so() -> None:
    with pytest.raises(CommandFailed, match="was killed by signal 9"):
        await run(python("import os; os.kill(os.getpid(), 9)"), timeout=LONG)


@pytest.mark.parametrize("command", [["no-such-program-anywhere"], ["/"]])
async def test_a_command_that_cannot_be_started_is_named(command: list[str]) -> None:
    with pytest.raises(CommandFailed, match=rf"{command[0]} could not be started: "):
        await run(command, timeout=LONG)


@pytest.mark.parametrize("manners", ["deaf", "polite"])
async def test_past_its_time_limit_the_command_and_its_children_are_killed(family: Family, manners: str) -> None:
    with pytest.raises(CommandFailed, match=r"took longer than 0:00:02 and was killed"):
        await run(family.command(manners, 60), timeout=timedelta(seconds=2))
    await family.here()
    await family.gone()


async def test_cancelling_kills_the_command_and_its_children(family: Family) -> None:
    task = asyncio.create_task(run(family.command("polite", 60), timeout=LONG))
    await family.here()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await family.gone()


async def test_cancelling_twice_does_not_spare_a_command_that_ignores_sigterm(family: Family) -> None:
    task = asyncio.create_task(run(family.command("deaf", 60), timeout=LONG))
    await family.here()
    task.cancel()
    await asyncio.sleep(0)  # into the wait after SIGTERM
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await family.gone()


async def test_a_command_that_has_ended_leaves_no_child_behind_and_waits_for_none(family: Family) -> None:
    async with asyncio.timeout(20):  # the grandchild, which holds the pipes open, sleeps for a minute
        assert await run(family.command("polite", 0), timeout=LONG) == b""
    await family.here()
    await family.gone()


async def test_output_is_allowed_up_to_the_limit_and_not_a_byte_more() -> None:
    program = "import sys; sys.stdout.write('x' * int(sys.argv[1]))"
    assert len(await run(python(program, "200000"), timeout=LONG, max_output_bytes=200_000)) == 200_000
    with pytest.raises(CommandFailed, match="wrote more than 200000 bytes and was killed"):
        await run(python(program, "200001"), timeout=LONG, max_output_bytes=200_000)


async def test_endless_output_ends_the_command_at_once_and_is_not_kept() -> None:
    endless = python("import sys\nwhile True: sys.stdout.write('x' * 65536)")
    async with asyncio.timeout(20):
        with pytest.raises(CommandFailed, match="wrote more than 1000000 bytes"):
            await run(endless, timeout=timedelta(minutes=5), max_output_bytes=1_000_000)


async def test_the_command_sees_no_secret_of_ours_and_no_git_repository_of_somebody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden = {
        "WEBHOOKS_SHORTCUT_TOKEN": "s",
        "WEBHOOKS_SECRET_GITHUB": "s",
        "DATABASE_URL": "s",
        "PGPASSWORD": "s",
        "GITHUB_TOKEN": "s",
        "github_token": "s",
        "AWS_SECRET_ACCESS_KEY": "s",
        "GIT_DIR": "/nowhere",
        "GIT_CONFIG_VALUE_0": "Authorization: s",
    }
    for name, value in hidden.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MODEL_API_KEY", "kept")
    monkeypatch.setenv("MAX_TOKENS", "100")
    seen = json.loads(
        await run(
            python("import json, os; print(json.dumps(dict(os.environ)))"), timeout=LONG, environment={"EXTRA": "given"}
        )
    )
    assert not hidden.keys() & seen.keys()
    assert (seen["MODEL_API_KEY"], seen["MAX_TOKENS"], seen["EXTRA"]) == ("kept", "100", "given")
    assert seen["PATH"] == os.environ["PATH"]


def test_what_is_inherited_does_not_depend_on_letter_case() -> None:
    assert inherited({"My_Token": "s", "my_password_file": "s", "HOME": "/", "TOKENIZERS": "1"}) == {
        "HOME": "/",
        "TOKENIZERS": "1",
    }
