"""The contracts that `python -m proxy dev` deploys: each one matches its entry in the ready file."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.dev.contracts import everything
from proxy.dev.encoding import name_hash
from proxy.dev.funded_accounts import ALICE, BOB, CAROL, FUNDED
from proxy.settings import load_tables
from tests import service as service_room
from tests.dev.onchain import Reverted, code_at, read, rpc
from tests.service import Service

ETHER = 10**18
VERSIONS = ("0.6", "0.7", "0.8")


def token(service: Service, symbol: str) -> str:
    return next(str(found["address"]) for found in service.ready["tokens"] if found["symbol"] == symbol)


def of_kind(service: Service, part: str, kind: str) -> dict[str, Any]:
    return next(found for found in service.ready[part] if found["kind"] == kind)


async def balance(service: Service, address: str, holder: str) -> int:
    return int(await read(service, address, "balanceOf(address)", "uint256", holder))


# Tokens


async def test_standard_tokens_match_the_ready_file(service: Service) -> None:
    tokens = [found for found in service.ready["tokens"] if found["kind"] in ("erc20", "weth", "rebasing")]
    assert {found["decimals"] for found in tokens} == {6, 18}
    for found in tokens:
        said = [await read(service, found["address"], f"{name}()", "string") for name in ("name", "symbol")]
        assert [*said, await read(service, found["address"], "decimals()", "uint8")] == [
            found["name"],
            found["symbol"],
            found["decimals"],
        ]


async def test_old_token_has_a_bytes32_name(service: Service) -> None:
    old = of_kind(service, "tokens", "bytes32")
    assert (await read(service, old["address"], "symbol()", "bytes32")).rstrip(b"\0") == old["symbol"].encode()
    assert (await read(service, old["address"], "name()", "bytes32")).rstrip(b"\0") == old["name"].encode()
    assert await balance(service, old["address"], ALICE.address) == 5 * ETHER


@pytest.mark.parametrize("function", ["name()", "symbol()", "decimals()"])
async def test_mute_token_reverts_but_has_balances(service: Service, function: str) -> None:
    mute = of_kind(service, "tokens", "mute")["address"]
    with pytest.raises(Reverted):
        await read(service, mute, function, "string")
    assert await balance(service, mute, FUNDED.address) == 7 * ETHER


async def test_odd_token_has_no_decimals_and_events_of_every_shape(service: Service) -> None:
    odd = of_kind(service, "tokens", "odd")
    assert await read(service, odd["address"], "name()", "string") == odd["name"]
    with pytest.raises(Reverted):
        await read(service, odd["address"], "decimals()", "uint8")
    wanted = {"address": odd["address"], "fromBlock": "0x0", "toBlock": "latest"}
    logs = await rpc(service.ready["upstream_url"], service, "eth_getLogs", wanted)
    assert {(len(log["topics"]), len(log["data"]) // 2 - 1) for log in logs} > {(1, 96), (2, 64), (3, 31), (4, 0)}


@pytest.mark.parametrize(
    ("symbol", "holder", "amount"),
    [
        ("PEN", FUNDED, 10**6 * ETHER),
        ("PEN", ALICE, 2400 * ETHER + 1),
        ("PEN", BOB, 1),
        ("PEN", CAROL, 100 * ETHER),
        ("DUSD", ALICE, 1_234_567_890),
        ("DUSD", BOB, 0),
        ("DUSD", CAROL, 50_000_000),
        ("HUGE", CAROL, 2**256 - 1),
        ("WETH", ALICE, 2 * ETHER),
        ("WETH", BOB, 3 * ETHER // 2),
        ("WETH", CAROL, ETHER // 2),
        ("RBS", ALICE, 55 * ETHER),
    ],
)
async def test_holders_have_their_balances(service: Service, symbol: str, holder: Any, amount: int) -> None:
    assert await balance(service, token(service, symbol), holder.address) == amount


# NFTs


async def test_token_uris_match_the_ready_file(service: Service) -> None:
    pictures = of_kind(service, "nfts", "erc721")
    assert {found["uri"].partition(":")[0] for found in pictures["tokens"]} >= {"data", "ipfs", "ar", "http", ""}
    for found in pictures["tokens"]:
        said = await read(service, pictures["address"], "tokenURI(uint256)", "string", int(found["token_id"]))
        assert said == found["uri"]
    assert await read(service, pictures["address"], "supportsInterface(bytes4)", "bool", bytes.fromhex("80ac58cd"))
    assert await read(service, pictures["address"], "totalSupply()", "uint256") == len(pictures["tokens"])
    assert (await read(service, pictures["address"], "ownerOf(uint256)", "address", 2)) == CAROL.address.lower()
    with pytest.raises(Reverted):
        await read(service, pictures["address"], "ownerOf(uint256)", "address", 8)


async def test_old_nft_contract_supports_no_interfaces(service: Service) -> None:
    old = of_kind(service, "nfts", "erc721-old")["address"]
    with pytest.raises(Reverted):
        await read(service, old, "supportsInterface(bytes4)", "bool", bytes.fromhex("80ac58cd"))
    assert await read(service, old, "ownerOf(uint256)", "address", 1) == BOB.address.lower()


async def test_erc1155_items_have_amounts_and_a_uri_template(service: Service) -> None:
    items, inline = [found for found in service.ready["nfts"] if found["kind"] == "erc1155"]
    for found in (items, inline):
        (uri,) = {one["uri"] for one in found["tokens"]}
        assert "{id}" in uri
        assert await read(service, found["address"], "uri(uint256)", "string", 1) == uri
        assert await read(service, found["address"], "name()", "string") == found["name"]
    held = {(ALICE, 1): 6, (BOB, 1): 4, (FUNDED, 1): 5, (ALICE, 2): 15, (CAROL, 2): 5, (ALICE, 3): 0, (CAROL, 3): 1}
    for (holder, token_id), amount in held.items():
        args = (holder.address, token_id)
        assert await read(service, items["address"], "balanceOf(address,uint256)", "uint256", *args) == amount


# Prices, names, many calls in one


async def test_price_feeds_match_the_ready_file(service: Service) -> None:
    head = await rpc(service.ready["upstream_url"], service, "eth_getBlockByNumber", "latest", False)
    gives = "uint80,int256,uint256,uint256,uint80"
    for feed in service.ready["price_feeds"]:
        round_id, answer, _, updated_at, answered = await read(service, feed["address"], "latestRoundData()", gives)
        assert str(answer) == feed["answer"]
        assert round_id == answered > 0
        assert updated_at == feed["updated_at"] or updated_at >= int(head["timestamp"], 16)
        assert await read(service, feed["address"], "decimals()", "uint8") == feed["decimals"]
        assert await read(service, feed["address"], "description()", "string") == f"{feed['symbol']} / USD"


async def test_chain_file_names_the_contracts_that_are_deployed(service: Service) -> None:
    chain, said = load_tables().chains.chains["dev"], service.ready
    assert dict(chain.entry_points) == said["entry_points"]
    assert dict(chain.factories) == said["factories"]
    assert chain.multicall == said["multicall"]
    feeds = {feed["token"] or "native": feed["address"] for feed in said["price_feeds"]}
    feeds[token(service, "WETH")] = feeds["native"]
    for network in chain.networks.values():
        assert {name: feed.address for name, feed in network.feeds.items()} == feeds
        assert network.ens == said["ens"]["registry"]


async def test_names_resolve_in_both_directions(service: Service) -> None:
    ens = service.ready["ens"]
    assert set(ens["names"]) == {"alice.eth", "bob.eth"}
    for name, address in ens["names"].items():
        reverse = name_hash(f"{address[2:].lower()}.addr.reverse")
        for node in (name_hash(name), reverse):
            found = await read(service, ens["registry"], "resolver(bytes32)", "address", node)
            assert found == ens["resolver"].lower()
        assert await read(service, ens["resolver"], "addr(bytes32)", "address", name_hash(name)) == address.lower()
        assert await read(service, ens["resolver"], "name(bytes32)", "string", reverse) == name


async def test_multicall_returns_failures_individually(service: Service) -> None:
    mute = of_kind(service, "tokens", "mute")["address"]
    selectors = [(token(service, "DUSD"), "313ce567"), (mute, "313ce567"), (token(service, "PEN"), "313ce567")]
    calls = [(address, True, bytes.fromhex(selector)) for address, selector in selectors]
    signature, gives = "aggregate3((address,bool,bytes)[])", "(bool,bytes)[]"
    found = await read(service, service.ready["multicall"], signature, gives, calls)
    assert [(ok, int.from_bytes(data, "big")) for ok, data in found] == [(True, 6), (False, 0), (True, 18)]
    with pytest.raises(Reverted):
        await read(service, service.ready["multicall"], signature, gives, [(mute, False, bytes.fromhex("313ce567"))])
    asked = (
        service.ready["multicall"],
        "getEthBalance(address)",
        "uint256",
        service.ready["paymaster_signer"]["address"],
    )
    assert await read(service, *asked) == 10_000 * ETHER


# Smart wallets


@pytest.mark.parametrize("version", VERSIONS)
async def test_entry_point_and_factory_have_their_canonical_addresses(service: Service, version: str) -> None:
    chain = load_tables().chains.chains["ethereum"]
    entry_point, factory = service.ready["entry_points"][version], service.ready["factories"][version]
    assert (entry_point, factory) == (chain.entry_points[version], chain.factories[version])
    assert len(await code_at(service, entry_point)) > 20_000
    implementation = await read(service, factory, "accountImplementation()", "address")
    assert await read(service, implementation, "entryPoint()", "address") == entry_point.lower()
    assert int(await read(service, factory, "getAddress(address,uint256)", "address", ALICE.address, 0), 16) > 0


@pytest.mark.parametrize("version", VERSIONS)
async def test_paymaster_has_its_signer_a_deposit_and_a_stake(service: Service, version: str) -> None:
    paymaster, entry_point = service.ready["paymasters"][version], service.ready["entry_points"][version]
    signer = service.ready["paymaster_signer"]["address"]
    assert await read(service, paymaster, "verifyingSigner()", "address") == signer.lower()
    assert await read(service, paymaster, "entryPoint()", "address") == entry_point.lower()
    gives = "(uint256,bool,uint112,uint32,uint48)"
    deposit, staked, stake, delay, _ = await read(service, entry_point, "getDepositInfo(address)", gives, paymaster)
    assert (deposit, staked, stake, delay) == (100 * ETHER, True, ETHER, 86_400)


# The list itself


async def test_addresses_are_the_same_at_every_start(service: Service) -> None:
    _, contracts = everything()
    for part in ("tokens", "nfts", "price_feeds", "paymasters", "ens"):
        assert service.ready[part] == getattr(contracts, part)
    accounts = service.ready["accounts"]
    assert accounts[0] == service.ready["funded_account"]
    assert len({account["private_key"] for account in accounts}) == 16
    assert service.ready["paymaster_signer"] not in accounts


async def test_chain_without_contracts_is_empty(tmp_path_factory: pytest.TempPathFactory) -> None:
    running = await service_room.start(tmp_path_factory.mktemp("empty"), "--no-contracts", bundler=True)
    try:
        assert running.ready["tokens"] == running.ready["nfts"] == []
        assert running.ready["entry_points"] == {}
        assert running.ready["bundler_url"] is None
        assert await rpc(running.ready["upstream_url"], running, "eth_blockNumber") == "0x0"
        assert (await running.rpc("eth_chainId")).status == 200
    finally:
        assert await service_room.stop(running) == 0
