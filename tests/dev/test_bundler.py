"""The bundler of `python -m proxy dev`: real operations on every EntryPoint, and no access from other machines."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from proxy.dev.recipe import Artifact
from tests import service as service_room
from tests.client_scripts import run_script
from tests.dev.onchain import Reverted, code_at, read, rpc
from tests.service import Service, is_running, until

# One operation waits for the bundler's next bundle; the machine may be busy.
WITHIN_S = 60.0
RECIPIENT = "0x00000000000000000000000000000000000beef5"
VERSIONS = ("0.6", "0.7", "0.8")
# As /proc/net/tcp writes 127.0.0.1.
LOOPBACK = "0100007F"


@pytest.fixture(scope="module")
async def bundled(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    """A whole service with its bundler, used only here, because these tests kill its chain."""
    running = await service_room.start(tmp_path_factory.mktemp("bundled"), bundler=True)
    yield running
    assert await service_room.stop(running) == 0


async def asked(service: Service, method: str, *params: Any) -> Any:
    return await rpc(service.ready["bundler_url"], service, method, *params)


def operations(service: Service) -> dict[str, Any]:
    """The results of a script that uses permissionless and viem."""
    ready = service.ready
    task = {
        **{name: ready[name] for name in ("bundler_url", "entry_points", "factories", "paymasters")},
        "chain_url": ready["upstream_url"],
        "private_key": ready["funded_account"]["private_key"],
        "signer_key": ready["paymaster_signer"]["private_key"],
        "paymaster_abis": {version: Artifact.named(f"VerifyingPaymaster-{version}").abi for version in VERSIONS},
        "recipient": RECIPIENT,
        "valid_until": int(time.time()) + 3600,
        "within_ms": int(WITHIN_S * 1000),
    }
    return run_script("operations.mjs", task, within_s=2 * WITHIN_S)


@pytest.fixture(scope="module")
async def seen(bundled: Service) -> dict[str, Any]:
    return await asyncio.to_thread(operations, bundled)


async def test_every_entry_point_is_served(bundled: Service) -> None:
    assert await asked(bundled, "eth_supportedEntryPoints") == list(bundled.ready["entry_points"].values())
    assert await asked(bundled, "eth_chainId") == "0x7a69"


async def test_bundler_listens_on_loopback_only(bundled: Service) -> None:
    """Check every listening socket on its port, IPv4 and IPv6."""
    port = urlsplit(bundled.ready["bundler_url"]).port
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    listening = [row[1] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]
    assert [address.partition(":")[0] for address in listening] == [LOOPBACK]


@pytest.mark.parametrize("version", VERSIONS)
async def test_wallet_is_deployed_and_pays_for_itself(bundled: Service, seen: dict[str, Any], version: str) -> None:
    paid = seen[version]["paid"]
    assert paid["success"]
    assert paid["has_code"]
    assert paid["paymaster"] is None
    assert paid["entry_point"].lower() == bundled.ready["entry_points"][version].lower()
    assert int(await rpc(bundled.ready["upstream_url"], bundled, "eth_getBalance", RECIPIENT, "latest"), 16) == 15


@pytest.mark.parametrize("version", VERSIONS)
async def test_paymaster_pays_for_a_wallet_without_ether(bundled: Service, seen: dict[str, Any], version: str) -> None:
    sponsored = seen[version]["sponsored"]
    assert sponsored["success"]
    assert sponsored["has_code"]
    assert sponsored["paymaster"].lower() == bundled.ready["paymasters"][version].lower()
    entry_point, paymaster = bundled.ready["entry_points"][version], bundled.ready["paymasters"][version]
    left = await read(bundled, entry_point, "balanceOf(address)", "uint256", paymaster)
    assert 0 < left < 100 * 10**18


async def test_killed_bundler_is_restarted(bundled: Service) -> None:
    old = bundled.child_pid("alto")
    os.kill(old, signal.SIGKILL)
    await until(lambda: not is_running(old))
    await until(lambda: answers(bundled), within_s=WITHIN_S)


async def test_killed_chain_comes_back_with_its_contracts_and_its_bundler(
    bundled: Service, seen: dict[str, Any]
) -> None:
    chain, bundler = bundled.child_pid("hardhat"), bundled.child_pid("alto")
    os.kill(chain, signal.SIGKILL)
    await until(lambda: not is_running(chain))
    await until(lambda: not is_running(bundler), within_s=WITHIN_S)
    await until(lambda: answers(bundled), within_s=WITHIN_S)
    for part in ("entry_points", "factories", "paymasters"):
        for address in bundled.ready[part].values():
            assert await code_at(bundled, address) != "0x"
    for found in (*bundled.ready["tokens"], *bundled.ready["nfts"], *bundled.ready["price_feeds"]):
        assert await code_at(bundled, found["address"]) != "0x"
    assert await code_at(bundled, seen["0.7"]["paid"]["address"]) == "0x"


async def answers(service: Service) -> bool:
    try:
        return bool(await asked(service, "eth_supportedEntryPoints"))
    except (OSError, Reverted):
        return False
