"""Two hosts with two workers each and upstreams that are not peers: what one worker has sent, all find."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import coincurve
import pytest
import rlp
import sha3
from aiohttp import web

from tests.database import Server
from tests.fleet.gateways import SEPOLIA, Gateways, each_worker, gateways, known_everywhere
from tests.flows.upstream import Upstream, reply
from tests.http_client import HttpClient, post, rpc
from tests.redis_server import redis_server, require_redis
from tests.rpc_upstreams import tx_hash

HOSTS, WORKERS, UPSTREAMS, ROUNDS = 2, 2, 4, 20
MORE = """
[[upstreams]]
network = "ethereum/sepolia"
url = "{url}"
"""


class Unpeered:
    """Serves pending transactions that this upstream has received itself."""

    def __init__(self) -> None:
        self.server = Upstream()
        self.server.act = self._act
        self._hashes: set[str] = set()

    async def _act(self, call: dict[str, Any]) -> web.StreamResponse:
        method, params = call["method"], call["params"]
        if method == "eth_sendRawTransaction":
            self._hashes.add(tx_hash(params[0]))
            return reply(call, result=tx_hash(params[0]))
        if method == "eth_getTransactionByHash":
            found = {"hash": params[0], "blockNumber": None} if params[0] in self._hashes else None
            return reply(call, result=found)
        assert method == "eth_getTransactionCount", method
        return reply(call, result=hex(len(self._hashes)))


@pytest.fixture(scope="module")
async def fleet(server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateways]:
    require_redis()
    room = tmp_path_factory.mktemp("fleet-writes")
    upstreams = [Unpeered().server for _ in range(UPSTREAMS)]
    async with AsyncExitStack() as stack:
        for each in upstreams:
            await each.open()
            stack.push_async_callback(each.close)
        redis = await stack.enter_async_context(redis_server(room))
        more = "".join(MORE.format(url=each.url) for each in upstreams[1:])
        more += f'[valkey]\nlimits_url = "{redis.url}"\n'
        hosts = gateways(server.postgres, room, upstreams[0].url, hosts=HOSTS, workers=WORKERS, more=more)
        yield await stack.enter_async_context(hosts)


def signed() -> tuple[str, str, str]:
    """A new transaction, with its hash and its sender."""
    key = coincurve.PrivateKey(secrets.token_bytes(32))
    fields = [b"", b"\x01", b"\x52\x08", b"\x22" * 20, b"", b""]
    made = key.sign_recoverable(sha3.keccak_256(rlp.encode(fields)).digest(), hasher=None)
    signature = [bytes([made[64] + 27]), made[:32].lstrip(b"\0"), made[32:64].lstrip(b"\0")]
    raw = "0x" + rlp.encode([*fields, *signature]).hex()
    sender = sha3.keccak_256(key.public_key.format(compressed=False)[1:]).hexdigest()[24:]
    return raw, tx_hash(raw), f"0x{sender}"


async def test_every_worker_and_host_finds_a_transaction_that_one_has_sent(fleet: Gateways) -> None:
    key = await fleet.new_key("enterprise")
    clients = [client for host in fleet.hosts for client in (await each_worker(host)).values()]
    assert len(clients) == HOSTS * WORKERS
    await known_everywhere(clients, key)

    async def result(client: HttpClient, method: str, *params: Any) -> Any:
        return (await client.send(post(rpc(method, params), key=key, network=SEPOLIA))).json["result"]

    for number in range(ROUNDS):
        raw, hash_, sender = signed()
        sent_by = clients[number % len(clients)]
        assert await result(sent_by, "eth_sendRawTransaction", raw) == hash_
        for client in clients:
            found = await result(client, "eth_getTransactionByHash", hash_)
            assert found is not None, (number, clients.index(client))
            assert int(await result(client, "eth_getTransactionCount", sender, "pending"), 16) > 0
    for client in clients:
        await client.close()
