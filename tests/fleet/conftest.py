"""One fleet for all tests of this room: three gateways on one Postgres and one Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.database import Server
from tests.fleet.gateways import UPSTREAM_RATE, Fleet, gateways
from tests.flows.upstream import HOODI, Upstream
from tests.redis_server import redis_server, require_redis

HOSTS = 3
MORE = """
[[upstreams]]
network = "ethereum/hoodi"
url = "{upstream_url}"
requests_per_second = {rate}
method_rates = {{ eth_getCode = {rate} }}
[valkey]
limits_url = "{limits_url}"
"""


@pytest.fixture(scope="package")
async def running_fleet(
    server: Server, upstream_server: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    require_redis()
    room = tmp_path_factory.mktemp("fleet")
    limited = Upstream(HOODI)
    await limited.open()
    async with redis_server(room) as redis:
        more = MORE.format(limits_url=redis.url, upstream_url=limited.url, rate=UPSTREAM_RATE)
        async with gateways(server.postgres, room, upstream_server.url, hosts=HOSTS, workers=1, more=more) as found:
            yield Fleet(found, redis, limited)
    await limited.close()


@pytest.fixture
def fleet(running_fleet: Fleet, upstream: Upstream) -> Fleet:
    return running_fleet
