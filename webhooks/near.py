"""Names like one that nothing has: a slip of the pen is told with what was perhaps meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MOST_CLOSE = 3
MOST_SHOWN = 10


def there_are(given: str, known: Iterable[str]) -> str:
    """Name what there is instead: `did you mean push? There are: push, star.created`.

    Args:
        given: the name that nothing has.
        known: those there are; of a long one the part before the first dot may be meant alone.
    """
    names = sorted(set(known))
    if not names:
        return "there are none"
    spelt = {part.lower(): name for name in names for part in (name.partition(".")[0], name)}
    found = (spelt[part] for part in get_close_matches(given.lower(), spelt, n=2 * MOST_CLOSE))
    close = list(dict.fromkeys(found))[:MOST_CLOSE]
    shown = [*close, *(name for name in names if name not in close)]
    more = f", and {len(shown) - MOST_SHOWN} more" if len(shown) > MOST_SHOWN else ""
    listed = f"here are: {', '.join(shown[:MOST_SHOWN])}{more}"
    return f"did you mean {' or '.join(close)}? T{listed}" if close else f"t{listed}"
