"""The tools and documents that `mcp` offers to agents, from the API's own description.

A tool is an operation of the API. Its calls go to the service over HTTP with the caller's key, so scopes, limits, prices and
records are those of any other client. Operations that the service gains later appear by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson

from proxy.chains.family import MethodTable
from proxy.web.api_spec import ApiOperation, ApiSpec

# Operations that read data, by the beginning of their paths. Those under /account and /admin are for people and programs that
# manage an account, and not for agents.
_READS = ("/chains", "/tokens/", "/nfts/", "/gas/{chain}", "/transfers", "/errors", "/requests/{id}")
# Operations that are posted and change nothing.
_POSTED_READS = ("/simulate",)
RPC_TOOL = "rpc_call"
# Longer replies are cut: they would fill the agent's context. Only the beginning of much longer ones is read.
MOST_CHARACTERS = 100_000
MOST_READ = 1 << 20
REPLY_S = 60.0
_RPC_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "network": {
            "type": "string",
            "pattern": "^[a-z0-9-]+/[a-z0-9-]+$",
            "description": "CHAIN/NETWORK, as list_chains returns them. A chain id may stand for the chain.",
        },
        "method": {"type": "string", "description": "A JSON-RPC method, such as eth_getBalance."},
        "params": {
            "type": "array",
            "description": "Its parameters, as in the node's own documentation.",
            "default": [],
        },
        "private": {
            "type": "boolean",
            "description": "Send a transaction to private relays only, never to the public mempool.",
            "default": False,
        },
    },
    "required": ["network", "method"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    title: str
    description: str
    schema: Mapping[str, Any]
    operation: ApiOperation | None = None


@dataclass(frozen=True, slots=True)
class ToolReply:
    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class ToolCaller:
    """Whose key a call uses. `address`: of a client behind this program, empty for its own."""

    key: str
    address: str = ""

    @property
    def headers(self) -> dict[str, str]:
        headers = {"X-API-Key": self.key} if self.key else {}
        return headers | ({"X-Forwarded-For": self.address} if self.address else {})


def tools_of(spec: ApiSpec, *, allow_writes: bool) -> dict[str, Tool]:
    tools = {RPC_TOOL: _rpc_tool(allow_writes=allow_writes)}
    for operation in spec.operations.values():
        if _is_offered(operation):
            tools[operation.id] = _tool(spec, operation)
    return tools


def _rpc_tool(*, allow_writes: bool) -> Tool:
    allowed = "Reads and writes" if allow_writes else "Reads only: methods that send transactions are refused"
    return Tool(RPC_TOOL, "Call a JSON-RPC method", f"Calls a method of a blockchain network. {allowed}.", _RPC_SCHEMA)


def _is_offered(operation: ApiOperation) -> bool:
    if operation.method == "GET":
        return operation.path.startswith(_READS)
    return operation.method == "POST" and operation.path.startswith(_POSTED_READS)


def _tool(spec: ApiSpec, operation: ApiOperation) -> Tool:
    described = spec.document["paths"][operation.path][operation.method.lower()]
    parameters = {**operation.path_parameters, **operation.query}
    properties = {name: _plain(each.schema, each.schema.get("components", {})) for name, each in parameters.items()}
    required = [name for name, each in parameters.items() if each.required]
    if operation.method == "POST":
        body = described["requestBody"]["content"]["application/json"]["schema"]
        properties["body"] = _plain(body, spec.document["components"])
        required.append("body")
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(
        operation.id, described["summary"], described.get("description", described["summary"]), schema, operation
    )


def _plain(schema: Any, components: Mapping[str, Any], depth: int = 0) -> Any:
    """The schema without references, and without our own keywords."""
    if isinstance(schema, list):
        return [_plain(each, components, depth) for each in schema]
    if not isinstance(schema, Mapping) or depth > 8:
        return schema
    if isinstance(ref := schema.get("$ref"), str):
        target = components.get("schemas", {}).get(ref.rpartition("/")[2], {})
        return _plain({**target, **{key: each for key, each in schema.items() if key != "$ref"}}, components, depth + 1)
    return {
        key: _plain(each, components, depth + 1)
        for key, each in schema.items()
        if key != "components" and not key.startswith("x-")
    }


@dataclass(slots=True)
class ToolCalls:
    """Runs tools against a service. `methods`: the method tables, which say what a read is."""

    session: aiohttp.ClientSession
    url: str
    tools: Mapping[str, Tool]
    methods: Mapping[str, MethodTable]
    allow_writes: bool = False
    _documents: dict[str, str] = field(default_factory=dict)

    async def call(self, name: str, arguments: Mapping[str, Any], caller: ToolCaller) -> ToolReply:
        tool = self.tools.get(name)
        if tool is None:
            return ToolReply(f"there is no tool {name}", is_error=True)
        if not caller.key:
            return ToolReply("an API key is required: send it in the header X-API-Key", is_error=True)
        try:
            return await (
                self._rpc(arguments, caller)
                if tool.operation is None
                else self._read(tool.operation, arguments, caller)
            )
        except KeyError as exc:
            return ToolReply(f"{exc.args[0]} is required", is_error=True)
        except _BadArgument as exc:
            return ToolReply(str(exc), is_error=True)
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            return ToolReply(f"the service does not reply ({type(exc).__name__})", is_error=True)

    async def _rpc(self, arguments: Mapping[str, Any], caller: ToolCaller) -> ToolReply:
        network, method = str(arguments["network"]), str(arguments["method"])
        if not re.fullmatch(r"[A-Za-z0-9-]+/[A-Za-z0-9-]+", network):
            return ToolReply("network must be CHAIN/NETWORK, such as list_chains returns", is_error=True)
        if not self.allow_writes and not self._is_read(method):
            return ToolReply(
                f"{method} is not a read. This server was started without --allow-writes, so only reads are allowed",
                is_error=True,
            )
        params = arguments.get("params") or []
        if not isinstance(params, list | dict):
            raise _BadArgument("params must be an array, or an object on networks that take one")
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        private = {"private": "1"} if arguments.get("private") else {}
        return await self._send("POST", f"/v1/rpc/{network}", caller, json=body, params=private)

    def _is_read(self, method: str) -> bool:
        return any(method in table and table[method].kind == "read" for table in self.methods.values())

    async def _read(self, operation: ApiOperation, arguments: Mapping[str, Any], caller: ToolCaller) -> ToolReply:
        path = operation.path
        for name in operation.path_parameters:
            path = path.replace(f"{{{name}}}", _segment(name, arguments[name]))
        query = {name: _word(arguments[name]) for name in operation.query if arguments.get(name) is not None}
        body = {"json": arguments["body"]} if operation.method == "POST" else {}
        return await self._send(operation.method, f"/v1{path}", caller, params=query, **body)

    async def _send(self, method: str, path: str, caller: ToolCaller, **more: Any) -> ToolReply:
        # The key must not follow a redirect to another host.
        async with self.session.request(
            method, f"{self.url}{path}", headers=caller.headers, allow_redirects=False, **more
        ) as response:
            data = await _beginning(response)
            request_id = response.headers.get("X-Request-Id", "")
            wait = response.headers.get("Retry-After", "")
        if 300 <= response.status < 400:
            return ToolReply("the service redirects elsewhere: --url must be its own address", is_error=True)
        if len(data) > MOST_READ:
            text = data[:MOST_CHARACTERS].decode("utf-8", "replace")
            return ToolReply(f"{text}\n… cut: the reply has more than {MOST_READ} bytes. Ask for less, or use pages.")
        try:
            reply = orjson.loads(data)
        except ValueError:
            return ToolReply(f"the service replied with status {response.status} and no JSON", is_error=True)
        # A record of a request has an `error` too: that of the request.
        is_error = response.status >= 400 or (path.startswith("/v1/rpc/") and "error" in reply)
        text = orjson.dumps(reply, option=orjson.OPT_INDENT_2).decode()
        if len(text) > MOST_CHARACTERS:
            text = f"{text[:MOST_CHARACTERS]}\n… cut: the reply has {len(text)} characters. Ask for less, or use pages."
        if is_error:
            text += f"\nstatus {response.status}, request id {request_id}: read_request explains it"
            text += f"; retry after {wait} s" if wait else ""
        return ToolReply(text, is_error)

    # Documents

    async def documents(self) -> dict[str, str]:
        """The titles of the documents by their paths: the index for language models, the API spec and the guide."""
        if not self._documents:
            index = await self._document("/llms.txt")
            pages = {path: title for title, path in re.findall(r"\[([^\]]+)\]\([^)]*?(/docs/guide/[^)#\s]*)\)", index)}
            self._documents |= {
                "/llms.txt": "Contents of the documentation",
                "/v1/openapi.json": "The API spec",
                **pages,
            }
        return self._documents

    async def read_document(self, path: str) -> str:
        """The text of a document. KeyError if it is not one."""
        if path not in await self.documents():
            raise KeyError(path)
        text = await self._document(path)
        return page_text(text) if path.startswith("/docs/guide/") else text

    async def _document(self, path: str) -> str:
        async with self.session.get(f"{self.url}{path}", allow_redirects=False) as response:
            response.raise_for_status()
            return await response.text()


class _BadArgument(ValueError):
    """An argument that no request can be made of."""


def _segment(name: str, value: Any) -> str:
    """An argument as a segment of a path. Dots alone would name another path."""
    text = str(value)
    if not text.strip("."):
        raise _BadArgument(f"{name} must not be empty or dots")
    return quote(text, safe="")


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """The body, or a little more than MOST_READ of it."""
    parts, size = list[bytes](), 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MOST_READ:
            break
    return b"".join(parts)


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_word, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


class _PageText(HTMLParser):
    """Collects the words of a page's article."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._depth = 0
        self._skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._depth += tag == "article"
        self._skipped += tag in ("script", "style", "nav")
        if tag in ("h1", "h2", "h3", "p", "li", "tr", "pre"):
            self.words.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "article"
        self._skipped -= tag in ("script", "style", "nav")
        if tag in ("td", "th"):
            self.words.append(" | ")

    def handle_data(self, data: str) -> None:
        if self._depth and not self._skipped:
            self.words.append(data)


def page_text(html: str) -> str:
    parser = _PageText()
    parser.feed(html)
    return re.sub(r"\n\s*\n+", "\n\n", "".join(parser.words)).strip()
