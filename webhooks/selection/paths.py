"""`--where-json`: a JSONPath (RFC 9535) that finds a value in a body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jsonpath import JSONPath, JSONPathEnvironment, JSONPathError
from jsonpath.filter import FunctionExtension, walk
from jsonpath.selectors import Filter

from webhooks.errors import ConfigurationError
from webhooks.nesting import loads

# Without the library's own additions to the standard.
ENVIRONMENT = JSONPathEnvironment(strict=True)
# The functions of RFC 9535 that take a regular expression.
PATTERNS = frozenset({"match", "search"})


def compiled(path: str) -> JSONPath:
    """Read a JSONPath.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        found = ENVIRONMENT.compile(path)
    except (JSONPathError, RecursionError) as error:
        # Not its text: writing that fails for some paths.
        reason = error.args[0] if error.args else "it cannot be read"
        raise ConfigurationError(f"{path!r} is no JSONPath such as $.repository.full_name: {reason}") from None
    if not isinstance(found, JSONPath):
        raise ConfigurationError(f"{path!r} is more than one JSONPath")
    return found


@dataclass(frozen=True, slots=True)
class JsonFilter:
    """Lets a body pass in which a path leads to a value; without a value, in which it leads anywhere.

    Args:
        text: `$.path=value`, or `$.path`.
        path: the path in it.
        value: what is sought, as text.
        values: the JSON value that is written so, which counts as well; empty where it is none.
    """

    text: str
    path: JSONPath
    value: str | None
    values: tuple[Any, ...] = ()

    @classmethod
    def read(cls, text: str) -> JsonFilter:
        """Read `$.path=value`. A path may itself hold `=`, in a filter: the value starts after the first whole path.

        Raises:
            ConfigurationError: there is no path in it.
        """
        cut = text.find("=")
        while cut > 0:
            try:
                return cls(text, compiled(text[:cut].strip()), text[cut + 1 :], _values(text[cut + 1 :]))
            except ConfigurationError:
                cut = text.find("=", cut + 1)
        return cls(text, compiled(text.strip()), None)

    @property
    def has_pattern(self) -> bool:
        """Whether it looks for a regular expression: looking through one body may then take for ever."""
        filters = [each for segment in self.path.segments for each in segment.selectors if isinstance(each, Filter)]
        return any(
            isinstance(each, FunctionExtension) and each.name in PATTERNS
            for found in filters
            for each in walk(found.expression)
        )

    def passes(self, body: Any) -> bool:
        """Say whether a parsed body passes."""
        try:
            return any(self.value is None or self._is(node.obj) for node in self.path.finditer(body))
        except (JSONPathError, RecursionError):  # nested past looking through
            return False

    def _is(self, found: Any) -> bool:
        if isinstance(found, str) and found == self.value:
            return True
        # 1 is not true, but it is 1.0.
        return any(isinstance(found, bool) == isinstance(value, bool) and found == value for value in self.values)


def _values(text: str) -> tuple[Any, ...]:
    try:
        return (loads(text),)
    except ValueError:
        return ()
