"""The follower beside the workers: it indexes the real dev chain through kills and reverts. And the roles of `serve`."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from proxy.dev.postgres import Postgres
from proxy.store.postgres import migrate
from tests.chain_upstream import ChainUpstream, LittleChain
from tests.database import another, connected
from tests.flows import production
from tests.flows.production import PEPPER, Production
from tests.follower.harness import NETWORK, everything, indexed, indexed_transfers
from tests.rpc_upstreams import scripted
from tests.service import Service, processes_named, until

# transfer(address,uint256), balanceOf(address), ownerOf(uint256), balanceOf(address,uint256)
TRANSFER, BALANCE, OWNER, BALANCE_OF = "0xa9059cbb", "0x70a08231", "0x6352211e", "0x00fdd58e"
# Transfer(address,address,uint256)
TRANSFERRED = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
DEV = "dev/mainnet"
FRESH = bytes(range(100, 120))
# A killed follower is a Python process that has to start: on a busy machine that takes a while.
SLOW_S = 40.0


async def chain(service: Service, method: str, *params: Any) -> Any:
    """Call the chain directly, not through the service."""
    call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    async with aiohttp.ClientSession() as session, session.post(service.ready["upstream_url"], json=call) as response:
        reply = await response.json()
    assert "result" in reply, reply
    return reply["result"]


async def read(service: Service, contract: str, data: str) -> int:
    return int(await chain(service, "eth_call", {"to": contract, "data": data}, "latest"), 16)


def word(value: bytes | int) -> str:
    return f"{value:064x}" if isinstance(value, int) else value.rjust(32, b"\0").hex()


def database(service: Service) -> str:
    return str(orjson.loads((service.data / "running.json").read_bytes())["database"]["url"])


async def holdings_of(service: Service) -> dict[tuple[bytes, ...], int]:
    return await indexed(database(service), DEV)


async def is_at_the_head(service: Service) -> bool:
    head = await chain(service, "eth_getBlockByNumber", "latest", False)
    async with connected(database(service)) as connection:
        found = await connection.fetchrow("select block, block_hash from followed_networks where network = $1", DEV)
    if found is None or found[0] is None:
        return False
    return (hex(found[0]), "0x" + found[1].hex()) == (head["number"], head["hash"])


async def give(service: Service, token: str, amount: int) -> str:
    funded = service.ready["funded_account"]["address"]
    data = TRANSFER + word(FRESH) + word(amount)
    return str(await chain(service, "eth_sendTransaction", {"from": funded, "to": token, "data": data}))


def follower_pid(service: Service | Production) -> int:
    return processes_named("background follower", service.process.pid)[0]


async def kill_follower(service: Service) -> int:
    """Kill the follower, once it has been restarted after an earlier kill, and return its process id."""
    found = await until(lambda: processes_named("background follower", service.process.pid), within_s=SLOW_S)
    os.kill(found[0], signal.SIGKILL)
    return int(found[0])


async def test_index_of_the_dev_chain_matches_its_contracts(followed: Service) -> None:
    await until(lambda: is_at_the_head(followed), within_s=SLOW_S)
    found = await holdings_of(followed)
    ordinary = {
        bytes.fromhex(t["address"][2:]) for t in followed.ready["tokens"] if t["kind"] in ("erc20", "bytes32", "weth")
    }
    multi = {bytes.fromhex(t["address"][2:]) for t in followed.ready["nfts"] if t["kind"] == "erc1155"}
    single = {bytes.fromhex(t["address"][2:]) for t in followed.ready["nfts"] if t["kind"] == "erc721"}
    assert {key[1] for key in found} >= ordinary | multi | single
    for (holder, contract, *token), amount in found.items():
        address = "0x" + contract.hex()
        if contract in ordinary:
            assert await read(followed, address, BALANCE + word(holder)) == amount
        elif contract in single:
            assert await read(followed, address, OWNER + token[0].hex()) == int.from_bytes(holder, "big")
        elif contract in multi:
            assert await read(followed, address, BALANCE_OF + word(holder) + token[0].hex()) == amount


async def test_transfer_is_indexed_and_a_revert_undoes_it(followed: Service) -> None:
    token = followed.ready["tokens"][0]["address"]
    key = (FRESH, bytes.fromhex(token[2:]))
    snapshot = await chain(followed, "evm_snapshot")
    await give(followed, token, 5)
    await until(lambda: _has(followed, key, 5), within_s=SLOW_S)
    await chain(followed, "evm_revert", snapshot)
    await give(followed, token, 7)
    await until(lambda: _has(followed, key, 7), within_s=SLOW_S)


async def _has(service: Service, key: tuple[bytes, ...], amount: int) -> bool:
    return (await holdings_of(service)).get(key, 0) == amount


async def test_killed_follower_is_restarted_and_resumes(followed: Service) -> None:
    token = followed.ready["tokens"][0]["address"]
    key = (FRESH, bytes.fromhex(token[2:]))
    await until(lambda: is_at_the_head(followed), within_s=SLOW_S)
    before = (await holdings_of(followed)).get(key, 0)
    for killed in range(1, 3):
        pid = await kill_follower(followed)
        await give(followed, token, 1)
        await until(lambda killed=killed: _has(followed, key, before + killed), within_s=SLOW_S)
        assert follower_pid(followed) != pid


async def transfers_of_the_chain(service: Service) -> list[tuple[Any, ...]]:
    """Block, transaction, log and amount of every Transfer of a fungible token."""
    logs = await chain(service, "eth_getLogs", {"fromBlock": "0x0", "topics": [TRANSFERRED]})
    return [
        (log["blockHash"], log["transactionHash"], int(log["logIndex"], 16), int(log["data"][:66], 16))
        for log in logs
        if len(log["topics"]) == 3 and len(log["data"]) >= 66
    ]


async def has_the_transfers_of_the_chain(service: Service) -> bool:
    if not await is_at_the_head(service):
        return False
    expected = await transfers_of_the_chain(service)
    rows = await indexed_transfers(database(service), DEV)
    wrapped = {bytes.fromhex(each["address"][2:]) for each in service.ready["tokens"] if each["kind"] == "weth"}
    found = [(row[1], row[3], row[4], row[-1]) for row in rows if row[6] == 20 and row[7] not in wrapped]
    addresses = {"0x" + each.hex() for each in wrapped}
    logs = await chain(service, "eth_getLogs", {"fromBlock": "0x0", "topics": [TRANSFERRED]})
    of_wrapped = {(log["transactionHash"], int(log["logIndex"], 16)) for log in logs if log["address"] in addresses}
    return found == [each for each in expected if each[1:3] not in of_wrapped]


async def test_transfers_equal_the_logs_of_the_chain_through_reverts_and_kills(followed: Service) -> None:
    rng = random.Random(5)
    token = followed.ready["tokens"][0]["address"]
    for _ in range(6):
        snapshot = await chain(followed, "evm_snapshot")
        for amount in range(rng.randrange(1, 8)):
            await give(followed, token, amount)
        if rng.random() < 0.5:
            await until(lambda: is_at_the_head(followed), within_s=SLOW_S)
        if rng.random() < 0.5:
            await kill_follower(followed)
        if rng.random() < 0.7:
            await chain(followed, "evm_revert", snapshot)
            await give(followed, token, 50)
    await give(followed, token, 1)
    await until(lambda: has_the_transfers_of_the_chain(followed), within_s=SLOW_S)


async def test_index_command_finds_the_running_service(followed: Service) -> None:
    done = await followed.cli("index", "--chain", "dev", "--from", "0")
    assert (done.returncode, done.stdout) == (0, "nothing to do: dev/mainnet is followed from block 0\n"), done.stderr


async def test_metrics_show_the_followers_block(followed: Service) -> None:
    await until(lambda: is_at_the_head(followed), within_s=SLOW_S)
    head = int(await chain(followed, "eth_blockNumber"), 16)

    async def shown() -> bool:
        text = await (await followed.get(followed.ready["metrics_url"])).text()
        return f'penstock_follower_block{{network="{DEV}"}} {float(head)}' in text

    await until(shown, within_s=SLOW_S)


# Roles


async def _serving(tmp_path: Path, database: str, url: str, role: str) -> Production:
    config = tmp_path / f"{role}.toml"
    config.write_text(f"""
