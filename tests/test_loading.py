"""Loading the consumer that `--app` names: what is found, and one line that says what to do where it is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from webhooks import Consumer
from webhooks.errors import ConfigurationError
from webhooks.loading import load_consumer

CONSUMER = "from webhooks import Consumer\nconsumer = Consumer(gates=[], sources=[])\n"

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a module into a working directory of the test's own, of which nothing stays imported."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


def refused(app: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_consumer(app)
    message = str(caught.value)
    assert "\n" not in message
    assert f"--app {app}" in message
    return message


def test_a_consumer_is_found_in_the_working_directory(write: Write) -> None:
    write("fresh_shop/hooks.py", CONSUMER)

    assert isinstance(load_consumer("fresh_shop.hooks:consumer"), Consumer)


def test_a_consumer_may_be_an_attribute_of_an_attribute(write: Write) -> None:
    write("fresh_shop.py", CONSUMER + "class App:\n    hooks = consumer\n")

    assert isinstance(load_consumer("fresh_shop:App.hooks"), Consumer)


@pytest.mark.parametrize("app", ["handlers", "handlers:", ":consumer", ""])
def test_a_name_without_module_or_attribute_is_refused_with_an_example(app: str) -> None:
    assert "such as handlers:consumer" in refused(app)


def test_a_missing_module_is_named_with_where_it_was_looked_for(write: Write, tmp_path: Path) -> None:
    assert refused("fresh_nowhere:consumer").endswith(f"there is no module fresh_nowhere in {tmp_path}")


def test_a_missing_part_of_a_package_is_named(write: Write) -> None:
    write("fresh_shop/__init__.py", "")

    assert "there is no module fresh_shop.hooks" in refused("fresh_shop.hooks:consumer")


def test_a_module_that_the_consumer_itself_misses_is_not_taken_for_the_consumer(write: Write, tmp_path: Path) -> None:
    write("fresh_shop.py", "\nimport fresh_nowhere\n")

    message = refused("fresh_shop:consumer")

    assert "cannot be imported: ModuleNotFoundError: No module named 'fresh_nowhere'" in message
    assert f"({tmp_path / 'fresh_shop.py'}, line 2)" in message


def test_an_error_of_an_imported_module_is_told_with_its_own_place(write: Write, tmp_path: Path) -> None:
    write("fresh_shop.py", "import fresh_part\n")
    write("fresh_part.py", "x = 1\n\nx.y\n")

    assert f"AttributeError: 'int' object has no attribute 'y' ({tmp_path / 'fresh_part.py'}, line 3)" in refused(
        "fresh_shop:consumer"
    )


def test_a_syntax_error_is_told_on_one_line(write: Write) -> None:
    write("fresh_shop.py", "def\n")

    assert "SyntaxError: invalid syntax (fresh_shop.py, line 1)" in refused("fresh_shop:consumer")


def test_a_module_that_ends_the_process_is_refused(write: Write) -> None:
    write("fresh_shop.py", "raise SystemExit('no')\n")

    assert "SystemExit: no" in refused("fresh_shop:consumer")


def test_a_missing_attribute_is_answered_with_the_consumers_there_are(write: Write) -> None:
    write("fresh_shop.py", CONSUMER)

    assert refused("fresh_shop:app").endswith("fresh_shop has no app; its consumers: consumer")


def test_what_is_no_consumer_is_refused_with_its_type(write: Write) -> None:
    write("fresh_shop.py", "consumer = {}\n")

    assert refused("fresh_shop:consumer").endswith("is of type dict, not a webhooks.Consumer")


def test_a_definition_that_is_wrong_is_told_as_it_is(write: Write) -> None:
    write("fresh_shop.py", "from webhooks import Consumer, GitHub\nConsumer(gates=[], sources=[GitHub(), GitHub()])\n")

    assert "two sources have one name" in refused("fresh_shop:consumer")
