"""`import` turns settings of other gateways into valid ones, and accounts for every line of theirs."""

from __future__ import annotations

import shlex
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy import settings
from proxy.commands.imports.documents import Entry, load_document
from tests.service import ROOT, command_here

SECRET = "s3cret-Key_0123456789"
ERPC = f"""\
logLevel: warn
server:
  httpHostV4: 0.0.0.0
  httpPortV4: 4000
  maxTimeout: 50s
  trustedIPForwarders: [10.0.0.0/8]
metrics: {{enabled: true, hostV4: 0.0.0.0, port: 4001}}
database:
  evmJsonRpcCache:
    connectors:
      - id: mem
        driver: memory
        memory: {{maxItems: 1000, maxTotalSize: 512MB}}
      - id: shared
        driver: redis
        redis: {{addr: "redis://cache.example:6379"}}
      - id: slow
        driver: dynamodb
        dynamodb: {{region: eu}}
    policies:
      - {{network: "*", method: "*", finality: finalized, connector: mem, ttl: 0}}
projects:
  - id: main
    auth:
      strategies:
        - type: secret
          secret: {{id: frontend, value: {SECRET}}}
        - type: jwt
          jwt: {{allowedIssuers: [me]}}
    cors: {{allowedOrigins: ["https://app.example"], allowedMethods: [GET]}}
    rateLimitBudget: clients
    networks:
      - architecture: evm
        evm: {{chainId: 1}}
        staticResponses:
          - {{method: eth_chainId, response: {{result: "0x1"}}}}
          - {{method: eth_mine, response: {{error: {{code: -32601, message: gone}}}}}}
        failsafe:
          - matchMethod: eth_getBalance|eth_getLogs
            timeout: {{duration: 30s}}
            retry: {{maxAttempts: 3}}
            consensus: {{maxParticipants: 3, agreementThreshold: 2, disputeBehavior: returnError}}
      - architecture: evm
        evm: {{chainId: 1284}}
    upstreamDefaults:
      jsonRpc: {{supportsBatch: true, batchMaxSize: 50}}
    upstreams:
      - id: Own Node
        endpoint: https://node.one.example/{SECRET}
        rateLimitBudget: own
        evm: {{chainId: 1, nodeType: full}}
        allowMethods: [eth_getLogs]
        ignoreMethods: ["trace_*", eth_getLogs]
        tags: ["tier:fallback", "region:eu"]
      - id: own-node
        endpoint: https://node.two.example/
        evm: {{chainId: 1}}
        jsonRpc: {{supportsBatch: false, headers: {{X-Key: "{SECRET}"}}}}
        shadow: {{enabled: true, sampleRate: 0.25, ignoreFields: {{eth_getLogs: ["*.blockTimestamp"]}}}}
      - endpoint: alchemy://{SECRET}
      - id: glmr
        endpoint: https://moon.example/
        rateLimitBudget: credits
        rateLimitCountMode: credit
        creditUnits: {{eth_call: 26, "*": 10}}
        evm: {{chainId: 1284, blockAvailability: {{lower: {{latestBlockMinus: 128}}, upper: {{latestBlockMinus: 2}}}}}}
      - id: other
        endpoint: tenderly://{SECRET}
      - id: nowhere
        endpoint: https://detected.example/
    providers:
      - id: inf
        vendor: infura
        settings: {{apiKey: {SECRET}}}
        onlyNetworks: [evm:8453]
rateLimiters:
  budgets:
    - id: own
      rules:
        - {{method: "*", maxCount: 600, period: minute}}
        - {{method: eth_call, maxCount: 5, period: 1s}}
        - {{method: "trace_*|eth_getLogs", maxCount: 120, period: minute}}
        - {{method: "no_such*", maxCount: 5, period: 1s}}
    - id: credits
      rules: [{{method: "*", maxCount: 300000000, period: month}}]
    - id: clients
      rules: [{{method: "*", maxCount: 100, period: 1s}}]
    - id: unused
      rules: [{{method: "*", maxCount: 1, period: 1s}}]
"""
NODECORE = f"""\
server:
  port: 9090
  metrics-port: 9093
  tls: {{enabled: true, certificate: /nowhere/cert.pem, key: /nowhere/key.pem}}
auth:
  enabled: true
  request-strategy: {{type: token, token: {{value: {SECRET}}}}}
  key-management:
    - id: first
      type: local
      local:
        key: {SECRET}
        settings:
          allowed-ips: [192.0.2.1]
          methods: {{allowed: [eth_call], forbidden: [eth_syncing]}}
    - {{id: second, type: drpc, drpc: {{owner: {{id: a, api-token: b}}}}}}
app-storages:
  - name: redis-1
    redis: {{full-url: "redis://localhost:6379/0"}}
cache:
  connectors:
    - {{id: m, driver: memory, memory: {{max-items: 5}}}}
    - {{id: r, driver: redis, redis: {{storage-name: redis-1}}}}
  policies:
    - {{id: p, chain: "*", method: "*", connector-id: m, finalization-type: finalized, ttl: 30s}}
rate-limit:
  - budgets:
      - name: standard
        config: {{rules: [{{pattern: ".*", requests: 120, period: 1m}}]}}
upstream-config:
  failsafe-config: {{retry: {{attempts: 10}}, hedge: {{delay: 500ms}}}}
  chain-defaults: {{ethereum: {{poll-interval: 2m}}}}
  upstreams:
    - id: eth
      chain: ethereum
      rate-limit-budget: standard
      poll-interval: 3m
      methods: {{disable: [eth_getProof]}}
      connectors:
        - {{type: json-rpc, url: "https://a.example/{SECRET}", headers: {{Key: Value}}}}
        - {{type: websocket, url: "wss://a.example/{SECRET}"}}
    - id: sepolia-node
      chain: sepolia
      rate-limit: {{auto: true, rules: [{{method: eth_call, requests: 5, period: 1s}}]}}
      connectors:
        - {{type: json-rpc, url: "https://b.example/"}}
        - {{type: grpc, url: "https://c.example/"}}
"""
PROXYD = f"""\
ws_method_whitelist = ["eth_subscribe"]
ws_backend_group = "main"

[server]
rpc_host = "0.0.0.0"
rpc_port = 8080
ws_port = 8085
max_body_size_bytes = 10485760
timeout_seconds = 20

[cache]
enabled = true

[redis]
url = "redis://localhost:6379"

[rate_limit]
use_redis = true
base_rate = 120
base_interval = "1m"
[rate_limit.method_overrides.eth_getLogs]
limit = 1
interval = "1s"

[backend]
response_timeout_seconds = 5
max_retries = 3

[backends]
[backends.Main]
rpc_url = "$MAIN_URL"
ws_url = "wss://main.example/{SECRET}"
username = "me"
password = "{SECRET}"
max_rps = 3
weight = 4
[backends.spare]
rpc_url = "https://spare.example/"
headers = {{ X-Key = "{SECRET}" }}

[backend_groups]
[backend_groups.main]
backends = ["Main"]
fallbacks = ["spare"]
weighted_routing = true
consensus_aware = true
consensus_max_block_range = 20000
[backend_groups.logs]
backends = ["spare"]

[authentication]
{SECRET} = "wallet"

[rpc_method_mappings]
eth_call = "main"
eth_getLogs = "logs"

[sender_rate_limit]
enabled = true
"""


