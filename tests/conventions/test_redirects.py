"""No request follows a redirect: its key, or a body meant for one host, would go to another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conventions.source import PACKAGE

_VERBS = {"get", "post", "put", "request"}
_SESSIONS = ("session", "_session", "_session(own=own)")


def requests(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Calls of aiohttp's sessions, with their places."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _VERBS
            and ast.unparse(node.func.value).endswith(_SESSIONS)
        ):
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def test_requests_follow_no_redirects() -> None:
    # The development service calls only what it has started itself.
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "dev"]
    found = [each for path in files for each in requests(path)]
    assert len(found) > 8, "the sessions have other names now"
    followed = [
        place
        for place, call in found
        if not any(word.arg == "allow_redirects" and ast.unparse(word.value) == "False" for word in call.keywords)
    ]
    assert not followed
    sockets = {path for path in files if ".ws_connect(" in path.read_text("utf-8")}
    # It has no such option: the session refuses.
    assert not {path for path in sockets if "no_redirects()" not in path.read_text("utf-8")}
