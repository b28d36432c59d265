"""Checks beyond the schemas: whether the networks named in settings exist, and whether paymasters have a signing key.

They work on plain data, so that their faults are reported together with schema faults.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import orjson

from proxy.chains.families import family_of
from proxy.chains.registry import Network, nearest_network
from proxy.core.credits import CREDITS_PER_PRICE, CallPrices
from proxy.core.routing_rules import fits
from proxy.settings.given_files import read_text
from proxy.settings.sections import (
    BudgetSettings,
    BundlerSettings,
    CostRoutingSettings,
    FixedPrice,
    IndexDatabaseSettings,
    PaymasterSettings,
    PriceFeed,
    RelaySettings,
    ReplySettings,
    RoutingSettings,
    UpstreamSettings,
    VerifySettings,
)
from proxy.settings.tables import Tables

# The order of secp256k1: a private key must be smaller.
_CURVE_ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141


# Settings that are lists of tables with a `network`, and the class of each table.
_NAMING: dict[
    str,
    type[
        UpstreamSettings
        | BundlerSettings
        | RelaySettings
        | PaymasterSettings
        | PriceFeed
        | FixedPrice
        | VerifySettings
        | RoutingSettings
        | CostRoutingSettings
        | ReplySettings
    ],
] = {
    "upstreams": UpstreamSettings,
    "bundlers": BundlerSettings,
    "relays": RelaySettings,
    "paymasters": PaymasterSettings,
    "verify": VerifySettings,
    "routing": RoutingSettings,
    "cost_routing": CostRoutingSettings,
    "replies": ReplySettings,
    "prices.feeds": PriceFeed,
    "prices.fixed": FixedPrice,
}
_FOLLOWED = ("follower.networks", "follower.start", "follower.transfers", "follower.keep_transfers")
T = TypeVar("T")


def named_networks(tree: Mapping[str, Any]) -> set[str]:
    """The networks that settings name. The schema reports values of the wrong type."""
    named = [_at(each, "network", str) for name in _NAMING for each in _at(tree, name)]
    named += [name for each in _at(tree, "databases") for name in _at(each, "networks")]
    named += [name for setting in _FOLLOWED for name in _at(tree, setting)]
    return {name for name in named if isinstance(name, str) and name not in ("", "*")}


def network_faults(tree: Mapping[str, Any], tables: Tables) -> Iterator[str]:
    """Report networks that no chain file defines, and networks without an upstream for calls."""
    for name, kind in _NAMING.items():
        for place, each in _listed(tree, name, kind):
            if _is_unknown(each.network, tables):
                yield f"{name}.{place}.network: {no_network(each.network, tables)}"
    for name in _FOLLOWED:
        for network in _at(tree, name):
            if _is_unknown(network, tables):
                yield f"{name}: {no_network(network, tables)}"
    yield from _name_faults(tree, "upstreams", UpstreamSettings)
    yield from _name_faults(tree, "bundlers", BundlerSettings)
    yield from _name_faults(tree, "relays", RelaySettings)
    yield from _cost_faults(tree, tables)
    yield from _method_rate_faults(tree, tables)
    yield from _call_faults(tree, tables)
    yield from _verify_faults(tree, tables)
    yield from _routing_faults(tree, tables)
    yield from _cost_routing_faults(tree)
    yield from _reply_faults(tree, tables)
    yield from _shadow_faults(tree)


def _name_faults(
    tree: Mapping[str, Any], name: str, kind: type[UpstreamSettings | BundlerSettings | RelaySettings]
) -> Iterator[str]:
    """Report names that two upstreams of a network share: metrics and records could not tell them apart."""
    seen = set()
    for place, each in _listed(tree, name, kind):
        if each.name and (each.network, each.name) in seen:
            yield f"{name}.{place}.name: {each.network} has another one named {each.name}"
        seen.add((each.network, each.name))


def _cost_faults(tree: Mapping[str, Any], tables: Tables) -> Iterator[str]:
    """Report price lists that do not exist, and prices without a list that they belong to."""
    shared: dict[str, tuple[BudgetSettings, int, int]] = {}
    priced = sorted(name for name, provider in tables.providers.items() if provider.credits is not None)
    for plan in _at(tree, "usage.unit_prices"):
        if plan not in tables.plans:
            yield f"usage.unit_prices.{plan}: there is no plan {plan!r}; there are: {', '.join(tables.plans)}"
    for place, each in _listed(tree, "upstreams", UpstreamSettings):
        if each.cost and each.cost not in priced:
            yield f"upstreams.{place}.cost: there is no price list {each.cost!r}; there are: {', '.join(priced)}"
        given = each.credit_price or each.included_credits or each.billing_day != 1
        if given and not each.is_metered:
            yield f"upstreams.{place}: credit_price, included_credits and billing_day need cost or credits"
        if each.budget is None:
            continue
        if not each.is_metered:
            yield f"upstreams.{place}.budget: needs cost or credits, because it is counted in credits"
        if each.budget.paced and each.budget.per != "month":
            yield f'upstreams.{place}.budget.paced: is for budgets of a month: leave it out, or set per = "month"'
        if each.budget.account_share < 1.0 and not each.budget.hard:
            yield f"upstreams.{place}.budget.account_share: is for hard budgets: leave it out, or set hard = true"
        terms = each.budget, each.billing_day, each.included_credits
        if each.budget.shared and shared.setdefault(each.budget.shared, terms) != terms:
            yield (
                f"upstreams.{place}.budget: another upstream has the budget {each.budget.shared!r} with other values: budget, "
                "billing_day and included_credits must be the same"
            )


def _method_rate_faults(tree: Mapping[str, Any], tables: Tables) -> Iterator[str]:
    """Report limits of methods that the network does not have."""
    for place, each in _listed(tree, "upstreams", UpstreamSettings):
        network = tables.find_network(each.network)
        if network is None:
            continue
        for method in each.method_rates:
            if not any(fits((method,), name) for name in tables.methods[network.family]):
                yield f"upstreams.{place}.method_rates: {each.network} has no method {method}"


def database_faults(tree: Mapping[str, Any], tables: Tables) -> Iterator[str]:
    """Report databases that share a name or an address, and networks that are unknown or in two databases."""
    main = _at(tree, "database")
    seen = {"main", main.get("url") if isinstance(main, Mapping) else None}
    for place, each in _listed(tree, "databases", IndexDatabaseSettings):
        if each.name in seen:
            yield f"databases.{place}.name: there is already a database {each.name}"
        if each.url in seen:
            yield shared_database(f"databases.{place}.url")
        for network in each.networks:
            if _is_unknown(network, tables):
                yield f"databases.{place}.networks: {no_network(network, tables)}"
            if network in seen:
                yield f"databases.{place}.networks: {network} is in another database already"
        seen |= {each.name, each.url, *each.networks}


def shared_database(setting: str) -> str:
    return f"{setting}: is the address of another database: each needs its own"


def _verify_faults(tree: Mapping[str, Any], tables: Tables) -> Iterator[str]:
    """Report methods that do not exist, are not reads, or cannot be verified in this way."""
    for place, each in _listed(tree, "verify", VerifySettings):
        if _is_unknown(each.network, tables):
            continue
        chain, _, name = each.network.partition("/")
        network = tables.chains.find(chain, name)
        methods = tables.methods[network.family] if network is not None else {}
        prover = None if network is None else family_of(network).prover
        for method in each.methods:
            if method not in methods or methods[method].kind != "read":
                yield f"verify.{place}.methods: {method} is not a read of {each.network}"
            elif each.by == "proof" and (prover is None or not prover.covers(method)):
                yield f"verify.{place}.methods: {method} cannot be verified by proof: name a quorum, such as quorum 2/3"
        yield from _quorum_faults(tree, tables, place, each)


def _shadow_faults(tree: Mapping[str, Any]) -> Iterator[str]:
    """Report upstreams on trial without a limit, or on a network that has no other upstream."""
    upstreams = list(_listed(tree, "upstreams", UpstreamSettings))
    for place, each in upstreams:
        if each.trial_without and not each.shadow:
            yield f"upstreams.{place}.trial_without: needs shadow: it is about the reads of a trial"
        if each.canary and not each.shadow:
            yield f"upstreams.{place}.canary: needs shadow, such as 0.05, because each step follows from a trial"
        if not each.shadow:
            continue
        if not each.requests_per_second:
            yield f"upstreams.{place}.shadow: needs a limit: add requests_per_second, and a budget if its calls cost something"
        if each.url.startswith("ws"):
            yield f"upstreams.{place}.shadow: needs an http or https URL"
        if all(other.shadow for _, other in upstreams if other.network == each.network):
            yield f"upstreams.{place}.shadow: {each.network} needs an upstream without shadow to compare it with"


def _reply_faults(tree: Mapping[str, Any], tables: Tables) -> Iterator[str]:
    """Report replies that are not JSON, have no place, or answer a method that the network does not have."""
    for place, each in _listed(tree, "replies", ReplySettings):
        network = tables.chains.find(*each.network.split("/")) if each.network.count("/") == 1 else None
        if network is not None and each.method not in tables.methods[network.family]:
            yield f"replies.{place}.method: {each.network} has no method {each.method}"
        if bool(each.result) == bool(each.error):
            yield f"replies.{place}: needs either result or error, as JSON"
        for name, kind in (("params", list | dict), ("result", object), ("error", dict)):
            text = getattr(each, name)
            try:
                parsed = orjson.loads(text or "{}")
            except ValueError:
                parsed = None
                yield f"replies.{place}.{name}: must be JSON, such as {_SAMPLES[name]}"
            else:
                if not isinstance(parsed, kind):
                    yield f"replies.{place}.{name}: must be JSON like {_SAMPLES[name]}"


# JSON of each member of a reply.
_SAMPLES = {"params": '["0x1"]', "result": '"0x1"', "error": '{"code":-32601,"message":"no such method"}'}


def _routing_faults(tree: Mapping[str, Any], tables: Tables) -> Iterator[str]:
    """Report rules that do nothing: methods that no network has, and labels that no upstream has."""
    for place, each in _listed(tree, "routing", RoutingSettings):
        named = {"require": each.require, "prefer": each.prefer, "avoid": each.avoid, "labels": each.labels}
        if not (each.require or each.prefer or each.avoid or each.above):
            yield f"routing.{place}: changes nothing: add require, prefer, avoid or above"
        if each.above.get("error_rate", 0.0) >= 1.0:
            yield f"routing.{place}.above.error_rate: can never match: it is a share, so use a number below 1"
        if not each.above and (each.labels or each.dry_run or each.then != "exclude"):
            yield f"routing.{place}: labels, then and dry_run are for limits: add above"
        if each.above and (each.require or each.prefer or each.avoid):
            yield f"routing.{place}: has limits and labels to choose by: write two rules, and use labels for the limits"
        network = tables.chains.find(*each.network.split("/")) if each.network.count("/") == 1 else None
        if network is None:
            continue
        for method in each.methods:
            if not any(fits((method,), name) for name in tables.methods[network.family]):
                yield f"routing.{place}.methods: {each.network} has no method {method}"
        upstreams = [
            upstream for _, upstream in _listed(tree, "upstreams", UpstreamSettings) if upstream.network == each.network
        ]
        known = {label for upstream in upstreams for label in upstream.own_labels}
        yield from _unmet_rule(place, each, upstreams, known)
        yield from _unmet_cost(place, each, upstreams, network, tables)
        for name, labels in named.items():
            for label in labels:
                # The client is known once an upstream has named it.
                if upstreams and label not in known and not label.startswith("client="):
                    listed = ", ".join(sorted(known)) or "none"
                    yield f"routing.{place}.{name}: no upstream of {each.network} has the label {label}; there are: {listed}"


def _unmet_rule(
    place: int, rule: RoutingSettings, upstreams: Sequence[UpstreamSettings], known: Collection[str]
) -> Iterator[str]:
    """Report labels that upstreams have, but none has all of them."""
    for name, labels in (("require", rule.require), ("labels", rule.labels)):
        named = {label for label in labels if not label.startswith("client=")}
        if named <= {*known} and upstreams and not any(named <= upstream.own_labels for upstream in upstreams):
            yield f"routing.{place}.{name}: can never match: no upstream of {rule.network} has all of {', '.join(labels)}"


def _unmet_cost(
    place: int, rule: RoutingSettings, upstreams: Sequence[UpstreamSettings], network: Network, tables: Tables
) -> Iterator[str]:
    """Report a limit of the cost that no call of an upstream exceeds."""
    name = f"routing.{place}.above.cost_usd: can never match"
    meant = [upstream for upstream in upstreams if upstream.own_labels.issuperset(rule.labels)]
    metered = [upstream for upstream in meant if upstream.is_metered]
    if "cost_usd" not in rule.above or not meant:
        return
    if not metered:
        yield f"{name}: no upstream that the rule is for has a cost"
        return
    methods = [each for each in tables.methods[network.family] if not rule.methods or fits(rule.methods, each)]
    costs = [_dearest_usd(upstream, methods, network, tables) for upstream in metered]
    if methods and max(costs) <= Decimal(str(rule.above["cost_usd"])):
        yield f"{name}: the dearest of these calls costs {max(costs).normalize():f} US dollars"


def _dearest_usd(given: UpstreamSettings, methods: Iterable[str], network: Network, tables: Tables) -> Decimal:
    """What the dearest of these methods costs at most. The schema reports a price that is no number."""
    table = tables.credit_table(given.cost)
    prices = CallPrices(table, network.chain.name, given.credits)
    price = table.usd_per_million
    with suppress(InvalidOperation):
        price = Decimal(given.credit_price or price)
    dearest = max((prices.credits(each, archive=True) for each in methods), default=0)
    return dearest * price / CREDITS_PER_PRICE


def _cost_routing_faults(tree: Mapping[str, Any]) -> Iterator[str]:
    """Report policies that change nothing, because another one or no cost is there."""
    seen = set()
    for place, each in _listed(tree, "cost_routing", CostRoutingSettings):
        if each.network in seen:
            yield f"cost_routing.{place}.network: {each.network} has another policy"
        seen.add(each.network)
        upstreams = [
            upstream for _, upstream in _listed(tree, "upstreams", UpstreamSettings) if upstream.network == each.network
        ]
        if upstreams and not any(upstream.is_metered for upstream in upstreams):
            yield f"cost_routing.{place}: changes nothing: no upstream of {each.network} has a cost"


def _quorum_faults(tree: Mapping[str, Any], tables: Tables, place: int, rule: VerifySettings) -> Iterator[str]:
    """Report a quorum of more operators than the network's upstreams have. A network without upstreams serves no calls."""
    match = re.match(r"quorum (\d)/", rule.by)
    upstreams = [each for _, each in _listed(tree, "upstreams", UpstreamSettings) if each.network == rule.network]
    if match is None or not upstreams:
        return
    calls = [each for each in upstreams if not each.url.startswith("ws") or _takes_socket_calls(rule.network, tables)]
    operators = sorted({each.operated_by for each in calls})
    if len(operators) < int(match[1]):
        yield (
            f"verify.{place}.by: {rule.by} needs upstreams of {match[1]} operators, and those of {rule.network} have "
            f"{len(operators)} ({', '.join(operators)}): add others, or name their operators"
        )


