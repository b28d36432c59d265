"""The cost of a trial for clients: `python -m bench.shadow` (about a minute).

Two workers serve the same calls at a fixed rate, one after the other in short rounds. One of them also sends a tenth of the
reads to a candidate and compares the replies. The figures are the ratios of the p99 that clients see and of the worker's CPU
time per call: the medians over all rounds.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from bench import bodies, machine
from bench.loaders import Load, Stub, Target, measure
from bench.processes import StartFailed
from tests.web.worker import LIVE, NO_CACHE, running_worker

SHARE = 0.1
# Far below what one core serves, so that neither worker is overloaded.
RATE, CONNECTIONS = 800.0, 32
SECONDS, WARMUP_S = 2.5, 0.3
START_S = 30.0
WITHOUT, WITH = "without", "with"
# How long each call takes at the upstreams.
DELAY_US = 2000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.shadow", description="measure the cost of a trial")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each (default: 8)")
    parser.add_argument("--serve", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(args.serve))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(_measured(Path(directory), args.rounds), indent=2))
    return 0


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


def _measured(workdir: Path, rounds: int) -> dict[str, Any]:
    layout, _ = machine.layouts()
    stubs = [Stub(name, size=66, delay_us=DELAY_US) for name in ("in-use", "candidate")]
    children: dict[str, subprocess.Popen[str]] = {}
    found: dict[str, dict[str, list[float]]] = {name: {"p99_us": [], "cpu_us": []} for name in (WITHOUT, WITH)}
    try:
        for stub in stubs:
            stub.start(layout.load, port=0, workdir=workdir)
        targets = {}
        for name, count in ((WITHOUT, 1), (WITH, 2)):
            children[name] = child = _started([stub.url for stub in stubs[:count]], layout.service[0])
            assert child.stdout is not None
            port, key = child.stdout.readline().split()
            targets[name] = Target("127.0.0.1", int(port), f"/v1/rpc/{LIVE}", key)
        for number in range(rounds):
            for name in (WITHOUT, WITH) if number % 2 else (WITH, WITHOUT):
                sample = measure(_load(targets[name]), targets[name], layout, workdir=workdir)
                if sample.faults:
                    raise StartFailed(f"{sample.faults} calls {name} a trial failed")
                found[name]["p99_us"].append(sample.p99_us)
                found[name]["cpu_us"].append(sample.cpu_us_per_request)
        trial = children[WITH].communicate("", timeout=START_S)[0]
    finally:
        for child in children.values():
            child.kill()
            child.wait()
        for stub in stubs:
            stub.stop()
    medians = {name: {figure: statistics.median(values) for figure, values in of.items()} for name, of in found.items()}
    ratios = {figure: round(medians[WITH][figure] / medians[WITHOUT][figure], 3) for figure in ("p99_us", "cpu_us")}
    return {"ratios": ratios, "medians": medians, "rounds": found, "trial": json.loads(trial)}


def _started(urls: list[str], cpu: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench.shadow", "--serve", *urls]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    machine.pin(child.pid, [cpu])
    return child


def _load(target: Target) -> Load:
    body = bodies.small()
    head = (
        f"POST {target.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {target.key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return Load((head + body).encode(), bodies.OWN_ID, CONNECTIONS, SECONDS, rate=RATE, warmup_s=WARMUP_S)


if __name__ == "__main__":
    sys.exit(main())
