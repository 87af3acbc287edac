"""The secrets of a consumer's sources, as they are when a process starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from webhooks.consumer import Consumer
from webhooks.errors import ConfigurationError
from webhooks.settings import Settings, dev_secrets, secret_variable, secrets_for
from webhooks.signatures import check_secret


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
    return Secrets(in_force, made)
