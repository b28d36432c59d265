"""web3.py's own tests for nodes pass through the service as they do directly."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.dev.funded_accounts import ALICE, FUNDED
from proxy.services.rpc.tracker import start_tracking
from tests.client_scripts import run_script
from tests.flows.test_feed_devchain import DEV, dev_chain
from tests.web.worker import on_uvloop, running_worker

# `make web3-tests` sets this and runs all of them, which takes several minutes.
ALL = bool(os.environ.get("WEB3_TESTS"))
# The socket's own tests, and some that call each module.
SOME = "TestSocket and not TestSocketEth and not TestSocketWeb3 or TestNet or TestTxPool or TestEth and eth_call"
# The node signs with its own keys.
NODE_KEYS = ("eth_sign", "eth_sign_ens_names", "eth_sign_transaction", "eth_sign_typed_data")


def needs_node_keys(name: str) -> bool:
    return name.rpartition("::")[2].partition("[")[0].removeprefix("test_").removeprefix("async_") in NODE_KEYS


def wanted(names: Iterable[str]) -> str:
    """The expression that selects these tests."""
    parts = [name.partition("[")[0].partition("::") for name in names]
    return " or ".join(f"({group} and {test})" for group, _, test in parts)


def worse(outcomes: dict[str, Any]) -> dict[str, str]:
    """The tests that pass directly and not through the service."""
    direct = {name: found for name, found in outcomes.items() if found.get("direct") == "passed"}
    found = {name: each.get("service", "missing") for name, each in direct.items() if each.get("service") != "passed"}
    return {name: why for name, why in found.items() if not needs_node_keys(name)}


@asynccontextmanager
async def both_ways(directory: Path) -> AsyncIterator[dict[str, Any]]:
    """The endpoints of a chain and of a service before it."""
    async with dev_chain(directory) as chain, running_worker({DEV: [chain.url]}) as running:
        await start_tracking(running.app.plane.trackers.values(), running.app.tasks)
        key, host = running.keys["main"], f"127.0.0.1:{running.port}/v1"
        yield {
            "direct": {
                "http": chain.url,
                "ws": chain.url.replace("http", "ws"),
                "headers": {},
                "private_key": FUNDED.private_key,
            },
            "service": {
                "http": f"http://{host}/rpc/{DEV}",
                "ws": f"ws://{host}/ws/{DEV}?apiKey={key}",
                "headers": {"X-API-Key": key},
                "private_key": ALICE.private_key,
            },
        }


@pytest.mark.timeout(3600 if ALL else 900)
@on_uvloop
async def test_tests_of_web3_py_pass_as_they_do_directly(tmp_path: Path) -> None:
    async with both_ways(tmp_path) as task:

        async def outcomes(selected: str) -> dict[str, Any]:
            given = {**task, "options": ["-k", selected] if selected else []}
            return await asyncio.to_thread(run_script, "web3_py_modules.py", given, within_s=1800.0)

        first = await outcomes("" if ALL else SOME)
        assert len([name for name in first if first[name].get("direct") == "passed"]) >= (400 if ALL else 35)
        left = worse(first)
        # Some of them have short deadlines, which a busy machine misses now and then.
        for _ in range(3):
            if left:
                left = {name: why for name, why in worse(await outcomes(wanted(left))).items() if name in left}
        assert left == {}
