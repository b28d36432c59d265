"""`chains list --provider`: the networks and URLs of a provider, from the shipped table or, if asked, from its own list.

Nothing is asked for over the network without `--refresh`. With it, the provider's list is compared with the table, and
`--write` makes a file of it, which the operator puts among the own data files. `repository://HOST/PATH` is a list of public
upstreams; a file of it is used as `repository:///path/file`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from proxy import settings as settings_room
from proxy.chains.registry import Network
from proxy.commands import output
from proxy.errors import StartError
from proxy.settings.providers import NetworkList, Provider
from proxy.settings.public_upstreams import REPOSITORY, UnusableList, read_file, urls_in

COLUMNS = ("network", "title", "id", "class", "url")
CHANGE_COLUMNS = (*COLUMNS, "change")
FETCH_S = 20.0
# The largest lists have half a megabyte.
MOST_BYTES = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_SCHEME = "://"
# The table of networks in a provider's file, up to an empty line, a comment or the next table.
_TABLE = re.compile(r"^\[networks\][^\n]*\n(?:[^\[#\s][^\n]*(?:\n|$))*", re.MULTILINE)


def register(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--provider",
        metavar="NAME",
        help="the networks of a provider, such as alchemy, with their URLs; or of repository:///path/file",
    )
    parser.add_argument(
        "--refresh", action="store_true", help="with --provider: ask for the provider's own list, and show what changed"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="with --refresh: write the list to a new file, for your data files"
    )


def listed(args: argparse.Namespace, own: str, tables: settings_room.Tables) -> int:
    if args.write is not None and not args.refresh:
        raise StartError(["--write: add --refresh, which asks for the list that is written"])
    if args.write is not None and args.write.exists():
        raise StartError([f"--write: {args.write} exists already: choose another name, or remove it"])
    name = args.provider.partition(_SCHEME)[0]
    if name == REPOSITORY:
        return _list_repository(args, tables)
    providers = settings_room.load_providers(own)
    if name not in providers:
        raise StartError([f"--provider: there is no such provider; there are: {', '.join(providers)}"])
    provider = providers[name]
    return _refresh(args, provider, tables) if args.refresh else _list(args, provider, tables)


# The shipped table


def _list(args: argparse.Namespace, provider: Provider, tables: settings_room.Tables) -> int:
    rows = [*_rows(provider, provider.networks, tables, args.name)]
    output.rows(rows, COLUMNS, as_json=args.json)
    return 0


def _rows(
    provider: Provider, networks: Iterable[str], tables: settings_room.Tables, part: str
) -> Iterator[dict[str, Any]]:
    known = {each.id: each for each in tables.with_networks(networks).chains.networks()}
    for name in networks:
        if part in name:
            yield {**_described(known[name]), "url": provider.shown(name)}


def _described(network: Network) -> dict[str, Any]:
    return {
        "network": network.id,
        "title": network.chain.title,
        "id": network.identity,
        "class": network.facts.class_,
    }


# The provider's own list


def _refresh(args: argparse.Namespace, provider: Provider, tables: settings_room.Tables) -> int:
    if provider.own_list is None:
        raise StartError([f"--refresh: {provider.title} has no list that can be asked for: see `penstock doctor URL`"])
    names = names_by_id(provider.own_list, _decoded(_fetched(provider.own_list.url), provider.own_list.url))
    networks = {chain: tables.find_network(str(chain)) for chain in names}
    listed_ = {network.id: names[chain] for chain, network in networks.items() if network is not None}
    kept = {name: word for name, word in provider.networks.items() if not _is_evm(name, tables)}
    renewed = provider.with_networks({**kept, **listed_})
    gone = [name for name in provider.networks if name not in renewed.networks]
    changes = {name: _change(provider, renewed, name) for name in (*renewed.networks, *gone)}
    rows = [
        *_rows(renewed, renewed.networks, tables, args.name),
        *_rows(provider, gone, tables, args.name),
    ]
    output.rows([{**row, "change": changes[row["network"]]} for row in rows], CHANGE_COLUMNS, as_json=args.json)
    unknown = sorted(chain for chain, network in networks.items() if network is None)
    if unknown and not args.json:
        print(f"\nnot known here, see `penstock chains add`: {', '.join(map(str, unknown))}")
    if args.write is not None:
        args.write.write_text(provider_text(provider, renewed.networks), "utf-8")
        print(
            f"wrote {args.write}: as providers/{provider.name}.toml in data_files.directory it replaces the shipped table"
        )
    return 0


def _change(before: Provider, after: Provider, name: str) -> str:
    if name not in before.networks:
        return "new"
    if name not in after.networks:
        return "gone"
    return "" if before.networks[name] == after.networks[name] else f"was {before.networks[name]}"


def _is_evm(name: str, tables: settings_room.Tables) -> bool:
    network = tables.find_network(name)
    return network is not None and network.family == "evm"


def names_by_id(given: NetworkList, data: Any) -> dict[int, str]:
    """The provider's names of its networks. Raises StartError if there is none, since the list has another form then."""
    best: dict[int, tuple[float, str]] = {}
    for entry in _entries(data, given.entries.split(".") if given.entries else []):
        chain, name = _chain_id(entry.get(given.chain_id)), entry.get(given.name)
        if chain is None or not isinstance(name, str) or not _NAME.fullmatch(name):
            continue
        if any(entry.get(member) != value for member, value in given.where.items()):
            continue
        rank = entry.get(given.prefer, 0)
        rank = rank if isinstance(rank, int | float) else 0
        if chain not in best or rank > best[chain][0]:
            best[chain] = rank, name
    if not best:
        raise StartError([f"--refresh: {given.url}: has no networks in the expected form: it may have changed"])
    return {chain: name for chain, (_, name) in best.items()}


