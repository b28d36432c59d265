"""Keys created, changed and revoked on the command line reach every worker within a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from proxy.core import access
from tests.http_client import HttpClient, Reply, close_all, post, request, rpc, send_once, to_every_worker
from tests.service import SOON_S, Service

Held = dict[int, list[HttpClient]]
WRITE = rpc("eth_sendRawTransaction", ["0x00"])
READ = rpc("eth_chainId")
UNKNOWN = access.mint("live", bytes(32))
# How long a rotated key works on, and how long if the machine is too busy for that.
OVERLAP_S, LONG_OVERLAP_S = 4, 40


@pytest.fixture(scope="module")
async def held(service: Service) -> AsyncIterator[Held]:
    """A keep-alive connection to every worker, opened before any change."""
    connections = await to_every_worker(service)
    yield connections
    await close_all(connections)


@pytest.fixture(scope="module")
async def account(service: Service) -> str:
    return str((await service.new_account("growth"))["id"])


async def in_every_worker(held: Held, data: bytes, wanted: Callable[[Reply], bool]) -> list[Reply]:
    """Wait until every worker's reply satisfies the condition, and return the replies."""
    end = time.monotonic() + SOON_S
    replies = []
    for clients in held.values():
        while not wanted(reply := await clients[0].send(data)):
            assert time.monotonic() < end, reply
            await asyncio.sleep(0.01)
        replies.append(reply)
    return replies


def has_status(status: int) -> Callable[[Reply], bool]:
    return lambda reply: reply.status == status


async def test_new_key_works_in_every_worker(service: Service, held: Held, account: str) -> None:
    made = await service.cli_json("keys", "create", "--account", account)
    assert made["key"].startswith("svc_live_")
    assert access.is_well_formed(made["key"])
    for reply in await in_every_worker(held, post(READ, key=made["key"]), has_status(200)):
        assert reply.json["result"] == "0x7a69"


async def test_both_headers_carry_a_key(service: Service, account: str) -> None:
    key = (await service.new_key(account))["key"]
    assert (await send_once(service, post(READ, key=None, X_API_Key=key))).status == 200
    assert (await send_once(service, post(READ, key=None, Authorization=f"Bearer {key}"))).status == 200
    assert (await send_once(service, post(READ, key=None, authorization=f"bearer {key}"))).status == 200
    assert (await send_once(service, post(READ, key=None, Authorization=f"Basic {key}"))).status == 401


async def test_revoked_key_is_refused_permanently(service: Service, held: Held, account: str) -> None:
    made = await service.new_key(account)
    data = post(READ, key=made["key"])
    await in_every_worker(held, data, has_status(200))
    await service.cli_json("keys", "revoke", made["id"])
    for reply in await in_every_worker(held, data, has_status(401)):
        reply.fault(401)
        assert reply.headers["x-ratelimit-limit"] != "100"  # The account's.
    done = await service.cli("keys", "enable", made["id"])
    assert done.returncode == 1
    assert "revoked" in done.stderr


async def test_disabled_key_is_forbidden_until_it_is_enabled(service: Service, held: Held, account: str) -> None:
    made = await service.new_key(account)
    data = post(READ, key=made["key"])
    await service.cli_json("keys", "disable", made["id"])
    for reply in await in_every_worker(held, data, has_status(403)):
        assert "disabled" in reply.fault(403)["message"]
        assert reply.headers["x-ratelimit-limit"] == "100"
    await service.cli_json("keys", "enable", made["id"])
    await in_every_worker(held, data, has_status(200))


async def test_scope_changes_apply_while_the_service_runs(service: Service, held: Held, account: str) -> None:
    made = await service.new_key(account, "--scope", "rpc:read")
    reads, writes = post(READ, key=made["key"]), post(WRITE, key=made["key"])
    await in_every_worker(held, reads, has_status(200))
    for reply in await in_every_worker(held, writes, has_status(403)):
        assert "rpc:write" in reply.fault(403)["message"]
    await service.cli_json("keys", "set", made["id"], "--scope", "rpc:write")
    for reply in await in_every_worker(held, reads, has_status(403)):
        assert "rpc:read" in reply.fault(403)["message"]
    await in_every_worker(held, writes, has_status(200))
    await service.cli_json("keys", "set", made["id"], "--scope", "data:read")
    await in_every_worker(held, reads, has_status(403))
    await in_every_worker(held, writes, has_status(403))
    await service.cli_json("keys", "set", made["id"], "--all-scopes")
    await in_every_worker(held, reads, has_status(200))
    await in_every_worker(held, writes, has_status(200))


@dataclass
class Rotation:
    """A rotated key, and the replies that the old and the new key got during their overlap."""

    old: dict[str, Any]
    new: dict[str, Any]
    replies: list[Reply]
    of_old: list[Reply]
    of_new: Reply
    refilled: float
    left_s: float


