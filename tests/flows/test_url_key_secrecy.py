"""Keys in URLs, sent to every surface in every way that can fail: nothing that the service writes contains one.

Searched are its log, with debug lines and reports of slow steps, its metrics, every table of its database, Valkey, the spans
that a collector receives, what upstreams and receivers of webhooks get, mails, and all replies. The search itself is tested
with a key that is written to each of these places.
"""

from __future__ import annotations

import asyncio
import smtplib
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiosmtpd.smtp import SMTP, Envelope, Session
from yarl import URL

from proxy.core import access
from tests.database import Server, connected
from tests.flows import production
from tests.flows.production import OPEN_EGRESS, Production, settings_text
from tests.http_client import HttpClient, request, rpc
from tests.redis_server import RedisServer, redis_server, require_redis
from tests.service import ROOT, command_here, until

NETWORK = "ethereum/sepolia"
REST_NETWORK = "aptos/testnet"
ADDRESS = "0x" + "11" * 20
CALL = rpc("eth_gasPrice")
UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec_WebSocket_Version": "13",
    "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
SAMPLED = {"traceparent": f"00-{'1' * 32}-00f067aa0ba902b7-01"}
EMAIL = "holder@example.com"
# Aliases that can be on together, and URLs of them with a key: host and target.
ALIASES = ("alchemy", "ankr", "drpc", "erpc", "infura", "nodecore", "quicknode")
ALIAS_URLS = (
    ("x", "/alchemy/eth-sepolia/v2/{key}"),
    ("eth-sepolia.rpc.example.com", "/v2/{key}"),
    ("x", f"/alchemy/eth-sepolia/nft/v3/{{key}}/getNFTsForOwner?owner={ADDRESS}"),
    ("x", f"/alchemy/eth-sepolia/v2/{{key}}/getContractMetadata?contractAddress={ADDRESS}"),
    ("eth-sepolia.rpc.example.com", f"/nft/v3/{{key}}/getNFTMetadata?contractAddress={ADDRESS}&tokenId=1"),
    ("eth-sepolia.rpc.example.com", f"/nft/v3/{{key}}/getNFTsForOwner?owner={ADDRESS}&pageKey={{key}}"),
    ("x", "/ankr/eth_sepolia/{key}"),
    ("x", "/eth_sepolia/{key}"),
    ("x", "/eth_sepolia/ws/{key}"),
    ("x", "/ogrpc?network=sepolia&dkey={key}"),
    ("x", "/drpc/sepolia/{key}"),
    ("x", "/main/evm/11155111?secret={key}"),
    ("x", "/infura/sepolia/v3/{key}"),
    ("sepolia.rpc.example.com", "/v3/{key}"),
    ("sepolia.rpc.example.com", "/ws/v3/{key}"),
    ("x", "/v3/{key}/networks/11155111/suggestedGasFees"),
    ("x", "/infura/sepolia/ws/v3/{key}"),
    ("x", "/ankr/eth_sepolia/ws/{key}"),
    ("x", "/multichain/{key}"),
    ("any.ethereum-sepolia.rpc.example.com", "/{key}/"),
    ("any.ethereum-sepolia.rpc.example.com", "/{key}"),
    ("x", "/queries/sepolia/api-key/{key}"),
    ("x", "/quicknode/ethereum-sepolia/{key}/"),
    # Networks that no alias has, and URLs that are almost those of one.
    ("x", "/alchemy/atlantis/v2/{key}"),
    ("x", "/alchemy/eth-sepolia/v3/{key}"),
    ("x", "/alchemy/eth-sepolia/v2/{key}/more"),
    ("x", "/alchemy/eth-sepolia/nft/v3/{key}"),
    ("x", "/alchemy/eth-sepolia/nft/v3/{key}/no/such"),
    ("x", "/v3/{key}/networks/1/{key}"),
    ("x", "/quicknode/ethereum-sepolia/{key}/{key}"),
    ("x", "/eth_sepolia/{key}/{key}"),
    # The key once more in the query, and another key there: a 400.
    ("x", "/alchemy/eth-sepolia/v2/{key}?apiKey={key}"),
    ("x", "/alchemy/eth-sepolia/v2/{key}?apiKey={other}"),
    ("x", "/infura/sepolia/v3/{key}?apiKey={other}"),
    ("x", "/quicknode/ethereum-sepolia/{key}?apiKey={other}"),
    ("x", "/eth_sepolia/{key}?apiKey={other}"),
    ("x", "/ogrpc?network=sepolia&dkey={key}&apiKey={other}"),
    ("x", "/main/evm/11155111?secret={key}&secret={key}"),
    ("x", "/ogrpc?network=atlantis&dkey={key}"),
    ("x", "/ogrpc?network=sepolia&dkey={key}&dkey={key}"),
    ("x", "/queries/sepolia?api-key={key}"),
    # More parameters and segments than an alias has.
    ("x", "/main/evm/11155111?secret={key}" + "&a" * 200),
    ("x", "/main/evm/11155111?" + "a&" * 200 + "secret={key}"),
    ("x", "/alchemy/eth-sepolia/v2/{key}" + "/a" * 20),
    ("x", "/alchemy/eth-sepolia/v2/{key}?" + "&".join(["a"] * 200)),
)


