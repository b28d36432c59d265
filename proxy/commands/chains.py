"""`chains`: list the known networks, and write the file of a new chain from the replies of one of its nodes."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from proxy import settings as settings_room
from proxy.chains.family import Family
from proxy.chains.registry import Chain, Network, Registry
from proxy.commands import context, output, provider_networks
from proxy.core.rest_routes import RestParams, target_of
from proxy.errors import InvalidRequest, StartError

COLUMNS = ("network", "title", "id", "family", "class", "coin", "block_time_s")
ASK_S = 10.0
# The block time is the mean over this many blocks.
MEASURED_BLOCKS = 100
# The bounds of schemas/config/chain.json.
DEFAULT_BLOCK_S, LONGEST_BLOCK_S = 12.0, 600.0


def register(commands: Any) -> None:
    parser = commands.add_parser("chains", help="list the known networks, and add a chain of your own")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="list the networks with a chain file, or all")
    listed.add_argument(
        "name", nargs="?", default="", help="only networks with this in their name or id, from all lists"
    )
    listed.add_argument(
        "--all", action="store_true", help="also the public networks that have no chain file of their own"
    )
    provider_networks.register(listed)
    listed.add_argument("--config", type=Path, metavar="FILE", help=context.CONFIG_HELP)
    listed.add_argument("--json", action="store_true", help="print JSON")
    listed.set_defaults(run=_list)
    add = actions.add_parser("add", help="write the file of a new chain; a node of the chain provides the facts")
    add.add_argument("id", type=int, nargs="?", help="the chain id (EIP-155), such as 100; only for the family evm")
    add.add_argument("--family", default="evm", help="the chain's family: a name in config/families (default: evm)")
    add.add_argument("--upstream", required=True, metavar="URL", help="an http or https URL of one of its nodes")
    add.add_argument("--name", required=True, help="the chain's name in paths: lower-case letters, digits and hyphens")
    add.add_argument("--symbol", help="the coin that pays for transactions (default: ETH for evm, else the name)")
    add.add_argument(
        "--block-time", type=float, metavar="SECONDS", help="the usual time between blocks (default: measured)"
    )
    add.add_argument("--config", type=Path, metavar="FILE", help=context.CONFIG_HELP)
    add.add_argument(
        "--directory", type=Path, metavar="DIR", help="your data files (default: the setting data_files.directory)"
    )
    add.set_defaults(run=lambda args: asyncio.run(_add(args)))


def _tables(config: Path | None) -> tuple[str, settings_room.Tables]:
    """The operator's directory and all tables. Settings that `serve` needs may still be missing."""
    own = settings_room.own_directory(config, environ=settings_room.environment())
    return own, settings_room.load_tables(own=own)


def _list(args: argparse.Namespace) -> int:
    own, tables = _tables(args.config)
    if args.provider is not None:
        return provider_networks.listed(args, own, tables)
    if args.refresh or args.write is not None:
        raise StartError(["--refresh: name the provider with --provider"])
    rows = [
        {
            "network": network.id,
            "title": network.chain.title,
            "id": network.identity,
            "family": network.family,
            "class": network.facts.class_,
            "coin": network.chain.native.symbol,
            "block_time_s": network.facts.block_time_s,
        }
        for network in _networks(tables, args)
    ]
    output.rows(rows, COLUMNS, as_json=args.json)
    return 0


def _networks(tables: settings_room.Tables, args: argparse.Namespace) -> Iterable[Network]:
    wants_all = args.all or args.name
    networks = (tables.with_networks(tables.network_names()) if wants_all else tables).chains.networks()
    return [each for each in networks if args.name in each.id or args.name == each.identity]


