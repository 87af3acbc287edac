"""Load the consumer that a command is told of as `module:attribute`."""

from __future__ import annotations

import importlib
import sys
import traceback
from functools import reduce
from pathlib import Path

from webhooks.consumer import Consumer
from webhooks.errors import ConfigurationError

DEFAULT_APP = "handlers:consumer"


def load_consumer(app: str, directory: Path | None = None) -> Consumer:
    """Import a module and return one of its consumers.

    Args:
        app: such as ``handlers:consumer``.
        directory: put first on `sys.path`, so that what is developed there is found; the working directory by default.

    Raises:
        ConfigurationError: it cannot be imported, or is no `Consumer`; the message is one line, and says where.
    """
    module_name, _, attribute = app.partition(":")
    if not module_name or not attribute:
        raise ConfigurationError(f"--app {app}: write it as module:attribute, such as {DEFAULT_APP}")
    found_in = str((directory or Path()).resolve())
    if found_in not in sys.path:
        sys.path.insert(0, found_in)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and _is_part(error.name, module_name):
            raise ConfigurationError(f"--app {app}: there is no module {error.name} in {found_in}") from error
        raise ConfigurationError(f"--app {app} cannot be imported: {_told(error)}") from error
    try:
        found = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        others = [name for name, value in vars(module).items() if isinstance(value, Consumer)]
        instead = f"; its consumers: {', '.join(others)}" if others else ""
        raise ConfigurationError(f"--app {app}: {module_name} has no {attribute}{instead}") from None
    if not isinstance(found, Consumer):
        raise ConfigurationError(f"--app {app} is of type {type(found).__name__}, not a webhooks.Consumer")
    return found


def _is_part(missing: str | None, module_name: str) -> bool:
    """Say whether what is missing is the module itself, or a package above it, and not something it imports."""
    return missing is not None and f"{module_name}.".startswith(f"{missing}.")


def _told(error: BaseException) -> str:
    """Tell an error, and the line of the user's own file that it comes from, on one line."""
    told = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, SyntaxError):
        return told  # which names its place itself
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    return f"{told} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else told


def _is_ours(filename: str) -> bool:
    return filename.startswith("<frozen") or filename == __file__ or filename == importlib.__file__