@dataclass
class Outside:
    """An upstream, a collector of spans and a receiver of webhooks: records every request as it comes."""

    seen: list[str] = field(default_factory=list)
    spans: int = 0
    mails: list[str] = field(default_factory=list)
    is_down: bool = False
    url: str = ""
    mail_port: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.seen.append(f"{request.method} {request.path_qs} {request.headers!r} {body!r}")
        if request.path != "/rpc":
            self.spans += request.path == "/v1/traces"
            return web.Response()
        if self.is_down:
            return web.Response(status=502)
        calls = orjson.loads(body)
        many = calls if isinstance(calls, list) else [calls]
        answers = [{"jsonrpc": "2.0", "id": call["id"], "result": self._result(call["method"])} for call in many]
        return web.json_response(answers if isinstance(calls, list) else answers[0])

    def _result(self, method: str) -> Any:
        block = {"number": "0x10", "hash": "0x" + "11" * 32, "parentHash": "0x" + "10" * 32, "timestamp": "0x1"}
        return {"eth_chainId": hex(11155111), "eth_getBlockByNumber": block}.get(method, "0x10")

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        self.mails.append(repr(envelope.content))
        return "250 OK"


@asynccontextmanager
async def outside() -> AsyncIterator[Outside]:
    found = Outside()
    application = web.Application()
    application.router.add_route("*", "/{any:.*}", found.answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    loop = asyncio.get_running_loop()
    mails = await loop.create_server(lambda: SMTP(found, hostname="localhost", loop=loop), "127.0.0.1", 0)
    found.mail_port = mails.sockets[0].getsockname()[1]
    yield found
    mails.close()
    await runner.cleanup()


def settings(database: str, around: Outside, redis: RedisServer) -> str:
    text = settings_text(database, f"{around.url}/rpc", workers=1, header_timeout_s=1.0)
    text = text.replace("[keys]", "[keys]\nauth_failures_per_minute = 1000000")
    return f"""{text}
[tracing]
endpoint = "{around.url}/v1/traces"
ratio = 1.0
flush_s = 0.2
[valkey]
limits_url = "{redis.url}"
[log]
level = "debug"
slow_step_ms = 0.05
[requests]
slow_ms = 0.001
[aliases]
{"".join(f"{name} = true{chr(10)}" for name in ALIASES)}
[mail]
host = "127.0.0.1"
port = {around.mail_port}
security = "none"
{OPEN_EGRESS}
[[upstreams]]
network = "{REST_NETWORK}"
url = "{around.url}/rest"
"""


class Keys:
    """Keys by what they are for. Secrets are their parts that must not appear anywhere."""

    def __init__(self, config: Path) -> None:
        self._config = str(config)
        self._account = self._run("accounts", "create", "--name", "A", "--email", EMAIL, "--plan", "enterprise")["id"]
        self.open = self._create("--allow-in-url")
        self.closed = self._create()
        self.second = self._create("--allow-in-url")
        self.slow = self._create("--allow-in-url", "--requests-per-second", "1")
        self.unknown = access.mint("test", b"never made".rjust(32))

    def _run(self, *words: str) -> dict[str, Any]:
        return dict(orjson.loads(command_here(*words, "--config", self._config, "--json").stdout))

    def _create(self, *options: str) -> str:
        scopes = [word for scope in access.SCOPES for word in ("--scope", scope)]
        owned = ("--account", self._account, "--mode", "test")
        return str(self._run("keys", "create", *owned, *scopes, *options)["key"])

    @property
    def all(self) -> tuple[str, ...]:
        return self.open, self.closed, self.second, self.slow, self.unknown

    @property
    def secrets(self) -> tuple[str, ...]:
        return tuple(key[9:-6] for key in self.all)


def rest_requests_with(key: str, other: str) -> Iterator[bytes]:
    """Requests to the routes of a REST chain with the key in their target."""
    root = f"/v1/rest/{REST_NETWORK}"
    for word in (key, key.replace("_", "%5F"), f"%73{key[1:]}", key.replace("_", "%255F")):
        for target in (
            f"{root}/{word}/v1/accounts/{ADDRESS}",
            f"{root}/v1/accounts/{ADDRESS}?apiKey={word}",
            f"{root}/{word}",
            f"{root}/{word}/",
            f"{root}/{word}/no/such/route",
            f"{root}/v1/{word}/accounts",
            f"{root}/{word}/{word}/v1/accounts/{ADDRESS}",
            f"{root}/{word}/v1/accounts/{ADDRESS}?apiKey={word}",
            f"{root}/{word}/v1/accounts/{ADDRESS}?apiKey={other}",
            f"{root}/{word}/../{word}",
            f"{root}//{word}/v1",
            f"/v1/rest/{word}/testnet/v1",
        ):
            yield request("GET", target)
            yield request("GET", target, b"", Referer=f"https://x{target}", X_Explain="1", **SAMPLED)
            yield request("POST", target, b"{}")


def requests_with(key: str, other: str) -> Iterator[bytes]:
    """Requests with the key in their target. Some have another one as well."""
    yield from rest_requests_with(key, other)
    encoded, twice = key.replace("_", "%5F"), key.replace("_", "%255F")
    for target in (f"/v1/rpc/{NETWORK}/{key}", f"/v1/rpc/{NETWORK}?apiKey={key}"):
        yield request("POST", target, CALL)
        yield request("POST", target, CALL, X_Explain="1")
        yield request("POST", target, CALL, **SAMPLED)
        yield request("POST", target, CALL, Referer=f"https://x{target}", Origin="https://x.example")
        yield request("POST", target, CALL, X_API_Key=access.mint("test", bytes(32)))
        yield request("POST", target, b"[" + b",".join([CALL] * 3) + b"]")
        yield request("POST", target, b"[" + b",".join([CALL] * 3) + b"]", **SAMPLED)
        yield request("POST", target, rpc("eth_nope"))
        yield request("POST", target, b"{")
        yield request("POST", target, b" " * 1_100_000)
        yield request("POST", target, CALL, X_Timeout_Ms="soon")
        yield request("POST", target, CALL, Content_Type="text/plain")
        yield request("POST", target, CALL, Expect="teapot")
        yield request("POST", target, CALL, X_Long="a" * 9000)
        yield request("OPTIONS", target, Origin="https://x.example", Access_Control_Request_Method="POST")
        yield request("GET", target)
        yield request("GET", target.replace("/rpc/", "/ws/"), b"", **UPGRADE)
        yield request("GET", target.replace("/rpc/", "/ws/"))
        yield request("POST", f"http://x{target}", CALL)
        yield request("POST", f"{target}#x", CALL)
        yield request("POST", target.replace("sepolia", "atlantis"), CALL)
        yield request("POST", target.replace("/rpc/", "/bundler/"), CALL)
        yield request("POST", target.replace("/rpc/", "/paymaster/"), CALL)
        yield request("POST", target, CALL).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        yield request("POST", target, CALL).replace(b"HTTP/1.1", b"HTTP/9.9", 1)
        yield request("POST", target, CALL).replace(b"Host:", b"Host :", 1)
        yield request("POST", target, CALL).partition(b"\r\n")[0] + b"\0\r\n\r\n"
        yield request("POST", target, CALL).partition(b" HTTP")[0]  # never completed
    for target in (
        f"/v1/rpc/{NETWORK}/{encoded}",
        f"/v1/rpc/{NETWORK}/{twice}",
        f"/v1/rpc/{NETWORK}/{key}/",
        f"/v1/rpc/{NETWORK}/{key}/more",
        f"/v1/rpc/{key}/mainnet",
        f"/v1/{key}/rpc/{NETWORK}",
        f"/{key}",
        f"/{encoded}",
        f"/{twice}",
        f"/{twice.replace('a', '%2561')}",
        f"/v2/{key}",
        f"/v1/rpc/{NETWORK}?key={key}",
        f"/v1/rpc/{NETWORK}?apikey={key}&api_key={encoded}",
        f"/v1/rpc/{NETWORK}?%61piKey={encoded}",
    ):
        yield request("POST", target, CALL)
    for target in (
        *(
            "/v1/chains",
            "/v1/requests",
            "/v1/webhooks?limit=ten",
            "/v1/wallets?limti=1",
            "/v1/account/keys",
            "/v1/nope",
        ),
        *(
            "/healthz",
            "/docs",
            "/docs/guide",
            "/dashboard",
            "/v1/openapi.json",
            "/v1/account/usage",
            "/v1/admin/accounts",
        ),
        "/v1/gas/ethereum-sepolia/prices",
    ):
        yield request("GET", f"{target}{'&' if '?' in target else '?'}apiKey={key}")
    for host, form in ALIAS_URLS:
        for word in (key, encoded):
            target = form.format(key=word, other=other)
            yield of_host(host, request("POST", target, CALL))
            yield of_host(host, request("POST", target, CALL, X_Explain="1", **SAMPLED))
            yield of_host(host, request("POST", target, b"{"))
            yield of_host(host, request("GET", target))
            yield of_host(host, request("GET", target, b"", **UPGRADE))
    hook = {"url": "https://hooks.example.com/x", "chain": "ethereum-sepolia", "event_type": "MINED_TRANSACTION"}
    yield request("POST", f"/v1/webhooks?apiKey={key}", orjson.dumps({**hook, "config": {}}))
    yield request("POST", f"/v1/account/sign-in/link?apiKey={key}", orjson.dumps({"email": EMAIL}))
    yield request("POST", f"/v1/account/keys?apiKey={key}", orjson.dumps({"name": "x", "mode": "test"}))


def of_host(host: str, data: bytes) -> bytes:
    head, _, rest = data.partition(b"Host: ")
    assert rest, data
    return head + b"Host: " + host.encode() + rest[rest.index(b"\r\n") :]


async def reply_to(port: int, data: bytes) -> str:
    """All bytes of the reply, up to its end or a pause. A key that a test has created is shown once, in its reply."""
    async with await HttpClient.open(port) as client:
        if b"HTTP/" not in data.partition(b"\r\n")[0]:
            await client.write(data)
            return ""
        reply = await client.send(data)
        return f"{reply.status} {reply.headers!r} {reply.body!r}"


async def use_sockets(port: int, key: str) -> str:
    said = []
    async with aiohttp.ClientSession() as session:
        for end in (f"/{key}", f"?apiKey={key}"):
            async with session.ws_connect(f"http://127.0.0.1:{port}/v1/ws/{NETWORK}{end}") as ws:
                for text in (
                    CALL.decode(),
                    "{",
                    '{"jsonrpc":"2.0","id":1,"method":"eth_subscribe","params":["newHeads"]}',
                ):
                    await ws.send_str(text)
                    said.append(str(await ws.receive()))
    return "".join(said)


async def tables_of(url: str) -> dict[str, str]:
    """The content of every table."""
    async with connected(url) as connection:
        names = await connection.fetch("select tablename from pg_tables where schemaname = 'public'")
        return {
            name: "\n".join(row[0] for row in await connection.fetch(f'select t::text from "{name}" t'))
            for (name,) in names
        }


async def records_of(port: int, key: str, ids: list[str]) -> str:
    said = []
    async with aiohttp.ClientSession(headers={"X-API-Key": key}) as session:
        for path in ("/requests", "/errors", *(f"/requests/{each}" for each in ids)):
            async with session.get(f"http://127.0.0.1:{port}/v1{path}") as response:
                said.append(f"{response.status} {await response.text()}")
    return "".join(said)


@dataclass
class Running:
    serving: Production
    keys: Keys
    around: Outside
    redis: RedisServer
    database: str
    room: Path


@pytest.fixture(scope="module")
async def running(server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    require_redis()
    name = await server.create("migrated")
    room = tmp_path_factory.mktemp("secrecy")
    async with outside() as around, redis_server(room, "--rdbcompression", "no") as redis:
        (config := room / "penstock.toml").write_text(settings(server.url(name), around, redis))
        keys = await asyncio.to_thread(Keys, config)
        serving = await production.start(config, room / "log", keys.open)
        yield Running(serving, keys, around, redis, server.url(name), room)
        assert await production.stop(serving) == 0
    await server.drop(name)


async def everything_written(running: Running, replies: Mapping[str, str]) -> dict[str, str]:
    """All places that a key could reach, each with its content."""
    running.redis.command("SAVE")
    async with (
        aiohttp.ClientSession() as session,
        session.get(
            f"http://127.0.0.1:{running.serving.metrics_port}/metrics",
            headers={"Accept": "application/openmetrics-text; version=1.0.0"},
        ) as response,
    ):
        metrics = await response.text()
    files = {str(path): path.read_bytes().decode("latin-1") for path in running.room.rglob("*") if path.is_file()}
    assert any(name.endswith(".rdb") for name in files)
    return {
        **files,
        **{f"table {name}": text for name, text in (await tables_of(running.database)).items()},
        **{f"reply to {name}": text for name, text in replies.items()},
        "metrics": metrics,
        "upstreams, collector and receivers": "\n".join(running.around.seen),
        "mails": "\n".join(running.around.mails),
    }


def leaks_in(written: Mapping[str, str], secrets: Sequence[str]) -> list[str]:
    return [name for name, text in written.items() if any(secret in text for secret in secrets)]


async def test_nothing_that_the_service_writes_contains_a_key_of_a_url(running: Running) -> None:
    port, keys, around = running.serving.port, running.keys, running.around
    replies: dict[str, str] = {}
    for down in (False, True):
        around.is_down = down
        for key in keys.all:
            for index, data in enumerate(requests_with(key, keys.second)):
                replies[f"{key[-4:]} {index} {'down' if down else 'up'} {data[:40]!r}"] = await reply_to(port, data)
    around.is_down = False
    statuses = {reply[:3] for reply in replies.values()}
    assert statuses >= {"200", "400", "401", "403", "404", "405", "413", "426", "429", "431", "503", "101"}, statuses
    replies["sockets"] = await use_sockets(port, keys.open)
    ids = [reply.split("'x-request-id': '")[1].split("'")[0] for reply in replies.values() if "x-request-id" in reply]
    mark = request("GET", "/v1/nope", X_Request_Id="after-all-others")
    await reply_to(port, mark)
    await until(lambda: b"after-all-others" in running.serving.log_file.read_bytes())
    await until(lambda: around.spans > 0 and around.mails)
    tables: dict[str, str] = {}

    async def are_written() -> bool:
        tables.update(await tables_of(running.database))
        return bool(tables["requests"] and tables["usage_minutes"])

    await until(are_written)
    replies["records"] = await records_of(port, keys.open, ids[-40:])
    written = await everything_written(running, replies)
    assert leaks_in(written, keys.secrets) == []


async def test_two_different_keys_in_a_url_are_refused_at_every_shape(running: Running) -> None:
    port, key, other = running.serving.port, running.keys.open, running.keys.second
    shapes = [(host, form) for host, form in ALIAS_URLS if "apiKey={other}" in form]
    targets = [
        *((host, "POST", form.format(key=key, other=other)) for host, form in shapes),
        ("x", "GET", f"/v1/rest/{REST_NETWORK}/{key}/v1?apiKey={other}"),
        ("x", "GET", f"/v1/rest/{REST_NETWORK}/%73{key[1:]}/v1?apiKey={other}"),
        ("x", "GET", f"/v1/rest/{REST_NETWORK}/v1?apiKey={key}&apiKey={other}"),
        ("x", "GET", f"/v1/chains?apiKey={key}&%61piKey={other}"),
        ("x", "POST", f"/v1/rpc/{NETWORK}/{key}?apiKey={other}"),
    ]
    for host, method, target in targets:
        reply = await reply_to(port, of_host(host, request(method, target, CALL if method == "POST" else b"")))
        assert reply.startswith("400"), (target.replace(key, "KEY").replace(other, "OTHER"), reply)
        assert "two different" in reply


async def test_program_for_agents_writes_no_key_of_a_url(running: Running, tmp_path: Path) -> None:
    """It takes keys in headers only. One that is in its URL all the same appears nowhere."""
    key, log = running.keys.open, tmp_path / "log"
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "list_chains", "arguments": {}}}
    body, accepts = orjson.dumps(call), {"Accept": "application/json, text/event-stream"}
    words = ("mcp", "--http", "--port", "0", "--url", f"http://127.0.0.1:{running.serving.port}")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy", *words, cwd=ROOT, stdout=output, stderr=output
        )
    try:
        await until(lambda: b"/mcp" in log.read_bytes(), within_s=60.0)
        port = int(log.read_bytes().split(b"/mcp")[0].rpartition(b":")[2])
        replies = {}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            for word in (key, key.replace("_", "%5F")):
                for path in (
                    f"/mcp?apiKey={word}",
                    f"/mcp/?apiKey={word}",
                    f"/mcp/{word}",
                    f"/mcp/{word}/",
                    f"/{word}",
                ):
                    for method in ("POST", "GET", "DELETE", "OPTIONS"):
                        async with session.request(
                            method,
                            URL(f"http://127.0.0.1:{port}{path}", encoded=True),
                            data=body if method == "POST" else None,
                            headers={**accepts, "Content-Type": "application/json", "Referer": f"https://x{path}"},
                            allow_redirects=False,
                        ) as reply:
                            name = f"{method} {path.replace(word, 'KEY')}"
                            # A stream of events stays open.
                            text = "" if reply.content_type == "text/event-stream" else await reply.text()
                            replies[name] = f"{reply.status} {reply.headers!r} {text}"
    finally:
        process.terminate()
        await process.wait()
    assert any(reply.startswith("200") for reply in replies.values()), replies
    written = {**replies, "log": log.read_text(), "service": running.serving.log_file.read_text()}
    assert leaks_in(written, running.keys.secrets) == []