async def _add(args: argparse.Namespace) -> int:
    own, tables = _tables(args.config)
    directory = args.directory or (Path(own) if own else None)
    if directory is None:
        raise StartError(["--directory DIR is required: data_files.directory is not set"])
    path = directory / "chains" / f"{args.name}.toml"
    text = await _file_text(args, tables.chains, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    try:
        settings_room.load_tables(own=str(directory))
    except StartError:
        path.unlink()
        raise
    print(f"wrote {path}: check it, and add an upstream to your settings:\n")
    print(f'[[upstreams]]\nnetwork = "{args.name}/mainnet"\nurl = {json.dumps(args.upstream)}')
    if str(directory) != own:
        print(f"\n[data_files]\ndirectory = {json.dumps(str(directory.resolve()))}")
    return 0


async def _file_text(args: argparse.Namespace, registry: Registry, path: Path) -> str:
    """The file of the new chain, from the replies of its node."""
    if args.family not in registry.families:
        raise StartError([f"there is no family {args.family!r}: use one of {', '.join(registry.families)}"])
    if args.family == "evm":
        if args.id is None:
            raise StartError(["the chain id is missing: chains of the family evm have one"])
        _check_free(registry, args.family, str(args.id), path)
        known = list(registry.chains.values())
        facts = await _facts(args.upstream, args.id, known, block_time_s=args.block_time)
        return chain_text(args.name, args.symbol or "ETH", facts)
    identity = await _identity(args.upstream, registry.families[args.family])
    _check_free(registry, args.family, identity, path)
    return plain_chain_text(args, identity)


def _check_free(registry: Registry, family: str, identity: str, path: Path) -> None:
    """Families number their chains on their own: Aptos has a chain 1 too."""
    of_family = (each for each in registry.networks() if each.chain.family == family)
    known = next((each for each in of_family if each.identity == identity), None)
    if known is not None:
        raise StartError([f"chain id {identity} is {known.id}, which is known already: add an upstream for it"])
    if path.exists():
        raise StartError([f"{path} exists already: choose another --name, or edit the file"])


async def _identity(url: str, family: Family) -> str:
    """The name that the node gives to its chain."""
    import aiohttp

    lookup = family.head.lookups.chain
    assert lookup is not None  # Every family's file has it.
    values = lookup.given(0, "at")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as session:
        node = NewNode(session, url)
        for call in lookup.calls:
            method, params = call.with_values(values)
            values |= call.values_in(json.dumps(await node.ask(method, json.loads(params))).encode())
    if not (identity := lookup.identity(values)):
        raise InvalidRequest("--upstream: the node does not name its chain: check the URL and --family")
    return identity


def plain_chain_text(args: argparse.Namespace, identity: str) -> str:
    """The file of a chain of another family. Its block time and finality are those of the family, unless they are given."""
    lines = [
        f"name = {json.dumps(args.name)}",
        f"family = {json.dumps(args.family)}",
        f"native = {{ symbol = {json.dumps(args.symbol or _symbol_of(args.name))}, decimals = 8 }}   # check the decimals",
        "",
        "[networks.mainnet]",
        f"genesis = {json.dumps(identity)}   # as the node names its chain",
        *([f"block_time_s = {args.block_time}"] if args.block_time else []),
    ]
    return "\n".join(lines) + "\n"


def _symbol_of(name: str) -> str:
    return "".join(filter(str.isalnum, name)).upper()[:10]


async def _facts(url: str, chain_id: int, known: Sequence[Chain], *, block_time_s: float | None) -> dict[str, Any]:
    """The facts of a network as its node reports them. Shared contracts are looked for at their addresses on known chains."""
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as session:
        node = NewNode(session, url)
        reported = int(await node.call("eth_chainId"), 16)
        if reported != chain_id:
            raise InvalidRequest(f"--upstream: the node's chain id is {reported}, not {chain_id}")
        head = await node.call("eth_getBlockByNumber", "latest", False)
        return {
            "chain_id": chain_id,
            "block_time_s": block_time_s or await node.block_time(int(head["number"], 16), int(head["timestamp"], 16)),
            "finality_tag": await node.has_tag("finalized"),
            "legacy_fees": "baseFeePerGas" not in head,
            "multicall": await node.first_deployed({chain.multicall for chain in known if chain.multicall}),
            "entry_points": await node.deployed([chain.entry_points for chain in known]),
            "factories": await node.deployed([chain.factories for chain in known]),
        }


async def route_reply(
    session: Any, url: str, route: str, params: Any, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any] | None]:
    """The status of a route's reply, and the record of the reply (`core/rest_routes.py`) if that is 200."""
    given = msgspec.convert(params or {}, RestParams)
    verb, target = target_of(route, given)
    sent = {**given.headers, **(headers or {})}
    async with session.request(verb, url.rstrip("/") + target, headers=sent, allow_redirects=False) as response:
        if response.status != 200:
            return response.status, None
        reply_headers = {name.lower(): value for name, value in response.headers.items()}
        return 200, {"status": 200, "headers": reply_headers, "body": await response.json(content_type=None)}


