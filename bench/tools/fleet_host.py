"""A simulated host: makes calls with a few keys at random moments, decides each as a worker does, and prints every decision."""

import asyncio
import json
import math
import random
import sys
import time

import uvloop

from proxy.compose.fleet import account_leases, link_to
from proxy.core.limits import BucketRates
from proxy.store.shared_memory import host_memory, rate_buckets
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.store.shared_memory.leased_buckets import ASK, LeasedBuckets
from proxy.store.valkey.live_hosts import LiveHosts
from proxy.tasks import Tasks

# The parts of the traffic that three hosts get; they change places every second.
PARTS = (0.90, 0.09, 0.01)
# Compute units of a call. A limit has as many units as its requests need.
UNITS = 20


async def no_postgres(_: str) -> int:
    return 0


class SimulatedHost:
    def __init__(self, port: int, host: int, limits: list[int]) -> None:
        """`limits`: of each key."""
        memory = HostMemory(host_memory.create())
        self.buckets = LeasedBuckets.of_accounts(rate_buckets.create(), memory.fd, alone=True)
        self.link = link_to(f"valkey://127.0.0.1:{port}")
        self.leases = account_leases(self.link, self.buckets)
        self.hosts = LiveHosts(self.link, f"host{host}", [self.buckets], memory.hosts, no_postgres)
        self.rates = [BucketRates(number + 1, limit, limit * UNITS) for number, limit in enumerate(limits)]
        for rate in self.rates:
            self.buckets.reserve_rates(rate, None)
        # For each key: when each call was made, when it was decided, and whether it was admitted and had to wait.
        self.decisions: list[list[tuple[float, float, bool, bool]]] = [[] for _ in limits]

    def call(self, key: int) -> None:
        self._decide(key, time.monotonic(), waited=False)

    def _decide(self, key: int, began: float, *, waited: bool) -> None:
        rate, now = self.rates[key], time.monotonic()
        wait = self.buckets.take(rate.bucket_index, now, rate.request_s, UNITS * rate.unit_s)
        if wait == ASK and self.leases.may_wait(began):
            need = (rate.request_s, UNITS * rate.unit_s)
            self.leases.wait(rate.bucket_index, need, lambda: self._decide(key, began, waited=True))
        else:
            self.decisions[key].append((began, now, wait == 0.0, waited))

    async def start(self, tasks: Tasks) -> None:
        tasks.start("valkey", self.link.run)
        await self.link.until_up(5.0)
        tasks.start("leases", self.leases.run)
        tasks.start("presence", self.hosts.run)


def after(at: float, start: float, rate_in: list[float]) -> float:
    """The next call of a Poisson process whose rate changes every second."""
    left = random.expovariate(1.0)
    while True:
        second = math.floor(at - start + 1e-9)
        rate, end = rate_in[second % len(rate_in)], start + second + 1
        if at + left / rate <= end:
            return at + left / rate
        left -= (end - at) * rate
        at = end


async def main(port: int, host: int, limits: list[int], load: float, seconds: float, rotates: bool) -> None:
    random.seed(host)
    simulated, tasks = SimulatedHost(port, host, limits), Tasks()
    await simulated.start(tasks)
    print("ready", flush=True)
    start = float(await asyncio.to_thread(sys.stdin.readline))
    parts = [PARTS[(host + second * rotates) % 3] for second in range(3)]
    rates = [[limit * load * part for part in parts] for limit in limits]
    due = [after(start, start, rate) for rate in rates]
    used_s = time.process_time()
    while (now := time.monotonic()) < start + seconds:
        for key, rate in enumerate(rates):
            while due[key] <= now:
                simulated.call(key)
                due[key] = after(due[key], start, rate)
        await asyncio.sleep(max(0.0005, min(min(due) - time.monotonic(), 0.005)))
    await asyncio.sleep(0.2)
    used_s = time.process_time() - used_s
    print(json.dumps({"decisions": simulated.decisions, "asked": simulated.leases.asked, "cpu_s": used_s}), flush=True)
    await tasks.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    uvloop.run(main(**given))
