"""`index`: back-fill a network's index with older blocks, or delete the index."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

from proxy import settings as settings_room
from proxy.chains.registry import Network
from proxy.commands import context
from proxy.commands.progress import Progress, duration
from proxy.errors import InvalidRequest, StartError

if TYPE_CHECKING:
    from proxy.compose.background import Background
    from proxy.services.follower.backfill import BackfillProgress
    from proxy.services.rpc.networks import Route

WIDTH = 24
# Attempts at a read before the command fails, and the pause between them.
TRIES, PAUSE_S = 5, 1.0
# The priority of the process, and the most gaps that are listed.
NICE, MOST_GAPS = 10, 20


def register(commands: Any) -> None:
    parser = commands.add_parser("index", help="add older blocks to the index of holdings and transfers")
    context.add_arguments(parser)
    add_blocks(parser, last="the block before the follower's first")
    parser.add_argument(
        "--contract", type=context.address, metavar="ADDRESS", help="index only events of this contract"
    )
    parser.add_argument(
        "--forget", action="store_true", help="delete the network's whole index; its follower starts again"
    )
    parser.add_argument(
        "--calls-per-second", type=_positive, default=0.0, metavar="N", help="most calls to upstreams per second"
    )
    parser.add_argument(
        "--credits", type=int, default=0, metavar="N", help="stop when the upstreams with a cost have billed N credits"
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="do not check each block without logs against its bloom filter, which takes a call for each",
    )
    parser.set_defaults(run=lambda args: asyncio.run(run(args)))


def add_blocks(parser: argparse.ArgumentParser, *, last: str, first: int | None = None) -> None:
    """Add the arguments for blocks of a network. `last` describes the default of `--to`, `first` is that of `--from`."""
    parser.add_argument(
        "--chain",
        required=True,
        metavar="CHAIN",
        help="chain or network, such as ethereum, ethereum-sepolia or base/mainnet",
    )
    default = "" if first is None else f" (default: {first})"
    parser.add_argument(
        "--from", dest="first", type=_block_number, default=first, metavar="N", help=f"first block{default}"
    )
    parser.add_argument("--to", dest="last", type=_block_number, metavar="M", help=f"last block (default: {last})")


def _block_number(text: str) -> int:
    """The type of an argument that is a block."""
    try:
        number = int(text, 0)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text!r} is not a block number")
    return number


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


async def run(args: argparse.Namespace) -> int:
    from proxy.chains.families import family_of
    from proxy.compose.background import Background

    if args.first is None and not args.forget:
        raise StartError(["--from N is required: give the first block (or use --forget)"])
    if args.first is not None and args.last is not None and args.first > args.last:
        raise StartError([f"--to {args.last}: must not be below --from {args.first}"])
    settings = context.load(args)
    tables = context.tables_of(settings)
    network = network_of(tables, args.chain)
    await context.check_database(settings)
    await context.check_indexes(settings)
    if "follower" not in family_of(network).features:
        raise StartError([f"--chain {args.chain}: chains of this family cannot be indexed"])
    running = Background(settings, tables)
    route = running.networks.find(network)
    if route is None:
        raise StartError([f"--chain {args.chain}: no upstream of {network.id} is configured"])
    if args.credits and all(each.health.meter is None for each in route.upstreams):
        raise StartError([f"--credits: no upstream of {network.id} has a cost; set `cost` in its [[upstreams]] block"])
    await running.open()
    try:
        return await (_forget(running, route) if args.forget else _backfill(running, route, args))
    finally:
        await running.close()


def network_of(tables: settings_room.Tables, text: str) -> Network:
    """The network that `--chain` names."""
    chain, slash, name = text.partition("/")
    network = tables.chains.find(chain, name) if slash else tables.chains.find_word(text, live=True)
    if network is None:
        raise StartError([f"--chain {text}: unknown chain; penstock chains list shows all"])
    return network


async def _forget(running: Background, route: Route) -> int:
    from proxy.services.follower.network_follower import forget

    network = route.network.id
    for following in running.follower_specs(route, running.events(route).sink):
        async with following.blocks.backfill(network, no_timeout=True) as term:
            await forget(term, following.sinks)
    print(f"deleted the index of {network}; its follower starts again")
    return 0


async def _backfill(running: Background, route: Route, args: argparse.Namespace) -> int:
    from proxy.services.follower.backfill import BackfillProgress

    # Serving calls and following come first.
    os.nice(NICE)
    bar, shown = Progress(), BackfillReport(route.network.id, BackfillProgress(), time.monotonic())
    running.report("backfill", backfills=lambda: [shown.values()])
    done = await _run_with_retries(running, route, args, bar, shown)
    bar.close()
    print(_summary(route.network.id, args, done))
    for first, last, reason in done.gaps[:MOST_GAPS]:
        print(f"blocks {first} to {last} are missing: {reason}")
    if done.gaps:
        count = len(done.gaps)
        print(
            f"{count} {'range is' if count == 1 else 'ranges are'} missing: run the command again to repair the index"
        )
    return 1 if done.gaps else 0


class BackfillReport:
    """The progress that operators see in `penstock top` and in the dashboard."""

    def __init__(self, network: str, progress: BackfillProgress, began: float) -> None:
        self._network = network
        self._progress = progress
        self._began = began

    def __repr__(self) -> str:
        return f"<BackfillReport {self._network}>"

    def update(self, progress: BackfillProgress) -> None:
        self._progress = progress

    def values(self) -> dict[str, Any]:
        progress, took_s = self._progress, time.monotonic() - self._began
        share = progress.done / progress.total if progress.total else 0.0
        return {
            "network": self._network,
            "block": progress.block,
            "done": progress.done,
            "total": progress.total,
            "blocks_s": round(progress.done / max(took_s, 0.001), 1),
            "transfers_s": round(progress.transfers / max(took_s, 0.001), 1),
            "left_s": round(took_s / share - took_s) if share else None,
            "calls": progress.calls,
            "lag_blocks": progress.lag,
            "paused": progress.paused or None,
        }


async def _run_with_retries(
    running: Background, route: Route, args: argparse.Namespace, bar: Progress, shown: BackfillReport
) -> BackfillProgress:
    """Retry failed reads. Each attempt continues after the blocks already indexed."""
    from proxy.services.follower.block_reader import ReadFailed

    left = TRIES
    while True:
        try:
            return await _run_once(running, route, args, bar, shown)
        except ReadFailed as exc:
            left -= 1
            if not left:
                raise InvalidRequest(
                    f"stopped because of a failed read, run the command again to continue: {exc}"
                ) from None
            bar.write(f"retrying after a failed read: {exc}")
            await asyncio.sleep(PAUSE_S)


async def _run_once(
    running: Background, route: Route, args: argparse.Namespace, bar: Progress, shown: BackfillReport
) -> BackfillProgress:
    from proxy.chains.evm.facts import TOPICS
    from proxy.services.follower.backfill import Backfill, BackfillLimits
    from proxy.services.follower.block_reader import BlockReader
    from proxy.services.rpc.traces import TraceReader

    contract = args.contract or ""
    fill = Backfill(
        BlockReader(route, topics=TOPICS, contract=contract),
        TraceReader(route.network, running.internal_calls),
        running.index_blocks(route.network.id),
        running.settings.follower.start.get(route.network.id),
        bytes.fromhex(contract[2:]),
        running.transfers(route).categories,
        BackfillLimits(args.calls_per_second, args.credits, verifies=not args.no_verify),
    )

    def show(progress: BackfillProgress) -> None:
        shown.update(progress)
        bar.show(line(progress, bar.took_s), line(progress, bar.took_s, width=0))

    return await fill.run(args.first, args.last, show)


def _summary(network: str, args: argparse.Namespace, done: BackfillProgress) -> str:
    whose = f" of {args.contract}" if args.contract else ""
    if args.first > done.last:
        return f"nothing to do: {network} is followed from block {done.last + 1 if args.last is None else args.first}"
    if not done.total:
        return f"nothing to do: blocks {args.first} to {done.last}{whose} of {network} are in the index already"
    ends = f"; the follower indexes the blocks after {done.last}" if args.last is None or args.last > done.last else ""
    return f"{done.done:,} blocks of {network} indexed{whose}: {done.transfers:,} transfers, {done.odd:,} malformed logs{ends}"


def line(progress: BackfillProgress, took_s: float, *, width: int = WIDTH) -> str:
    """`[======   ] 45%  block 12,345  120 blocks/s  20,000 transfers/s  3 min left  2,100 calls`"""
    share = progress.done / max(1, progress.total)
    left_s = took_s / share - took_s if share else 0.0
    full = int(share * width)
    bar = f"[{'=' * full}{' ' * (width - full)}] " if width else ""
    rate = progress.transfers / max(took_s, 0.001)
    blocks = progress.done / max(took_s, 0.001)
    end = f"  paused: {progress.paused}" if progress.paused else f"  {progress.lag:,} behind" if progress.lag else ""
    return (
        f"{bar}{share:.0%}  block {progress.block:,}  {blocks:,.0f} blocks/s  {rate:,.0f} transfers/s  "
        f"{duration(left_s)} left  {progress.calls:,} calls{end}"
    )
