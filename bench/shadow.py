"""The cost of a trial for clients.

Two workers serve the same calls at a fixed rate, in turns of a second. One of them also sends a tenth of the reads to a
candidate and compares the replies. Each turn of one is compared with the turn of the other beside it, so that a slow phase of
the machine affects both.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import uvloop

from bench import bodies, machine
from bench.loaders import Load, Sample, Stub, Target, measure
from bench.processes import StartFailed
from tests.web.worker import LIVE, NO_CACHE, running_worker

SHARE = 0.1
# Far below what one core serves, so that neither worker is overloaded.
RATE, CONNECTIONS = 800.0, 32
TURN_S, WARMUP_S = 1.0, 0.3
END_S = 30.0
# How long each call takes at the upstreams.
DELAY_US = 2000


async def _serve(urls: list[str]) -> None:
    """One worker. The second upstream is on trial."""
    given: list[dict[str, Any]] = [{"url": urls[0]}]
    given += [{"url": url, "name": "new", "shadow": SHARE, "requests_per_second": 100_000} for url in urls[1:]]
    async with running_worker({LIVE: given}, **NO_CACHE) as worker:
        tracker = worker.app.plane.trackers[LIVE]
        await tracker.look()
        print(worker.port, worker.keys["main"], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        for shadow in worker.app.networks.shadows:
            total = shadow.trial.total
            print(json.dumps({"reads": total.reads, **total.outcomes, "skipped": shadow.trial.skipped}), flush=True)


def turns(layout: machine.Layout, workdir: Path, count: int) -> tuple[list[Sample], list[Sample]]:
    """So many turns without and with a trial."""
    stubs = [Stub(name, size=66, delay_us=DELAY_US) for name in ("in-use", "candidate")]
    children: list[subprocess.Popen[str]] = []
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    try:
        for stub in stubs:
            stub.start(layout.load, port=0, workdir=workdir)
        targets = []
        for upstreams in (stubs[:1], stubs):
            children.append(child := _started([stub.url for stub in upstreams], layout.service[0]))
            assert child.stdout is not None
            port, key = child.stdout.readline().split()
            targets.append(Target("127.0.0.1", int(port), f"/v1/rpc/{LIVE}", key))
        for number in range(count):
            for at in (0, 1) if number % 2 else (1, 0):
                samples[at].append(measure(_load(targets[at]), targets[at], layout, workdir=workdir))
        trial = json.loads(children[1].communicate("", timeout=END_S)[0])
    finally:
        for child in children:
            child.kill()
            child.wait()
        for stub in stubs:
            stub.stop()
    calls = sum(sample.requests for sample in samples[1])
    if trial["same"] != trial["reads"] or trial["reads"] < 0.99 * SHARE * calls:
        raise StartFailed(f"of {calls} calls, the trial has {trial}")
    return samples


def _started(urls: list[str], cpu: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench.shadow", *urls]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    machine.pin(child.pid, [cpu])
    return child


def _load(target: Target) -> Load:
    body = bodies.small()
    head = (
        f"POST {target.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {target.key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return Load((head + body).encode(), bodies.OWN_ID, CONNECTIONS, TURN_S, rate=RATE, warmup_s=WARMUP_S)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sys.argv[1:]))