def _call_faults(tree: Mapping[str, Any], tables: Tables) -> Iterator[str]:
    """Report networks whose upstreams carry subscriptions only."""
    by_network: dict[str, list[str]] = {}
    for _, each in _listed(tree, "upstreams", UpstreamSettings):
        by_network.setdefault(each.network, []).append(each.url)
    for name, urls in by_network.items():
        if (
            _is_unknown(name, tables)
            or _takes_socket_calls(name, tables)
            or not all(url.startswith("ws") for url in urls)
        ):
            continue
        yield f"upstreams: {name} needs an http or https upstream: its ws and wss ones carry subscriptions only"


def _takes_socket_calls(name: str, tables: Tables) -> bool:
    """Whether upstreams with ws and wss URLs take calls. Networks that do not exist are reported elsewhere."""
    network = _network_of(name, tables)
    return network is None or family_of(network).socket_calls


def _network_of(name: str, tables: Tables) -> Network | None:
    return tables.chains.find(*name.split("/")) if name.count("/") == 1 else None


def _is_unknown(network: Any, tables: Tables) -> bool:
    """Ignore values that cannot be a network's name, such as `*`; the schema reports the invalid ones."""
    return isinstance(network, str) and network.count("/") == 1 and tables.chains.find(*network.split("/")) is None