class NewNode:
    """A node of the new chain, called directly: it is not an upstream yet."""

    def __init__(self, session: Any, url: str) -> None:
        self._session = session
        self._url = url

    async def call(self, method: str, *params: Any) -> Any:
        return await self.ask(method, params)

    async def ask(self, method: str, params: Any) -> Any:
        reply = await self._reply(method, params)
        if reply.get("result") is None:
            raise InvalidRequest(f"--upstream: the node does not answer {method}: {reply.get('error')}")
        return reply["result"]

    async def _reply(self, method: str, params: Any) -> dict[str, Any]:
        import aiohttp

        try:
            if " " in method:
                status, record = await route_reply(self._session, self._url, method, params)
                return {"error": f"status {status}"} if record is None else {"result": record}
            call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            async with self._session.post(self._url, json=call, allow_redirects=False) as response:
                reply = await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:
            raise InvalidRequest(f"--upstream: the node does not reply ({type(exc).__name__}): check the URL") from None
        if not isinstance(reply, dict):
            raise InvalidRequest("--upstream: the reply is not JSON-RPC: check the URL")
        return reply

    async def block_time(self, head: int, at: int) -> float:
        """Mean seconds between the newest blocks; at least 0.1, as timestamps are whole seconds. The first block does not
        count, because its time is often 0. A development chain may have rested for days between two blocks."""
        blocks = min(MEASURED_BLOCKS, head - 1)
        if blocks < 1:
            return DEFAULT_BLOCK_S
        older = await self.call("eth_getBlockByNumber", hex(head - blocks), False)
        return min(LONGEST_BLOCK_S, max(0.1, round((at - int(older["timestamp"], 16)) / blocks, 1)))

    async def has_tag(self, tag: str) -> bool:
        return bool((await self._reply("eth_getBlockByNumber", (tag, False))).get("result"))

    async def first_deployed(self, addresses: Iterable[str]) -> str | None:
        for address in sorted(addresses):
            if len(await self.call("eth_getCode", address, "latest")) > 2:
                return address
        return None

    async def deployed(self, tables: Iterable[Mapping[str, str]]) -> dict[str, str]:
        """For each version, the first of its addresses that has code."""
        known: dict[str, set[str]] = {}
        for version, address in (pair for table in tables for pair in table.items()):
            known.setdefault(version, set()).add(address)
        deployed = {version: await self.first_deployed(addresses) for version, addresses in sorted(known.items())}
        return {version: address for version, address in deployed.items() if address is not None}


def chain_text(name: str, symbol: str, facts: Mapping[str, Any]) -> str:
    """The file of a chain. `schemas/config/chain.json` describes all keys."""
    lines = [
        f"name = {json.dumps(name)}",
        f"native = {{ symbol = {json.dumps(symbol)}, decimals = 18 }}",
        *([f"multicall = {json.dumps(facts['multicall'])}"] if facts["multicall"] else []),
        f"entry_points = {_inline(facts['entry_points'])}   # ERC-4337, as deployed on this chain",
        f"factories = {_inline(facts['factories'])}",
        "",
        "[networks.mainnet]",
        f"chain_id = {facts['chain_id']}",
        f"block_time_s = {facts['block_time_s']}   # as given, or the mean of the newest {MEASURED_BLOCKS} blocks",
        f"finality_tag = {json.dumps(facts['finality_tag'])}   # whether nodes know the tags safe and finalized",
        "finality_blocks = 64   # the depth at which a block is final without these tags",
        f"legacy_fees = {json.dumps(facts['legacy_fees'])}   # whether blocks lack baseFeePerGas",
        'min_priority_gwei = "0.0"   # the lowest priority fee to suggest',
    ]
    return "\n".join(lines) + "\n"


def _inline(table: Mapping[str, str]) -> str:
    pairs = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items()]
    return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
