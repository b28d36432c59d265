"""Create, read, change and delete the webhooks of an account.

The signing secret is generated here, returned once and stored encrypted. The URL is checked as text here; the address that it
resolves to is checked at every delivery. The chain's family parses the config.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from proxy.chains.evm import address, webhook_filters
from proxy.chains.evm.log_filter import ADDRESS_SIZE, each_value
from proxy.chains.evm.watch_index import KINDS, WatchFilter
from proxy.chains.evm.webhook_filters import BadConfig
from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.core import fault_plans, signatures
from proxy.core.access import Key
from proxy.core.bounded_json import LongText
from proxy.core.paging import Page
from proxy.errors import InvalidRequest
from proxy.request_threads import request_threads
from proxy.store.postgres.events import CONFIRM_S
from proxy.store.postgres.secrets import Vault
from proxy.store.postgres.webhooks import AddressChange, NewWebhook, Webhook, WebhookStore
from proxy.turn_queue import next_turn
from proxy.wire.outbound_guard import UrlRefused
from proxy.wire.webhook_guard import WebhookGuard

__all__ = ("CreatedWebhook", "Webhook", "WebhookChange", "WebhookService", "read_config")

# Addresses handled in one step, of about 1 ms: the checksums of the longest list take a second.
ADDRESSES_PER_TURN = 100
# Other values of a filter that are read on the event loop: a thousand take a millisecond or two.
VALUES_PER_TURN = 200
HASHED_PER_TURN = 2_000
# The parts of a set of addresses, and how many of them are freed at a time.
SETS = 64
SETS_PER_TURN = 8
# How often, and how many times, a change of a pending-transaction webhook checks whether it has effect: for five seconds.
MEMPOOL_CHECK_S, MEMPOOL_CHECKS = 0.1, 50
# A mempool whose watch was not confirmed for this long is not watched any more: three missed confirmations.
MEMPOOL_SILENT_S = 3 * CONFIRM_S


@dataclass(frozen=True, slots=True)
class CreatedWebhook:
    """A webhook and its secret, which is not shown again."""

    webhook: Webhook
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookChange:
    """A change of a webhook; None leaves a member as it is. Addresses are added and removed, or the config is replaced."""

    url: str | None = None
    status: str | None = None
    config: Mapping[str, Any] | None = None
    add: Sequence[Any] = ()
    remove: Sequence[Any] = ()
    # An empty one ends the fault.
    fault: str | None = None


class AddressSet:
    """Up to a hundred thousand addresses, in many small sets: a large one takes milliseconds each time that it grows. The sets
    are dictionaries, which the garbage collector does not visit."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts = [dict[bytes, None]() for _ in range(SETS)]

    def __repr__(self) -> str:
        return f"<AddressSet {sum(map(len, self._parts))}>"

    def __contains__(self, each: object) -> bool:
        return each in self._parts[hash(each) % SETS]

    def added(self, addresses: Iterable[bytes]) -> list[bytes]:
        """Add them, and return those that are new, in order."""
        new = []
        for each in addresses:
            part = self._parts[hash(each) % SETS]
            if each not in part:
                part[each] = None
                new.append(each)
        return new

    async def clear(self) -> None:
        """Free the addresses, a part in each turn of the account."""
        while self._parts:
            del self._parts[-SETS_PER_TURN:]
            await next_turn()


class PackedAddresses(Sequence[bytes]):
    """A list of addresses as one string of bytes: a fourth of the memory, and nothing for the garbage collector to visit."""

    __slots__ = ("_packed",)

    def __init__(self) -> None:
        self._packed = bytearray()

    def __repr__(self) -> str:
        return f"<PackedAddresses {len(self)}>"

    def __len__(self) -> int:
        return len(self._packed) // ADDRESS_SIZE

    def extend(self, addresses: Iterable[bytes]) -> None:
        self._packed += b"".join(addresses)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, int):
            at = range(len(self))[index]
            return self[at : at + 1][0]
        first, end, _ = index.indices(len(self))
        return [*each_value(bytes(self._packed[first * ADDRESS_SIZE : end * ADDRESS_SIZE]), ADDRESS_SIZE)]


