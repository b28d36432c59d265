"""API keys: their format, digest, scopes, network class and restrictions.

A key is `svc_live_` or `svc_test_`, thirty random base62 characters, and six characters of CRC32 over everything before
them, so a mistyped or guessed key is refused without a look-up. Only the keyed digest of a key is ever stored. This
module does not deal with storage or rate limits.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from proxy.core.fault_plans import FaultPlan
from proxy.core.limits import BucketRates
from proxy.core.sessions import ADMIN_PREFIX
from proxy.core.usage import KeyTallies
from proxy.errors import Forbidden

Mode = Literal["live", "test"]
MODES: tuple[Mode, ...] = ("live", "test")
KEY_PREFIXES = tuple(f"svc_{mode}_" for mode in MODES)

BAD_KEY = "the API key is not valid"
_KEYS = "API keys start with svc_live_ or svc_test_"
_HOOK_PREFIX = "whsec_"
_QUOTES = frozenset("\"'`“”‘’<>")

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CHANCE, _CHECK = 30, 6
_FORM = re.compile(r"svc_(?:live|test)_[0-9A-Za-z]{36}", re.ASCII)

# The scopes of a key for which none are named.
USUAL_SCOPES = (
    *("rpc:read", "rpc:write", "data:read", "wallets:manage", "webhooks:manage", "gas:manage", "bundler:send"),
    # Records of all requests of the account. Every key may read those of its own.
    "requests:read",
)
# Scopes of the account's own operations, which a key has only if they are named.
ACCOUNT_SCOPES = ("usage:read", "activity:read", "keys:manage", "members:manage", "account:manage")
SCOPES = (*USUAL_SCOPES, *ACCOUNT_SCOPES)
SCOPE_BIT = {name: 1 << index for index, name in enumerate(SCOPES)}
ALL_SCOPES = (1 << len(SCOPES)) - 1
_USUAL_BITS = (1 << len(USUAL_SCOPES)) - 1
# One in this many good requests of an account is recorded, unless its plan says otherwise.
USUAL_SAMPLE = 100
# The number of requests until the next one is sampled, for accounts without a sample.
NEVER_SAMPLED = 1 << 60


def _base62(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, digit = divmod(number, 62)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))


def _check(stem: str) -> str:
    return _base62(crc32(stem.encode("ascii")), _CHECK)


def mint(mode: Mode, entropy: bytes) -> str:
    """A new key. With 32 bytes of entropy, the modulo bias is below 2**-77: a key has 178 random bits."""
    stem = f"svc_{mode}_{_base62(int.from_bytes(entropy, 'big') % 62**_CHANCE, _CHANCE)}"
    return stem + _check(stem)


def is_well_formed(key: str) -> bool:
    return _FORM.fullmatch(key) is not None and _check(key[:-_CHECK]) == key[-_CHECK:]


def has_key(text: str) -> bool:
    """Whether an API key may be part of the text."""
    return any(prefix in text for prefix in KEY_PREFIXES)


def wrong_key_words(text: str) -> str:
    """Why a text that is not a known key is refused. The message does not repeat the text."""
    if text.startswith(ADMIN_PREFIX):
        return f"{BAD_KEY}: this is an operator's admin token, which opens /v1/admin only; {_KEYS}"
    if text.startswith(_HOOK_PREFIX):
        return f"{BAD_KEY}: this is the signing secret of a webhook; {_KEYS}"
    if text[:1] in _QUOTES or text[-1:] in _QUOTES:
        return f"{BAD_KEY}: send it without the quotes around it"
    if text[:7].lower() == "bearer ":
        return f"{BAD_KEY}: send it without Bearer in X-API-Key"
    if not text.startswith(KEY_PREFIXES):
        return f"{BAD_KEY}: {_KEYS}"
    return BAD_KEY if is_well_formed(text) else f"{BAD_KEY}: it is mistyped or incomplete"


def hint_of(key: str) -> str:
    """The part of a key that may be shown after its creation."""
    return f"{key[:9]}…{key[-4:]}"


def digest(pepper: bytes, key: str) -> bytes:
    return hmac.digest(pepper, key.encode("ascii"), "sha256")


def scope_bits(names: list[str] | tuple[str, ...]) -> int:
    """No scopes given means the usual ones."""
    bits = 0
    for name in names:
        bits |= SCOPE_BIT[name]
    return bits or _USUAL_BITS


def scope_names(bits: int) -> list[str]:
    return [name for name, bit in SCOPE_BIT.items() if bits & bit]


_NETWORK = re.compile(r"[a-z0-9-]{1,40}/[a-z0-9-]{1,40}", re.ASCII)
_METHOD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}", re.ASCII)
_CONTRACT = re.compile(r"0x[0-9a-fA-F]{40}", re.ASCII)
_ORIGIN = re.compile(r"https?://(?:\*\.)?[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?(?::[0-9]{1,5})?", re.ASCII)


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address of a client, if it is one. Dual-stack sockets show IPv4 as IPv4-mapped addresses (RFC 4291, 2.5.5.2)."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address


def client_prefix_of(address: str) -> str:
    """The address under which a client is counted: its /64 for IPv6, whose hosts change the rest at will (RFC 8981)."""
    if ":" not in address:
        return address
    parsed = address_of(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))
    return address if parsed is None else str(parsed)


def block_of(text: str) -> str:
    """A block of addresses in its usual form. Raises ValueError with the reason."""
    try:
        return str(ipaddress.ip_network(text.strip(), strict=False))
    except ValueError:
        raise ValueError(f"{text[:100]!r} is no address or block: write 203.0.113.7 or 203.0.113.0/24") from None


def network_name(text: str) -> str:
    """A network in its usual form. Raises ValueError with the reason."""
    if not _NETWORK.fullmatch(text):
        raise ValueError(f"{text[:100]!r} is not a network: write it as chain/network")
    return text


def method_name(text: str) -> str:
    """A method of JSON-RPC. Raises ValueError with the reason."""
    if not _METHOD.fullmatch(text):
        raise ValueError(f"{text[:100]!r} is not a method: write eth_call")
    return text


def contract_address(text: str) -> str:
    """A contract of an EVM chain, as it is written. Raises ValueError with the reason."""
    if not _CONTRACT.fullmatch(text):
        raise ValueError(f"{text[:100]!r} is not a contract's address: write 0x and 40 hex digits")
    return text


def origin_of(text: str) -> str:
    """An origin of browsers in its usual form, `https://*.example.com` for all hosts below one."""
    origin = text.strip().lower().rstrip("/")
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"{text[:100]!r} is not an origin: write https://app.example.com or https://*.example.com")
    return origin


@dataclass(frozen=True, slots=True)
class AllowedUses:
    """The networks, methods and contracts that a key may be used for. Empty means all. Contracts are in lower case."""

    networks: frozenset[str] = frozenset()
    methods: frozenset[str] = frozenset()
    contracts: frozenset[str] = frozenset()


_ANY_USE = AllowedUses()


class KeyRestrictions:
    """IP ranges and origins that a key may be used from, and what it may be used for. Each that is not empty must match."""

    def __init__(self, blocks: tuple[str, ...], origins: tuple[str, ...], uses: AllowedUses = _ANY_USE) -> None:
        self.blocks = blocks
        self.origins = origins
        self.uses = uses
        # Parsed at first use: most processes never check requests against them.
        self._ranges: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []

    @property
    def _values(self) -> tuple[object, ...]:
        return self.blocks, self.origins, self.uses

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyRestrictions) and self._values == other._values

    def __hash__(self) -> int:
        return hash(self._values)

    def __repr__(self) -> str:
        uses = sorted(self.uses.networks | self.uses.methods | self.uses.contracts)
        return f"<KeyRestrictions {', '.join((*self.blocks, *self.origins, *uses))}>"

    def has_network(self, network: str) -> bool:
        return not self.uses.networks or network in self.uses.networks

    def network_refusal(self, network: str) -> Forbidden | None:
        """The error for a request to the network, or None if it is allowed."""
        if self.has_network(network):
            return None
        return Forbidden(f"this API key may not be used on {network}: {remedy('allowed_networks')}", reason="network")

    def method_refusal(self, method: str) -> Forbidden | None:
        """The error for a call of the method, or None if it is allowed."""
        if not self.uses.methods or method in self.uses.methods:
            return None
        return Forbidden(f"this API key may not call {method}: {remedy('allowed_methods')}", reason="scope")

    @property
    def limits_calls(self) -> bool:
        """Whether each call must be checked, besides the request that contains it."""
        return bool(self.uses.methods or self.uses.contracts)

    @property
    def limits_contracts(self) -> bool:
        return bool(self.uses.contracts)

    def contract_refusal(self, contracts: Sequence[str] | None) -> Forbidden | None:
        """The error for a request that reaches these contracts, which are in lower case, or any if None. None if it is
        allowed."""
        if not self.uses.contracts:
            return None
        if contracts is None:
            message = "this API key is limited to some contracts, and this may reach others"
            return Forbidden(f"{message}: {remedy('allowed_contracts')}", reason="contract")
        for contract in contracts:
            if contract not in self.uses.contracts:
                message = f"this API key may not be used for the contract {contract}"
                return Forbidden(f"{message}: {remedy('allowed_contracts')}", reason="contract")
        return None

    def refusal(self, address: str, origin: str) -> Forbidden | None:
        """The error for a request from there, or None if it is allowed."""
        if self.blocks and not self._has_address(address):
            return Forbidden(f"{_wrong_address(address)}: {remedy('allowed_ips')}", reason="ip")
        if self.origins and not self.has_origin(origin):
            return Forbidden(f"{_wrong_origin(origin)}: {remedy('allowed_origins')}", reason="origin")
        return None

    def _has_address(self, address: str) -> bool:
        if not self._ranges:
            self._ranges = [ipaddress.ip_network(block) for block in self.blocks]
        parsed = address_of(address)
        return parsed is not None and any(parsed in block for block in self._ranges)

    def has_origin(self, origin: str) -> bool:
        """Whether the list has this origin, or a pattern for it."""
        origin = origin.lower()
        if "*" in origin or not _ORIGIN.fullmatch(origin):
            return False
        for allowed in self.origins:
            scheme, star, host = allowed.partition("*")
            if origin == allowed or (star and origin.startswith(scheme) and origin.endswith(host)):
                return True
        return False


def remedy(member: str) -> str:
    """The remedy that the account's holder has for a refusal because of this member of the key."""
    return f"change its {member} on the dashboard's page API keys, or with PATCH /v1/account/keys/{{id}}"


