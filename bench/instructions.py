"""Instructions per request, counted by callgrind: `python -m bench.instructions [--against DIR] [CASE ...]`. Needs valgrind.

Counted is all that a worker does while it reads a message of a client or of an upstream (libuv's `uv__read`), without timers
and background tasks. Left out are the functions of libc's allocator: their work depends on the layout of the heap. Two builds
also differ by up to 2 % because of collisions in the interpreter's cache of methods: see the list of functions.

The case shared-limits is compared with the same call without Valkey. Its tokens are there already: only the path of the call is
counted, not the leases that a worker asks for in the background.
"""

import argparse
import asyncio
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench import cases
from bench.loaders import MARKER, Stub, Target, build
from bench.warm_leases import lease_all
from proxy.store.shared_memory.leased_buckets import LeasedBuckets
from tests.web.worker import LIVE, NO_CACHE, running_worker

COUNTS = {
    "small": 2000,
    "path-key": 2000,
    "shared-limits": 2000,
    "bitcoin": 2000,
    "hit": 2000,
    "rest-hit": 2000,
    "batch": 400,
}
# Cases that are compared with another one.
BASES = {"path-key": "small", "shared-limits": "small", "bitcoin": "small", "rest-hit": "hit"}
# Settings of a case.
SETTINGS: dict[str, dict[str, Any]] = {
    "hit": {},
    "rest-hit": {},
    "shared-limits": {**NO_CACHE, "valkey": {"limits_url": "valkey://127.0.0.1:1"}},
}
CALLGRIND = ("valgrind", "-q", "--tool=callgrind", "--collect-atstart=no", "--toggle-collect=uv__read")
ALLOCATOR = re.compile(r"(_int_(malloc|free|realloc|memalign)|malloc_consolidate|unlink_chunk|sysmalloc|systrim)\b")
ROOT = Path(__file__).parent.parent
_NAME = re.compile(r"\((\d+)\)(?: (.*))?")


def main() -> None:
    parser = argparse.ArgumentParser(description="count instructions per request")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(COUNTS)}; all without one")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, compiled like this one")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        uvloop.run(_serve(args.cases[0], args.serve))
        return
    count = functools.cache(instructions)
    for name in args.cases or COUNTS:
        mine = count(name, ROOT)
        print(f"{name}: {mine.total():,.0f} instructions per request", flush=True)
        if name in BASES:
            _compare(mine, count(BASES[name], ROOT))
        if args.against is not None:
            _compare(mine, count(name, args.against.resolve()))


def _compare(mine: Counter[str], other: Counter[str]) -> None:
    more = mine.total() - other.total()
    print(f"  {more:+,.0f} ({more / other.total():+.2%}) against {other.total():,.0f}")
    differences = {name: mine[name] - other[name] for name in mine | other}
    for name in sorted(differences, key=lambda name: -abs(differences[name]))[:12]:
        print(f"  {differences[name]:+9.1f}  {name}", flush=True)


def instructions(case: str, root: Path) -> Counter[str]:
    """By function, per request, of the checkout at `root`."""
    with tempfile.TemporaryDirectory() as workdir:
        # The other checkout's own program knows how to start its worker.
        python = (str(root / ".venv/bin/python"), "-P", str(root / "bench/instructions.py"))
        argv = [*CALLGRIND, f"--callgrind-out-file={workdir}/counts", *python, case, "--serve", workdir]
        # With another seed, dictionaries have other collisions.
        env = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "0"}
        subprocess.run(argv, cwd=root, env=env, check=True, stderr=subprocess.DEVNULL)
        [dump] = [file for file in Path(workdir).glob("counts.*") if "Trigger: dump case" in file.read_text()]
        costs = own_costs(dump.read_text().splitlines())
    return Counter({name: cost / COUNTS[case] for name, cost in costs.items() if not ALLOCATOR.match(name)})


def own_costs(lines: Sequence[str]) -> Mapping[str, int]:
    """The instructions of each function without those that it calls, from a file in callgrind's format."""
    names: dict[str, str] = {}
    costs: Counter[str] = Counter()
    current, is_call = "", False
    for line in lines:
        kind, _, rest = line.partition("=")
        if kind in ("fn", "cfn") and (found := _NAME.match(rest)):
            names.setdefault(found[1], (found[2] or "").partition("'")[0])
            current = found[1] if kind == "fn" else current
        elif kind == "calls":
            is_call = True  # The next line has the costs of the function that is called.
        elif line[:1] in "0123456789+-*" and line and current:
            costs[names[current]] += 0 if is_call else int(line.split()[1])
            is_call = False
    return costs


async def _serve(name: str, workdir: Path) -> None:
    """A worker under callgrind, with a load on one connection."""
    case = next(case for case in cases.CASES if case.name == name)
    stub = Stub("small", size=66)
    stub.start(0, port=0, workdir=workdir)
    upstreams = {case.network: [{"url": stub.url, "connections": 1024}]}
    try:
        async with running_worker(upstreams, rpc={"depth": 1}, **SETTINGS.get(name, NO_CACHE)) as worker:
            await worker.app.plane.trackers[case.network].look()
            if isinstance(worker.app.admission.buckets, LeasedBuckets):
                lease_all(worker.app.admission.buckets)
            worker.add_key("open", allow_in_url=True)
            target = Target("127.0.0.1", worker.port, f"/v1/rpc/{LIVE}", worker.keys["open"])
            (workdir / "request").write_bytes(case.template(cases.at_path(target, case.stem)))
            await _load(worker.port, workdir / "request", COUNTS[name] // 4, first=10**6)
            await _run("callgrind_control", "--dump=before", str(os.getpid()))
            await _load(worker.port, workdir / "request", COUNTS[name], first=10**8)
            await _run("callgrind_control", "--dump=case", str(os.getpid()))
    finally:
        stub.stop()


async def _load(port: int, request: Path, count: int, *, first: int) -> None:
    address = ("--host", "127.0.0.1", "--port", str(port), "--connections", "1", "--cpu", "0")
    length = ("--seconds", "600", "--warmup", "0", "--rate", "0", "--count", str(count), "--first", str(first))
    await _run(str(build("load")), *address, *length, "--request", str(request), "--marker", MARKER)


async def _run(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.DEVNULL)
    if await process.wait():
        sys.exit(f"{argv[0]} failed")


if __name__ == "__main__":
    main()