def no_network(name: str, tables: Tables) -> str:
    """The error for a network that no chain file defines."""
    near = nearest_network(name, tables.network_names())
    return f"there is no network {name}; " + (f"did you mean {near}?" if near else "`penstock chains list` shows all")


def _at(tree: Any, name: str, kind: Any = Mapping | list | tuple) -> Any:
    """Return the value at a dotted name, or nothing if it is not of this kind."""
    value: Any = tree
    for step in name.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value if isinstance(value, kind) else ()


def _listed(tree: Mapping[str, Any], name: str, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Yield the valid tables of a list with their positions. The schema reports the others."""
    for index, each in enumerate(_at(tree, name)):
        with suppress(msgspec.ValidationError):
            yield index, msgspec.convert(each, kind, strict=False)


def signer_key(given: PaymasterSettings | RelaySettings, environ: Mapping[str, str]) -> bytes:
    """Return the 32-byte signing key of a paymaster or relay. ValueError says what is wrong and never includes the value."""
    named = given.signer_env or given.signer_file
    try:
        text = environ[named] if given.signer_env else read_text(Path(named))
    except (KeyError, OSError, ValueError):
        raise ValueError(f"there is no signing key in {named or 'signer_env or signer_file'}") from None
    digits = text.strip().removeprefix("0x")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", digits, re.ASCII) or not 0 < int(digits, 16) < _CURVE_ORDER:
        raise ValueError(f"{named} does not contain a private key: write 0x and 64 hex digits")
    return bytes.fromhex(digits)


def paymaster_faults(tree: Mapping[str, Any], tables: Tables, environ: Mapping[str, str]) -> Iterator[str]:
    """Report paymasters with an unknown entry point, with the entry point of another one, or without a signing key."""
    seen: set[tuple[str, str]] = set()
    for place, each in _listed(tree, "paymasters", PaymasterSettings):
        name, network = f"paymasters.{place}", _network_of(each.network, tables)
        if network is not None and each.entry_point not in network.chain.entry_points:
            yield f"{name}.entry_point: {each.network} has no entry point {each.entry_point}"
        if (each.network, each.entry_point) in seen:
            yield f"{name}: there is already a paymaster for entry point {each.entry_point} of {each.network}"
        seen.add((each.network, each.entry_point))
        try:
            signer_key(each, environ)
        except ValueError as exc:
            yield f"{name}: {exc}"


def relay_faults(tree: Mapping[str, Any], tables: Tables, environ: Mapping[str, str]) -> Iterator[str]:
    """Report relays of networks that have no such transactions or no upstream, and relays without the key that they need."""
    upstreams = [_network_of(each.network, tables) for _, each in _listed(tree, "upstreams", UpstreamSettings)]
    served = {network.id for network in upstreams if network is not None}
    for place, each in _listed(tree, "relays", RelaySettings):
        name, network = f"relays.{place}", _network_of(each.network, tables)
        if network is None:
            continue  # This is reported elsewhere.
        if network.family != "evm":
            yield f"{name}.network: relays are for EVM networks, and {each.network} is not one"
        elif network.id not in served:
            yield f"{name}.network: {each.network} has no upstream: add one under [[upstreams]]"
        if each.style == "flashbots" and not each.signs:
            yield f"{name}: style flashbots signs its requests: set signer_env or signer_file"
        if each.signs:
            try:
                signer_key(each, environ)
            except ValueError as exc:
                yield f"{name}: {exc}"


def tracing_faults(tree: Mapping[str, Any]) -> Iterator[str]:
    """Report a missing SDK. It is optional, and imported only by processes that trace."""
    given = tree.get("tracing")
    if isinstance(given, Mapping) and given.get("endpoint") and find_spec("opentelemetry") is None:
        yield "tracing.endpoint: needs OpenTelemetry's SDK: run pip install 'penstock[trace]', or set it to \"\""
