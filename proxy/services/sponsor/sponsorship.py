"""Sponsors user operations under gas policies.

The steps, in order: parse the operation, compute its maximum cost at the current price, check the policy's rules, sign, and
then, in one statement, reserve the maximum cost together with the signature. A signature is returned only once it is reserved.
Nothing is written before the reservation and nothing can fail after it, so a repeated request gets the first signature again
and reserves nothing more.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, assert_never
from weakref import WeakValueDictionary

from proxy import telemetry
from proxy.chains.evm import abi, paymaster, policy, reached_contracts, user_operation
from proxy.chains.evm.paymaster import PaymasterTerms
from proxy.chains.evm.policy import PolicyOperation, Refusal
from proxy.chains.evm.user_operation import BadOperation, UserOperation
from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.core.access import Key, KeyRestrictions
from proxy.errors import Fault, Forbidden, InternalError, InvalidRequest, Unavailable
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.sponsor.account_versions import AccountVersions
from proxy.services.sponsor.costs import SponsorCosts
from proxy.services.sponsor.paymasters import Paymaster, Paymasters
from proxy.services.sponsor.policies import EffectivePolicy, PolicyService
from proxy.store.postgres.ledger import LedgerStore, ReserveRefusal, ReserveRequest
from proxy.store.postgres.policies import absent

# A signature is valid from this long before now, because the time of the latest block is some seconds in the past; and from
# before the latest block in any case, because bundlers simulate operations on that block. A chain without transactions may
# have made its latest block hours ago. A development chain can skip hours before its next block.
BACKDATED_S = 30
# The longest validity of a signature, from BACKDATED_S before now to its end.
MAX_VALIDITY_S = 300
# A signature is returned again while at least one FRESH-th of its validity is left.
FRESH = 5
# How often a request is decided again because its policy changed meanwhile, or because another policy signed the same
# operation in the same second.
TRIES = 5
# The maximum number of calls estimated one by one for an account that is not deployed yet.
MOST_ESTIMATED = 10
_TRANSACTION_GAS = 21_000
# Fields of the request that are ignored: the paymaster is chosen here, and the account signs afterwards.
_IGNORED = frozenset({"paymaster", "paymasterData", "paymasterAndData", "signature"})
_LIMITS = ("paymasterVerificationGasLimit", "paymasterPostOpGasLimit")
_GAS = ("callGasLimit", "verificationGasLimit", "preVerificationGas", "maxFeePerGas", "maxPriorityFeePerGas")


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """The time of the latest block, and the earliest time of the following one, in seconds."""

    latest: int
    following: int


@dataclass(frozen=True, slots=True)
class Sponsorship:
    """The paymaster's data for the operation that it was signed for. `worst`: the most that the operation can cost, in
    pico-dollars."""

    paymaster: Paymaster
    data: bytes
    operation: UserOperation
    worst: int = 0


@dataclass(frozen=True, slots=True)
class SponsorRequest:
    """A parsed request for sponsorship. `operation` names the paymaster, but has no paymaster data yet."""

    key: Key
    network: Network
    paymaster: Paymaster
    operation: UserOperation
    policy_id: str


class SponsorService:
    def __init__(
        self,
        policies: PolicyService,
        ledger: LedgerStore,
        paymasters: Paymasters,
        versions: AccountVersions,
        costs: SponsorCosts,
        internal_calls: InternalCalls,
        *,
        daily_limits: Mapping[str, int | None],
        refused: Callable[[str, bytes, str, str], None] = lambda *_: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`daily_limits`: the most that is sponsored for an account per day, in pico-dollars by plan; None for no limit.
        `refused` is called with the policy, the sender, the rule and the message of each refusal."""
        self._refused = refused
        self._policies = policies
        self._ledger = ledger
        self._paymasters = paymasters
        self._versions = versions
        self._costs = costs
        self._internal_calls = internal_calls
        self._daily_limits = daily_limits
        self._wall = wall
        # One reservation at a time per policy, or per account if the account has a daily limit. The database serializes them in
        # any case; waiting here does not hold a connection.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<SponsorService with {self._paymasters!r}>"

    # Parsing

    async def read(
        self,
        key: Key,
        network: Network,
        given: Mapping[str, Any],
        *,
        policy_id: str,
        entry_point: str | None,
        draft: bool = False,
        completes: bool = False,
    ) -> SponsorRequest:
        """Parse a request. Raises BadOperation, which names the invalid field; a draft may lack the gas fields. `completes`:
        adds the init code that a wallet created here still needs."""
        if "user_operations" not in family_of(network).features:
            raise InvalidRequest(f"chain: {network.id} has no user operations to sponsor", param="chain")
        version = await self._versions.find(network, given, entry_point)
        payer = self._paymasters.find(network, version)
        for name in () if draft else _GAS:
            if given.get(name) is None:
                raise BadOperation(f"{name}: is missing")
        fields = {name: value for name, value in given.items() if name not in _IGNORED and value is not None}
        if version != "0.6":
            for name, limit in zip(_LIMITS, payer.gas, strict=True):
                fields.setdefault(name, hex(limit))
            fields |= {"paymaster": "0x" + payer.address.hex(), "paymasterData": "0x"}
        operation = user_operation.parse(fields, version, draft=True)
        if version == "0.6":
            operation = paymaster.funded(operation, payer.address)
        if completes and not operation.init_code:
            operation = replace(operation, init_code=await self._versions.init_code(key, network, operation.sender))
        if key.restrictions is not None and key.restrictions.limits_contracts:
            _require_contracts(key.restrictions, operation)
        return SponsorRequest(key, network, payer, operation, policy_id)

    # Sponsoring

    async def stub(self, request: SponsorRequest) -> Sponsorship:
        """Placeholder data for estimates: it has the size and form of a real signature and is invalid on the chain. Nothing is
        reserved."""
        with self._recorded_refusals(request):
            await self._decide(request, None)
        payer = request.paymaster
        terms = PaymasterTerms(payer.address, payer.chain_id, 2**48 - 1, 2**48 - 1)
        data = paymaster.data_of(terms, paymaster.STUB_SIGNATURE)
        return Sponsorship(payer, data, request.operation)

    async def sponsor(self, request: SponsorRequest) -> Sponsorship:
        with self._recorded_refusals(request):
            return await self._sponsor(request)

    @contextmanager
    def _recorded_refusals(self, request: SponsorRequest) -> Iterator[None]:
        """Record a refusal by a rule before it propagates."""
        try:
            yield
        except Forbidden as fault:
            if fault.details and "rule" in fault.details:
                self._refused(request.policy_id, request.operation.sender, fault.details["rule"], str(fault))
            raise

    async def _sponsor(self, request: SponsorRequest) -> Sponsorship:
        operation, payer = request.operation, request.paymaster
        price = await self._costs.coin(request.network)
        wei = paymaster.worst_gas(operation) * operation.max_fee_wei
        worst = policy.cost(wei, price=price, decimals=request.network.chain.native.decimals)
        effective = await self._decide(request, worst)
        delegate = await self._delegate(request)
        sender_nonce = await self._sender_nonce(request)
        times = await self._block_times(request.network)
        for attempt in range(TRIES):
            reservation = self._signed(
                request,
                effective,
                worst=worst,
                price=price,
                sender_nonce=sender_nonce,
                delegate=delegate,
                times=times,
                shorter_s=attempt,
            )
            lock_id = request.policy_id if reservation.account_most is None else request.key.account.id
            async with self._locks.setdefault(lock_id, asyncio.Lock()):
                outcome = await self._ledger.reserve(reservation)
            telemetry.sponsorships_total.labels(request.network.id, outcome.kind).inc()
            match outcome.kind:
                case "granted" | "same":
                    return Sponsorship(payer, outcome.data, operation, outcome.worst)
                case "stale":
                    effective = await self._decide(request, worst, fresh=True)
                case "twice":
                    pass
                case refusal:
                    raise _refused(request, refusal, outcome.left)
        raise Unavailable("the policy is changing too often; try again")

    async def _decide(self, request: SponsorRequest, worst: int | None, *, fresh: bool = False) -> EffectivePolicy:
        """The policy that allows the operation. Only the newest revision may refuse it."""
        account = request.key.account.id
        effective = await self._policies.effective(request.policy_id, account=account, fresh=fresh)
        refusal = await self._refusal(request, effective, worst)
        if refusal is not None and not fresh:
            effective = await self._policies.effective(request.policy_id, account=account, fresh=True)
            refusal = await self._refusal(request, effective, worst)
        if refusal is not None:
            telemetry.sponsorships_total.labels(request.network.id, refusal.rule).inc()
            raise _forbidden(refusal)
        return effective

    async def _refusal(self, request: SponsorRequest, effective: EffectivePolicy, worst: int | None) -> Refusal | None:
        stored = effective.policy
        if stored.network != request.network.id:
            raise InvalidRequest(
                f"policy_id: the policy is for {stored.network}, not for {request.network.id}", param="policy_id"
            )
        if stored.status != "active":
            return Refusal("status", f"the policy is {stored.status}")
        operation, rules = request.operation, effective.rules
        facts = PolicyOperation(
            sender=operation.sender,
            calls=paymaster.inner_calls(operation.call_data) if rules.reads_calls else None,
            max_fee_wei=operation.max_fee_wei,
            worst=worst,
            now=self._wall(),
        )
        refusal = policy.decide(rules, facts) or await self._overpriced(request)
        if refusal is not None:
            return refusal
        if rules.min_gas_efficiency is None or worst is None:
            return None
        return policy.too_wasteful(rules, expected_gas=await self._expected_gas(request), call_gas=operation.call_gas)

    def _signed(
        self,
        request: SponsorRequest,
        effective: EffectivePolicy,
        *,
        worst: int,
        price: int,
        sender_nonce: int,
        delegate: bytes | None,
        times: BlockTimes,
        shorter_s: int,
    ) -> ReserveRequest:
        """Sign the operation; the signature is not returned to the client until it is reserved. `shorter_s` shortens the
        validity, so that a retry produces another signature than the attempt before it."""
        operation, payer = request.operation, request.paymaster
        now = int(self._wall())
        life_s = _life_s(effective.rules, now)
        timeless = PaymasterTerms(payer.address, payer.chain_id, 0, 0, sender_nonce)
        terms = _valid_for(timeless, life_s - shorter_s, now, times)
        data = paymaster.data_of(terms, payer.signer.sign(paymaster.message(operation, terms)))
        final = paymaster.funded(operation, payer.address, gas=operation.paymaster_gas, data=data)
        return ReserveRequest(
            policy=effective.policy.id,
            revision=effective.policy.revision,
            network=request.network.id,
            entry_point=payer.entry_point,
            sender=operation.sender,
            nonce=operation.nonce,
            digest=paymaster.hash_of(operation, timeless),
            op_hash=user_operation.hash_of(final, payer.entry_point, payer.chain_id, delegate=delegate),
            data=data,
            worst=worst,
            price=price,
            valid_until=terms.valid_until,
            fresh_until=times.following + min(life_s, max(1, life_s // FRESH)),
            block=self._final(request.network),
            at=datetime.datetime.fromtimestamp(now, datetime.UTC),
            account_most=self._daily_limits[request.key.account.plan],
        )

    # Reads of the chain and of prices

    def _final(self, network: Network) -> int:
        """The final block, which is older than the signature: settlement searches from here, not from the first block."""
        heads = self._internal_calls.route(network).heads
        if not heads.agreed:
            raise Unavailable(f"the head of {network.id} is not known yet; try again shortly")
        return max(0, heads.final)

    async def _overpriced(self, request: SponsorRequest) -> Refusal | None:
        """Refuse fees far above the current price: the sender may also be the bundler, and would earn the difference out of
        the operator's money."""
        fee = request.operation.max_fee_wei
        if fee <= request.paymaster.any_fee_wei:
            return None
        return policy.overpriced(fee, fast_wei=await self._costs.fast_wei(request.network))

    async def _block_times(self, network: Network) -> BlockTimes:
        """Only a chain that makes its blocks on demand has its own clock. An upstream must not extend a signature."""
        now = int(self._wall())
        latest = await self._block_time(network, "latest")
        following = await self._block_time(network, "pending") if network.facts.on_demand else None
        return BlockTimes(now if latest is None else latest, max(now, following or 0))

    async def _block_time(self, network: Network, tag: str) -> int | None:
        block = await self._call(network, "eth_getBlockByNumber", tag, False)
        try:
            return int(block["timestamp"], 16)
        except (KeyError, TypeError, ValueError):
            return None

    async def _sender_nonce(self, request: SponsorRequest) -> int:
        """How often the 0.6 paymaster has paid for the sender; the hash it signs covers this count. 0 for later versions."""
        if request.operation.version != "0.6":
            return 0
        data = abi.call("senderNonce(address)", request.operation.sender)
        call = {"to": "0x" + request.paymaster.address.hex(), "data": "0x" + data.hex()}
        nonce = abi.uint(abi.unhex(await self._call(request.network, "eth_call", call, "latest")))
        if nonce is None:
            raise InternalError(
                f"the paymaster on {request.network.id} does not respond; check that it is deployed", reason="upstream"
            )
        return nonce

    async def _delegate(self, request: SponsorRequest) -> bytes | None:
        """The sender's EIP-7702 delegate, read from its code if the operation has no authorization that names it."""
        operation = request.operation
        if not operation.is_delegated or operation.delegate is not None:
            return None
        code = await self._call(request.network, "eth_getCode", "0x" + operation.sender.hex(), "latest")
        return user_operation.delegate_of(abi.unhex(code) or b"")

    async def _expected_gas(self, request: SponsorRequest) -> int | None:
        """The estimated gas of the account's call. For an account that is not deployed yet, the sum over its inner calls."""
        operation = request.operation
        sender = "0x" + operation.sender.hex()
        if not operation.init_code or operation.is_delegated:
            entry_point = "0x" + request.paymaster.entry_point.hex()
            calls = [{"from": entry_point, "to": sender, "data": "0x" + operation.call_data.hex()}]
        else:
            inner = paymaster.inner_calls(operation.call_data)
            if inner is None or len(inner) > MOST_ESTIMATED:
                return None
            calls = [
                {
                    "from": sender,
                    "to": "0x" + call.target.hex(),
                    "value": hex(call.value_wei),
                    "data": "0x" + operation.call_data[call.start : call.end].hex(),
                }
                for call in inner
            ]
        estimates = await self._internal_calls.call_many(
            request.network, [("eth_estimateGas", [call]) for call in calls]
        )
        try:
            return sum(max(0, int(each, 16) - _TRANSACTION_GAS) for each in estimates)
        except (TypeError, ValueError):  # an error, or no number
            return None

    async def _call(self, network: Network, method: str, *params: Any) -> Any:
        try:
            return await self._internal_calls.call(network, method, *params)
        except RpcError:
            return None


def _life_s(rules: policy.Rules, now: int) -> int:
    """How long a signature by these rules is valid."""
    life_s = min(rules.expiry_seconds, MAX_VALIDITY_S - BACKDATED_S)
    return life_s if rules.ends_at is None else max(0, min(life_s, int(rules.ends_at) - now))


def _valid_for(timeless: PaymasterTerms, life_s: int, now: int, times: BlockTimes) -> PaymasterTerms:
    # Entry point 0.8 accepts a block only if its time is after `validAfter`.
    valid_after = max(0, min(now - BACKDATED_S, times.latest - 1))
    return replace(timeless, valid_until=times.following + life_s, valid_after=valid_after)


def _refused(request: SponsorRequest, rule: ReserveRefusal, left: int) -> Fault:
    """The error for a reservation that the ledger refused."""
    match rule:
        case "absent":
            return absent(request.policy_id)
        case "used":
            return InvalidRequest(
                "user_operation.nonce: a sponsored operation of this sender with this nonce has already been included",
                param="user_operation.nonce",
            )
        case "max_total_usd" | "max_per_user_usd":
            whose = "the policy" if rule == "max_total_usd" else "the sender"
            return _forbidden(
                Refusal(
                    rule,
                    f"{whose} has {policy.usd(left)} USD left, and the operation can cost more",
                    policy.usd(left),
                )
            )
        case "sponsored_usd_per_day":
            reason = f"the account has {policy.usd(left)} USD left today, and the operation can cost more"
            return Forbidden(
                f"refused by the plan's limit {rule}: {reason}",
                details={"rule": rule, "left": policy.usd(left)},
                reason="plan",
            )
        case "max_per_user_per_day":
            return _forbidden(
                Refusal(rule, "the sender has used up the operations that the policy allows per day", left)
            )
        case "rate_limit":
            return _forbidden(
                Refusal(rule, f"the policy sponsors its next operation in {left} s", 0), retry_after_s=left
            )
        case _:
            assert_never(rule)


def _forbidden(refusal: Refusal, **more: Any) -> Forbidden:
    details = {"rule": refusal.rule, **({} if refusal.left is None else {"left": refusal.left}), **more}
    return Forbidden(
        f"refused by the policy's rule {refusal.rule}: {refusal.message}", details=details, reason="policy"
    )


def _require_contracts(limits: KeyRestrictions, operation: UserOperation) -> None:
    """Raise if the key may not be used for a contract that the operation reaches."""
    if (refusal := limits.contract_refusal(reached_contracts.of_operation(operation))) is not None:
        raise refusal
