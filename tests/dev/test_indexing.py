"""Waiting for the index of the development chain: returns when it is complete, and gives up when it cannot tell."""

from __future__ import annotations

import orjson
import pytest

from proxy.dev import indexing
from proxy.dev.run import DEV_NETWORKS
from tests.service import Service

CLOSED_PORT = "127.0.0.1:1"


def database_of(service: Service) -> str:
    return str(orjson.loads((service.data / "running.json").read_bytes())["database"]["url"])


async def test_chain_of_a_ready_service_is_indexed(service: Service) -> None:
    assert await indexing.is_indexed(database_of(service), service.ready["upstream_url"], DEV_NETWORKS)


async def test_wait_for_an_unfollowed_chain_times_out(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "WITHIN_S", 0.3)
    assert not await indexing.is_indexed(
        database_of(service), service.ready["upstream_url"], [*DEV_NETWORKS, "ethereum/mainnet"]
    )


@pytest.mark.parametrize("gone", ["database", "chain", "answer"])
async def test_unreachable_database_or_chain_is_not_an_error(service: Service, gone: str) -> None:
    database = f"postgresql://{CLOSED_PORT}/none" if gone == "database" else database_of(service)
    # The last one answers but has no blocks.
    chains = {"chain": f"http://{CLOSED_PORT}", "answer": service.ready["base_url"] + "/rpc/dev/mainnet"}
    assert not await indexing.is_indexed(database, chains.get(gone, service.ready["upstream_url"]), DEV_NETWORKS)
