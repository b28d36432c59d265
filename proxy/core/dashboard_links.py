"""Links to the dashboard in mails, alerts and the output of commands. `address`: the service's public address."""

from __future__ import annotations

from typing import Literal

# The purpose of a token: it signs in, confirms an email address, or joins an account.
LinkToken = Literal["token", "email", "invitation"]


def site_of(address: str) -> str:
    """The installation's public URL without a slash at its end; empty without an address."""
    return address.rstrip("/").removesuffix("/dashboard")


def page_link(address: str, page: str) -> str:
    """A link to a page of the dashboard, such as `#/alerts`; empty without an address."""
    return f"{address.rstrip('/')}/dashboard{page}" if address else ""


def token_link(address: str, purpose: LinkToken, token: str) -> str:
    """A link with a token in its fragment, which browsers never send: no server or log sees it."""
    return f"{address.rstrip('/')}/#{purpose}={token}"
