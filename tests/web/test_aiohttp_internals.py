"""The undocumented members of aiohttp that `web/aiohttp_internals.py` relies on. A new version of aiohttp fails here first."""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import re
from importlib import metadata
from weakref import ref

import pytest
from aiohttp import HttpVersion10, HttpVersion11, http_parser, web
from aiohttp._websocket.helpers import websocket_mask
from aiohttp.test_utils import make_mocked_request

from proxy.web import aiohttp_internals
from proxy.web.aiohttp_internals import AiohttpConnection, reply_in_version, version_of
from proxy.web.front.handler_connection import HandlerConnection
from tests.conventions.source import ROOT, modules
from tests.service import until
from tests.web.worker import on_uvloop, running_worker

ADAPTER = aiohttp_internals.__name__
# Of a connection before its first request, with the values that the adapter expects.
STATE = {
    "_buffer_paused": False,
    "_current_request": None,
    "_message_tail": b"",
    "_reading_paused": False,
    "_task_handler": None,
}
OVERRIDDEN = {
    "_handle_request": ["self", "request", "start_time", "request_handler"],
    "_pause_transport_reading": ["self"],
    "_resume_transport_reading": ["self"],
}
FUNCTIONS = {"HttpRequestParser", "HttpRequestParserPy"}


def connection() -> AiohttpConnection:
    async def no_handler(request: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError(request)

    return AiohttpConnection(web.Server(no_handler), loop=asyncio.get_running_loop())


def test_minor_version_is_the_one_that_setup_cfg_pins() -> None:
    assert "    aiohttp >= 3.14, < 3.15\n" in (ROOT / "setup.cfg").read_text("utf-8")
    assert metadata.version("aiohttp").startswith("3.14.")


@pytest.mark.parametrize("name", STATE)
async def test_handler_has_state(name: str) -> None:
    assert getattr(connection(), name, "missing") == STATE[name], f"aiohttp's RequestHandler.{name} has changed"


async def test_handler_has_its_server_and_an_empty_queue_of_one_request() -> None:
    assert connection().is_open
    assert len(connection()._messages) == 0
    assert connection()._max_msg_queue_size == 1, "MAX_MSG_QUEUE_SIZE is no longer read by aiohttp"


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_handler_has_method(name: str) -> None:
    method = getattr(web.RequestHandler, name, None)
    assert method is not None, f"aiohttp's RequestHandler.{name} is gone"
    assert [*inspect.signature(method).parameters] == OVERRIDDEN[name]


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_parser_is_there(name: str) -> None:
    assert hasattr(http_parser, name), f"aiohttp.http_parser.{name} is gone"


def test_version_of_the_reply_can_be_set() -> None:
    request = make_mocked_request("GET", "/", version=HttpVersion10)
    assert version_of(request) == HttpVersion10
    reply_in_version(request, HttpVersion11)
    assert request.version == HttpVersion11


def test_mask_is_applied_in_place() -> None:
    data = bytearray(b"abcdefghi")
    websocket_mask(b"\1\2\3\4", data)
    assert data == bytes(byte ^ b"\1\2\3\4"[at % 4] for at, byte in enumerate(b"abcdefghi"))


def test_no_attribute_of_ours_hides_one_of_aiohttp() -> None:
    theirs = {name for each in web.RequestHandler.__mro__ for name in vars(each)}
    assert not theirs & {*HandlerConnection.__slots__}


@on_uvloop
async def test_stopped_worker_is_not_kept() -> None:
    """Every worker of a test maps memory. If they stayed, the process would run out of files, and collecting garbage would take
    longer after every test."""
    async with running_worker("http://127.0.0.1:1/") as worker, await worker.connect() as client:
        assert (await client.send(b"GET /healthz HTTP/1.1\r\nHost: penstock\r\n\r\n")).status == 200
        app = ref(worker.app)
    del worker, client
    await until(lambda: gc.collect() is not None and app() is None)


def test_only_the_adapter_uses_internals() -> None:
    private = {name for each in web.RequestHandler.__mro__ for name in vars(each) if re.match("_[a-z]", name)}
    found = []
    for module, tree in modules().items():
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=str(source), names=names) if source.split(".")[0] == "aiohttp":
                    imported = {f"{source}.{alias.name}" for alias in names}
                    found += [(module, name) for name in imported if "._" in name or name == "aiohttp.web_protocol"]
                case ast.Attribute(value=ast.Name(id="request"), attr=name) if name.startswith("_"):
                    found.append((module, name))
                case ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    if module == HandlerConnection.__module__ and name in private:
                        found.append((module, name))
                case _:
                    pass
    assert {module for module, _ in found} == {ADAPTER}, found
