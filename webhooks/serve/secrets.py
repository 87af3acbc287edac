"""The secrets of a consumer's sources, as they are when a process starts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from webhooks.consumer import Consumer
from webhooks.errors import ConfigurationError
from webhooks.hooks.left_behind import FOLDER, hook_secrets
from webhooks.settings import Settings
from webhooks.signatures import check_secret
from webhooks.source_secrets import dev_secrets, secret_variable, secrets_for

SETTLED_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Secrets:
    """What requests are verified with.

    Args:
        in_force: by source, all its secrets.
        made: by source, the one that `--dev` made; sources that have one of their own are not in it.
    """

    in_force: Mapping[str, tuple[str, ...]]
    made: Mapping[str, str]


def read_secrets(consumer: Consumer, settings: Settings, *, dev: bool) -> Secrets:
    """Return the secrets of every source.

    Args:
        consumer: whose sources.
        settings: where those of `--dev` are kept.
        dev: make one for each source that has none, and set its variable, for what else runs in this process.

    Raises:
        ConfigurationError: a source has none, or one that cannot be used; the message names the variable.
    """
    in_force = {name: secrets_for(name) for name in consumer.sources}
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
    return Secrets(_WithHooks(in_force, settings.home) if dev else in_force, made)


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
