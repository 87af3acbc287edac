"""`webhooks trigger`."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from pathlib import Path

import click
import httpx

from webhooks.cli.app import app_option, examples, printable, run
from webhooks.errors import ConfigurationError, Unavailable, Unreadable
from webhooks.loading import load_consumer
from webhooks.samples import sample
from webhooks.samples.request import Request, changed, signed
from webhooks.settings import Settings, dev_secrets, secret_variable, secrets_for
from webhooks.sources import Source
from webhooks.sources.reading import is_object, read_json

RECEIVER = "http://127.0.0.1:8000"
AT_ONCE = 50
TIMEOUT_S = 15


@click.command(
    epilog=examples(
        "webhooks trigger shortcut story.update --times 50",
        "webhooks trigger shortcut story-comment.create --set actions.0.story_id=123",
        "webhooks trigger github pull_request.closed --set pull_request.merged=false",
        "webhooks trigger github release.published --file release.json",
    )
)
@click.argument("source")
@click.argument("event")
@app_option
@click.option("--set", "changes", multiple=True, metavar="PATH=VALUE", help="Change a value of the body.")
@click.option("--times", type=click.IntRange(1, 100_000), default=1, help="Send the one delivery so many times.")
@click.option(
    "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A body to send instead of a sample."
)
@click.option("--exact", is_flag=True, help="Send the file byte for byte, without a fresh id.")
@click.option("--id", "given", help="The delivery's id; a fresh one by default.")
@click.option("--url", envvar="WEBHOOKS_RECEIVER_URL", default=RECEIVER, show_default=True, help="The receiver.")
def trigger(
    source: str,
    event: str,
    app: str,
    changes: tuple[str, ...],
    times: int,
    file: Path | None,
    exact: bool,
    given: str | None,
    url: str,
) -> None:
    """Send a signed sample delivery to a running receiver.

    Its id is fresh, so every call is a new delivery; --times repeats one. The secret is the receiver's own, from
    WEBHOOKS_SECRET_<SOURCE> or from where serve --dev keeps it.
    """
    if exact and (file is None or changes):
        raise click.UsageError("--exact goes with --file, and without --set")
    sources = load_consumer(app).sources
    sender = sources.get(source)
    if sender is None:
        raise ConfigurationError(f"there is no source {source!r}; there are: {', '.join(sources) or 'none'}")
    secret = _secret(source, Settings.load())
    id = given or str(uuid.uuid4())
    try:
        body = file.read_bytes() if file is not None else None
        content = body if body is not None and exact else _content(sender, event, body, changes, id)
    except ValueError as error:
        raise click.UsageError(f"--set {error}") from None
    request = signed(sender, event, content, secret, id)
    _warn_of_another_event(sender, event, request)
    target = f"{url.rstrip('/')}/webhooks/{source}"
    answers = run(_send(target, request, times))
    for (code, answer), count in answers.items():
        click.echo(f"{code} {printable(answer)}" + (f"  ({count} times)" if count > 1 else ""))
    refused = sum(count for (code, _), count in answers.items() if not 200 <= code < 300)
    if refused:
        raise click.ClickException(f"{refused} of {times} refused by {target}" if times > 1 else f"refused by {target}")


def _content(source: Source, event: str, body: bytes | None, changes: tuple[str, ...], id: str) -> bytes:
    if body is None:
        return changed(source, sample(source, event), changes, id)
    try:
        parsed = read_json(body)
    except Unreadable as error:
        if changes:
            raise ConfigurationError(f"--set cannot change the file: {error}") from None
        return body
    return changed(source, parsed, changes, id)


def _secret(source: str, settings: Settings) -> str:
    secrets = secrets_for(source)
    if not secrets and (settings.home / "secrets" / source).exists():
        secrets = dev_secrets(settings.home, source)
    if not secrets:
        raise ConfigurationError(
            f"no secret to sign with: set {secret_variable(source)} to the receiver's, or start it here with "
            "webhooks serve --dev"
        )
    return secrets[0]


def _warn_of_another_event(source: Source, event: str, request: Request) -> None:
    try:
        found = [one.name for one in source.events(request.headers, source.read(request.headers, request.body))]
    except Unreadable:
        return
    if event not in found:
        click.echo(f"note: the body says {', '.join(found) or 'nothing'}, not {event}", err=True)


async def _send(target: str, request: Request, times: int) -> Counter[tuple[int, str]]:
    """Post one request several times at once, and count the answers."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def post(http: httpx.AsyncClient) -> tuple[int, str]:
        async with turn:
            try:
                response = await http.post(target, content=request.body, headers=list(request.headers))
            except (httpx.TransportError, httpx.InvalidURL) as error:
                raise Unavailable(
                    f"no answer from {target}: {str(error) or type(error).__name__}; is webhooks serve running? "
                    "--url names another receiver"
                ) from error
        return response.status_code, _said(response)

    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
    # The receiver is on this machine: a proxy of the environment is not for it.
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, trust_env=False) as http:
        return Counter(await asyncio.gather(*(post(http) for _ in range(times))))


def _said(response: httpx.Response) -> str:
    try:
        answer = response.json()
    except json.JSONDecodeError:
        return response.text[:200]
    if is_object(answer):
        return "  ".join(f"{name}: {value}" for name, value in answer.items())
    return str(answer)
