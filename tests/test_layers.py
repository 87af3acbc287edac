"""Imports point down, `webhooks` never imports `handlers`, and `handlers` uses public names only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import webhooks

ROOT = Path(__file__).parent.parent
# From the bottom up. A module imports only from layers below its own, or from its own folder.
LAYERS = (
    ("nesting", "text"),
    ("errors", "delivery", "marks", "near", "threads"),
    ("outcome", "phase", "settings", "source_secrets", "db", "observe"),
    ("signatures", "senders", "statements", "shape", "stuck", "renewer", "migrate", "postmaster"),
    ("sources", "embedded", "settling"),
    ("pool", "rewriting", "respelling"),
    ("effects", "wire"),
    ("owned",),
    ("claim",),
    ("taking",),
    ("gate",),
    ("inbox", "notify"),
    ("consumer",),
    ("accept", "apply", "bell", "lane", "status", "deliveries", "hints", "samples", "loading", "rows", "standing"),
    ("escalation", "decision", "why", "verify", "selection", "rejections", "retention", "feed", "sending", "captures"),
    ("provider_api",),
    ("refusals", "explanation", "replay", "reconcile", "hooks"),
    ("tunnel",),
    ("receiver", "reverify", "worker"),
    ("control",),
    ("serve",),
    ("cli",),
    ("__main__",),
)
PLACE = {name: place for place, layer in enumerate(LAYERS) for name in layer}
MODULES = sorted(
    path for path in (ROOT / "webhooks").rglob("*.py") if path.name != "__init__.py" or path.parent.name != "webhooks"
)


def imported(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Every module a file imports when it runs (not what it imports for its annotations only), and the names."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", [alias.name for alias in node.names]
        waiting += ast.iter_child_nodes(node)


def modules_of_ours(path: Path) -> Iterator[str]:
    for module, names in imported(path):
        parts = module.split(".")
        if parts[0] != "webhooks":
            continue
        yield from [parts[1]] if len(parts) > 1 else [name for name in names if name in PLACE]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_is_below_it(path: Path) -> None:
    own = path.relative_to(ROOT / "webhooks").parts[0].removesuffix(".py")
    assert own in PLACE, f"{own} has no place in LAYERS: give it one"
    above = {name for name in modules_of_ours(path) if name != own and PLACE[name] >= PLACE[own]}
    assert not above, f"{own} imports {', '.join(sorted(above))}, which is not below it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_never_imports_handlers(path: Path) -> None:
    assert not [module for module, _ in imported(path) if module.split(".")[0] == "handlers"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "handlers").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_handlers_import_public_names_only(path: Path) -> None:
    for module, names in imported(path):
        if module.split(".")[0] == "webhooks":
            assert module == "webhooks", f"{path.name} imports {module}"
            assert set(names) <= set(webhooks.__all__)
