"""A canary key sent in every place of a request: no log, metric, error or table contains it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import orjson
import pytest

from proxy.core import access
from tests.flows.upstream import PASSWORD, SECRET_PATH, Upstream
from tests.http_client import HttpClient, Reply, fresh_call, post, request, rpc
from tests.service import Service, until

READ = rpc("eth_chainId")
UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec_WebSocket_Version": "13",
    "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def requests_with_key(key: str) -> Iterable[bytes]:
    """Requests with the key in the right place and in wrong ones."""
    yield post(READ, key=key)
    yield post(READ, key=None, Authorization=f"Bearer {key}")
    yield post(READ, key=None, Authorization=key)
    yield post(READ, key=None, Authorization=f"Basic {key}")
    yield post(rpc("eth_nope"), key=key)
    yield post(b"{", key=key)
    yield post(READ, key=key, Content_Type="text/plain")
    yield post(READ, key=key, network="polygon/mainnet")
    yield post(READ, key=f"{key}x")
    yield post(READ, key=None, X_Request_Id=key, User_Agent=key, Referer=f"https://x/?apiKey={key}", Cookie=f"k={key}")
    yield post(READ, key=key, network=f"dev/{key}")
    yield post(READ, key=key, network=f"{key}/mainnet")
    for target in (
        f"/v1/rpc/dev/mainnet?apiKey={key}",
        f"/v1/ws/dev/mainnet?apiKey={key}",
        f"/v1/{key}",
        f"/{key}",
        f"/docs/{key}",
        f"/docs?key={key}",
        f"/healthz?apiKey={key}",
        f"/readyz?apiKey={key}",
        f"/v1/openapi.json?apiKey={key}",
        f"/v1/wallets/{key}",
        f"/%73vc{key[3:]}",
    ):
        yield request("GET", target, key=key)
        yield request("POST", target, READ, key=key)
    for target in (f"/v1/ws/dev/mainnet?apiKey={key}", f"/v1/ws/{key}/mainnet?apiKey={key}"):
        yield request("GET", target, b"", **UPGRADE)
    yield f"GET /{key} HTTP/9.9\r\nHost: x\r\nX-API-Key: {key}\r\n\r\n".encode()
    yield f"{key}\r\n\r\n".encode()
    yield f"GET / HTTP/1.1\r\nHost: {key}\r\nX-API-Key: {key}\r\n{key}\r\n\r\n".encode()


async def tried(service: Service, key: str) -> list[Reply]:
    replies = []
    for data in requests_with_key(key):
        async with await HttpClient.open(service.port) as client:
            replies.append(await client.send(data))
    return replies


def files_with(root: Path, secret: bytes) -> list[str]:
    return sorted(str(path) for path in root.rglob("*") if path.is_file() and secret in path.read_bytes())


@pytest.fixture(scope="module")
async def canary(service: Service) -> str:
    account = await service.new_account("enterprise")
    return str((await service.new_key(account["id"]))["key"])


def never_made() -> str:
    return access.mint("live", b"canary".rjust(32, b"!"))


@pytest.mark.parametrize("known", [True, False])
async def test_no_error_body_repeats_a_key(service: Service, canary: str, known: bool) -> None:
    key = canary if known else never_made()
    for reply in await tried(service, key):
        assert key.encode() not in reply.body, reply
        assert key not in repr(reply.headers)


async def test_no_log_metric_or_table_contains_a_key(service: Service, canary: str) -> None:
    for key in (canary, never_made(), canary[:-1] + "!", canary.replace("live", "test")):
        await tried(service, key)
    mark = request("GET", "/v1/nope", X_Request_Id="after-the-canaries")
    async with await HttpClient.open(service.port) as client:
        await client.send(mark)
    log = service.data / "logs" / "penstock.log"
    await until(lambda: b"after-the-canaries" in log.read_bytes())
    stem = canary[9:-1]  # without its prefix and last character: no part of it may appear either
    assert files_with(service.data, stem.encode()) == []
    assert stem not in await (await service.get(service.ready["metrics_url"])).text()
    assert never_made()[9:-1].encode() not in log.read_bytes()


async def test_key_sent_as_a_request_id_is_not_logged(service: Service, canary: str) -> None:
    log = service.data / "logs" / "penstock.log"
    for way, network in (("hot", "dev/mainnet"), ("handed-over", "dev/nowhere")):
        async with await HttpClient.open(service.port) as client:
            ids = (canary, f"mine-{canary}", f"after-the-{way}")
            asked = [await client.send(post(READ, key=canary, network=network, X_Request_Id=given)) for given in ids]
        assert asked[-1].headers["x-request-id"] == f"after-the-{way}"
        await until(lambda way=way: f"after-the-{way}".encode() in log.read_bytes())
        assert canary.encode() not in log.read_bytes()


async def test_pepper_and_database_url_are_only_in_their_own_files(service: Service) -> None:
    running = orjson.loads((service.data / "running.json").read_bytes())
    pepper, url = running["keys"]["pepper"], running["database"]["url"]
    own = [str(service.data / name) for name in ("pepper", "running.json")]
    assert files_with(service.data, pepper.encode()) == own
    assert files_with(service.data, url.encode()) == own[1:]
    metrics = await (await service.get(service.ready["metrics_url"])).text()
    for pid in (service.process.pid, *service.worker_pids()):
        seen = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert pepper.encode() not in seen
        assert url.encode() not in seen
    assert pepper not in metrics


async def test_upstreams_credentials_are_in_no_log_and_no_metric(service: Service, faulty: Upstream) -> None:
    """The upstream's password and path appear in no log or metric, even when its calls fail."""

    async def fail(_call: dict[str, object]) -> None:
        raise ConnectionResetError(faulty.url)

    faulty.act = fail  # type: ignore[assignment]
    async with await HttpClient.open(service.port) as client:
        for _ in range(3):
            data = post(fresh_call(), key=service.keys["enterprise"], network="ethereum/hoodi")
            assert (await client.send(data)).status in (500, 503)
    metrics = await (await service.get(service.ready["metrics_url"])).text()
    # running.json has the upstreams for other commands, so only its owner may read it.
    running = service.data / "running.json"
    assert running.stat().st_mode & 0o777 == 0o600
    for secret in (PASSWORD, SECRET_PATH):
        assert files_with(service.data, secret.encode()) == [str(running)]
        assert secret not in metrics
    for pid in service.worker_pids():
        assert PASSWORD.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
