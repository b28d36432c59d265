"""`python -m bench.fleet`: run the fleet until Ctrl-C, or break it for some seconds and print the ledger."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from bench.fleet.figures import FleetFigures
from bench.fleet.one_machine import COUNTS, RATE, SETTLE_S, FleetOnOneMachine
from bench.fleet.traffic import FleetTraffic
from proxy.errors import StartError
from proxy.tasks import Tasks, unless_stopped

SHOW_S = 1.0
# Between two tables if the output is not a terminal.
SHOW_PLAIN_S = 10.0
_HOME = "\x1b[H\x1b[J"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--chaos", type=float, metavar="SECONDS", help="break parts at random, then print the ledger")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 10**6), help="repeats the order of the breaks")
    parser.add_argument(
        "--kills", type=int, metavar="NUMBER", help="with --chaos: break the parts in turn, at most this many times"
    )
    parser.add_argument(
        "--figures", type=float, metavar="SECONDS", help="measure each figure for this long, and print all of them"
    )
    parser.add_argument(
        "--rolling",
        type=int,
        metavar="CALLS",
        help="replace the gateways one by one, again and again, until this many calls were answered",
    )
    parser.add_argument("--rate", type=float, default=RATE, help="calls per second of the clients")
    parser.add_argument("--gateways", type=int, default=COUNTS["gateway"], help="how many gateways to run")
    args = parser.parse_args()
    try:
        return uvloop.run(run(args))
    except StartError as exc:
        print("\n".join(exc.faults), file=sys.stderr)
        return 1


async def run(args: argparse.Namespace) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with tempfile.TemporaryDirectory(prefix="penstock-fleet-") as home:
        Path(home).chmod(0o711)
        async with AsyncExitStack() as stack:
            fleet = FleetOnOneMachine(Path(home), counts={**COUNTS, "gateway": args.gateways}, rate=args.rate)
            print("starting …", flush=True)
            return await unless_stopped(stop, _show(fleet, stack, stop, args)) or 0


async def _show(fleet: FleetOnOneMachine, stack: AsyncExitStack, stop: asyncio.Event, args: argparse.Namespace) -> int:
    await fleet.start(stack)
    traffic = await fleet.run_traffic(stack)
    tasks = Tasks()
    tasks.start("table", lambda: _tables(fleet))
    try:
        if args.figures is not None:
            async for line in FleetFigures(fleet).measure(args.figures):
                print(line, flush=True)
        if args.rolling is not None:
            print(await FleetFigures(fleet).rolling_update(args.rolling), flush=True)
            print("\n".join(fleet.ledger.lines()), flush=True)
        if args.chaos is not None:
            return await _break(fleet, traffic, args)
        if args.figures is None and args.rolling is None:
            await stop.wait()
        return 0
    finally:
        await tasks.close()


async def _break(fleet: FleetOnOneMachine, traffic: FleetTraffic, args: argparse.Namespace) -> int:
    rng = random.Random(args.seed)
    until_s = fleet.elapsed_s + args.chaos
    if args.kills:
        await fleet.break_in_turn(args.kills, until_s, traffic, rng)
    else:
        await fleet.break_for(until_s, traffic, rng)
    await traffic.settle(SETTLE_S)
    print("\n".join([f"\nseed {args.seed}", *fleet.ledger.lines()]), flush=True)
    return 0 if fleet.ledger.is_clean else 1


async def _tables(fleet: FleetOnOneMachine) -> None:
    while True:
        lines = "\n".join(await fleet.table())
        print(f"{_HOME}{lines}" if sys.stdout.isatty() else lines, flush=True)
        await asyncio.sleep(SHOW_S if sys.stdout.isatty() else SHOW_PLAIN_S)


if __name__ == "__main__":
    sys.exit(main())
