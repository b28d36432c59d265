"""The option `--upstream NETWORK=URL`."""

from __future__ import annotations

import argparse

from proxy import settings
from proxy.errors import StartError


def add(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument(
        "--upstream",
        action="append",
        default=[],
        metavar="NETWORK=URL",
        help=f"{about}: its name or chain id, and a URL or PROVIDER://KEY, such as 8453=https://host/path; repeatable. "
        "PROVIDER://KEY alone stands for all networks of the provider",
    )


def parse(text: str, tables: settings.Tables) -> dict[str, str]:
    """The upstream with the full name of its network. The URL is secret, so no error has it."""
    if settings.has_provider(text.partition("=")[0]):
        return {"url": text}
    name, _, url = text.partition("=")
    if not url or not name:
        raise StartError([f"--upstream {name!r}: write CHAIN/NETWORK=URL"])
    network = tables.find_network(name)
    if network is None:
        raise StartError([f"--upstream: {settings.no_network(name, tables)}"])
    return {"network": network.id, "url": url}