class WebhookService:
    def __init__(
        self,
        store: WebhookStore,
        vault: Vault,
        guard: WebhookGuard,
        *,
        most: Mapping[str, int],
        values_per_day: Mapping[str, int],
        follows: Callable[[str], bool],
    ) -> None:
        """`most` is the number of webhooks per account, `values_per_day` that of the filter values that it writes per day, both
        by plan. `follows` returns whether a network is followed."""
        self._follows = follows
        self._store = store
        self._vault = vault
        self._guard = guard
        self._most = most
        self._values_per_day = values_per_day

    def __repr__(self) -> str:
        return f"<WebhookService {self._guard!r}>"

    async def create(
        self,
        key: Key,
        network: Network,
        *,
        url: str,
        event_type: str,
        config: Mapping[str, Any],
        fault: str | None = None,
    ) -> CreatedWebhook:
        """Without a `fault`, the webhook of a test key gets the parts of the key's fault plan that concern webhooks."""
        if "webhooks" not in family_of(network).features or not self._follows(network.id):
            raise InvalidRequest(f"chain: webhooks are not available on {network.id}", param="chain")
        self._check_url(url)
        _check_fault(fault, test_key=not key.live)
        addresses = await read_config(event_type, config)
        webhook_id, secret = self._store.new_id(), secrets.token_bytes(signatures.SECRET_BYTES)
        new = NewWebhook(
            account=key.account.id,
            network=network.id,
            live=network.is_live,
            url=url,
            event_type=event_type,
            config=_without_addresses(config),
            test_key=not key.live,
            fault=_inherited(key) if fault is None else fault or None,
        )
        webhook = await self._store.create(
            webhook_id,
            new,
            addresses=addresses,
            secret=self._vault.seal(webhook_id, secret),
            rotated=self._vault.seal_for_previous(webhook_id, secret),
            most=self._most[key.account.plan],
            values_per_day=self._values_per_day[key.account.plan],
        )
        return CreatedWebhook(await self._started(webhook), signatures.secret_of(secret))

    async def read(self, key: Key, webhook_id: str) -> Webhook:
        (webhook,) = await self._seen([await self._store.read(webhook_id, account=key.account.id)])
        return webhook

    async def addresses(self, webhook: Webhook) -> AsyncIterator[list[str]]:
        """The addresses with checksums, a part in each turn of the account."""
        listed = await self._store.addresses(webhook)
        for first in range(0, len(listed), ADDRESSES_PER_TURN):
            yield [*map(address.fresh_checksum, listed[first : first + ADDRESSES_PER_TURN])]
            await next_turn()

    async def page(self, key: Key, page: Page, *, status: str | None) -> tuple[list[Webhook], int]:
        webhooks, total = await self._store.list_of(
            key.account.id, live=key.live, status=status, page=page, networks=key.only_networks
        )
        return await self._seen(webhooks), total

    async def update(self, key: Key, before: Webhook, change: WebhookChange) -> Webhook:
        if change.url is not None:
            self._check_url(change.url)
        if (change.add or change.remove) and change.config is not None:
            raise InvalidRequest(
                "config: send either a new config, or add_addresses and remove_addresses", param="config"
            )
        _check_fault(change.fault, test_key=before.test_key)
        addresses = None
        if change.config is not None:
            addresses = await read_config(before.event_type, change.config)
        delta = await self._delta(before, change)
        if delta is None and all(each is None for each in (change.url, change.status, change.config, change.fault)):
            return before
        after = await self._store.update(
            before,
            url=change.url,
            cause=None if change.status is None else "activate" if change.status == "active" else "pause",
            config=None if change.config is None else _without_addresses(change.config),
            addresses=addresses,
            delta=delta,
            fault=change.fault,
            values_per_day=self._values_per_day[key.account.plan],
        )
        return await self._started(after)

    async def _started(self, webhook: Webhook) -> Webhook:
        """Return the webhook once it gets its events: a pending transaction that is missed does not come again.

        If that takes too long, because no upstream shows its mempool or the follower is away, it starts later.
        """
        (seen,) = await self._seen([webhook])
        for _ in range(MEMPOOL_CHECKS):
            if seen.is_listening:
                break
            await asyncio.sleep(MEMPOOL_CHECK_S)
            (seen,) = await self._seen([webhook])
        return seen

    async def _seen(self, webhooks: list[Webhook]) -> list[Webhook]:
        """The webhooks with `is_listening` as it is now."""
        if not any(map(_needs_mempool, webhooks)):
            return webhooks
        watched = await self._store.mempool_watches(within_s=MEMPOOL_SILENT_S)
        return [
            replace(each, is_listening=not _needs_mempool(each) or watched.get(each.network, -1) >= each.version)
            for each in webhooks
        ]

    async def _delta(self, before: Webhook, change: WebhookChange) -> AddressChange | None:
        if not change.add and not change.remove:
            return None
        if not webhook_filters.takes_addresses(before.event_type):
            raise InvalidRequest(
                f"add_addresses: {before.event_type} webhooks have no addresses", param="add_addresses"
            )
        added = await _addresses(change.add, "add_addresses")
        removed = await _addresses(change.remove, "remove_addresses", but=await _set_of(added))
        return AddressChange(
            add=added,
            remove=removed,
            most=webhook_filters.most_addresses(before.event_type),
        )

    async def delete(self, webhook: Webhook) -> None:
        await self._store.move(webhook, "delete")

    async def resume(self, webhook: Webhook) -> Webhook:
        """Resume a webhook that is paused, or disabled because its receiver returned 410."""
        return await self._started(await self._store.move(webhook, "resume"))

    async def rotate(self, webhook: Webhook) -> CreatedWebhook:
        """Create a new secret. The old one signs as well for another day."""
        secret = secrets.token_bytes(signatures.SECRET_BYTES)
        after = await self._store.rotate(
            webhook.id,
            account=webhook.account,
            secret=self._vault.seal(webhook.id, secret),
            rotated=self._vault.seal_for_previous(webhook.id, secret),
            old_for_s=signatures.ROTATION_S,
        )
        return CreatedWebhook(after, signatures.secret_of(secret))

    def _check_url(self, url: str) -> None:
        try:
            self._guard.check(url)
        except UrlRefused as exc:
            raise InvalidRequest(f"url: {exc}", param="url") from None