def mail(port: int, text: str) -> None:
    with smtplib.SMTP("127.0.0.1", port) as client:
        client.sendmail("a@example.com", [EMAIL], f"Subject: x\r\n\r\n{text}")


async def test_search_finds_a_key_in_each_place(running: Running) -> None:
    """A key that is planted where the service writes, by the way in which it would get there."""
    planted, port = access.mint("test", b"planted".rjust(32)), running.serving.port
    secret = planted[9:-6]
    await reply_to(port, request("POST", f"/v1/rpc/{NETWORK}", CALL, X_API_Key=running.keys.open))
    with running.serving.log_file.open("a") as log:
        # The service goes on writing at its own place in the file.
        log.write("\n" * 1_000_000 + orjson.dumps({"message": "planted", "key": planted}).decode() + "\n")
    async with connected(running.database) as connection:
        await connection.execute("update keys set note = $1", planted)
    running.redis.command("SET", "planted", planted)
    async with aiohttp.ClientSession() as session:
        for path in ("/rpc", "/v1/traces", "/hook"):
            async with session.post(
                f"{running.around.url}{path}", data=orjson.dumps({**orjson.loads(CALL), "x": planted})
            ):
                pass
    await asyncio.to_thread(mail, running.around.mail_port, planted)
    written = await everything_written(running, {"planted": f"200 {planted}"})
    found = {name.rpartition("/")[2] if name.startswith("/") else name for name in leaks_in(written, (secret,))}
    places = {"log", "table keys", "reply to planted", "upstreams, collector and receivers", "mails"}
    assert found >= places, places - found
    assert any(name.endswith(".rdb") for name in found), found
    # Nobody but the service writes its metrics: a word that is in them is found.
    assert "metrics" in leaks_in(written, ("eth_gasPrice",))
