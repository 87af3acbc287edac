"""What a provider knows of and we do not have: found by its own API, and fetched.

`github` reads GitHub's delivery log, and `redelivering` has GitHub deliver again what is not in the inbox; `shortcut`
reads the history of stories and accepts what is missing. `scheduled` does both beside everything else.
"""
