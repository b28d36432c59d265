"""`cost`: what the calls to upstreams cost, and what they would cost at another provider."""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from proxy.commands import context, output
from proxy.compose.credit_budgets import INCLUDED, budget_of, included_of
from proxy.compose.upstream_ids import upstream_id_of
from proxy.core.budgets import CreditBudget
from proxy.core.credits import NANOS_PER_USD, CallPrices, CreditTable, in_usd
from proxy.errors import InvalidRequest, NotFound
from proxy.services.cost_report import budget_rows
from proxy.settings import Settings, Tables
from proxy.store.postgres.spending import COLUMNS, SpendingStore
from proxy.store.postgres.usage import UsageStore

SHOWN = ("name", "calls", "credits", "usd")
BUDGETS = ("name", "per", "hard", "credits", "used", "left", "ends", "runs_out", "set_by")
MOST_CREDITS = 10**15
ELSEWHERE = ("network", "method", "calls", "credits", "usd")
# Rows of one export, and the most days of a report.
MOST_ROWS, MOST_DAYS = 1_000_000, 1100


@dataclass(frozen=True, slots=True)
class CostSource:
    settings: Settings
    tables: Tables
    store: SpendingStore
    usage: UsageStore


def register(commands: Any) -> None:
    about = "show what calls to upstreams cost, or would cost at another provider"
    parser = context.add_action(commands, "cost", about, _report, _source)
    parser.add_argument("--days", type=int, default=30, metavar="N", help="the last N days, with today (default: 30)")
    parser.add_argument("--by", choices=COLUMNS, default="upstream", help="one line for each of these")
    parser.add_argument("--account", metavar="ID", help="only what this account has spent")
    parser.add_argument("--budgets", action="store_true", help="list the budgets, and when each will run out")
    parser.add_argument("--csv", action="store_true", help="print every row as CSV, by day")
    other = parser.add_argument_group("the same calls elsewhere")
    other.add_argument(
        "--as", dest="provider", metavar="PROVIDER", help="price the recorded calls by this provider's list"
    )
    other.add_argument(
        "--price", metavar="USD", help="its price for a million credits, if the list has none or another"
    )
    other.add_argument(
        "--own",
        action="append",
        default=[],
        metavar="METHOD",
        help="a method that an own node answers at no cost; may end in *",
    )
    other.add_argument(
        "--hits",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="the share of the calls that a larger cache answers, 0 to 1",
    )


@asynccontextmanager
async def _source(args: argparse.Namespace) -> AsyncIterator[CostSource]:
    async with context.opened(args) as (settings, pool):
        yield CostSource(settings, context.tables_of(settings), SpendingStore(pool), UsageStore(pool))


async def _report(source: CostSource, args: argparse.Namespace) -> None:
    if not 1 <= args.days <= MOST_DAYS:
        raise InvalidRequest(f"--days must be between 1 and {MOST_DAYS}")
    last = datetime.datetime.now(datetime.UTC).date()
    first = last - datetime.timedelta(days=args.days - 1)
    if args.budgets:
        output.rows(await _budgets(source), BUDGETS, as_json=args.json)
    elif args.provider:
        await _elsewhere(source, args, first)
    elif args.csv:
        _print_csv(await source.store.rows(first, last, MOST_ROWS))
    else:
        rows = await source.store.read(first, last, args.by, args.account)
        if not rows and not args.json and not any(each.is_metered for each in source.settings.upstreams):
            print('nothing is counted: no upstream names a price list, such as cost = "alchemy", or credits')
            return
        output.rows([{**each, "usd": in_usd(each["nanos"])} for each in rows], SHOWN, as_json=args.json)


def _print_csv(rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("day", "upstream", "network", "method", "account", "key", "calls", "credits", "usd"))
    for row in rows:
        *values, nanos = row.values()
        writer.writerow((*values, in_usd(nanos)))


def add_budget(actions: Any) -> None:
    """`upstreams budget`."""
    about = "set the credits of a budget in place of the settings, on every host"
    parser = context.add_action(actions, "budget", about, _set_budget, _source)
    parser.add_argument("name", help="its name, as `penstock cost --budgets` shows it")
    change = parser.add_mutually_exclusive_group(required=True)
    change.add_argument("--credits", type=int, metavar="N", help="credits of a period")
    change.add_argument("--reset", action="store_true", help="those of the settings again")


