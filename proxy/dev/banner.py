"""What is said when all is ready: to people as a banner, to programs as one JSON object."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proxy.settings import Settings
from proxy.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Ready:
    base_url: str
    ws_url: str
    dashboard_url: str
    metrics_url: str
    upstream_url: str
    keys: dict[str, str]
    funded_account: dict[str, str]

    @classmethod
    def of(
        cls,
        settings: Settings,
        supervisor: Supervisor,
        *,
        chain_url: str,
        keys: dict[str, dict[str, str]],
        funded: dict[str, str],
    ) -> Ready:
        where = f"{settings.server.host}:{supervisor.port}"
        return cls(
            base_url=f"http://{where}/v1",
            ws_url=f"ws://{where}",
            dashboard_url=f"http://{where}/",
            metrics_url=f"http://{settings.metrics.host}:{supervisor.metrics_port}/metrics",
            upstream_url=chain_url,
            keys={**{plan: pair["live"] for plan, pair in keys.items()}, "test": keys["growth"]["test"]},
            funded_account=funded,
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def banner(ready: Ready, data: Path) -> str:
    root = ready.base_url.removesuffix("/v1")
    return f"""
Penstock is ready.

  API        {ready.base_url}
  reference  {root}/docs
  metrics    {ready.metrics_url}
  dev chain  {ready.upstream_url}
  data       {data}

  keys       free        {ready.keys["free"]}
             growth      {ready.keys["growth"]}
             enterprise  {ready.keys["enterprise"]}
             test        {ready.keys["test"]}

Try it:

  {_curl(ready, "free", "mainnet", "eth_blockNumber", "")}

  {_curl(ready, "test", "testnet", "eth_getBalance", f'"{ready.funded_account["address"]}","latest"')}

Ctrl-C stops everything; the data stays for the next start (--fresh begins anew)."""


def _curl(ready: Ready, key: str, network: str, method: str, params: str) -> str:
    call = f'{{"jsonrpc":"2.0","id":1,"method":"{method}","params":[{params}]}}'
    return (
        f"curl -s {ready.base_url}/rpc/dev/{network} -H 'X-API-Key: {ready.keys[key]}' \\\n"
        f"    -H 'Content-Type: application/json' -d '{call}'"
    )
