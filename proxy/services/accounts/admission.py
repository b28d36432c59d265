"""Admission: decides whether a request of a key may proceed, for HTTP and sockets alike.

Three checks in this order, all in memory: authentication (a known key), authorization (its scopes and the class of the
network) and limits (both token buckets, then the account's daily quota). A refusal is returned or raised as the error that the
client receives. A refused request costs nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial

from proxy.chains.registry import Network
from proxy.core import access, limits
from proxy.core.access import Key
from proxy.core.presented_key import PresentedKey
from proxy.errors import Fault, Forbidden, InvalidRequest, LeasePending, RateLimited, Reason, Unauthorized
from proxy.services.accounts.keyring import Keyring
from proxy.services.accounts.quotas import Quotas
from proxy.store.shared_memory.bucket_table import SharedBucketTable
from proxy.store.shared_memory.rate_buckets import RateBuckets
from proxy.store.valkey.lease_client import LeaseClient

# The burst of failures that an address may make before it has to wait, in seconds of its rate.
ALLOWANCE_S = 60.0
_DAY_S = 86_400
# How soon a caller that does not wait for a lease may try again.
LEASE_PAUSE_S = 0.005

NO_KEY = "an API key is required: send it in the header X-API-Key or as Authorization: Bearer <API_KEY>"
_NOT_IN_URL = (
    "this API key may not be used in URLs: send it in the header X-API-Key, or allow it in URLs, "
    "in the dashboard under API keys or with: penstock keys set {key} --allow-in-url"
)
_DISABLED = (
    "this API key is disabled: enable it on the dashboard's page API keys; "
    "if it is enabled there, the operator has disabled the account"
)
_TEST_KEY = "test keys (svc_test_) cannot be used on {network}, a live network: use a live key"


class AuthFailures:
    """Failed authentications by client: one token bucket for each address or IPv6 /64, with a minute's allowance. All
    workers of a host share the buckets."""

    def __init__(self, per_minute: int, buckets: SharedBucketTable, note: Callable[[str], None] | None = None) -> None:
        """`note` is called with each address or /64 whose failure was counted."""
        self._note = note
        self._cost_s = 60.0 / per_minute
        self._most = int(ALLOWANCE_S / self._cost_s + limits.TOLERANCE_S)
        self._buckets = buckets

    def count(self, address: str, now: float) -> float:
        """Record a failure. Returns 0 while the address is within its allowance, otherwise the seconds to wait."""
        prefix = access.client_prefix_of(address)
        wait = self._buckets.take(prefix, now, self._cost_s, holds_s=ALLOWANCE_S)
        if not wait and self._note is not None:
            self._note(prefix)
        return wait

    def rate_headers(self, address: str, now: float) -> dict[str, str]:
        """The `X-RateLimit-*` headers of a client without a valid key: the failures that it is allowed at once, and those
        that are left."""
        tag = self._buckets.tag_of(access.client_prefix_of(address))
        edge = max(self._buckets.edge(tag), now - ALLOWANCE_S)
        left = min(self._most, max(0, int((now - edge + limits.TOLERANCE_S) / self._cost_s)))
        return _rate_headers(self._most, left, max(0.0, edge + ALLOWANCE_S - now))


class Admission:
    def __init__(
        self,
        keyring: Keyring,
        buckets: RateBuckets,
        quotas: Quotas,
        failures: AuthFailures,
        leases: LeaseClient | None = None,
    ) -> None:
        """`leases`: leases parts of limits that all hosts share."""
        self._leases = leases
        self._keyring = keyring
        self._quotas = quotas
        self._failures = failures
        self.buckets = buckets

    def __repr__(self) -> str:
        return f"<Admission {self._keyring!r} {self.buckets!r}>"

    def known(self, presented: PresentedKey | None, now: float) -> Key | None:
        """The key's record, or None. Does not count a failure."""
        return self._keyring.find(presented.text, now) if presented is not None else None

    def authenticate(self, presented: PresentedKey | None, address: str, now: float, *, origin: str = "") -> Key:
        """Authenticate a request. Raises if the key is unknown, not allowed in URLs, or restricted to other addresses or
        origins."""
        if presented is None:
            raise self.unknown(address, now, NO_KEY)
        if not presented.text:
            raise InvalidRequest("the request has two different API keys: send one", reason="key")
        key = self._keyring.find(presented.text, now)
        if key is None:
            raise self.unknown(address, now, access.wrong_key_words(presented.text))
        if presented.is_in_url and not key.allow_in_url:
            raise Forbidden(_NOT_IN_URL.format(key=key.id), reason="url")
        return _allowed_from(key, address, origin)

    def authenticate_by_id(
        self, key_id: str, account: str, address: str, now: float, *, origin: str, words: str
    ) -> Key:
        """Like `authenticate`, by the id of a key of the account. `words`: the error message if the id is empty or is not that
        of one of the account's keys."""
        key = self._keyring.by_id(key_id, now)
        if key is None or key.account.id != account:
            raise self.unknown(address, now, words)
        return _allowed_from(key, address, origin)

    def unknown(self, address: str, now: float, words: str, *, reason: Reason = "key") -> Fault:
        """Count a failed authentication and return the error for the client."""
        if wait := self._failures.count(address, now):
            message = "too many failed authentications from this address"
            return RateLimited(message, retry_after_s=math.ceil(wait), reason="rate")
        return Unauthorized(words, reason=reason)

    def authorize(self, key: Key, scopes: int, network: Network | None = None) -> Fault | None:
        """The error if the key lacks all of these scopes or may not use the network, otherwise None."""
        if key.disabled:
            return Forbidden(_DISABLED, reason="disabled")
        if not key.may(scopes):
            return missing_scope(scopes)
        if network is not None and network.is_live and not key.live:
            return Forbidden(_TEST_KEY.format(network=network.id), reason="mode")
        if network is not None and key.restrictions is not None:
            return key.restrictions.network_refusal(network.id)
        return None

    def charge(self, key: Key, requests: int, units: int, now: float) -> Fault | None:
        """Charge the buckets of account and key, and the daily quota. Returns the error if one of them is exhausted."""
        account = key.account
        if account.exhausted and account.day_limit:
            return self._day_is_over() if self._quotas.is_over(account) else _lease_pending()
        rate = key.rate
        if key.own_rate is None:
            wait = self.buckets.take(rate.bucket_index, now, requests * rate.request_s, units * rate.unit_s)
        else:
            wait = self.buckets.take_both(rate, key.own_rate, now, requests=requests, units=units)
        if wait:
            return self._refusal(key, requests, units, wait) if wait > 0.0 else self._pending(key, requests, units)
        if account.day_limit:
            self._quotas.count(account, requests)
        return None

    def refill_s(self, key: Key, requests: int, units: int) -> float:
        """How long the buckets of account and key need to refill what this takes."""
        rate, own = key.rate, key.own_rate or key.rate
        return max(requests * max(rate.request_s, own.request_s), units * max(rate.unit_s, own.unit_s))

    # Limits that all hosts share

    def _pending(self, key: Key, requests: int, units: int) -> Fault:
        """This host has no lease that is large enough: request one."""
        refusal = self._refusal(key, requests, units, LEASE_PAUSE_S)
        if not isinstance(refusal, RateLimited):
            return refusal
        assert self._leases is not None
        self._leases.hint(*self._need(self._leases, key, requests, units))
        return LeasePending(refusal.message, retry_after_s=1, wait_s=LEASE_PAUSE_S, reason="rate")

    def _need(self, leases: LeaseClient, key: Key, requests: int, units: int) -> tuple[int, tuple[float, float]]:
        """The bucket index of the limit that a request has to wait for, and the tokens it needs."""
        limit = key.rate if key.own_rate is None else leases.lacking(key.rate, key.own_rate, requests, units)
        return limit.bucket_index, (requests * limit.request_s, units * limit.unit_s)

    def may_wait(self, refusal: Fault | None, began: float) -> bool:
        """Whether the request was refused only because a lease is pending, and it has not waited for the lease too long."""
        return isinstance(refusal, LeasePending) and self._leases is not None and self._leases.may_wait(began)

    def when_leased(self, key: Key, requests: int, units: int, again: Callable[[], None]) -> None:
        """Call `again` when the request can be charged, or refused."""
        assert self._leases is not None
        self._leases.wait(*self._need(self._leases, key, requests, units), again)

    async def admit(self, key: Key, requests: int, units: int, now: float) -> Fault | None:
        """The same as `charge`, for requests that can wait for a lease."""
        while self.may_wait(refusal := self.charge(key, requests, units, now), now):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.when_leased(key, requests, units, partial(_wake, future))
            await future
        return refusal

    def refund(self, key: Key, requests: int, units: int) -> None:
        """Return the charge of a call that failed through our own fault."""
        rate = key.rate
        if key.own_rate is None:
            self.buckets.give_back(rate.bucket_index, requests * rate.request_s, units * rate.unit_s)
        else:
            self.buckets.give_back_both(rate, key.own_rate, requests=requests, units=units)
        if requests and key.account.day_limit:
            key.account.left += requests

    def headers(self, key: Key, now: float) -> dict[str, str]:
        """The three `X-RateLimit-*` headers. They describe the tighter request bucket."""
        rate = self.buckets.tighter(key.rate, key.own_rate, now)
        edge = self.buckets.edge(rate.bucket_index)
        remaining = limits.remaining(edge, now, rate.requests_per_second)
        return _rate_headers(rate.requests_per_second, remaining, limits.full_in(edge, now))

    def headers_without_key(self, address: str) -> dict[str, str]:
        return self._failures.rate_headers(address, time.monotonic())

    def _refusal(self, key: Key, requests: int, units: int, wait: float) -> Fault:
        limit = key.own_rate or key.rate
        if not limits.fits_ever(requests * limit.request_s, units * limit.unit_s):
            what = f"{requests} requests of {units} compute units" if requests else f"a size of {units} compute units"
            return InvalidRequest(
                f"{what} can never fit the limit of "
                f"{limit.requests_per_second} requests and {limit.units_per_second} units a second"
            )
        message = f"rate limit exceeded: {_rates_of(key)}"
        return RateLimited(message, retry_after_s=math.ceil(wait), wait_s=wait, reason="rate")

    def _day_is_over(self) -> Fault:
        left_s = _DAY_S - int(time.time()) % _DAY_S
        return RateLimited(
            "daily quota exceeded: it resets at 00:00 UTC",
            retry_after_s=left_s,
            details={"reason": "daily_quota"},
            reason="quota",
        )