async def _set_budget(source: CostSource, args: argparse.Namespace) -> None:
    if args.credits is not None and not 1 <= args.credits <= MOST_CREDITS:
        raise InvalidRequest(f"--credits must be between 1 and {MOST_CREDITS}")
    rows = {row["name"]: row for row in await _budgets(source) if not row["budget"].startswith(INCLUDED)}
    if args.name not in rows:
        raise NotFound(f"no upstream has a budget {args.name}; there are: {', '.join(rows) or 'none'}")
    row = rows[args.name]
    await source.store.set_limit(row["budget"], args.credits, context.COMMAND_LINE.name)
    after = row["settings"] if args.reset else args.credits
    await context.record(
        "admin_set_budget", subject=args.name, before={"credits": row["credits"]}, after={"credits": after}
    )
    output.row({"name": args.name, "credits": after, "settings": row["settings"]}, as_json=args.json)


async def _budgets(source: CostSource) -> list[dict[str, Any]]:
    """The budgets of the settings, with a forecast."""
    budgets: dict[str, tuple[str, CreditBudget]] = {}
    for each in source.settings.upstreams:
        network = source.tables.find_network(each.network)
        assert network is not None  # The settings were validated.
        own_id = upstream_id_of(source.settings.keys.pepper, network.id, each.place, "")
        shown = f"{each.network}#{each.name}" if each.budget is None or not each.budget.shared else each.budget.shared
        for budget, what in ((budget_of(each, own_id), ""), (included_of(each, own_id), " (included)")):
            if budget is not None:
                budgets[budget.name] = shown + what, budget
    return await budget_rows(source.store, budgets)


async def _elsewhere(source: CostSource, args: argparse.Namespace, first: datetime.date) -> None:
    """Price recorded calls by another provider's list. Which of them read old blocks is not recorded, so a price for these is
    not applied."""
    table = list_of(source.tables, args.provider)
    if not 0.0 <= args.hits < 1.0:
        raise InvalidRequest("--hits must be at least 0 and below 1")
    price = price_of(args.price) if args.price else table.usd_per_million
    rows: list[dict[str, Any]] = []
    for (network, method), calls in (await _calls(source, first)).items():
        left = 0 if _is_own(method, args.own) else round(calls * (1.0 - args.hits))
        credits_ = left * CallPrices(table, network.partition("/")[0]).credits(method)
        nanos = int(credits_ * price * NANOS_PER_USD / 1_000_000)
        rows.append({"network": network, "method": method, "calls": left, "credits": credits_, "nanos": nanos})
    rows.sort(key=lambda row: (-row["credits"], row["network"], row["method"]))
    sums = {name: sum(row[name] for row in rows) for name in ("calls", "credits", "nanos")}
    shown = [*rows, {"network": "all", "method": "", **sums}]
    output.rows([{**each, "usd": in_usd(each["nanos"])} for each in shown], ELSEWHERE, as_json=args.json)


async def _calls(source: CostSource, first: datetime.date) -> dict[tuple[str, str], int]:
    """The calls of all upstreams, by network and method. Attempts are recorded for upstreams whose calls cost something; for
    others, usage has the calls that the cache did not answer."""
    counts = {(network, method): calls for network, method, calls in await source.store.calls(first)}
    since = datetime.datetime.combine(first, datetime.time(), datetime.UTC)
    for place, used in (await source.usage.methods("day", since)).items():
        if _is_call(source.tables, *place):
            counts[place] = max(counts.get(place, 0), used.requests - used.hits - used.joins)
    return counts


def _is_call(tables: Tables, network: str, method: str) -> bool:
    """Whether this is a JSON-RPC method. Usage counts REST operations too, and makes its calls under their own names."""
    known = tables.chains.find(*network.split("/")) if network.count("/") == 1 else None
    return known is not None and method in tables.methods[known.family]


def list_of(tables: Tables, provider: str) -> CreditTable:
    listed = tables.providers.get(provider)
    if listed is None or listed.credits is None:
        priced = sorted(name for name, each in tables.providers.items() if each.credits is not None)
        raise NotFound(f"there is no price list {provider!r}; there are: {', '.join(priced)}")
    return listed.credits


def price_of(text: str) -> Decimal:
    try:
        price = Decimal(text)
    except ArithmeticError:
        price = Decimal("NaN")
    if not price.is_finite() or price < 0:
        raise InvalidRequest(f"--price must be an amount of US dollars, not {text!r}")
    return price


def _is_own(method: str, own: Sequence[str]) -> bool:
    return any(method == name or (name.endswith("*") and method.startswith(name[:-1])) for name in own)
