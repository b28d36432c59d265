"""`upstreams trial` and `upstreams certify`: whether an upstream on trial, or one that is not in use yet, can be promoted.

Both make the same report. `trial` has what the running service found with reads of clients (`shadow` in the settings).
`certify` makes reads of its own at blocks that both upstreams have, so it needs no traffic; or the reads of a captured file.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

from proxy.chains.families import family_of
from proxy.chains.family import BlockRef
from proxy.commands import context, cost, output
from proxy.commands.capture_file import CapturedCall, read_capture
from proxy.commands.certify_progress import CertifyProgress, Comparison
from proxy.commands.progress import Progress
from proxy.commands.rate_ceiling import MOST_RATE, rate_ceiling
from proxy.compose.networks import NetworkBuilder
from proxy.core.trials import Trial, trials_of
from proxy.errors import InvalidRequest, NotFound, StartError
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.services.rpc.probe import Probe
from proxy.services.rpc.probing import result_of
from proxy.services.rpc.shadow import REPLY_S, AnsweredRead, Shadow, is_comparable
from proxy.services.rpc.shadow_judge import ShadowJudge
from proxy.services.rpc.tracker import Tracker
from proxy.settings import Settings, Tables, UpstreamSettings
from proxy.store.postgres.fleet import FleetStore
from proxy.telemetry import Tallies
from proxy.turn_queue import TurnQueue
from proxy.wire.upstream import Upstream
from proxy.wire.write_buffer import WriteBuffer

COLUMNS = (
    *("method", "reads", "same", "different", "behind", "error", "missing", "members"),
    *("p50_ms", "their_p50_ms", "p99_ms", "their_p99_ms", "usd", "their_usd"),
)
USUAL_READS, MOST_READS = 1000, 100_000
# Blocks behind the head that reads of `certify` are spread over.
DEPTH: Final = 100
CANDIDATE: Final = "candidate"


def add_reporting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=context.new_file, metavar="FILE", help="also write the report as a page")


def add_certify(actions: Any) -> None:
    about = "compare an upstream that is not in use with one that is, by reads of both"
    parser = actions.add_parser(
        "certify", help=about, description=f"{about.capitalize()}. Exits with 1 if it should not be promoted."
    )
    context.add_arguments(parser)
    parser.add_argument("url", help="the URL of the candidate")
    parser.add_argument("--against", metavar="NAME", help="the name of the upstream in use (default: the first one)")
    parser.add_argument(
        "--network", metavar="NETWORK", help="its network, such as ethereum/mainnet (default: the first one)"
    )
    parser.add_argument(
        "--reads", type=int, default=USUAL_READS, metavar="N", help=f"how many (default: {USUAL_READS})"
    )
    parser.add_argument(
        "--calls", type=Path, metavar="FILE", help="make the reads of this file, which `penstock capture` wrote"
    )
    parser.add_argument(
        "--resume",
        type=context.new_file,
        metavar="FILE",
        help="keep what was found in this file; if it exists, go on where the last run ended",
    )
    parser.add_argument("--cost", metavar="LIST", default="", help="the candidate's price list, such as alchemy")
    parser.add_argument(
        "--price", metavar="USD", default="", help="its price for a million credits, if the list has none or another"
    )
    parser.add_argument(
        "--rate",
        type=int,
        metavar="N",
        help="also find how many calls a second it takes, N at most: makes up to 3 N calls more",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_reporting(parser)
    parser.set_defaults(run=_certify)


async def show_trials(store: FleetStore, args: argparse.Namespace) -> None:
    """The trials that all workers report."""
    trials = [each for each in trials_of(await store.views()) if args.label in (None, each.label)]
    if not trials:
        raise NotFound(
            "no upstream is on trial: set shadow = 0.05 and requests_per_second on one, and reload the settings"
        )
    for each in trials:
        report(each, args)


def report(trial: Trial, args: argparse.Namespace) -> None:
    if args.html is not None:
        args.html.write_text(page_of(trial))
    facts = facts_of(trial)
    if args.json:
        output.row({"label": trial.label, "verdict": trial.verdict, **facts, "methods": trial.rows}, as_json=True)
        return
    output.rows(trial.rows, COLUMNS, as_json=False)
    for name, fact in facts.items():
        if fact:
            print(f"{trial.label}: {name.replace('_', ' ')}: {fact}")
    print(f"{trial.label}: {trial.verdict}")


def facts_of(trial: Trial) -> dict[str, str | None]:
    """What is known of the candidate besides its replies."""
    return {"oldest_blocks": trial.bounds or None, "rate": trial.rate or None}


# The columns of a page, each with the member of a row, or with those of the candidate and of the upstream in use.
PAGE = {
    **{name: (name.lower(),) for name in ("Method", "Reads", "Same", "Different", "Behind", "Error", "Missing")},
    "Members that differ": ("members",),
    "p50 in ms, in use": ("their_p50_ms", "p50_ms"),
    "p99 in ms, in use": ("their_p99_ms", "p99_ms"),
    "Cost in US$, in use": ("their_usd", "usd"),
}
STYLE = """
:root { color-scheme: light dark }
body { font: 14px/1.5 system-ui, sans-serif; max-width: 92em; margin: 2em auto; padding: 0 1em }
.verdict { padding: .6em 1em; border-left: 4px solid #b3261e; background: rgb(128 128 128 / 12%); font-size: 1.15em }
.safe { border-color: #1d7a46 }
div { overflow-x: auto }
table { border-collapse: collapse }
td, th { padding: .35em .6em; border-bottom: 1px solid rgb(128 128 128 / 35%); text-align: right; white-space: nowrap }
td:nth-child(1), th:nth-child(1), td:nth-child(8), th:nth-child(8) { text-align: left }
td:nth-child(8) { white-space: normal }
.bad { font-weight: bold; color: light-dark(#b3261e, #ff8a80) }
tr:last-child td { font-weight: bold }
"""


def page_of(trial: Trial) -> str:
    """The report as one page without scripts."""
    title = html.escape(f"Trial of {trial.label}")
    facts = [f"{name.replace('_', ' ').capitalize()}: {fact}" for name, fact in facts_of(trial).items() if fact]
    verdict = f'<p class="verdict{" safe" if trial.is_ready else ""}">{html.escape(trial.verdict)}</p>'
    lines = "".join(f"<p>{html.escape(each)}</p>" for each in facts)
    heads = "".join(f'<th scope="col">{name}</th>' for name in PAGE)
    rows = "".join(f"<tr>{''.join(_cell(row, names) for names in PAGE.values())}</tr>\n" for row in trial.rows)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>{verdict}{lines}"
        f"<div><table><tr>{heads}</tr>\n{rows}</table></div>\n"
    )


def _cell(row: dict[str, Any], names: tuple[str, ...]) -> str:
    """A cell with these members of a row."""
    is_bad = names[0] in ("different", "error", "missing") and row[names[0]]
    text = ", ".join(_text(row[name]) for name in names)
    return f"<td{' class=bad' if is_bad else ''}>{html.escape(text)}</td>"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


def _certify(args: argparse.Namespace) -> int:
    """Returns 1 if the candidate should not be promoted."""
    if not 1 <= args.reads <= MOST_READS:
        raise InvalidRequest(f"--reads must be between 1 and {MOST_READS}")
    if args.rate is not None and not 1 <= args.rate <= MOST_RATE:
        raise InvalidRequest(f"--rate must be between 1 and {MOST_RATE}")
    settings, tables = context.load_with_tables(args)
    pair = with_candidate(settings, tables, args)
    present, candidate = pair.upstreams
    captured = None if args.calls is None else read_capture(args.calls, present.network)
    kept = CertifyProgress(args.resume, Comparison.of(present.network, (present.url, candidate.url), args.calls))
    kept.load()
    reads = CertifyReads(args.reads, kept, captured, args.rate or 0)
    trial = asyncio.run(certified(pair, tables, reads, Progress(shown=not args.json)))
    report(trial, args)
    return int(not trial.is_ready)


def with_candidate(settings: Settings, tables: Tables, args: argparse.Namespace) -> Settings:
    """The settings with two upstreams alone: the one in use, and the candidate."""
    if not args.url.startswith(("http://", "https://")):
        raise InvalidRequest(f"the candidate must be an http or https URL, not {args.url!r}")
    known = [each for each in settings.upstreams if args.network in (None, each.network) and not each.shadow]
    known = [each for each in known if args.against in (None, each.name) and not each.url.startswith("ws")]
    if not known:
        names = ", ".join(sorted({each.name for each in settings.upstreams if each.name})) or "none"
        raise StartError([f"the settings have no such upstream to compare with; use --against with one of: {names}"])
    price = str(cost.price_of(args.price)) if args.price else ""
    if args.cost:
        cost.list_of(tables, args.cost)
    elif price:
        raise InvalidRequest("--price needs --cost, the price list that it belongs to")
    candidate = UpstreamSettings(
        url=args.url, network=known[0].network, name=CANDIDATE, shadow=1.0, cost=args.cost, credit_price=price
    )
    return replace(settings, upstreams=(known[0], candidate), bundlers=(), routing=(), verify=())


@dataclass(frozen=True, slots=True)
class CertifyReads:
    """How many reads are made, which were made already, and the calls that they are taken from, if they are not made up."""

    count: int
    kept: CertifyProgress
    captured: list[CapturedCall] | None = None
    # Up to how many calls a second the candidate is tried; 0: not at all.
    most_rate: int = 0

    def calls(self, route: Route, head: int) -> Iterator[tuple[int, str, bytes]]:
        """Those that are left, each with its position."""
        left = max(0, self.count - self.kept.reads)
        if self.captured is None:
            return islice(_sample_calls(route, head, self.kept.position), left)
        return islice(_captured_calls(route, head, self.captured, self.kept.position), left)


async def certified(settings: Settings, tables: Tables, reads: CertifyReads, progress: Progress) -> Trial:
    loop = asyncio.get_running_loop()
    builder = NetworkBuilder(settings, tables, WriteBuffer(loop), TurnQueue(loop), tally=Tallies().of)
    networks = builder.networks(builder.states())
    try:
        (route,) = networks.routes.values()
        tracker = Tracker(route.state)
        await tracker.look()
        (shadow,) = route.shadows
        await _read_all(route, shadow, reads, progress)
        progress.show("searching for the oldest blocks")
        await tracker.find_bounds_of(shadow.upstream)
        shadow.trial.bounds_found(shadow.upstream.health.bounds.text)
        # The reads come one after the other, so they say nothing of it.
        shadow.trial.rate_found("not tried: use --rate")
        if reads.most_rate:
            progress.show("finding how many calls a second it takes")
            (call, *_) = route.state.head_reader.lookups.number.calls
            shadow.trial.rate_found(await rate_ceiling(shadow.upstream, call, reads.most_rate))
        return shadow.trial
    finally:
        progress.close()
        await networks.close()


async def _read_all(route: Route, shadow: Shadow, reads: CertifyReads, progress: Progress) -> None:
    (present,) = route.upstreams
    if not present.health.head:
        raise StartError([f"{present.label} does not answer: compare with another one, by --against"])
    reads.kept.resume(shadow.trial)
    judge = ShadowJudge(shadow)
    try:
        for position, method, params in reads.calls(route, present.health.head):
            read = await _read(route, present, method, params)
            if read is not None:
                await judge.compare(read)
            reads.kept.read(position, shadow.trial)
            progress.show(f"{reads.kept.reads} of {reads.count} reads")
    finally:
        reads.kept.save(shadow.trial)


def _captured_calls(
    route: Route, head: int, captured: list[CapturedCall], start: int
) -> Iterator[tuple[int, str, bytes]]:
    """Reads of clients whose replies can be compared. Those of a block that moves are made at one that both upstreams have."""
    at_block = family_of(route.network).at_block
    for position, call in enumerate(islice(captured, start, None), start + 1):
        policy, params = route.policies.get(call.method), bytes(call.params)
        if policy is None:
            continue
        ref = BlockRef("none") if policy.is_plain else policy.family.block_ref(policy.method, params)
        if ref.moves and not policy.by_range and at_block is not None:
            params = at_block(policy.method, params, max(1, head - DEPTH // 10))
        if is_comparable(policy, params, head):
            yield position, call.method, params


def _sample_calls(route: Route, head: int, start: int) -> Iterator[tuple[int, str, bytes]]:
    """Reads of all methods with known params, at random blocks that are old enough for both upstreams."""
    chosen, at_block = random.Random(start), family_of(route.network).at_block
    methods = [each for each in route.policies.values() if each.method.sample]
    methods = [each for each in methods if each.has_block or each.method.cache == "static"]

    def pinned(policy: MethodPolicy) -> bytes:
        block, params = max(1, head - chosen.randint(2, DEPTH)), policy.method.sample.encode()
        return params if at_block is None else at_block(policy.method, params, block)

    methods = [each for each in methods if is_comparable(each, pinned(each), head)]
    for position in count(start) if methods else ():
        policy = methods[position % len(methods)]
        yield position + 1, policy.method.name, pinned(policy)


async def _read(route: Route, present: Upstream, method: str, params: bytes) -> AnsweredRead | None:
    """The reply of the upstream in use; None if it has none, which says nothing about the candidate."""
    policy = route.policies[method]
    ref = BlockRef("none") if policy.is_plain else policy.family.block_ref(policy.method, params)
    archive = policy.family.is_archive(ref, present.health.head)
    probe = Probe(present, method, params, rules=policy.family.error_rules, archive=archive)
    began = time.monotonic()
    result = await result_of(probe, REPLY_S)
    took_s = time.monotonic() - began
    reply = probe.error_reply if result is None else result
    if not reply or (result is None and probe.error != "revert"):
        return None
    meter = present.health.meter
    cost = 0 if meter is None else meter.cost_of(method, archive=archive)
    is_error = result is None
    return AnsweredRead(policy, params, reply, present, took_s, is_error=is_error, cost=cost, archive=archive)
