"""`index`: back-fill a network's index with blocks from before it was followed; or forget all of it."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from proxy import settings as settings_room
from proxy.chains.registry import Network
from proxy.commands import context
from proxy.errors import InvalidRequest, StartError

if TYPE_CHECKING:
    from proxy.compose.background import Background
    from proxy.services.follower.backfill import BackfillProgress
    from proxy.services.rpc.networks import Route

ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}")
WIDTH = 24
# How often something is said where no terminal shows a bar.
SAY_S = 5.0
# How often a read that failed is tried again before it is given up.
TRIES, PAUSE_S = 5, 1.0


def register(commands: Any) -> None:
    parser = commands.add_parser("index", help="back-fill the index of holdings with old blocks")
    context.add_arguments(parser)
    parser.add_argument(
        "--chain", required=True, metavar="CHAIN", help="such as ethereum, ethereum-sepolia, base/mainnet"
    )
    parser.add_argument("--from", dest="first", type=_block, metavar="N", help="the first block")
    parser.add_argument(
        "--to",
        dest="last",
        type=_block,
        metavar="M",
        help="the last block (default: the last before the follower's first)",
    )
    parser.add_argument("--contract", type=_address, metavar="ADDRESS", help="only this contract's events")
    parser.add_argument(
        "--forget", action="store_true", help="drop the network's whole index; its follower begins anew"
    )
    parser.set_defaults(run=lambda args: asyncio.run(run(args)))


def _block(text: str) -> int:
    try:
        number = int(text, 0)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text!r} is no block's number")
    return number


def _address(text: str) -> str:
    if not ADDRESS.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no address: 0x and 40 digits")
    return text.lower()


async def run(args: argparse.Namespace) -> int:
    from proxy.chains.families import family_of
    from proxy.compose.background import Background

    if args.first is None and not args.forget:
        raise StartError(["--from N: say at which block to begin (or --forget)"])
    if args.first is not None and args.last is not None and args.first > args.last:
        raise StartError([f"--to {args.last}: lies before --from {args.first}"])
    settings, tables = context.load(args), settings_room.load_tables()
    network = _network(tables, args.chain)
    await context.check_schema(settings.database.url)
    if "follower" not in family_of(network).features:
        raise StartError([f"--chain {args.chain}: blocks of its family are not indexed"])
    running = Background(settings, tables)
    route = running.networks.find(network)
    if route is None:
        raise StartError([f"--chain {args.chain}: no upstream of {network.id} is configured"])
    await running.open()
    try:
        await (_forget(running, route) if args.forget else _backfill(running, route, args))
    finally:
        await running.close()
    return 0


def _network(tables: settings_room.Tables, text: str) -> Network:
    chain, slash, name = text.partition("/")
    found = tables.chains.find(chain, name) if slash else tables.chains.find_word(text, live=True)
    if found is None:
        raise StartError([f"--chain {text}: there is no such chain in config/chains"])
    return found


async def _forget(running: Background, route: Route) -> None:
    from proxy.services.follower.network_follower import forget

    network = route.network.id
    async with running.blocks.backfill(network, no_timeout=True) as term:
        await forget(term, [*running.sinks, running.events(route).sink])
    print(f"the index of {network} is empty; its follower begins anew")


async def _backfill(running: Background, route: Route, args: argparse.Namespace) -> None:
    bar = Bar()
    done = await _run_patiently(running, route, args, bar)
    bar.close()
    print(_summary(route.network.id, args, done))


async def _run_patiently(running: Background, route: Route, args: argparse.Namespace, bar: Bar) -> BackfillProgress:
    """What was covered before a read failed is kept: the next try goes on from there."""
    from proxy.services.follower.block_reader import ReadFailed

    left = TRIES
    while True:
        try:
            return await _run_once(running, route, args, bar)
        except ReadFailed as exc:
            left -= 1
            if not left:
                raise InvalidRequest(f"stopped; run it again, and it goes on from there: {exc}") from None
            bar.say(f"not read ({exc}): trying again")
            await asyncio.sleep(PAUSE_S)


async def _run_once(running: Background, route: Route, args: argparse.Namespace, bar: Bar) -> BackfillProgress:
    from proxy.chains.evm.facts import TOPICS
    from proxy.services.follower.backfill import Backfill
    from proxy.services.follower.block_reader import BlockReader

    contract = args.contract or ""
    fill = Backfill(
        BlockReader(route, topics=TOPICS, contract=contract),
        running.blocks,
        running.settings.follower.start.get(route.network.id),
        bytes.fromhex(contract[2:]),
    )
    return await fill.run(args.first, args.last, bar.show)


def _summary(network: str, args: argparse.Namespace, done: BackfillProgress) -> str:
    whose = f" of {args.contract}" if args.contract else ""
    if args.first > done.last:
        return (
            f"nothing to do: {network} is followed from block {done.last + 1 if args.last is None else args.first} on"
        )
    if not done.total:
        return f"nothing to do: blocks {args.first} to {done.last}{whose} of {network} are in the index already"
    ends = f"; the follower has the blocks after {done.last}" if args.last is None or args.last > done.last else ""
    return (
        f"{done.done:,} blocks of {network} indexed{whose}: {done.transfers:,} transfers, {done.odd:,} odd logs{ends}"
    )


class Bar:
    """How far it is: on a terminal one line that changes, elsewhere a line now and then."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._began = self._said = time.monotonic()

    def show(self, progress: BackfillProgress) -> None:
        now = time.monotonic()
        if self._live:
            print(f"\r\033[K{line(progress, now - self._began)}", end="", flush=True)
        elif now - self._said >= SAY_S:
            self._said = now
            print(line(progress, now - self._began, width=0), flush=True)

    def say(self, text: str) -> None:
        print(f"\r\033[K{text}" if self._live else text, flush=True)

    def close(self) -> None:
        if self._live:
            print("\r\033[K", end="")


def line(progress: BackfillProgress, took_s: float, *, width: int = WIDTH) -> str:
    """`[=======>       ] 45 %  block 12,345  20,000 transfers/s  3 min left`"""
    share = progress.done / max(1, progress.total)
    left_s = took_s / share - took_s if share else 0.0
    full = int(share * width)
    bar = f"[{'=' * full}{' ' * (width - full)}] " if width else ""
    rate = progress.transfers / max(took_s, 0.001)
    return f"{bar}{share:.0%}  block {progress.block:,}  {rate:,.0f} transfers/s  {_duration(left_s)} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
