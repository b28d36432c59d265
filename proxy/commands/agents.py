"""`mcp`: serve agents by the Model Context Protocol, over standard input and output or, with --http, at /mcp.

Needs `pip install 'penstock[mcp]'`. Over HTTP each client sends its own key, as in calls of the API. It runs beside the
service, and a load balancer can pass /mcp to it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from proxy import __version__, settings
from proxy.commands.agent_tools import REPLY_S, ToolCaller, ToolCalls, tools_of
from proxy.commands.context import CONFIG_HELP
from proxy.errors import StartError
from proxy.web import api_spec

KEY_VARIABLE = "API_KEY"
SERVICE = "http://127.0.0.1:8545"
SCHEME = "penstock:/"
# Codes of JSON-RPC 2.0.
INVALID_PARAMS, INTERNAL_ERROR = -32602, -32603
INSTRUCTIONS = (
    "Penstock gives access to blockchain networks. Begin with list_chains, which returns the networks. rpc_call calls any "
    "read of a node; the other tools return balances, NFTs and gas prices. Each reply that failed has a request id: "
    "read_request explains it."
)


def register(commands: Any) -> None:
    about = "serve agents by the Model Context Protocol (MCP)"
    parser = commands.add_parser(
        "mcp",
        help=about,
        description=f"{about.capitalize()}, over standard input and output, or with --http at /mcp. Tools call a running "
        "service with the caller's API key.",
    )
    parser.add_argument("--url", default=SERVICE, help=f"the service (default: {SERVICE})")
    parser.add_argument(
        "--key", metavar="KEY", help=f"the API key over standard input (default: the variable {KEY_VARIABLE})"
    )
    parser.add_argument(
        "--allow-writes", action="store_true", help="also allow methods that send transactions, if the key may"
    )
    parser.add_argument(
        "--http", action="store_true", help="listen for HTTP; each client sends its own key as X-API-Key or Bearer"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8546, help="the port to listen on (default: 8546; 0: any free one)")
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"for your own methods: {CONFIG_HELP}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if find_spec("mcp") is None:
        raise StartError(["mcp needs the package mcp: run pip install 'penstock[mcp]'"])
    if urlsplit(args.url).scheme not in ("http", "https"):
        raise StartError(["--url: must be the http or https address of a service"])
    key = args.key or settings.environment().get(KEY_VARIABLE, "")
    if not args.http and not key:
        raise StartError([f"an API key is required: give --key, or set {KEY_VARIABLE}"])
    asyncio.run(_serve(args, key))
    return 0


async def _serve(args: argparse.Namespace, key: str) -> None:
    own = settings.own_directory(args.config, environ=settings.environment()) if args.config else ""
    tables = settings.load_tables(own=own)
    tools = tools_of(api_spec.load(settings.SCHEMAS), allow_writes=args.allow_writes)
    async with AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=REPLY_S)
        # Requests are bounded where they come in.
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        calls = ToolCalls(session, args.url.rstrip("/").removesuffix("/v1"), tools, tables.methods, args.allow_writes)
        server = _server(calls, key)
        await (_serve_http(server, args) if args.http else _serve_stdio(server))


def _server(calls: ToolCalls, key: str) -> Any:
    """The protocol's server. `key`: of calls without a request, those over standard input."""
    from mcp import types
    from mcp.server import Server

    async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        shown = [
            types.Tool(name=each.name, title=each.title, description=each.description, input_schema=dict(each.schema))
            for each in calls.tools.values()
        ]
        return types.ListToolsResult(tools=shown)

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        reply = await calls.call(params.name, params.arguments or {}, _caller(context, key))
        return types.CallToolResult(content=[types.TextContent(type="text", text=reply.text)], is_error=reply.is_error)

    async def list_resources(_context: Any, _params: Any) -> types.ListResourcesResult:
        with _document_faults():
            documents = await calls.documents()
        return types.ListResourcesResult(
            resources=[types.Resource(uri=f"{SCHEME}{path}", name=title) for path, title in documents.items()]
        )

    async def read_resource(_context: Any, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        uri = str(params.uri)
        with _document_faults():
            text = await calls.read_document(uri.removeprefix(SCHEME))
        return types.ReadResourceResult(
            contents=[types.TextResourceContents(uri=uri, mime_type="text/plain", text=text)]
        )

    return Server(
        "penstock",
        version=__version__,
        title="Penstock",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_read_resource=read_resource,
    )


@contextmanager
def _document_faults() -> Iterator[None]:
    """Translate errors of documents into the protocol's."""
    from mcp.shared.exceptions import MCPError

    try:
        yield
    except KeyError:
        raise MCPError(code=INVALID_PARAMS, message="there is no such document: list the resources") from None
    except (aiohttp.ClientError, OSError, TimeoutError) as exc:
        raise MCPError(code=INTERNAL_ERROR, message=f"the service does not reply ({type(exc).__name__})") from None


def _caller(context: Any, key: str) -> ToolCaller:
    """Over HTTP, the client's own key counts and never this program's."""
    request = context.request
    if request is None:
        return ToolCaller(key)
    from proxy.commands.agent_http import key_of

    return ToolCaller(key_of(request.headers), request.client.host if request.client else "")


async def _serve_stdio(server: Any) -> None:
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


async def _serve_http(server: Any, args: argparse.Namespace) -> None:
    import uvicorn

    from proxy.commands.agent_http import BoundedApp, BoundedConnection

    app = server.streamable_http_app(json_response=True, stateless_http=True, host=args.host)
    config = uvicorn.Config(
        BoundedApp(app),
        host=args.host,
        port=args.port,
        http=BoundedConnection,
        ws="none",
        log_level="warning",
        access_log=False,
    )
    listening = uvicorn.Server(config)
    sockets = [config.bind_socket()]
    # Clients connect as soon as the address is printed.
    sockets[0].listen()
    port = sockets[0].getsockname()[1]
    print(f"MCP at http://{args.host}:{port}/mcp for {args.url}", flush=True)
    await listening.serve(sockets)
