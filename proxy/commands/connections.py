"""Tests the service's connections for `check --connect` and `upstreams test`: one row for the database, the cache, the
mail server and each upstream, with the problem if there is one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.commands.context import database
from proxy.compose.fleet import link_to
from proxy.compose.networks import NetworkBuilder
from proxy.core.fleet import REASONS, state_of
from proxy.core.rest_routes import read_error
from proxy.errors import StartError
from proxy.services.rpc.networks import Route
from proxy.services.rpc.probe import Probe
from proxy.services.rpc.probing import REPLY_S, result_of
from proxy.services.rpc.tracker import Tracker
from proxy.settings import Settings, Tables
from proxy.tasks import Tasks
from proxy.telemetry import Tallies
from proxy.turn_queue import TurnQueue
from proxy.wire.mailer import Mailer, Undelivered
from proxy.wire.upstream import Upstream
from proxy.wire.write_buffer import WriteBuffer

COLUMNS = ("part", "state", "chain", "head", "behind", "bounds", "batches", "operator", "problem")
CACHE_S = 3.0
# Statuses of nodes and proxies that want other credentials (RFC 9110, 15.5.2 and 15.5.4).
_REFUSED = frozenset((401, 403))
# States that keep the service from working.
_USELESS = frozenset(("failed", "wrong_chain", "wrong_version", "forked", "silent", "unchecked"))
ConnectionRow = dict[str, Any]


def failure_of(probe: Probe) -> str:
    """Why a probe that was sent has no result."""
    if not probe.status:
        return probe.failure or f"no reply within {REPLY_S:g} s"
    method, path = probe.method, probe.method.partition(" ")[2]
    # The status of a route is the code of its error, and 0 if its body is an error.
    code = read_error(probe.error_reply).code if probe.error_reply else 0
    if probe.status in _REFUSED or code in _REFUSED:
        return f"it refuses the credentials in the URL, or their lack (HTTP status {code or probe.status})"
    if path and probe.error_reply:
        return f"its reply to {method} " + (f"has the HTTP status {code}" if code else "is an error")
    if path:
        return f"its reply to {method} is not JSON"
    if probe.is_answered:
        return f"it refuses the call {method} (HTTP status {probe.status})"
    return f"its reply to {method} is not JSON-RPC (HTTP status {probe.status})"


async def tried(settings: Settings, tables: Tables, *, offline: bool) -> list[ConnectionRow]:
    rows = [] if offline else [await _outcome(name, partial(_query, url)) for name, url in _servers(settings)]
    if settings.valkey.limits_url:
        rows.append(await _outcome("limits", lambda: _link(settings.valkey.limits_url)))
    if settings.valkey.cache_url:
        rows.append(await _outcome("cache", lambda: _ping(settings.valkey.cache_url)))
    if settings.mail.host:
        rows.append(await _outcome("mail", Mailer(settings.mail).try_connection, within_s=settings.mail.timeout_s))
    return rows + await tried_upstreams(settings, tables)


def _servers(settings: Settings) -> Iterator[tuple[str, str]]:
    """The configured addresses of Postgres."""
    given = settings.database
    named = {"database": given.url, "database (direct)": given.direct_url, "replica": given.replica_url}
    for each in settings.databases:
        named |= {f"database {each.name}": each.url, f"database {each.name} (direct)": each.direct_url}
    yield from ((name, url) for name, url in named.items() if url)


def is_useful(row: ConnectionRow) -> bool:
    return row["state"] not in _USELESS


def _part(name: str, state: str, problem: str = "") -> ConnectionRow:
    return {**dict.fromkeys(COLUMNS), "part": name, "state": state, "problem": problem}


async def _outcome(name: str, attempt: Callable[[], Awaitable[None]], *, within_s: float = CACHE_S) -> ConnectionRow:
    try:
        async with asyncio.timeout(within_s):
            await attempt()
    except StartError as exc:
        return _part(name, "failed", exc.faults[0].partition(": ")[2])
    except TimeoutError:
        return _part(name, "failed", f"no reply within {within_s:g} s")
    except (OSError, RedisError, Undelivered) as exc:
        return _part(name, "failed", str(exc))
    return _part(name, "up")


async def _query(url: str) -> None:
    async with database(url) as connection:
        await connection.execute("select 1")


async def _ping(url: str) -> None:
    # The client of the cache knows Valkey under its older name only.
    async with Redis.from_url(url.replace("valkey", "redis", 1) if url.startswith("valkey") else url) as redis:
        await redis.ping()


async def _link(url: str) -> None:
    """Log in and load the functions, as a worker does."""
    link, tasks = link_to(url), Tasks()
    tasks.start("valkey", link.run)
    try:
        if not await link.until_up(CACHE_S):
            raise OSError("Valkey does not answer, or refuses the functions")
    finally:
        await tasks.close()


# Upstreams


async def tried_upstreams(settings: Settings, tables: Tables) -> list[ConnectionRow]:
    loop = asyncio.get_running_loop()
    builder = NetworkBuilder(settings, tables, WriteBuffer(loop), TurnQueue(loop), tally=Tallies().of)
    networks = builder.networks(builder.states())
    try:
        rows = await asyncio.gather(*[_route(route) for route in networks.routes.values()])
    finally:
        await networks.close()
    return [row for each in rows for row in each]


async def _route(route: Route) -> list[ConnectionRow]:
    tracker = Tracker(route.state)
    tracker.withhold()
    await tracker.look()
    await tracker.find_bounds()
    tip = max([upstream.health.head for upstream in route.upstreams], default=0)
    return await asyncio.gather(*[_upstream(route, upstream, tip) for upstream in route.every_upstream])


async def _upstream(route: Route, upstream: Upstream, tip: int) -> ConnectionRow:
    health, lookups = upstream.health, route.dispatcher.state.head_reader.lookups
    row = {**_part(health.label, state_of(health, time.monotonic())), "operator": health.operator}
    asked = lookups.chain or lookups.number
    given = asked.given(route.network.facts.genesis_at, "at")
    first = Probe(upstream, *asked.calls[0].with_values(given))
    result = await result_of(first)
    if lookups.chain is not None and result:
        row["chain"] = asked.identity(asked.calls[0].values_in(result))
    row["problem"] = _problem(row, "" if result else failure_of(first), route.network)
    if not health.head:
        return row
    row |= {"head": health.head, "behind": tip - health.head}
    row["bounds"] = _brief(health.bounds.text) or None
    if family_of(route.network).batches:
        row["batches"] = _yes_or_no(await result_of(Probe(upstream, *lookups.number.first, is_batch=True)))
    return row


def _brief(bounds: str) -> str:
    """`all=0` in place of `blocks=0 state=0 logs=0`."""
    values = {each.partition("=")[2] for each in bounds.split()}
    return f"all={values.pop()}" if len(values) == 1 else bounds


def _problem(row: ConnectionRow, failure: str, network: Network) -> str:
    match row["state"]:
        case "up":
            return ""
        case "wrong_chain" if not row["chain"]:
            return f"its reply names no chain: it is not a node of {network.id}"
        case "wrong_chain":
            return f"it is on chain {row['chain']}, and {network.id} is {network.identity}"
        case "silent" | "unchecked" if failure:
            return failure
        case state:
            return REASONS[state]


def _yes_or_no(result: bytes | None) -> str:
    return "no" if result is None else "yes"