def _check_fault(fault: str | None, *, test_key: bool) -> None:
    if not fault:
        return
    if not test_key:
        raise InvalidRequest("fault: only webhooks that were created with a test key can have one", param="fault")
    try:
        fault_plans.plan_for(fault, "webhooks")
    except ValueError as exc:
        raise InvalidRequest(
            f"fault: {str(exc)[:60]!r} is not valid for a webhook; write parts such as delay=2s, duplicate=1, correction",
            param="fault",
        ) from None


def _inherited(key: Key) -> str | None:
    plan = None if key.live or key.fault is None else fault_plans.parts_of(key.fault, "webhooks")
    return None if plan is None else fault_plans.text_of(plan)


def _needs_mempool(webhook: Webhook) -> bool:
    return KINDS[webhook.event_type] == "pending" and webhook.status == "active"


async def read_config(event_type: str, config: Mapping[str, Any]) -> Sequence[bytes] | None:
    """Check the config and return its addresses without duplicates, or None if it has no list. Raises InvalidRequest.

    A webhook without a config starts with an empty list of addresses, where its event type has one.
    """
    await read_filter(event_type, config)
    if not config and webhook_filters.takes_addresses(event_type):
        return []
    given = config.get("addresses")
    return None if given is None else await _addresses(given, "config.addresses")


async def read_filter(event_type: str, config: Mapping[str, Any]) -> WatchFilter:
    """The filter of a config, without its addresses. Raises InvalidRequest. Thousands of values are read in a thread."""
    try:
        if _values_in(config) <= VALUES_PER_TURN:
            return webhook_filters.parse(event_type, config)
        return await request_threads.run(lambda: webhook_filters.parse(event_type, config))
    except BadConfig as exc:
        raise InvalidRequest.naming(f"config.{exc}") from None


def _values_in(config: Mapping[str, Any]) -> int:
    """How many values the lists of a config have, without its addresses."""
    lists = [value for name, value in config.items() if name != "addresses" and isinstance(value, (list, LongText))]
    return sum(map(len, lists)) + sum(len(each) for each in config.get("topics") or () if isinstance(each, list))


async def _addresses(given: Sequence[Any], name: str, *, but: Container[bytes] = ()) -> PackedAddresses:
    """The addresses in order, each once, without those in `but`. A long list is read a part in each turn of the account."""
    addresses = PackedAddresses()
    known = AddressSet()
    try:
        for first in range(0, len(given), ADDRESSES_PER_TURN):
            part = webhook_filters.addresses_of(given[first : first + ADDRESSES_PER_TURN], first, name)
            addresses.extend(each for each in known.added(part) if each not in but)
            await next_turn()
    except BadConfig as exc:
        raise InvalidRequest.naming(str(exc)) from None
    if len(addresses) > HASHED_PER_TURN:
        await known.clear()
    return addresses


async def _set_of(addresses: Sequence[bytes]) -> AddressSet:
    hashed = AddressSet()
    for first in range(0, len(addresses), HASHED_PER_TURN):
        hashed.added(addresses[first : first + HASHED_PER_TURN])
        await next_turn()
    return hashed


def _without_addresses(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "addresses"}
