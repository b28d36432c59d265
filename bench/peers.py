"""Other open gateways: eRPC, proxyd and nodecore, each with a key, limits and a configuration that is written here.

They run with `--peers` if their programs are on PATH. One that does not start is skipped with its reason. Go programs get one
thread (GOMAXPROCS), as every candidate has one core, and trust the bench's certificate (SSL_CERT_FILE).
"""

from pathlib import Path

from bench import machine, tls_files
from bench.baselines import KEY, Baseline, Start

# Far above any rate that is measured: the limit is checked, and refuses nothing.
LIMIT = 10_000_000
METHODS = ("eth_getBalance", "eth_call", "eth_getBlockByHash", "eth_getBlockByNumber", "eth_sendRawTransaction")

ERPC = """\
logLevel: error
server: {{ httpHostV4: 127.0.0.1, httpPort: {port}, maxTimeout: 30s }}
metrics: {{ enabled: false }}
{cache}
rateLimiters:
  store: {{ driver: memory }}
  budgets:
    - id: bench
      rules: [{{ method: "*", maxCount: {limit}, period: 1s }}]
projects:
  - id: bench
    auth:
      strategies: [{{ type: secret, rateLimitBudget: bench, secret: {{ value: "{key}" }} }}]
    networks: [{{ architecture: evm, evm: {{ chainId: 1 }} }}]
    upstreams:
{upstreams}
"""
ERPC_CACHE = """\
database:
  evmJsonRpcCache:
    connectors: [{ id: memory, driver: memory, memory: { maxItems: 100000 } }]
    policies: [{ network: "*", method: "*", finality: finalized, connector: memory, ttl: 0 }]
"""

PROXYD = """\
[server]
rpc_host = "127.0.0.1"
rpc_port = {port}
ws_port = 0
max_body_size_bytes = 10485760
max_concurrent_rpcs = 10000
log_level = "error"
[rate_limit]
base_rate = {limit}
base_interval = "1s"
[cache]
enabled = {cache}
[backend]
response_timeout_seconds = 30
max_response_size_bytes = 52428800
max_retries = 3
{backends}
[backend_groups.main]
backends = [{names}]
[authentication]
{key} = "bench"
[rpc_method_mappings]
{methods}
"""

NODECORE = """\
server: {{ port: {port} }}
{cache}
auth:
  enabled: true
  key-management:
    - {{ id: bench, type: local, local: {{ key: "{key}" }} }}
rate-limit:
  - budgets:
      - name: bench
        config:
          rules: [{{ pattern: ".*", requests: {limit}, period: 1s }}]
upstream-config:
  upstreams:
{upstreams}
"""
NODECORE_CACHE = """\
cache:
  connectors: [{ id: memory, driver: memory, memory: { max-items: 100000 } }]
  policies:
    - { id: all, chain: "*", method: "*", connector-id: memory, finalization-type: finalized, ttl: 1h }
"""


def _erpc(start: Start) -> list[str]:
    upstreams = [
        f"      - {{ id: stub{at}, endpoint: {url}, evm: {{ chainId: 1 }} }}" for at, url in enumerate(start.urls)
    ]
    fields = {"port": start.port, "key": KEY, "limit": LIMIT, "cache": ERPC_CACHE if start.caches else ""}
    config = _write(start, "erpc.yaml", ERPC.format(**fields, upstreams="\n".join(upstreams)))
    return [*_environment(), machine.find_tool("erpc") or "erpc", str(config)]


def _proxyd(start: Start) -> list[str]:
    names = [f"stub{at}" for at in range(len(start.urls))]
    backends = [f'[backends.{name}]\nrpc_url = "{url}"' for name, url in zip(names, start.urls, strict=True)]
    text = PROXYD.format(
        port=start.port,
        limit=LIMIT,
        key=KEY,
        cache=str(start.caches).lower(),
        backends="\n".join(backends),
        names=", ".join(f'"{name}"' for name in names),
        methods="\n".join(f'{method} = "main"' for method in METHODS),
    )
    return [*_environment(), machine.find_tool("proxyd") or "proxyd", str(_write(start, "proxyd.toml", text))]


def _nodecore(start: Start) -> list[str]:
    upstreams = [
        f"    - {{ id: stub{at}, chain: ethereum, rate-limit-budget: bench, "
        f"connectors: [{{ type: json-rpc, url: {url} }}] }}"
        for at, url in enumerate(start.urls)
    ]
    fields = {"port": start.port, "key": KEY, "limit": LIMIT, "cache": NODECORE_CACHE if start.caches else ""}
    config = _write(start, "nodecore.yml", NODECORE.format(**fields, upstreams="\n".join(upstreams)))
    program = machine.find_tool("nodecore") or "nodecore"
    return [*_environment(), f"NODECORE_CONFIG_PATH={config}", "LOG_LEVEL=error", program]


def _environment() -> list[str]:
    return ["env", "GOMAXPROCS=1", f"SSL_CERT_FILE={tls_files.CERT}"]


def _write(start: Start, name: str, text: str) -> Path:
    config = start.workdir / name
    config.write_text(text)
    return config


def _missing(program: str) -> str | None:
    return None if machine.find_tool(program) else f"{program} is not on PATH"


# All take their key in the path or in the query.
PEERS = {
    peer.name: peer
    for peer in (
        Baseline("erpc", "eRPC", lambda: _missing("erpc"), _erpc, path=f"/bench/evm/1?secret={KEY}"),
        Baseline("proxyd", "proxyd", lambda: _missing("proxyd"), _proxyd, path=f"/{KEY}"),
        Baseline(
            "nodecore",
            "nodecore",
            lambda: _missing("nodecore"),
            _nodecore,
            path=f"/queries/ethereum/api-key/{KEY}",
        ),
    )
}
