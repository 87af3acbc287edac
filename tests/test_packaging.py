"""The lock, `pyproject.toml` and the page about dependencies say the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements.lock").read_text()


def declared() -> set[str]:
    # What is only measured beside ours is not pinned: it is installed by who wants to measure.
    extras = [extra for name, extra in PROJECT["project"]["optional-dependencies"].items() if name != "bench"]
    every = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    every.extend(requirement for extra in extras for requirement in extra)
    return {re.split(r"[\[<>=;~! ]", requirement, maxsplit=1)[0] for requirement in every}


def locked() -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", LOCK, re.MULTILINE))


def test_the_lock_pins_everything_declared_the_build_backend_included() -> None:
    assert declared() <= set(locked())


def test_every_pin_carries_hashes() -> None:
    pins = re.split(r"^(?=[a-z0-9-]+==)", LOCK, flags=re.MULTILINE)[1:]

    assert len(pins) == len(locked())
    assert all("--hash=sha256:" in pin for pin in pins)


@pytest.mark.parametrize("word", ["://", "--index-url", "--extra-index-url", "--find-links", "--trusted-host"])
def test_the_lock_names_no_index(word: str) -> None:
    assert word not in LOCK


def test_the_page_lists_every_declared_dependency_in_its_locked_version_and_no_other() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    listed = dict(re.findall(r"^\| ([a-z0-9-]+) \| ([0-9][^ ]*) \|", page, re.MULTILINE))

    assert listed == {name: version for name, version in locked().items() if name in declared()}
