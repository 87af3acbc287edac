"""Any sender that follows the Standard Webhooks specification, version 1 (https://www.standardwebhooks.com)."""

from __future__ import annotations

from typing import Any, ClassVar

from webhooks.delivery import Headers, RawEvent
from webhooks.signatures import Recipe
from webhooks.sources.base import Source
from webhooks.sources.reading import first, mapping, moment


class StandardWebhooks(Source):
    """A source of Standard Webhooks: an event is named by the body's `type`, and its data is the whole body.

    Secrets are `whsec_` (shared) or `whpk_` (the sender's public key). A delivery's time may differ from ours by
    five minutes; a retry is signed with a new time, so the limit does not refuse late ones.
    """

    recipe: ClassVar[Recipe] = Recipe(
        header="webhook-signature",
        prefix="v1,",
        public_key_prefix="v1a,",
        encoding="base64",
        signed="{id}.{timestamp}.{body}",
        key_form="base64",
        separator=" ",
        id_header="webhook-id",
        timestamp_header="webhook-timestamp",
    )

    def __init__(self, name: str = "standard_webhooks") -> None:
        super().__init__(name)

    def identity(self, headers: Headers, body: bytes) -> str | None:
        return first(headers, "webhook-id")

    def events(self, headers: Headers, body: Any) -> list[RawEvent]:
        data = mapping(body)
        name = data.get("type")
        if not isinstance(name, str) or not name:
            return []
        return [RawEvent(name, data, moment(data.get("timestamp")))]