def _entries(data: Any, path: list[str]) -> Iterator[Mapping[str, Any]]:
    """The objects at the end of the path. A list stands for each of its items."""
    if isinstance(data, list):
        for each in data:
            yield from _entries(each, path)
    elif isinstance(data, dict):
        if path:
            yield from _entries(data.get(path[0]), path[1:])
        else:
            yield data


def _chain_id(value: Any) -> int | None:
    try:
        number = int(value, 0) if isinstance(value, str) else value
    except ValueError:
        return None
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else None


def provider_text(provider: Provider, networks: Mapping[str, str]) -> str:
    """The provider's file with these networks. Everything else stays as it is."""
    lines = [f"{output.toml_value(name)} = {output.toml_value(word)}" for name, word in sorted(networks.items())]
    table = "\n".join(["[networks]", *lines]) + "\n"
    text = _TABLE.sub(lambda _: table, provider.path.read_text("utf-8"), count=1)
    try:
        written = tomllib.loads(text).get("networks")
    except tomllib.TOMLDecodeError:
        written = None
    if written != networks:
        raise StartError([f"--write: {provider.path}: its table of networks must be one block without empty lines"])
    return text


# Public upstreams


def _list_repository(args: argparse.Namespace, tables: settings_room.Tables) -> int:
    parts = urlsplit(args.provider)
    url = f"https{_SCHEME}{args.provider.partition(_SCHEME)[2]}"
    if parts.netloc and not args.refresh:
        raise StartError(["--provider: add --refresh to ask for the list at this address, or name a file"])
    try:
        by_id = urls_in(_fetched(url).decode("utf-8", "replace"), url) if parts.netloc else read_file(Path(parts.path))
    except UnusableList as exc:
        raise StartError([f"--provider: {exc}"]) from None
    known = [(network, urls) for chain, urls in by_id.items() if (network := tables.find_network(chain)) is not None]
    rows = [{**_described(network), "url": each} for network, urls in known if args.name in network.id for each in urls]
    output.rows(rows, COLUMNS, as_json=args.json)
    if args.write is not None:
        kept = {network.identity: {"endpoints": urls} for network, urls in known}
        args.write.write_bytes(orjson.dumps(kept, option=orjson.OPT_INDENT_2))
        print(f'wrote {args.write}: use it with url = "{REPOSITORY}{_SCHEME}{args.write.resolve()}" in [[upstreams]]')
    return 0


# The network


def _decoded(body: bytes, url: str) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise StartError([f"--refresh: {url}:{exc.lineno}: is not JSON: {exc.msg}"]) from None


def _fetched(url: str) -> bytes:
    """The document. Redirects are not followed: a list has one address, which the operator can read."""
    return asyncio.run(_fetch(url))


async def _fetch(url: str) -> bytes:
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=FETCH_S)) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            body = await response.content.read(MOST_BYTES)
            is_whole = response.content.at_eof()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:
        raise StartError([f"--refresh: {url}: does not reply ({type(exc).__name__}): try again later"]) from None
    if response.status != 200:
        raise StartError([f"--refresh: {url}: replied with status {response.status} and not 200"])
    if not is_whole:
        raise StartError([f"--refresh: {url}: has more than {MOST_BYTES} bytes"])
    return body
