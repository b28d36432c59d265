"""`upstreams`: list upstreams as the running service sees them, take one out of use, and try and compare them."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

from proxy.commands import certify, connections, context, cost, output, rules
from proxy.core.canary import STEPS
from proxy.core.fleet import last_upstream_of, networks_of
from proxy.core.trials import Trial, trials_of
from proxy.errors import InvalidRequest, NotFound, StartError
from proxy.store.postgres.fleet import FleetStore

COLUMNS = (
    *(
        "label",
        "kind",
        "operator",
        "client",
        "bounds",
        "state",
        "head",
        "lag_blocks",
        "latency_ms",
        "p99_ms",
        "error_rate",
    ),
    *("in_flight", "answered", "failed", "contradicted", "cordon"),
)


def register(commands: Any) -> None:
    parser = commands.add_parser("upstreams", help="list, try, compare, cordon and uncordon upstreams")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    context.add_action(actions, "list", "list upstreams as all workers see them", _list, fleet_store)
    cordon = context.add_action(actions, "cordon", "take an upstream out of use on every host", _cordon, fleet_store)
    cordon.add_argument("label", help="the upstream's label, such as ethereum/mainnet#1")
    cordon.add_argument("--method", metavar="NAME", help="only this method; the upstream keeps its other calls")
    cordon.add_argument("--reason", default="", help="a note for other operators")
    cordon.add_argument(
        "--last", action="store_true", help="also the last upstream of its network: its calls then fail; do not ask"
    )
    uncordon = context.add_action(actions, "uncordon", "use a cordoned upstream again", _uncordon, fleet_store)
    uncordon.add_argument("label", help="the upstream's label, such as ethereum/mainnet#1")
    uncordon.add_argument("--method", metavar="NAME", help="only this method")
    promote = context.add_action(
        actions, "promote", "send calls to an upstream on trial (canary), more with each step", _promote, fleet_store
    )
    promote.add_argument("label", help="the upstream's label, such as ethereum/mainnet#new")
    promote.add_argument("--anyway", action="store_true", help="even if its trial does not say that this is safe")
    withdraw = context.add_action(
        actions, "withdraw", "send no more calls to an upstream that is being promoted", _withdraw, fleet_store
    )
    withdraw.add_argument("label", help="the upstream's label, such as ethereum/mainnet#new")
    about = "call each upstream of the settings: its chain, head, bounds and batches"
    test = actions.add_parser(
        "test", help=about, description=f"{about.capitalize()}. Exits with 1 if one cannot be used."
    )
    context.add_arguments(test)
    test.add_argument("--json", action="store_true", help="print JSON")
    test.set_defaults(run=_test)
    trial = context.add_action(
        actions, "trial", "report how upstreams on trial (shadow) compare", certify.show_trials, fleet_store
    )
    trial.add_argument("label", nargs="?", help="only this one, such as ethereum/mainnet#new")
    certify.add_reporting(trial)
    certify.add_certify(actions)
    cost.add_budget(actions)
    rules.add_rules(actions)


@asynccontextmanager
async def fleet_store(args: argparse.Namespace) -> AsyncIterator[FleetStore]:
    async with context.opened(args) as (_, pool):
        yield FleetStore(pool)


async def _list(store: FleetStore, args: argparse.Namespace) -> None:
    cordons = {row["label"]: row["reason"] or "yes" for row in (await store.cordons()).values()}
    for row in await store.method_cordons():
        cordons[row["label"]] = ", ".join(filter(None, (cordons.get(row["label"]), row["method"])))
    rows = [{**each, "cordon": cordons.get(each["label"])} for each in await upstreams_of(store)]
    output.rows(rows, COLUMNS, as_json=args.json)


async def upstreams_of(store: FleetStore) -> list[dict[str, Any]]:
    """All upstreams, merged from the reports of the workers of every host."""
    return [each for network in networks_of(await store.views()) for each in network["upstreams"]]


async def _cordon(store: FleetStore, args: argparse.Namespace) -> None:
    networks, cordons = networks_of(await store.views()), await store.cordons()
    for each in chain.from_iterable(network["upstreams"] for network in networks):
        each["cordon"] = cordons.get(each["id"])
    known = {each["label"]: each["id"] for network in networks for each in network["upstreams"]}
    if args.label not in known:
        raise NotFound(f"no running worker has an upstream {args.label}; there are: {', '.join(known) or 'none'}")
    if args.method:
        await _cordon_method(store, args, known[args.label])
        return
    if not args.last and (network := last_upstream_of(networks, known[args.label])):
        _confirm_last(args.label, network)
    await store.cordon(known[args.label], label=args.label, reason=args.reason, by=context.COMMAND_LINE.name)
    await context.record(
        "admin_cordon", subject=args.label, before={"cordoned": False}, after={"cordoned": True, "reason": args.reason}
    )
    output.row({"label": args.label, "cordoned": True}, as_json=args.json)


def _confirm_last(label: str, network: str) -> None:
    """Ask before the last upstream of a network is taken out of use. Without a terminal, --last is needed."""
    problem = f"{label} is the last upstream of {network} that is not cordoned, so its calls would fail"
    if not sys.stdin.isatty():
        raise InvalidRequest(f"{problem}: use --last to cordon it nevertheless")
    if input(f"{problem}. Type yes to cordon it: ").strip().lower() != "yes":
        raise InvalidRequest("nothing was cordoned. Use --last to skip the question")


async def _cordon_method(store: FleetStore, args: argparse.Namespace, upstream_id: str) -> None:
    by = context.COMMAND_LINE.name
    await store.cordon_method(upstream_id, args.method, label=args.label, reason=args.reason, by=by)
    after = {"method": args.method, "cordoned": True, "reason": args.reason}
    await context.record("admin_cordon", subject=args.label, before={"cordoned": False}, after=after)
    output.row({"label": args.label, "method": args.method, "cordoned": True}, as_json=args.json)


async def _uncordon_method(store: FleetStore, args: argparse.Namespace) -> None:
    cordoned = {(row["label"], row["method"]): row["upstream"] for row in await store.method_cordons()}
    if (args.label, args.method) not in cordoned:
        listed = ", ".join(f"{method} of {label}" for label, method in cordoned) or "none"
        raise NotFound(f"{args.method} of {args.label} is not cordoned; cordoned are: {listed}")
    await store.uncordon_method(cordoned[args.label, args.method], args.method)
    after = {"method": args.method, "cordoned": False}
    await context.record("admin_uncordon", subject=args.label, before={"cordoned": True}, after=after)
    output.row({"label": args.label, "method": args.method, "cordoned": False}, as_json=args.json)


async def _uncordon(store: FleetStore, args: argparse.Namespace) -> None:
    if args.method:
        await _uncordon_method(store, args)
        return
    cordons = {row["label"]: upstream_id for upstream_id, row in (await store.cordons()).items()}
    if args.label not in cordons:
        raise NotFound(f"{args.label} is not cordoned; cordoned are: {', '.join(cordons) or 'none'}")
    await store.uncordon(cordons[args.label])
    await context.record("admin_uncordon", subject=args.label, before={"cordoned": True}, after={"cordoned": False})
    output.row({"label": args.label, "cordoned": False}, as_json=args.json)


async def _promote(store: FleetStore, args: argparse.Namespace) -> None:
    trial = await _trial_of(store, args.label)
    if not args.anyway and not trial.is_ready:
        raise InvalidRequest(
            f"the trial of {args.label} says {trial.verdict!r}: use --anyway to promote it nevertheless"
        )
    await _set_share(store, args, STEPS[0], "admin_promote")


async def _withdraw(store: FleetStore, args: argparse.Namespace) -> None:
    await _trial_of(store, args.label)
    await _set_share(store, args, 0.0, "admin_withdraw")


async def _trial_of(store: FleetStore, label: str) -> Trial:
    trials = {each.label: each for each in trials_of(await store.views())}
    if label not in trials:
        raise NotFound(f"{label} is not on trial; on trial are: {', '.join(trials) or 'none'}")
    return trials[label]


async def _set_share(store: FleetStore, args: argparse.Namespace, share: float, operation: str) -> None:
    ids = {each["label"]: each["id"] for each in await upstreams_of(store)}
    if args.label not in ids:
        raise InvalidRequest(f"{args.label} cannot be promoted: set canary = true in its settings and reload them")
    shares = await store.shares()
    before = shares[ids[args.label]]["share"] if ids[args.label] in shares else 0.0
    await store.set_share(ids[args.label], label=args.label, share=share, reason=f"by the {context.COMMAND_LINE.name}")
    await context.record(operation, subject=args.label, before={"share": before}, after={"share": share})
    output.row({"label": args.label, "share": share}, as_json=args.json)


def _test(args: argparse.Namespace) -> int:
    """Like `check --connect`, for the upstreams alone. Returns 1 if one of them cannot be used."""
    settings, tables = context.load_with_tables(args)
    if not settings.upstreams:
        raise StartError(["the settings have no upstreams: add [[upstreams]] blocks"])
    rows = asyncio.run(connections.tried_upstreams(settings, tables))
    output.rows(rows, connections.COLUMNS, as_json=args.json)
    return int(not all(connections.is_useful(row) for row in rows))
