"""Agents use the service through the official MCP client, over standard input and HTTP, with keys and limits as everywhere."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import orjson
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.types import TextContent, TextResourceContents

from proxy.commands.agent_tools import page_text, tools_of
from proxy.settings import SCHEMAS
from proxy.web import api_spec
from tests.service import ROOT, Service, command_here

HOLDER = "0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266"
MISSING = "0x" + 40 * "0"
READ_TOOLS = {
    *("rpc_call", "list_chains", "list_token_balances", "read_token_metadata", "list_owned_nfts", "read_nft"),
    *("read_nft_collection", "read_gas_prices", "read_request", "simulate_transactions"),
}


def parameters(service: Service, key: str, *words: str) -> StdioServerParameters:
    environment = {name: value for name, value in os.environ.items() if name.startswith("PYTHON") or name == "PATH"}
    return StdioServerParameters(
        command=sys.executable,
        args=["-m", "proxy", "mcp", "--url", service.base, *words],
        env={**environment, "API_KEY": key},
        cwd=ROOT,
    )


@asynccontextmanager
async def over_stdio(service: Service, key: str, *words: str) -> AsyncIterator[Client]:
    # Its default for `errlog` is the sys.stderr of the time of its import, which the test runner may have closed since.
    async with Client(stdio_client(parameters(service, key, *words), errlog=sys.stderr)) as client:
        yield client


@asynccontextmanager
async def over_http(service: Service, headers: dict[str, str], *words: str) -> AsyncIterator[Client]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "mcp", "--http", "--port", "0", "--url", service.base, *words),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        url = line.split()[2]
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            yield client
    finally:
        process.terminate()
        await process.wait()


async def outcome(client: Client, name: str, **arguments: Any) -> tuple[bool, str]:
    result = await client.call_tool(name, arguments)
    (content,) = result.content
    assert isinstance(content, TextContent)
    return bool(result.is_error), content.text


async def document(client: Client, uri: str) -> str:
    (contents,) = (await client.read_resource(uri)).contents
    assert isinstance(contents, TextResourceContents)
    return contents.text


async def value(client: Client, name: str, **arguments: Any) -> Any:
    is_error, text = await outcome(client, name, **arguments)
    assert not is_error, text
    return orjson.loads(text)


async def read_everything(client: Client) -> None:
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(tools) >= READ_TOOLS
    assert tools["list_token_balances"].input_schema["required"] == ["chain", "address"]
    assert not any("account" in name for name in tools)
    chains = await value(client, "list_chains")
    assert "dev" in {each["chain"] for each in chains["networks"]}
    block = await value(client, "rpc_call", network="dev/mainnet", method="eth_blockNumber")
    assert int(block["result"], 16) > 0
    balances = await value(client, "list_token_balances", chain="dev", address=HOLDER, limit=5)
    assert balances["tokens"]
    assert await value(client, "read_gas_prices", chain="dev")
    assert await value(client, "list_owned_nfts", chain="dev", address=HOLDER)


async def test_agent_reads_over_standard_input(service: Service) -> None:
    async with over_stdio(service, service.keys["enterprise"]) as client:
        await read_everything(client)


async def test_agent_reads_over_http_with_its_own_key(service: Service) -> None:
    async with over_http(service, {"X-API-Key": service.keys["enterprise"]}) as client:
        await read_everything(client)
    async with over_http(service, {"Authorization": f"Bearer {service.keys['enterprise']}"}) as client:
        assert (await value(client, "rpc_call", network="dev/mainnet", method="eth_chainId"))["result"] == "0x7a69"


async def test_writes_need_the_option_and_the_scope(service: Service) -> None:
    raw = {"network": "dev/mainnet", "method": "eth_sendRawTransaction", "params": ["0x00"]}
    async with over_stdio(service, service.keys["enterprise"]) as client:
        is_error, text = await outcome(client, "rpc_call", **raw)
        assert is_error
        assert "started without --allow-writes" in text
        for method in ("eth_newFilter", "no_such_method"):
            assert (await outcome(client, "rpc_call", **{**raw, "method": method}))[0]
    account = await service.new_account()
    reader = (await service.new_key(account["id"], "--scope", "rpc:read"))["key"]
    async with over_stdio(service, reader, "--allow-writes") as client:
        is_error, text = await outcome(client, "rpc_call", **raw)
        assert is_error
        assert "status 403" in text
    async with over_stdio(service, service.keys["enterprise"], "--allow-writes") as client:
        is_error, text = await outcome(client, "rpc_call", **raw)
        assert is_error  # The node refuses the transaction itself.
        assert "status 200" in text


async def test_errors_name_the_request_which_can_be_explained(service: Service) -> None:
    async with over_stdio(service, service.keys["enterprise"]) as client:
        is_error, text = await outcome(client, "read_token_metadata", chain="dev", contract="nonsense")
        assert is_error
        assert "status 400" in text
        request_id = text.rpartition("request id ")[2].partition(":")[0]
        for _ in range(100):
            is_error, text = await outcome(client, "read_request", id=request_id)
            if not is_error:
                break
            await asyncio.sleep(0.1)
        assert not is_error, (request_id, text)
        assert request_id in text
        assert (await outcome(client, "list_token_balances", chain="dev"))[0]
        assert await outcome(client, "rpc_call", network="../v1/admin", method="eth_chainId") == (
            True, "network must be CHAIN/NETWORK, such as list_chains returns"
        )  # fmt: skip


async def test_wrong_and_missing_keys_are_refused(service: Service) -> None:
    async with over_http(service, {}) as client:
        assert await outcome(client, "list_chains") == (
            True, "an API key is required: send it in the header X-API-Key"
        )  # fmt: skip
    async with over_http(service, {"X-API-Key": "svc_live_wrong"}) as client:
        is_error, text = await outcome(client, "list_chains")
        assert is_error
        assert "status 401" in text
    done = await asyncio.to_thread(command_here, "mcp", "--url", service.base, env={"API_KEY": ""})
    assert (done.returncode, done.stderr) == (2, "penstock: an API key is required: give --key, or set API_KEY\n")


async def test_documents_are_resources(service: Service) -> None:
    async with over_stdio(service, service.keys["free"]) as client:
        found = {str(each.uri): each.name for each in (await client.list_resources()).resources}
        assert "penstock://llms.txt" in found
        assert "Penstock" in await document(client, "penstock://llms.txt")
        spec = orjson.loads(await document(client, "penstock://v1/openapi.json"))
        assert spec["openapi"].startswith("3.")
        with pytest.raises(MCPError, match="there is no such document"):
            await client.read_resource("penstock://v1/admin/actions")


def test_text_of_a_page_is_its_article() -> None:
    html = "<nav>menu</nav><article><h1>Title</h1><p>One <b>two</b></p><script>x</script></article><p>foot</p>"
    assert page_text(html) == "Title\nOne two"


def test_tool_with_a_body_has_the_schema_of_the_body() -> None:
    tool = tools_of(api_spec.load(SCHEMAS), allow_writes=False)["simulate_transactions"]
    item = tool.schema["properties"]["body"]["properties"]["transactions"]["items"]
    assert {"from", "to", "value", "data"} <= set(item["properties"])


def test_every_tool_has_a_schema_without_references() -> None:
    for tool in tools_of(api_spec.load(SCHEMAS), allow_writes=False).values():
        assert "$ref" not in orjson.dumps(tool.schema).decode()
        assert tool.title
        assert tool.description


def test_guide_names_every_tool() -> None:
    page = (ROOT / "docs" / "agents.md").read_text()
    assert [name for name in tools_of(api_spec.load(SCHEMAS), allow_writes=False) if f"`{name}`" not in page] == []
