"""Calls in the form of a URL, as CometBFT reads them (rpc/jsonrpc/server/http_uri_handler.go)."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.core.rest_routes import BadTarget, query_of
from proxy.core.uri_calls import UriType, params_of

TYPES: dict[str, UriType] = {"height": "integer", "prove": "boolean", "query": "text", "tx": "bytes", "data": "hex"}


@pytest.mark.parametrize(
    ("query", "params"),
    [
        ("", {}),
        ("height=5", {"height": "5"}),
        ("height=%225%22", {"height": "5"}),
        ("height=", {}),
        ("prove=true", {"prove": True}),
        ("prove=false&height=2", {"prove": False, "height": "2"}),
        ("query=%22tx.height%3D5%22", {"query": "tx.height=5"}),
        ("tx=0x6b3d76", {"tx": "az12"}),
        ("tx=%22k=v%22", {"tx": "az12"}),
        ("data=0x6B", {"data": "6b"}),
        ("data=%22k%22", {"data": "6b"}),
        ("query=%22%22", {"query": ""}),
    ],
)
def test_values_are_read_by_their_type(query: str, params: dict[str, Any]) -> None:
    assert orjson.loads(params_of("a", TYPES, query_of(query))) == params


def test_method_may_have_another_type() -> None:
    types: dict[str, UriType] = {"hash": "bytes", "b.hash": "hex"}
    assert [params_of(name, types, {"hash": ["0x00"]}) for name in "ab"] == [b'{"hash":"AA=="}', b'{"hash":"00"}']


@pytest.mark.parametrize(
    ("query", "advice"),
    [
        ("height=x", "integer"),
        ("height=5&height=6", "twice"),
        ("prove=1", "true or false"),
        ("query=a", "double quotes"),
        ("tx=abc", "hexadecimal"),
        ("tx=0xabc", "hexadecimal"),
        ("other=1", "not a parameter"),
        ("height=" + "9" * 30, "integer"),
    ],
)
def test_error_says_what_to_change(query: str, advice: str) -> None:
    with pytest.raises(BadTarget, match=advice):
        params_of("a", TYPES, query_of(query))