def missing_scope(scopes: int) -> Forbidden:
    names = " or ".join(access.scope_names(scopes))
    return Forbidden(f"this API key lacks the scope {names}: {access.remedy('scopes')}", reason="scope")


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _rate_headers(limit: int, remaining: int, full_in_s: float) -> dict[str, str]:
    return {
        "X-RateLimit-Limit": str(limit),
        "X-RateLimit-Remaining": str(remaining),
        "X-RateLimit-Reset": str(math.ceil(time.time() + full_in_s)),
    }


def _rates_of(key: Key) -> str:
    """The limits in words."""
    rate, own = key.rate, key.own_rate
    words = f"{rate.requests_per_second} requests and {rate.units_per_second} compute units a second for the account"
    return words if own is None else f"{words}, {own.requests_per_second} and {own.units_per_second} for this key"


def _lease_pending() -> Fault:
    """Little of the daily quota is left, so this worker needs a new lease before it admits more."""
    message = "the daily quota is almost used up and is being counted: retry in a second"
    return RateLimited(message, retry_after_s=1, reason="quota")


def _allowed_from(key: Key, address: str, origin: str) -> Key:
    """The key. Raises if it is restricted to other addresses or origins."""
    if key.restrictions is not None and (refusal := key.restrictions.refusal(address, origin)):
        raise refusal
    return key
