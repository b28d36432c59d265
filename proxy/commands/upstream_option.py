"""The option `--upstream CHAIN/NETWORK=URL`."""

from __future__ import annotations

import argparse

from proxy.errors import StartError


def add(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument(
        "--upstream",
        action="append",
        default=[],
        metavar="CHAIN/NETWORK=URL",
        help=f"{about}, such as ethereum/mainnet=https://host/path; repeatable",
    )


def parse(text: str) -> dict[str, str]:
    network, _, url = text.partition("=")
    if not url or "/" not in network:
        raise StartError([f"--upstream {network!r}: write CHAIN/NETWORK=URL"])
    return {"network": network, "url": url}