[server]
port = 0
workers = 1
[metrics]
port = 0
[database]
url = "{database}"
[keys]
pepper = "{PEPPER}"
[follower.start]
"{NETWORK}" = 0
[[upstreams]]
network = "{NETWORK}"
url = "{url}"
""")
    return await production.start(config, tmp_path / f"{role}.log", "", role=role)


async def test_each_role_runs_its_own_processes(tmp_path: Path, cluster: Postgres) -> None:
    little = LittleChain()
    little.mine(*everything())
    async with another(cluster.url, "followed") as database, scripted(1, little, ChainUpstream) as (upstream,):  # type: ignore[arg-type]
        async with connected(database) as connection:
            await migrate.migrate(connection)
        gateway = await _serving(tmp_path, database, upstream.url, "gateway")
        assert (len(gateway.worker_pids()), gateway.port > 0) == (1, True)
        assert not processes_named("background", gateway.process.pid)
        follower = await _serving(tmp_path, database, upstream.url, "follower")
        assert (follower.worker_pids(), follower.port) == ([], 0)
        deliverer = await _serving(tmp_path, database, upstream.url, "deliverer")
        assert (
            processes_named("background", deliverer.process.pid)
            == processes_named("background deliverer", deliverer.process.pid)
            != []
        )

        async def is_complete() -> bool:
            return await indexed(database) == little.holdings()

        await until(is_complete, within_s=SLOW_S)
        little.drop(2)
        little.mine(*everything())
        await until(is_complete, within_s=SLOW_S)
        pid = follower_pid(follower)
        assert [await production.stop(each) for each in (follower, deliverer, gateway)] == [0, 0, 0]
        assert not Path(f"/proc/{pid}").exists()
