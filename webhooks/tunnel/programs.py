"""Programs that give the receiver an address on the internet: cloudflared, ngrok, ssh.

They are used as installed, never fetched: how each is started, and where it says the address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from webhooks.errors import ConfigurationError

_CLOUDFLARED = re.compile(r"https://(?!api\.)[a-z0-9-]+\.trycloudflare\.com(?![\w.-])")
_NGROK = re.compile(r'msg="started tunnel".* url=(https://[^\s"]+)')
# serveo.net says "Forwarding HTTP traffic from", localhost.run "tunneled with tls termination,", pinggy.io nothing.
_SSH = re.compile(r"(?:^|traffic from |tls termination, )(https://[A-Za-z0-9.-]+(?::[0-9]+)?)/?$")
_FORWARDED = re.compile(r"remote forward success for: ")
_PAGES_OF_A_SERVICE = frozenset({"admin", "console", "dashboard", "docs", "www"})
_DESTINATION = re.compile(r"(?:ssh://)?[A-Za-z0-9_][A-Za-z0-9_.+:@\[\]-]*")


@dataclass(frozen=True, slots=True)
class Program:
    """An installed program, and how it is used.

    Args:
        name: of the executable.
        arguments: what it is started with.
        address: finds the public address in a line that it says; None where the line has none.
        get_it: how to get it, for a person who has not.
        hint: what may be the matter when it does not work.
        settle_s: how long to leave its address alone at first. A resolver that is asked for a name too early remembers
            for minutes that there is none.
        aside: how lines begin that are read and not shown: it says them because it is asked to say everything.
    """

    name: str
    arguments: tuple[str, ...]
    address: Callable[[str], str | None]
    get_it: str
    hint: str
    settle_s: float = 0.0
    aside: str | None = None


def cloudflared(local: str) -> Program:
    """A quick tunnel of Cloudflare's: no account, a new address every time."""
    return Program(
        "cloudflared",
        # Without --config it would read a configuration of the user's, which turns quick tunnels off or opens others.
        ("tunnel", "--config", os.devnull, "--no-autoupdate", "--url", local),
        lambda line: found[0] if (found := _CLOUDFLARED.search(line)) else None,
        "get it at https://developers.cloudflare.com/cloudflare-one/connections/connect-networks/downloads/ "
        "(brew install cloudflared); it needs no account",
        "cloudflared needs an outgoing connection to port 7844",
        settle_s=3.0,
    )


def ngrok(local: str) -> Program:
    """A tunnel of ngrok's; it needs an account, whose token ngrok keeps itself."""
    return Program(
        "ngrok",
        ("http", local, "--log", "stdout", "--log-format", "logfmt"),
        lambda line: found[1] if (found := _NGROK.search(line)) else None,
        "get it at https://ngrok.com/download (brew install ngrok), then ngrok config add-authtoken with yours",
        "ngrok needs an account's token: ngrok config add-authtoken",
    )


def ssh(local: str, host: str, *, port: int = 80, public: str | None = None) -> Program:
    """A remote forward over ssh, to a service such as localhost.run or to a server of one's own.

    Args:
        local: the receiver's base address.
        host: what ssh connects to, such as ``nokey@localhost.run`` or a name of the user's own configuration.
        port: the port to listen on there; 0 where a service says so.
        public: the address that leads there, where the other side says none.

    Raises:
        ConfigurationError: that is no name of a server.
    """
    if not _DESTINATION.fullmatch(host):  # ssh would take -oProxyCommand=… for an option
        raise ConfigurationError(f"{host!r} is no server: write it as ssh takes it, such as nokey@localhost.run")
    parts = urlsplit(local)
    there = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    forward = f"{port}:{there}:{parts.port or 80}"
    options = {
        "ExitOnForwardFailure": "yes",
        "ServerAliveInterval": "30",
        "ServerAliveCountMax": "3",
        # The user's own settings may have one connection serve many: the forward would be that one's, and outlive us.
        "ControlMaster": "no",
        "ControlPath": "none",
    }
    # The services say the address in a session. A server of one's own says nothing, so ssh has to say when the port is
    # forwarded: until then the address may be that of another tunnel.
    session = () if public is None else ("-N", "-o", "LogLevel=DEBUG1")
    given = [word for option, value in options.items() for word in ("-o", f"{option}={value}")]
    return Program(
        "ssh",
        ("-T", *session, *given, "-R", forward, host),
        (lambda line: _ssh_address(line, host)) if public is None else lambda line: _FORWARDED.search(line) and public,
        "install OpenSSH's client",
        f"ssh asks nothing here: connect by hand once (ssh {host}) to accept the server's key, and give a key that has "
        "a passphrase to an agent (ssh-add). For a server of your own say with --public which address leads to the "
        "forwarded port",
        aside="debug1: ",
    )


def _ssh_address(line: str, host: str) -> str | None:
    found = _SSH.search(line)
    if found is None:
        return None
    said = urlsplit(found[1]).hostname or ""
    return None if said == host.rpartition("@")[2] or said.partition(".")[0] in _PAGES_OF_A_SERVICE else found[1]
