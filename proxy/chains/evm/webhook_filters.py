"""Parses the config of a webhook into a filter. Each event type has its own members; errors name the invalid one.

    address_activity, ADDRESS_ACTIVITY     addresses; direction, categories, min_value, selectors, topics
    token_transfer, TOKEN_TRANSFER         any of addresses, contracts, from, to; min_value, selectors, topics. B may have
                                           one of these three alone
    nft_transfer, NFT_ACTIVITY             any of addresses, contracts; token_ids of these contracts, selectors, topics. B
                                           may have one of the last two alone
    mined_transaction, MINED_TRANSACTION   tx_hashes
    log                                    any of addresses, topics (as eth_getLogs takes them); selector
    INTERNAL_TRANSFER                      addresses; direction, min_value
    NEW_BLOCK                              nothing
    PENDING_TRANSACTION                    addresses; direction, min_value, selectors

An empty config watches nothing until it gets addresses or another filter; for NEW_BLOCK it is every block. All but the
last type, for which there is no block yet, take `finality` (included, safe, finalized) or `confirmations`. Transfer types
also take `exclude_spam`, which leaves out transfers of zero. Values are in the smallest unit, as decimal text. Addresses
are parsed separately (`addresses_of`): there may be a hundred thousand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from proxy.chains.evm import abi, address, log_filter
from proxy.chains.evm.watch_index import KINDS, WatchFilter, WatchKind
from proxy.core.bounded_json import LongText

MOST_ADDRESSES = 100_000
# Nodes have the same limit for logs.
MOST_LOG_ADDRESSES = 1_000
MOST_VALUES = 1_000
MOST_CONFIRMATIONS = 1_000

_COMMON = frozenset({"finality", "confirmations"})
_MEMBERS: dict[WatchKind, frozenset[str]] = {
    "activity": _COMMON | {"addresses", "direction", "categories", "min_value", "selectors", "topics", "exclude_spam"},
    "token": _COMMON | {"addresses", "contracts", "from", "to", "min_value", "selectors", "topics", "exclude_spam"},
    "nft": _COMMON | {"addresses", "contracts", "token_ids", "selectors", "topics", "exclude_spam"},
    "mined": _COMMON | {"tx_hashes"},
    "log": _COMMON | {"addresses", "topics", "selector"},
    "internal": _COMMON | {"addresses", "direction", "min_value"},
    "block": _COMMON,
    "pending": frozenset({"addresses", "direction", "min_value", "selectors"}),
}
# At least one of these is required, so that no webhook receives a whole chain by mistake.
_NEEDS: dict[WatchKind, tuple[str, ...]] = {
    "activity": ("addresses",),
    "token": ("addresses", "contracts", "from", "to"),
    "nft": ("addresses", "contracts"),
    "mined": ("tx_hashes",),
    "log": ("addresses", "topics"),
    "internal": ("addresses",),
    "block": (),
    "pending": ("addresses",),
}
# In Format B, these filters are enough too.
_ENOUGH = {"TOKEN_TRANSFER": ("min_value", "selectors", "topics"), "NFT_ACTIVITY": ("selectors", "topics")}
# Members by which a webhook is looked up.
_KEYS = ("addresses", "contracts", "from", "to")
_CATEGORIES = frozenset({"native", "erc20", "erc721", "erc1155"})
_UINT = re.compile(r"0|[1-9][0-9]{0,77}", re.ASCII)
_HASH = re.compile(r"0x[0-9a-fA-F]{64}", re.ASCII)
_SELECTOR = re.compile(r"0x[0-9a-fA-F]{8}", re.ASCII)
_SIGNATURE = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]{0,99}\([A-Za-z0-9,()\[\]]{0,400}\)", re.ASCII)

T = TypeVar("T")


class BadConfig(ValueError):
    """Names the member of a config that is wrong, and why."""


def takes_addresses(event_type: str) -> bool:
    return "addresses" in _MEMBERS[KINDS[event_type]]


def most_addresses(event_type: str) -> int:
    return MOST_LOG_ADDRESSES if KINDS[event_type] == "log" else MOST_ADDRESSES


def parse(event_type: str, config: Mapping[str, Any]) -> WatchFilter:
    """The filter without its addresses: only their number matters here."""
    kind = KINDS[event_type]
    _check_members(event_type, kind, config)
    if (addresses := config.get("addresses")) is not None:
        _check_list(addresses, "addresses", most=most_addresses(event_type))
    contracts = _set(config, "contracts", _address)
    token_ids = _set(config, "token_ids", _uint)
    if token_ids and not contracts:
        raise BadConfig("token_ids: the contracts that they are of must be given")
    selectors = _set(config, "selectors", _selector)
    if "selector" in config:
        selectors = frozenset((_one(config, "selector", _selector),))
    finality: Any = _choice(config, "finality", ("included", "safe", "finalized")) or "included"
    confirmations = _confirmations(config)
    if confirmations and finality != "included":
        raise BadConfig("confirmations: give either this or finality")
    return WatchFilter(
        direction=_choice(config, "direction", ("incoming", "outgoing")),
        categories=_set(config, "categories", _category),
        min_value=_one(config, "min_value", _uint) if "min_value" in config else 0,
        contracts=contracts,
        senders=_set(config, "from", _address),
        recipients=_set(config, "to", _address),
        token_ids=token_ids,
        tx_hashes=_set(config, "tx_hashes", _hash),
        topics=_topics(config),
        selectors=selectors,
        finality=finality,
        confirmations=confirmations,
        exclude_spam=_flag(config, "exclude_spam"),
    )


def addresses_of(given: Sequence[Any], first: int = 0, name: str = "config.addresses") -> list[bytes]:
    """A part of a list; `first` is the place of its first item in the whole list, for the message."""
    addresses = []
    for index, text in enumerate(given, first):
        read = address.parse(text) if isinstance(text, str) else None
        if read is None or address.is_mistyped(text):
            raise BadConfig(f"{name}.{index}: is not an address, or its checksum (EIP-55) is wrong")
        addresses.append(read)
    return addresses


def _check_members(event_type: str, kind: WatchKind, config: Mapping[str, Any]) -> None:
    for name in config:
        if name not in _MEMBERS[kind]:
            known = ", ".join(sorted(_MEMBERS[kind]))
            raise BadConfig(f"{name[:40]}: is unknown for {event_type}, which has {known}")
    needs = (*_NEEDS[kind], *_ENOUGH.get(event_type, ()))
    if config and needs and not any(config.get(name) for name in needs):
        raise BadConfig(f"{' or '.join(needs)}: must be given for {event_type}")


def _check_list(value: Any, name: str, *, most: int) -> None:
    if not isinstance(value, (list, LongText)):
        raise BadConfig(f"{name}: must be an array")
    if not value:
        raise BadConfig(f"{name}: must not be empty")
    if len(value) > most:
        raise BadConfig(f"{name}: has {len(value)} values, at most {most} are allowed")


def _set(config: Mapping[str, Any], name: str, read: Callable[[Any], T]) -> frozenset[T]:
    if name not in config:
        return frozenset()
    _check_list(config[name], name, most=MOST_VALUES)
    return frozenset(_read(each, f"{name}.{index}", read) for index, each in enumerate(config[name]))


def _one(config: Mapping[str, Any], name: str, read: Callable[[Any], T]) -> T:
    return _read(config[name], name, read)


def _read(value: Any, name: str, read: Callable[[Any], T]) -> T:
    try:
        return read(value)
    except ValueError as exc:
        raise BadConfig(f"{name}: {exc}") from None


def _choice(config: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> Any:
    value = config.get(name)
    if value is not None and value not in allowed:
        raise BadConfig(f"{name}: must be {' or '.join(allowed)}")
    return value


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise BadConfig(f"{name}: must be true or false")
    return value


def _confirmations(config: Mapping[str, Any]) -> int:
    value = config.get("confirmations", 0)
    if type(value) is not int or not ("confirmations" not in config or 1 <= value <= MOST_CONFIRMATIONS):
        raise BadConfig(f"confirmations: must be a number from 1 to {MOST_CONFIRMATIONS}")
    return value


def _topics(config: Mapping[str, Any]) -> tuple[bytes, ...]:
    if "topics" not in config:
        return ()
    try:
        topics = log_filter.parse({"topics": config["topics"]}).topics
    except ValueError as exc:
        raise BadConfig(f"topics: {exc}") from None
    if not any(topics) and not any(name in config for name in _KEYS):
        raise BadConfig("topics: must name a topic where no addresses are given")
    return topics


# Values. Each raises ValueError with what is allowed


def _address(value: Any) -> bytes:
    parsed = address.parse(value) if isinstance(value, str) else None
    if parsed is None or address.is_mistyped(value):
        raise ValueError("is no address, or its checksum (EIP-55) is wrong")
    return parsed


def _uint(value: Any) -> int:
    if not isinstance(value, str) or not _UINT.fullmatch(value) or int(value) >= 1 << 256:
        raise ValueError("must be a whole number in decimal text, below 2^256")
    return int(value)


def _hash(value: Any) -> str:
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ValueError("must be 32 bytes in hex")
    return value.lower()


def _selector(value: Any) -> bytes:
    if isinstance(value, str) and _SELECTOR.fullmatch(value):
        return bytes.fromhex(value[2:])
    if isinstance(value, str) and _SIGNATURE.fullmatch(value):
        return abi.selector(value)
    raise ValueError("must be four bytes in hex, or a function such as transfer(address,uint256)")


def _category(value: Any) -> str:
    if not isinstance(value, str) or value not in _CATEGORIES:
        raise ValueError(f"must be one of {', '.join(sorted(_CATEGORIES))}")
    return value
