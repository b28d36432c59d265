"""Lists of public upstreams by chain id, in the shape of eRPC's repository: `{"CHAIN_ID": {"endpoints": ["https://…"]}}`.

`url = "repository:///path/file.json"` in [[upstreams]] stands for all of them. URLs of other kinds, such as WebSockets, and
chain ids that are not numbers are passed over, as eRPC does. Anything else that is wrong is a fault with its line.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import orjson

from proxy.settings.given_files import read_text

REPOSITORY = "repository"


class UnusableList(Exception):
    """Says what is wrong, with the file and the line."""


def read_file(path: Path) -> dict[str, list[str]]:
    """The URLs of each chain id."""
    try:
        return urls_in(read_text(path), str(path))
    except OSError as exc:
        raise UnusableList(f"{path}: cannot be read: {exc.strerror}") from None
    except UnicodeDecodeError as exc:
        raise UnusableList(f"{path}: is not text in UTF-8 (byte {exc.start})") from None


def urls_in(text: str, place: str) -> dict[str, list[str]]:
    """Like `read_file`, for the text of a list that is called `place`."""
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        raise UnusableList(f"{place}:{exc.lineno}: is not JSON: {exc.msg}") from None
    if not isinstance(data, dict) or not data:
        raise UnusableList(f'{place}:1: must be JSON like {{"CHAIN_ID": {{"endpoints": ["https://…"]}}}}')
    by_chain = {chain: _urls(entry, f"{place}:{_line_of(text, chain)}: {chain[:64]}") for chain, entry in data.items()}
    return {chain: urls for chain, urls in by_chain.items() if urls and chain.isascii() and chain.isdecimal()}


def _urls(entry: Any, place: str) -> list[str]:
    urls = entry.get("endpoints") if isinstance(entry, dict) else None
    if not isinstance(urls, list):
        raise UnusableList(f'{place}: must have a list of URLs, as in {{"endpoints": ["https://…"]}}')
    for each in urls:
        if not isinstance(each, str) or "://" not in each:
            raise UnusableList(f"{place}.endpoints: must have URLs only")
    return [each for each in urls if each.lower().startswith(("http://", "https://"))]


def _line_of(text: str, chain: str) -> int:
    """The line of a member of the outermost object. Its name may be written in another way, with escapes."""
    match = re.search(rf"{re.escape(json.dumps(chain))}\s*:", text)
    return 1 if match is None else text.count("\n", 0, match.start()) + 1
