"""The secrets of a consumer's sources, as they are when a process starts."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from webhooks.consumer import Consumer
from webhooks.errors import ConfigurationError
from webhooks.hooks.left_behind import FOLDER, hook_secrets
from webhooks.settings import Settings
from webhooks.signatures import Recipe, check_secret
from webhooks.source_secrets import dev_secrets, read_secret_file, secret_file, secret_variable, secrets_for

log = structlog.get_logger(__name__)

SETTLED_NS = 1_000_000_000
LOOK_EVERY_S = 1.0
TELL_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Secrets:
    """What requests are verified with.

    Args:
        in_force: by source, all its secrets.
        made: by source, the one that `--dev` made; sources that have one of their own are not in it.
    """

    in_force: Mapping[str, tuple[str, ...]] = field(repr=False)
    made: Mapping[str, str] = field(repr=False)


def read_secrets(consumer: Consumer, settings: Settings, *, dev: bool) -> Secrets:
    """Return the secrets of every source.

    Args:
        consumer: whose sources.
        settings: where those of `--dev` are kept.
        dev: make one for each source that has none, and set its variable, for what else runs in this process.

    Raises:
        ConfigurationError: a source has none, or one that cannot be used; the message names the variable.
    """
    in_force: dict[str, tuple[str, ...]] = {name: secrets_for(name) for name in consumer.sources}
    made: dict[str, str] = {}
    for name, source in consumer.sources.items():
        if dev and not in_force[name]:
            in_force[name] = dev_secrets(settings.home, name, "whsec" if source.recipe.key_form == "base64" else "text")
            made[name] = os.environ[secret_variable(name)] = in_force[name][0]
        for secret in in_force[name]:
            try:
                check_secret(source.recipe, secret)
            except ConfigurationError as error:
                raise ConfigurationError(f"{secret_variable(name)}: {error}") from None
    missing = [name for name, secrets in in_force.items() if not secrets]
    if missing:
        variables = " and ".join(secret_variable(name) for name in missing)
        raise ConfigurationError(
            f"no secret for {', '.join(missing)}: set {variables}, or try it out with webhooks serve --dev"
        )
    files = {name: path for name in consumer.sources if (path := secret_file(name)) is not None}
    recipes = {name: source.recipe for name, source in consumer.sources.items()}
    current = _FromFiles(in_force, files, recipes) if files else in_force
    return Secrets(_WithHooks(current, settings.home) if dev else current, made)


class _FromFiles(Mapping[str, tuple[str, ...]]):
    """Secrets, those from files as the files are now: a rotation needs no new start.

    A file is looked at once a second at most, by what its path leads to at that time: a mounted secret is changed by
    another target of a symbolic link. One that cannot be used any more leaves the secrets there were, and says so.

    Args:
        own: those there were at the start.
        files: by source, where they come from.
        recipes: by source, what they have to fit.
    """

    def __init__(
        self, own: Mapping[str, tuple[str, ...]], files: Mapping[str, Path], recipes: Mapping[str, Recipe]
    ) -> None:
        self._current = dict(own)
        self._files = files
        self._recipes = recipes
        self._seen = {name: _state(path) for name, path in files.items()}
        self._look_at = dict.fromkeys(files, time.monotonic() + LOOK_EVERY_S)
        self._told_at = dict.fromkeys(files, -math.inf)

    def __getitem__(self, source: str) -> tuple[str, ...]:
        if source in self._files and time.monotonic() >= self._look_at[source]:
            self._look_at[source] = time.monotonic() + LOOK_EVERY_S
            self._look(source)
        return self._current[source]

    def __iter__(self) -> Iterator[str]:
        return iter(self._current)

    def __len__(self) -> int:
        return len(self._current)

    def _look(self, source: str) -> None:
        path = self._files[source]
        state = _state(path)
        if state is not None and state == self._seen[source]:
            return
        try:
            found = read_secret_file(f"{secret_variable(source)}_FILE", path)
            for secret in found:
                check_secret(self._recipes[source], secret)
        except ConfigurationError as error:
            if time.monotonic() - self._told_at[source] >= TELL_EVERY_S:
                self._told_at[source] = time.monotonic()
                log.error("the secrets there were stay in force", source=source, file=str(path), error=str(error))
            return
        self._seen[source] = state
        self._told_at[source] = -math.inf
        if found != self._current[source]:
            self._current[source] = found
            log.info("the secrets changed", source=source, file=str(path), secrets=len(found))


def _state(path: Path) -> tuple[int, int, int, int] | None:
    """Return what tells a file from what it was; None for one that is too young to tell two changes apart, or gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    if time.time_ns() - found.st_mtime_ns < SETTLED_NS:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class _WithHooks(Mapping[str, tuple[str, ...]]):
    """Secrets, and beside them those of the hooks that tunnels register while this process runs.

    Only under `--dev`: there a tunnel on the same machine makes a secret for each hook, and takes it away again.
    """

    def __init__(self, own: Mapping[str, tuple[str, ...]], home: Path) -> None:
        self._own = own
        self._home = home
        self._hooks: Mapping[str, tuple[str, ...]] = {}
        self._read_at_ns = -1

    def __getitem__(self, source: str) -> tuple[str, ...]:
        own = self._own[source]
        return (*own, *self._current().get(source, ()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def _current(self) -> Mapping[str, tuple[str, ...]]:
        try:
            changed_at_ns = (self._home / FOLDER).stat().st_mtime_ns
        except OSError:
            return {}
        if changed_at_ns != self._read_at_ns:
            self._hooks = hook_secrets(self._home)
            # Two changes within one tick of the file system's clock look like one: a young one is read again.
            self._read_at_ns = changed_at_ns if time.time_ns() - changed_at_ns > SETTLED_NS else -1
        return self._hooks