def _wrong_address(address: str) -> str:
    """Names the address that was compared: behind a proxy, it may differ from the one that the client knows. A forwarded text
    that is not an address is not repeated."""
    parsed = address_of(address)
    if parsed is None:
        return "this API key is restricted to some addresses, and the address of this request is not known"
    return f"this API key may not be used from the address {parsed}"


def _wrong_origin(origin: str) -> str:
    if not origin:
        return "this API key may be used only by web pages of some origins, and this request has no Origin header"
    named = f"the origin {origin}" if _ORIGIN.fullmatch(origin.lower()) else "this origin"
    return f"this API key may not be used from {named}"


def restrictions_of(blocks: list[str], origins: list[str], uses: AllowedUses = _ANY_USE) -> KeyRestrictions | None:
    if blocks or origins or uses.networks or uses.methods or uses.contracts:
        return KeyRestrictions(tuple(blocks), tuple(origins), uses)
    return None


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a plan, or of one account's own agreement. 0 requests per day means no daily limit."""

    requests_per_second: int
    units_per_second: int
    requests_per_day: int


class Account:
    """An account as a worker sees it: its daily allowance, leased from the store in chunks (services/accounts/quotas)."""

    __slots__ = (
        "captured_until",
        "day_limit",
        "exhausted",
        "id",
        "left",
        "plan",
        "plan_sample",
        "records_params",
        "remaining",
        "sample_every",
        "unsampled",
    )

    def __init__(
        self,
        *,
        id: str,  # noqa: A002
        plan: str,
        day_limit: int,
        exhausted: bool = False,
        sample_every: int = USUAL_SAMPLE,
    ) -> None:
        self.id = id
        self.plan = plan
        self.day_limit = day_limit
        # The requests of the lease that are unused; negative if requests were admitted before the next lease.
        self.left = 0
        # The remaining daily quota beyond the lease, as last read: other workers may have used some since.
        self.remaining = day_limit
        self.exhausted = exhausted
        # One in `sample_every` good requests is recorded (0: none). `unsampled`: how many are left until the next one.
        # `records_params`: whether records have the params.
        self.sample_every = sample_every
        self.unsampled = sample_every
        self.records_params = False
        # While its requests are captured, all are samples: until this Unix time, and `plan_sample` applies afterwards.
        self.captured_until = 0.0
        self.plan_sample = sample_every

    def sample(self, every: int, captured_until: float = 0.0) -> None:
        """One in `every` good requests is recorded, and until a Unix time all of them."""
        self.plan_sample, self.captured_until = every, captured_until
        self.sample_every = 1 if captured_until else every
        if captured_until:
            self.unsampled = min(self.unsampled, 1)

    def is_captured(self, now: float) -> bool:
        """Whether all its requests are recorded. `now`: the Unix time."""
        if self.captured_until and now >= self.captured_until:
            self.sample(self.plan_sample)
        return self.captured_until > 0.0

    def passed_over(self) -> None:
        """A good request was not sampled."""
        self.unsampled -= 1

    def is_sampled(self) -> bool:
        """Whether the request that has just ended is a sample."""
        self.unsampled -= 1
        if self.unsampled > 0:
            return False
        self.unsampled = self.sample_every or NEVER_SAMPLED
        return self.sample_every > 0

    def __repr__(self) -> str:
        state = "exhausted" if self.exhausted else f"{self.left} leased"
        return f"<Account {self.id} {self.plan} {self.day_limit or 'unlimited'}/day, {state}>"