async def rotate(service: Service, held: Held, account: str, overlap_s: int) -> Rotation:
    old = await service.new_key(account, "--scope", "rpc:read", "--requests-per-second", "50")
    new = await service.cli_json("keys", "rotate", old["id"], "--overlap-s", str(overlap_s))
    end = time.monotonic() + overlap_s
    replies = await in_every_worker(held, post(READ, key=new["key"]), has_status(200))
    client = next(iter(held.values()))[0]
    of_old = [await client.send(post(READ, key=old["key"])) for _ in range(30)]
    last_at = time.monotonic()
    of_new = await client.send(post(READ, key=new["key"]))
    now = time.monotonic()
    return Rotation(old, new, replies, of_old, of_new, refilled=50 * (now - last_at), left_s=end - now)


async def test_rotated_key_works_during_the_overlap_and_shares_its_buckets(
    service: Service, held: Held, account: str
) -> None:
    seen = await rotate(service, held, account, OVERLAP_S)
    if seen.left_s <= 0:
        seen = await rotate(service, held, account, LONG_OVERLAP_S)
    assert seen.new["lineage_id"] == seen.old["id"]
    assert seen.new["scopes"] == ["rpc:read"]
    assert {reply.headers["x-ratelimit-limit"] for reply in seen.replies} == {"50"}
    assert {reply.status for reply in seen.of_old} == {200}
    # Both take from one bucket: requests of the old key reduce the new key's limit.
    left_to_old, left_to_new = (int(reply.headers["x-ratelimit-remaining"]) for reply in (seen.of_old[-1], seen.of_new))
    assert left_to_new <= left_to_old + seen.refilled + 10
    await asyncio.sleep(max(0.0, seen.left_s))
    await in_every_worker(held, post(READ, key=seen.old["key"]), has_status(401))
    await in_every_worker(held, post(READ, key=seen.new["key"]), has_status(200))


async def test_rotation_without_overlap_ends_the_old_key_at_once(service: Service, held: Held, account: str) -> None:
    old = await service.new_key(account)
    await in_every_worker(held, post(READ, key=old["key"]), has_status(200))
    new = await service.cli_json("keys", "rotate", old["id"], "--overlap-s", "0")
    await in_every_worker(held, post(READ, key=old["key"]), has_status(401))
    await in_every_worker(held, post(READ, key=new["key"]), has_status(200))


async def test_test_key_works_on_test_networks_only(service: Service, account: str) -> None:
    key = (await service.new_key(account, "--mode", "test"))["key"]
    assert key.startswith("svc_test_")
    assert (await send_once(service, post(READ, key=key, network="dev/testnet"))).status == 200
    for network in ("dev/mainnet", "polygon/mainnet"):
        refused = await send_once(service, post(READ, key=key, network=network))
        assert "svc_test_" in refused.fault(403)["message"]


async def test_live_key_works_on_test_networks(service: Service) -> None:
    assert (await service.rpc("eth_chainId", network="dev/testnet")).status == 200


@pytest.mark.parametrize(
    "key",
    [
        UNKNOWN,
        UNKNOWN[:-1] + ("0" if UNKNOWN[-1] != "0" else "1"),
        UNKNOWN[:-1],
        UNKNOWN + "0",
        "svc_live_",
        "x",
        "svc_live_" + "é" * 36,
        "svc_prod_" + UNKNOWN[9:],
        " ",
    ],
)
async def test_every_invalid_key_gets_the_same_unauthorized_reply(service: Service, key: str) -> None:
    reply = await send_once(service, post(READ, key=None, X_API_Key=key))
    error = reply.fault(401)
    assert error["message"] == NO_KEY or error["message"].startswith("the API key is not valid")
    assert reply.headers["x-ratelimit-limit"]


NO_KEY = "an API key is required: send it in the header X-API-Key or as Authorization: Bearer <API_KEY>"


async def test_key_is_accepted_in_urls_only_if_that_is_allowed(service: Service, held: Held, account: str) -> None:
    """URLs are often logged. Sockets accept every key there, because browsers cannot set their headers."""
    made = await service.new_key(account)
    targets = [f"/v1/rpc/dev/mainnet{end}{made['key']}" for end in ("/", "?apiKey=")]
    for target in targets:
        error = (await send_once(service, request("POST", target, READ))).fault(403)
        assert error["reason"] == "url"
        assert f"penstock keys set {made['id']} --allow-in-url" in error["message"]
    await service.cli_json("keys", "set", made["id"], "--allow-in-url")
    for target in targets:
        await in_every_worker(held, request("POST", target, READ), has_status(200))
    await service.cli_json("keys", "set", made["id"], "--no-allow-in-url")
    for target in targets:
        await in_every_worker(held, request("POST", target, READ), has_status(403))


async def test_concurrent_changes_of_many_keys_reach_every_worker(service: Service, held: Held, account: str) -> None:
    """Several commands make changes at the same time; every worker gets all of them."""
    made: list[dict[str, Any]] = await asyncio.gather(*(service.new_key(account) for _ in range(6)))
    await asyncio.gather(*(service.cli_json("keys", "revoke", row["id"]) for row in made[::2]))
    for index, row in enumerate(made):
        await in_every_worker(held, post(READ, key=row["key"]), has_status(200 if index % 2 else 401))
