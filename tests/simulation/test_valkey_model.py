"""The model of Valkey replies as a real server does, to many hundreds of commands of several hosts over several limits."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from proxy.compose.fleet import FUNCTIONS
from proxy.store.valkey.valkey_address import address_of
from proxy.store.valkey.valkey_link import ValkeyLink
from proxy.tasks import Tasks
from tests.redis_server import redis_server, require_redis
from tests.service import until
from tests.simulation.valkey_model import ValkeyModel

REAL_CLOCK = """
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
"""
# The same with a clock that the test sets.
SET_CLOCK = "\n  return tonumber(redis.call('GET', 'now'))\n"
HOSTS = ("alpha", "beta", "gamma")
BEGAN_S = 1_750_000_000.25
# Keys expire by the real server's own clock, which stands still compared with the test's: the test deletes them itself.
EXPIRE_MS = {b"lease": 5000, b"hosts": 5000, b"count": 30_000, b"head": 60_000}


class Pair:
    """The model and a real server with the same clock."""

    def __init__(self, link: ValkeyLink) -> None:
        self._link, self._model = link, ValkeyModel(lambda: self.now_s)
        self.now_s = BEGAN_S
        self._used_at: dict[bytes, float] = {}
        self._model.execute([b"FUNCTION", b"LOAD"], self._publish)

    def __repr__(self) -> str:
        return f"<Pair at {self.now_s:.6f}>"

    @staticmethod
    def _publish(_: bytes, __: bytes) -> int:
        return 0

    async def advance(self, seconds: float) -> None:
        self.now_s = round(self.now_s + seconds, 6)
        await self._link.ask("SET", "now", repr(self.now_s))

    async def _expire(self, key: bytes) -> None:
        used_at = self._used_at.get(key, math.inf)
        if self.now_s * 1000 >= used_at * 1000 + EXPIRE_MS.get(key.partition(b":")[0], math.inf):
            del self._used_at[key]
            await self._link.ask("DEL", key)

    async def compare(self, *words: object) -> Any:
        texts = [str(word).encode() for word in words]
        key = texts[3] if texts[0] == b"FCALL" else texts[1]
        await self._expire(key)
        real = await self._link.ask(*texts)
        if texts[0] == b"FCALL":
            self._used_at[key] = self.now_s
        model = self._model.execute(texts, self._publish)
        assert real == model, f"{words} at {self.now_s}: {real} and {model}"
        return real


class LeasingHost:
    """Leases tokens, and reports and returns some of them later."""

    def __init__(self, pair: Pair, rng: random.Random) -> None:
        self._pair, self._rng = pair, rng
        self._epochs = [0, 0]

    async def lease(self, key: str, request_s: float, unit_s: float) -> None:
        rng = self._rng
        must = rng.choice((0, 1, 3)), rng.choice((0, 2, 20))
        want = rng.choice((0, 1, 8)), rng.choice((0, 16, 100))
        reports: list[object] = []
        for epoch in self._epochs:
            spent = [f"{rng.random() * 0.2:.12g}" for _ in range(2)]
            returned = [f"{rng.choice((0.0, rng.random() * 0.3)):.12g}" for _ in range(2)]
            reports += [epoch, *spent, *returned]
        words = ("FCALL", "penstock_lease_1", 1, key, f"{request_s:.9g}", f"{unit_s:.9g}")
        reply = await self._pair.compare(*words, *must, *want, *reports)
        if reply[5] != self._epochs[1]:
            self._epochs = [self._epochs[1], reply[5]]


async def one_step(pair: Pair, hosts: list[LeasingHost], rng: random.Random) -> None:
    draw, host = rng.random(), rng.choice(HOSTS)
    if draw < 0.75:
        limit = rng.choice((1, 20, 100))
        await rng.choice(hosts).lease(f"lease:{limit}", 1 / limit, 1 / (limit * 5))
    elif draw < 0.8:
        await pair.compare("FCALL", "penstock_present_1", 1, "hosts:1", host, 5000)
    elif draw < 0.85:
        await pair.compare("FCALL", "penstock_members_1", 1, "hosts:2", host, 5000)
    elif draw < 0.95:
        await pair.compare("FCALL", "penstock_count_1", 1, "count:1", host, rng.randint(0, 3), 30_000)
    else:
        await pair.compare("FCALL", "penstock_head_1", 1, "head:1", "channel", f"{host} moved", 60_000)
    plain = (("ZCARD", "hosts:1"), ("GET", "head:1"), ("EXISTS", "{penstock}"), ("PUBLISH", "channel", "x"))
    await pair.compare(*rng.choice(plain))


async def test_model_replies_as_a_real_server_does(tmp_path: Path) -> None:
    require_redis()
    source = FUNCTIONS.read_text("utf-8")
    assert source.count(REAL_CLOCK) == 1
    async with redis_server(tmp_path) as server:
        link = ValkeyLink(address_of(server.url), source.replace(REAL_CLOCK, SET_CLOCK), late_s=10.0)
        tasks = Tasks()
        tasks.start("valkey", link.run)
        try:
            await until(lambda: link.is_up)
            for seed in range(3):
                rng = random.Random(f"valkey {seed}")
                await link.ask("FLUSHDB")
                pair = Pair(link)
                hosts = [LeasingHost(pair, rng) for _ in HOSTS]
                for _ in range(300):
                    # Mostly little time passes, sometimes a slot or more, and now and then the clock is set back.
                    await pair.advance(rng.choice((0.0, 0.003, 0.02, 0.02, 0.3, 0.7, rng.random() * 8, -rng.random())))
                    await one_step(pair, hosts, rng)
        finally:
            await tasks.close()