class Key:
    """A key as a worker sees it. A changed key is a new object, and `alive` of the old one becomes false.

    `rate` is the account's, shared by all its keys. `own_rate` is set if the key's own limits are lower.
    """

    __slots__ = (
        "account",
        "alive",
        "allow_in_url",
        "counts_day",
        "digest",
        "directives",
        "disabled",
        "expires_at",
        "fault",
        "id",
        "lineage",
        "live",
        "needs_full_checks",
        "own_rate",
        "private_transactions",
        "rate",
        "records_params",
        "restrictions",
        "scopes",
        "tallies",
    )

    def __init__(
        self,
        *,
        id: str,  # noqa: A002
        lineage: str,
        digest: bytes,
        live: bool,
        scopes: int,
        account: Account,
        rate: BucketRates,
        own_rate: BucketRates | None = None,
        disabled: bool,
        expires_at: float,
        restrictions: KeyRestrictions | None = None,
        directives: frozenset[str] = frozenset(),
        fault: FaultPlan | None = None,
        allow_in_url: bool = False,
        private_transactions: bool = False,
    ) -> None:
        self.id = id
        self.lineage = lineage
        self.digest = digest
        self.live = live
        self.scopes = scopes
        self.account = account
        # Whether the account has a daily limit. If that changes, its keys become new objects.
        self.counts_day = account.day_limit > 0
        # The same for recording params: such calls take the long path, which reads their params.
        self.records_params = account.records_params
        self.rate = rate
        self.own_rate = own_rate
        self.disabled = disabled
        self.restrictions = restrictions
        # The directives that its requests may use (core/directives).
        self.directives = directives
        # The faults to inject into replies to this test key, if any.
        self.fault = fault
        # Whether requests may have the key in their URL.
        self.allow_in_url = allow_in_url
        # Whether its transactions go to relays only, and never to the public mempool.
        self.private_transactions = private_transactions
        # Whether the short path must not serve the key, because it needs more checks than the account's buckets.
        self.needs_full_checks = disabled or restrictions is not None or own_rate is not None
        self.expires_at, self.alive = expires_at, True
        # Its usage counts. The keyring replaces these with tallies that are written to the store.
        self.tallies = KeyTallies(account.id, id)

    def invalidate(self) -> None:
        """The key was changed, was revoked, or has expired: holders of this object must look the key up again."""
        self.alive = False

    def may(self, scopes: int) -> bool:
        """Whether the key has at least one of these scopes."""
        return self.scopes & scopes != 0

    def may_use(self, network: str, *, is_live: bool) -> bool:
        """Whether the key may be used on the network at all, whatever its scopes."""
        return (self.live or not is_live) and (self.restrictions is None or self.restrictions.has_network(network))

    @property
    def only_networks(self) -> list[str] | None:
        """The networks that the key is limited to, or None."""
        if self.restrictions is None or not self.restrictions.uses.networks:
            return None
        return sorted(self.restrictions.uses.networks)

    def __repr__(self) -> str:
        state = "disabled" if self.disabled else "alive" if self.alive else "replaced"
        rate = self.own_rate or self.rate
        return f"<Key {self.id} {'live' if self.live else 'test'} {rate.requests_per_second}/s {state}>"
