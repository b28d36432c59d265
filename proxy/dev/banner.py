"""The summary when everything is ready: a banner for people, a JSON object for programs (`--ready-file`)."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proxy.dev.contracts import DevContracts
from proxy.dev.devnet import Devnet
from proxy.dev.funded_accounts import ACCOUNTS, FUNDED, WORKING
from proxy.dev.seed import Seeded, email_of
from proxy.processes.supervisor import Supervisor
from proxy.settings import Settings


@dataclass(frozen=True, slots=True)
class ReadyFile:
    base_url: str
    ws_url: str
    dashboard_url: str
    metrics_url: str
    upstream_url: str
    bundler_url: str | None
    keys: dict[str, str]
    # Dashboard sign-in: email and password of an account's holder, and the token of an operator.
    sign_in: dict[str, str]
    contracts: DevContracts

    @classmethod
    def of(
        cls,
        settings: Settings,
        supervisor: Supervisor,
        *,
        devnet: Devnet,
        seeded: Seeded,
    ) -> ReadyFile:
        where, keys = f"{settings.server.host}:{supervisor.port}", seeded.keys
        scheme = settings.server.tls.scheme
        return cls(
            base_url=f"{scheme}://{where}/v1",
            ws_url=f"{scheme.replace('http', 'ws')}://{where}",
            dashboard_url=f"{scheme}://{where}/dashboard",
            metrics_url=f"http://{settings.metrics.host}:{supervisor.metrics_port}/metrics",
            upstream_url=devnet.url,
            bundler_url=devnet.bundler_url,
            keys={**{plan: pair["live"] for plan, pair in keys.items()}, "test": keys["growth"]["test"]},
            sign_in={"email": email_of("growth"), **seeded.sign_in},
            contracts=devnet.contracts,
        )

    def as_json(self) -> dict[str, Any]:
        """Return one flat object with the service's addresses and the contracts on the chain."""
        fields = asdict(self)
        on_chain = fields.pop("contracts")
        accounts = [asdict(account) for account in ACCOUNTS if account not in WORKING]
        return {
            **fields,
            **on_chain,
            "funded_account": asdict(FUNDED),
            "accounts": accounts,
            "admin_token": self.sign_in["admin_token"],
        }


def banner(ready: ReadyFile, data: Path) -> str:
    root = ready.base_url.removesuffix("/v1")
    return f"""
Penstock is ready.

  API        {ready.base_url}
  WebSocket  {ready.ws_url}/v1/ws/dev/mainnet?apiKey=KEY
  wallets    {ready.base_url}/rpc/dev/mainnet/KEY
  dashboard  {ready.dashboard_url}
  API docs   {root}/docs
  guide      {root}/docs/guide/
  metrics    {ready.metrics_url}
  dev chain  {ready.upstream_url}
  bundler    {ready.bundler_url or "not running"}
  data       {data}
{_on_chain(ready.contracts)}
  API keys   free        {ready.keys["free"]}
             growth      {ready.keys["growth"]}
             enterprise  {ready.keys["enterprise"]}
             test        {ready.keys["test"]}  (test networks only)

  sign in    account     {ready.sign_in["email"]}  password {ready.sign_in["password"]}
             operator    {ready.sign_in["admin_token"]}

Get the newest block number:

  {_curl(ready, "free", "mainnet", "eth_blockNumber", "")}

Get a balance on the test network:

  {_curl(ready, "test", "testnet", "eth_getBalance", f'"{FUNDED.address}","latest"')}

Subscribe to new blocks over a WebSocket:

  {listener(ready, "growth")}

Make a block, in another terminal; the development chain also makes one for each transaction:

  {miner(ready)}

Ctrl-C stops everything. The data is kept for the next start; start with --fresh to delete it."""


def _on_chain(contracts: DevContracts) -> str:
    """List the standard tokens and the entry points. The ready file has all contracts."""
    ordinary = ("erc20", "weth", "erc721", "erc1155")
    shown = [
        (contract["symbol"], contract)
        for contract in (*contracts.tokens, *contracts.nfts)
        if contract["kind"] in ordinary
    ]
    lines = [
        f"{symbol:<11} {contract['address']}  {contract['kind']}, {contract['name']}" for symbol, contract in shown
    ]
    lines += [f"{'EntryPoint':<11} {address}  {version}" for version, address in contracts.entry_points.items()]
    return "".join(f"\n  {'contracts' if at == 0 else '':<10} {line}" for at, line in enumerate(lines)) + "\n"


def _curl(ready: ReadyFile, key: str, network: str, method: str, params: str) -> str:
    return (
        f"curl -s {ready.base_url}/rpc/dev/{network} -H 'X-API-Key: {ready.keys[key]}' \\\n"
        f"    -H 'Content-Type: application/json' -d '{_call(method, params)}'"
    )


def _call(method: str, params: str) -> str:
    return f'{{"jsonrpc":"2.0","id":1,"method":"{method}","params":[{params}]}}'


# Prints each new head. One argument for `python -c`.
_LISTENER = (
    "import asyncio, aiohttp, sys\n"
    "async def main():\n"
    "  async with aiohttp.ClientSession() as s, s.ws_connect(sys.argv[1]) as ws:\n"
    '    await ws.send_json(dict(jsonrpc="2.0", id=1, method="eth_subscribe", params=["newHeads"]))\n'
    "    async for message in ws: print(message.data, flush=True)\n"
    "asyncio.run(main())"
)


def listener(ready: ReadyFile, key: str) -> str:
    """Return a command that subscribes with packages that are already installed."""
    url = f"{ready.ws_url}/v1/ws/dev/mainnet?apiKey={ready.keys[key]}"
    return f"{shlex.quote(sys.executable)} -c '{_LISTENER}' '{url}'"


def miner(ready: ReadyFile) -> str:
    """Return a command that makes an empty block: no API key may, so it calls the development chain itself."""
    return f"curl -s {ready.upstream_url} -H 'Content-Type: application/json' -d '{_call('evm_mine', '')}'"
