"""The documents name every command, setting and public name, and every path they point to exists."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

import webhooks
from handlers.settings import Settings as FlowSettings
from webhooks.cli.main import cli
from webhooks.settings import Settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = {path: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
ALL = "\n".join(DOCUMENTS.values())


def commands(group: click.Command, prefix: str = "") -> list[str]:
    if not isinstance(group, click.Group):
        return [prefix]
    with click.Context(group) as context:
        found = [(name, group.get_command(context, name)) for name in group.list_commands(context)]
    return [leaf for name, command in found if command for leaf in commands(command, f"{prefix} {name}".strip())]


@pytest.mark.parametrize("command", commands(cli))
def test_every_command_is_named(command: str) -> None:
    assert re.search(rf"\b{command.split()[0]}\b", README)
    assert re.search(rf"webhooks {command}\b|`{command}`", ALL)


@pytest.mark.parametrize("name", [*Settings.variables(), *FlowSettings.variables()])
def test_every_setting_is_in_the_readme(name: str) -> None:
    assert f"`{name}`" in README


@pytest.mark.parametrize("name", webhooks.__all__)
def test_every_public_name_is_named(name: str) -> None:
    assert re.search(rf"\b{name}\b", ALL)


def test_the_library_exports_the_public_names_and_no_others() -> None:
    names = "Claim Consumer Done Escalate Event Gate GitHub Ignore LostClaim Moved NotDone Park Pool Shortcut Snooze"
    assert set(webhooks.__all__) == {*names.split(), "StandardWebhooks", "Transaction"}
    assert all(hasattr(webhooks, name) for name in webhooks.__all__)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_a_document_names_is_there(path: Path) -> None:
    text = DOCUMENTS[path]
    links = [target for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in target]
    named = re.findall(r"`((?:webhooks|handlers|tests|docs|bench)/[\w/.-]+\.\w+)`", text)
    missing = [name for name in links if not (path.parent / name).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing
