"""JSON from clients is parsed only where its size and its number of values are bounded first."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conventions.source import PACKAGE

PROXY = PACKAGE
# The functions that parse JSON, and aiohttp's `request.json()`.
PARSERS = {
    "orjson.loads", "json.loads", "json.load", "msgspec.json.decode", "msgspec.json.Decoder", "request.json", "request.post",
}  # fmt: skip
# Everything that is parsed in web/: where, and why it is bounded.
IN_WEB = {
    "web/api_spec.py orjson.loads((schemas / 'openapi.json').read_bytes())": "a file of the project",
    "web/api_spec.py orjson.loads(path.read_bytes())": "a file of the project",
    "web/changed_objects.py orjson.loads(value.json)": "a list that we have encoded, of 16 KiB at most",
    "web/dashboard/network_list.py orjson.loads(text)": "an example of the project",
    "web/websocket/subscription_request.py msgspec.json.Decoder()": "params of a call, which jsonrpc.parse has bounded",
    "web/websocket/subscriptions.py msgspec.json.decode(why.error if isinstance(why, RpcError) else rpc_error_of(why))": (
        "an error of ours"
    ),
}  # fmt: skip
# Elsewhere, what is named after a request: where, and why it is bounded.
IN_CALLS = {
    "chains/evm/reached_contracts.py json.loads(params, object_pairs_hook=_members)": "1,000 objects and 10,000 values at most",
    "chains/evm/methods.py msgspec.json.decode(params)": "params of a call",
    "chains/svm/polled_params.py msgspec.json.decode(params)": "params of a call",
    "services/rpc/verifier.py msgspec.json.decode(params)": "params of a call",
    "services/rpc/verifier.py msgspec.json.decode(self._params)": "params of a call",
    "services/rpc/filter_ids.py msgspec.json.decode(params, type=list[str])": "4 KiB at most",
    "core/fault_plans.py orjson.loads(body)": "16 KiB at most",
    "core/fixed_replies.py orjson.loads(params)": "16 KiB at most, and 256 bytes",
    "core/jsonrpc.py json.loads(body, object_pairs_hook=list, parse_int=str, parse_float=str)": "16 KiB at most",
    "core/webhook_bodies.py msgspec.json.decode(body)": "the body of an event, which is ours",
}
NAMED = ("(params", "(self._params", "(body", "(request", "(message")


def parses(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PARSERS:
            yield f"{path.relative_to(PROXY)} {ast.unparse(node)}"


def found(*rings: str) -> set[str]:
    return {each for ring in rings for path in (PROXY / ring).rglob("*.py") for each in parses(path)}


def test_web_parses_json_of_clients_with_the_bounded_reader_only() -> None:
    """Use `ApiOperation.body_steps` for bodies, and `parse_bounded` for the params of a call."""
    assert found("web") == {*IN_WEB}


def test_calls_are_parsed_where_their_size_is_bounded() -> None:
    named = {each for each in found("core", "chains", "services") if any(word in each for word in NAMED)}
    assert named == {*IN_CALLS}


@pytest.mark.parametrize(
    "source", ["orjson.loads(x)", "await request.json()", "json.load(f)", "msgspec.json.decode(b)"]
)
def test_every_way_to_parse_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(f"{__name__}.PROXY", tmp_path)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "new.py").write_text(f"async def f(): return {source}\n")
    assert found("web") == {f"web/new.py {source.removeprefix('await ')}"}


def test_no_parser_is_imported_by_its_own_name() -> None:
    """The search above goes by the full name."""
    for path in PROXY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in ("orjson", "json", "msgspec.json"):
                names = {each.name for each in node.names}
                assert not names & {"loads", "load", "decode", "Decoder"}, path
