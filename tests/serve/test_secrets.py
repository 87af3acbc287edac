"""Secrets in files that change while the process runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from webhooks import Consumer, GitHub, StandardWebhooks
from webhooks.serve import secrets
from webhooks.settings import Settings

Read = Callable[[], Sequence[str]]
OLD_NS = 1_600_000_000_000_000_000


def written(path: Path, text: str, age: int = 0) -> None:
    """Write a file as if it had been there for long: a young one is read again and again."""
    path.write_text(text)
    os.utime(path, ns=(OLD_NS + age, OLD_NS + age))


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], Read]:
    """How the receiver looks up the secrets of a source whose file this is."""
    monkeypatch.setattr(secrets, "LOOK_EVERY_S", 0.0)

    def of(path: Path) -> Read:
        monkeypatch.setenv("WEBHOOKS_SECRET_GITHUB_FILE", str(path))
        consumer = Consumer(gates=[], sources=[GitHub()])
        found = secrets.read_secrets(consumer, Settings(home=tmp_path), dev=False)
        return lambda: found.in_force["github"]

    return of


def test_a_file_that_changes_is_read_again_and_may_hold_both_secrets_meanwhile(
    live: Callable[[Path], Read], tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    written(path, "old\n")
    current = live(path)
    assert current() == ("old",)
    written(path, "old\nnew\n", age=1)
    assert current() == ("old", "new")
    written(path, "new\n", age=2)
    assert current() == ("new",)


def test_a_secret_that_is_mounted_changes_with_the_target_of_its_link(
    live: Callable[[Path], Read], tmp_path: Path
) -> None:
    """How Kubernetes does it: secret -> ..data/secret, and ..data -> a directory a version, swapped by rename."""
    for version in ("first", "second"):
        (tmp_path / version).mkdir()
        written(tmp_path / version / "secret", f"{version}\n")  # of the same time and the same size, but for the name
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "secret").symlink_to("..data/secret")
    current = live(tmp_path / "secret")
    assert current() == ("first",)
    (tmp_path / "..new").symlink_to("second")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert current() == ("second",)


@pytest.mark.parametrize("broken", ["", "\n", "\udcff", None])
def test_a_file_that_cannot_be_used_leaves_the_secrets_there_were_and_says_so_once_a_minute(
    live: Callable[[Path], Read], tmp_path: Path, broken: str | None
) -> None:
    path = tmp_path / "secret"
    written(path, "old\n")
    current = live(path)
    if broken is None:
        path.unlink()
    else:
        path.write_bytes(broken.encode("utf-8", "surrogateescape"))
    with capture_logs() as told:
        assert [current() for _ in range(3)] == [("old",)] * 3
    assert [line["event"] for line in told] == ["the secrets there were stay in force"]
    assert str(path) in told[0]["error"]
    written(path, "new\n", age=1)
    assert current() == ("new",)


def test_a_secret_that_does_not_fit_its_source_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(secrets, "LOOK_EVERY_S", 0.0)
    path = tmp_path / "secret"
    written(path, "whsec_c2VjcmV0\n")
    monkeypatch.setenv("WEBHOOKS_SECRET_STANDARD_WEBHOOKS_FILE", str(path))
    consumer = Consumer(gates=[], sources=[StandardWebhooks()])
    found = secrets.read_secrets(consumer, Settings(home=tmp_path), dev=False).in_force
    written(path, "not base64!\n", age=1)
    assert found["standard_webhooks"] == ("whsec_c2VjcmV0",)


def test_two_changes_within_one_tick_of_the_clock_are_both_seen(live: Callable[[Path], Read], tmp_path: Path) -> None:
    path = tmp_path / "secret"
    written(path, "old\n")
    current = live(path)
    at = time.time_ns()
    for text in ("one", "two", "six"):
        path.write_text(f"{text}\n")
        os.utime(path, ns=(at, at))
        assert current() == (text,)