def imported(tmp_path: Path, name: str, text: str, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings that were written, and the rows."""
    source, target = tmp_path / name, tmp_path / "penstock.toml"
    source.write_text(text)
    done = command_here("import", str(source), "--write", str(target), "--json", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert SECRET not in done.stdout
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    return tomllib.loads(target.read_text()), orjson.loads(done.stdout)


def states(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["theirs"]: row["state"] for row in rows}


def test_every_line_of_erpc_is_accounted_for(tmp_path: Path) -> None:
    found, rows = imported(tmp_path, "erpc.yaml", ERPC)
    assert found["server"] == {
        "host": "0.0.0.0", "port": 4000, "trusted_proxies": ["10.0.0.0/8"], "cors_origins": ["https://app.example"]
    }  # fmt: skip
    assert (found["log"]["level"], found["metrics"]["port"], found["rpc"]["call_timeout_s"]) == ("warning", 4001, 50.0)
    assert (found["cache"]["bytes"], found["valkey"]["cache_url"]) == (512 << 20, "redis://cache.example:6379")
    own, two, alchemy, moon, infura = found["upstreams"]
    assert own["network"] == "ethereum/mainnet"
    assert (own["name"], own["requests_per_second"], own["tier"], own["archive"], own["batch"]) == (
        "own-node",
        10.0,
        1,
        False,
        50,
    )
    assert own["allow"] == ["eth_getLogs"]
    assert "trace_block" in own["deny"]
    assert "eth_getLogs" not in own["deny"]
    assert own["method_rates"] == {"eth_call": 5.0, "trace_*": 2.0, "eth_getLogs": 2.0}
    assert (two["shadow"], two["requests_per_second"]) == (0.25, 100.0)
    assert (two["name"], two["batch"], two["headers"]) == ("own-node-2", 1, {"X-Key": SECRET})
    assert (alchemy["url"], alchemy["network"]) == (f"alchemy://{SECRET}", ["ethereum/mainnet", "moonbeam/mainnet"])
    assert (moon["network"], infura["network"]) == ("moonbeam/mainnet", "base/mainnet")
    assert (moon["credits"], set(moon["bounds"].values())) == ({"eth_call": 26, "*": 10}, {-128})
    assert moon["budget"] == {"credits": 300_000_000, "per": "month", "shared": "credits"}
    assert "requests_per_second" not in moon
    assert found["replies"] == [
        {"network": "ethereum/mainnet", "method": "eth_chainId", "params": "[]", "result": '"0x1"'}
    ]
    assert found["verify"] == [
        {"network": "ethereum/mainnet", "methods": ["eth_getBalance", "eth_getLogs"], "by": "quorum 2/3"}
    ]
    by_path = states(rows)
    limited = next(row["ours"] for row in rows if row["theirs"] == "projects[0].upstreams[2].endpoint")
    assert limited == "[[upstreams]] ethereum/mainnet, moonbeam/mainnet"
    assert by_path["projects[0].auth.strategies[1]"] == "no equal"
    assert by_path["database.evmJsonRpcCache.connectors[2]"] == "no equal"
    assert by_path["projects[0].upstreams[4].endpoint"] == by_path["projects[0].upstreams[5].endpoint"] == "no equal"
    assert by_path["projects[0].networks[0].staticResponses[1]"] == "no equal"
    assert by_path["projects[0].upstreams[1].shadow"] == "differs"
    assert by_path["projects[0].upstreams[3].evm.blockAvailability.upper"] == "no equal"
    assert by_path["rateLimiters.budgets[0].rules[1]"] == "mapped"
    assert by_path["rateLimiters.budgets[0].rules[2]"] == "differs"
    assert by_path["rateLimiters.budgets[0].rules[3]"] == "no equal"
    assert by_path["projects[0].rateLimitBudget"] == "differs"
    assert "keys create --account ACCOUNT --name frontend --allow-in-url" in (tmp_path / "penstock.toml").read_text()
    lines = {row["theirs"]: row["line"] for row in rows}
    text = ERPC.splitlines()
    assert "maxTimeout" in text[lines["server.maxTimeout"] - 1]
    assert "tenderly" in text[lines["projects[0].upstreams[4].endpoint"] - 1]


def test_every_line_of_nodecore_is_accounted_for(tmp_path: Path) -> None:
    found, rows = imported(tmp_path, "nodecore.yml", NODECORE)
    assert found["server"]["port"] == 9090
    assert found["server"]["tls"] == {"cert": "/nowhere/cert.pem", "key": "/nowhere/key.pem"}
    assert found["valkey"] == {"cache_url": "redis://localhost:6379/0"}
    http, socket, sepolia = found["upstreams"]
    assert (http["network"], http["requests_per_second"], http["deny"]) == ("ethereum/mainnet", 2.0, ["eth_getProof"])
    assert (socket["url"], socket["name"]) == (f"wss://a.example/{SECRET}", "eth-2")
    assert sepolia["network"] == "ethereum/sepolia"
    by_path = states(rows)
    assert by_path["upstream-config.upstreams[1].connectors[1]"] == "no equal"
    assert by_path["upstream-config.upstreams[1].rate-limit.rules[0]"] == "mapped"
    assert sepolia["method_rates"] == {"eth_call": 5.0}
    assert by_path["auth.key-management[1]"] == "no equal"
    assert "--allow-ip 192.0.2.1 --allow-method eth_call" in (tmp_path / "penstock.toml").read_text()


def test_connectors_of_nodecore_are_those_of_the_family(tmp_path: Path) -> None:
    """A node of Cosmos has CometBFT's JSON-RPC here and, as a chain of its own, its REST API. One of Aptos has a REST API, and
    one of Tron also a JSON-RPC API."""
    text = """\
upstream-config:
  upstreams:
    - id: hub
      chain: cosmos-hub
      connectors:
        - {type: rest, url: "https://lcd.example"}
        - {type: tendermint, url: "https://rpc.example"}
    - id: beacon
      chain: eth-beacon-chain
      connectors: [{type: rest, url: "https://beacon.example"}]
    - id: move
      chain: aptos
      connectors: [{type: rest, url: "https://aptos.example/v1"}, {type: json-rpc, url: "https://no.example"}]
    - id: trx
      chain: tron
      methods: {disable: [eth_getLogs]}
      connectors: [{type: rest, url: "https://tron.example"}, {type: json-rpc, url: "https://tron.example/jsonrpc"}]
    - id: btc
      chain: bitcoin
      connectors: [{type: json-rpc, url: "https://btc.example"}, {type: tendermint, url: "https://no.example"}]
"""
    written, rows = imported(tmp_path, "nodecore.yml", text)
    assert [(each["network"], each["url"]) for each in written["upstreams"]] == [
        ("cosmoshub-lcd/mainnet", "https://lcd.example"),
        ("cosmoshub/mainnet", "https://rpc.example"),
        ("ethereum-beacon/mainnet", "https://beacon.example"),
        ("aptos/mainnet", "https://aptos.example/v1"),
        ("tron/mainnet", "https://tron.example"),
        ("tron-evm/mainnet", "https://tron.example/jsonrpc"),
        ("bitcoin/mainnet", "https://btc.example"),
    ]
    refused = [row["ours"] for row in rows if row["state"] == "no equal"]
    assert [each.split(":")[0] for each in refused] == [
        "a json-rpc connector",
        "a tendermint connector",
    ]
    done = command_here("check", "--offline", "--config", str(tmp_path / "penstock.toml"))
    assert (done.returncode, done.stderr) == (0, "")


def test_every_line_of_proxyd_is_accounted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAIN_URL", f"https://main.example/{SECRET}")
    found, rows = imported(tmp_path, "proxyd.toml", PROXYD, "--network", "8453")
    assert found["server"] == {"host": "0.0.0.0", "port": 8080, "max_body_bytes": 10485760}
    assert (found["valkey"], found["rpc"]) == (
        {"limits_url": "redis://localhost:6379"}, {"call_timeout_s": 20.0, "max_logs_blocks": 20000}
    )  # fmt: skip
    main, socket, spare = found["upstreams"]
    assert main == {
        "network": "base/mainnet",
        "url": f"https://me:{SECRET}@main.example/{SECRET}",
        "name": "main",
        "requests_per_second": 3.0,
        "weight": 4.0,
        "allow": ["eth_call"],
    }
    assert (socket["name"], spare["tier"], spare["allow"]) == ("main-ws", 1, ["eth_getLogs"])
    by_path = states(rows)
    assert by_path["sender_rate_limit"] == "no equal"
    assert by_path["rate_limit.method_overrides.eth_getLogs"] == "no equal"
    assert by_path["rate_limit.base_rate"] == "differs"
    lines = {row["theirs"]: row["line"] for row in rows}
    assert PROXYD.splitlines()[lines["backends.spare.rpc_url"] - 1] == 'rpc_url = "https://spare.example/"'


# Names of settings that are an upstream or a limit, in files of all three.
PLACES_AND_LIMITS = (
    *("endpoint", "url", "rpc_url", "ws_url", "max_rps", "base_rate", "maxCount", "requests"),
    *("rateLimitBudget", "rate-limit-budget", "maxTimeout", "max_body_size_bytes"),
)


def leaves(entry: Entry) -> Iterator[Entry]:
    if not entry.children():
        yield entry
    for each in entry.children():
        yield from leaves(each)


@pytest.mark.parametrize(
    ("name", "words", "upstreams"),
    [
        ("erpc.dist.yaml", (), 6),
        ("erpc.svm.example.yaml", (), 4),
        ("nodecore.yml", (), 1),
        ("nodecore-default.yml", (), 1),
        ("nodecore-full.yaml", (), 2),
        ("nodecore-cosmos.yaml", (), 2),
        ("proxyd.example.toml", ("--network", "optimism/mainnet"), 4),
    ],
)
def test_examples_of_the_gateways_themselves(tmp_path: Path, name: str, words: tuple[str, ...], upstreams: int) -> None:
    """Every upstream and limit of them has a row, and the result passes `check`."""
    text = (ROOT / "tests" / "peer_settings" / name).read_text()
    # That of proxyd leaves the URLs to its reader, and that of nodecore names certificates that do not exist.
    text = text.replace('rpc_url = ""', 'rpc_url = "https://node.example"')
    text = text.replace('ws_url = ""', 'ws_url = "wss://node.example"')
    text = text.replace("enabled: true\n    certificate", "enabled: false\n    certificate")
    found, rows = imported(tmp_path, name, text, *words)
    assert len(found["upstreams"]) == upstreams
    shown = {row["theirs"] for row in rows}
    for entry in leaves(load_document(tmp_path / name, {})):
        if entry.path.rpartition(".")[2] in PLACES_AND_LIMITS and entry.value:
            within = [entry.path[:at] for at, sign in enumerate(entry.path) if sign in ".["]
            assert shown & {entry.path, *within}, entry
    done = command_here("check", "--offline", "--config", str(tmp_path / "penstock.toml"))
    assert (done.returncode, done.stderr) == (0, "")


def test_result_passes_check(tmp_path: Path) -> None:
    imported(tmp_path, "erpc.yaml", ERPC)
    done = command_here("check", "--offline", "--config", str(tmp_path / "penstock.toml"))
    assert (done.returncode, done.stderr) == (0, "")
    assert SECRET not in done.stdout
    assert settings.load_with_tables(tmp_path / "penstock.toml", environ={})[0].upstreams


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.yaml", "projects: [\n  - x: 1\n", "a.yaml:2: not valid YAML"),
        ("a.yaml", "", "a.yaml: the file is empty"),
        ("a.yaml", "servers: []\n", "a.yaml:1: this is not a settings file of eRPC, nodecore or proxyd"),
        ("a.yaml", "projects:\n  id: main\n", "a.yaml:1: projects: must be a list"),
        ("a.yaml", "server:\n  maxTimeout: soon\nprojects: []\n", "a.yaml:2: server.maxTimeout: must be a duration"),
        ("a.yaml", "server:\n  httpPort: high\nprojects: []\n", "a.yaml:2: server.httpPort: must be a number"),
        ("a.toml", "[backends]\n[backends\n", "a.toml:2: not valid TOML"),
        ("a.toml", "[backends]\n", "--network NAME is required"),
        ("a.yaml", "projects: [{id: a, upstreams: []}]\n", "none of its upstreams can be used here"),
        ("a.yaml", "a: &a\n  - *a\nprojects: []\n", "a.yaml"),
    ],
)  # fmt: skip
def test_wrong_file_is_an_error_with_its_line_and_writes_nothing(
    tmp_path: Path, name: str, text: str, fault: str
) -> None:
    source, target = tmp_path / name, tmp_path / "penstock.toml"
    source.write_text(text)
    done = command_here("import", str(source), "--write", str(target))
    assert done.returncode == 2
    assert fault in done.stderr
    assert not target.exists()


def test_existing_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "erpc.yaml").write_text(ERPC)
    (tmp_path / "penstock.toml").write_text("mine")
    done = command_here("import", str(tmp_path / "erpc.yaml"), "--write", str(tmp_path / "penstock.toml"))
    assert done.returncode == 2
    assert (tmp_path / "penstock.toml").read_text() == "mine"
    assert "cannot be read" in command_here("import", str(tmp_path / "none.yaml")).stderr


def test_name_of_a_key_is_one_word_of_the_command(tmp_path: Path) -> None:
    """Nothing in the other gateway's file becomes a command, or a line of the settings."""
    name = "a\\n[server]\\nport = 1 $(touch x) 'b'"
    secret = f'{{type: secret, secret: {{id: "{name}", value: x}}}}'
    text = f"""\
projects:
  - id: main
    auth: {{strategies: [{secret}]}}
    upstreams: [{{endpoint: "https://a.example", evm: {{chainId: 1}}}}]
"""
    found, _ = imported(tmp_path, "erpc.yaml", text)
    assert "port" not in found.get("server", {})
    (line,) = [each for each in (tmp_path / "penstock.toml").read_text().splitlines() if "keys create" in each]
    words = shlex.split(line)
    assert words[words.index("--name") + 1] == "a [server] port = 1 $(touch x) 'b'"


def test_table_is_printed_with_a_summary(tmp_path: Path) -> None:
    (tmp_path / "erpc.yaml").write_text(ERPC)
    done = command_here("import", str(tmp_path / "erpc.yaml"))
    assert done.returncode == 0
    assert "nothing was written: --write penstock.toml writes the settings" in done.stdout
    assert "5 upstreams; " in done.stdout
    assert "without --allow-in-url" in done.stdout
