"""Databases of one server: a template for each peer, filled once, and a fresh copy for each measurement."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg.sql import SQL, Identifier


class Databases:
    """The databases of the server at `url`, which names the one to maintain them from."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers = count(1)

    def url(self, name: str) -> str:
        return urlunsplit(urlsplit(self._url)._replace(path=f"/{name}"))

    def make(self, name: str) -> str:
        """Make an empty database and return its address."""
        self._run("CREATE DATABASE {}", name)
        return self.url(name)

    def settle(self, name: str) -> None:
        """Leave a filled database as a running system has it: its statistics known, its pages on disk."""
        with psycopg.connect(self.url(name), autocommit=True) as connection:
            connection.execute("VACUUM (ANALYZE)")
            connection.execute("CHECKPOINT")

    @contextmanager
    def copy(self, template: str) -> Generator[str]:
        """A copy for the block, and its address."""
        name = f"{template}_{next(self._numbers)}"
        self._run("CREATE DATABASE {} TEMPLATE {}", name, template)
        try:
            with psycopg.connect(self._url, autocommit=True) as connection:
                connection.execute("CHECKPOINT")
            yield self.url(name)
        finally:
            self.drop(name)

    def drop(self, name: str) -> None:
        self._run("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _run(self, statement: Any, *names: str) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(SQL(statement).format(*map(Identifier, names)))
