"""Has a policy pay for an operation.

In this order: what the operation is; whether the policy's rules let it pass; what it can cost at most, at today's price; a
signature over all of that; and then, in one statement, the reservation of that most together with what was signed. Only what is
reserved leaves this room. Before the reservation nothing is written, and after it nothing can fail: whoever asks again, for
whatever reason, is given what was signed the first time, and nothing more is reserved for it.
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
from proxy.chains.evm import abi, paymaster, user_operation
from proxy.chains.evm.paymaster import PaymasterTerms
from proxy.chains.evm.user_operation import BadOperation, UserOperation
from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.core import policy
from proxy.core.access import Key
from proxy.core.policy import PolicyOperation, Refusal
from proxy.errors import Fault, Forbidden, InternalError, InvalidRequest, Unavailable
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.sponsor.costs import SponsorCosts
from proxy.services.sponsor.paymasters import Paymaster, Paymasters
from proxy.services.sponsor.policies import EffectivePolicy, PolicyService
from proxy.store.ledger import LedgerStore, ReserveRefusal, ReserveRequest
from proxy.store.policies import absent

# A signature begins this long before now, because a block's time is some seconds old when it is asked; its life from its
# beginning to its end is at most five minutes.
BEFORE_S = 30
LONGEST_S = 300
# What was signed is given out again while at least this share of its life is left.
FRESH = 5
# How often a request is decided anew: its policy changed in between, or another policy signed the same in the same second.
TRIES = 5
# To estimate the calls of an account that is not there yet, each alone.
MOST_ESTIMATED = 10
_TRANSACTION_GAS = 21_000
_DELEGATION = bytes.fromhex("ef0100")
# What the operation is asked without: who pays is decided here, and the account signs afterwards.
_NOT_GIVEN = frozenset({"paymaster", "paymasterData", "paymasterAndData", "signature"})
_LIMITS = ("paymasterVerificationGasLimit", "paymasterPostOpGasLimit")
_GAS = ("callGasLimit", "verificationGasLimit", "preVerificationGas", "maxFeePerGas", "maxPriorityFeePerGas")
# The fields that only one of the two shapes has.
_V06_ONLY = frozenset({"initCode", "paymasterAndData"})
_V07_ONLY = frozenset({"factory", "factoryData", "paymaster", "paymasterData", *_LIMITS, "eip7702Auth"})
_DEFAULT_VERSION = "0.7"


@dataclass(frozen=True, slots=True)
class Sponsorship:
    """What goes into the operation. `worst`: the most that it can cost, in pico-dollars."""

    paymaster: Paymaster
    data: bytes
    gas: tuple[int, int]
    worst: int = 0


@dataclass(frozen=True, slots=True)
class SponsorRequest:
    """An operation that is to be sponsored, read. `operation` has the paymaster's place in it, without data."""

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
        market: SponsorCosts,
        internal_calls: InternalCalls,
        *,
        most_of_day: Mapping[str, int | None],
        refused: Callable[[str, bytes, str, str], None] = lambda *_: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`most_of_day`: what an account may have sponsored in a day, in pico-dollars by plan; None for any amount. `refused`
        is told of the policy, the sender, the rule and why."""
        self._refused = refused
        self._policies = policies
        self._ledger = ledger
        self._paymasters = paymasters
        self._market = market
        self._internal_calls = internal_calls
        self._most_of_day = most_of_day
        self._wall = wall
        # One reservation at a time of a policy, or of an account that has a limit itself: they wait for each other in any case,
        # and here without a connection.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<SponsorService with {self._paymasters!r}>"

    # Reading

    def read(
        self,
        key: Key,
        network: Network,
        given: Mapping[str, Any],
        *,
        policy_id: str,
        entry_point: str | None,
        draft: bool = False,
    ) -> SponsorRequest:
        """BadOperation names what is wrong; a draft may lack its gas."""
        if "user_operations" not in family_of(network).features:
            raise InvalidRequest(f"chain: there are no operations to sponsor on {network.id}")
        version = self._version(network, given, entry_point)
        payer = self._paymasters.find(network, version)
        for name in () if draft else _GAS:
            if given.get(name) is None:
                raise BadOperation(f"{name}: is missing")
        fields = {name: value for name, value in given.items() if name not in _NOT_GIVEN and value is not None}
        if version == "0.6":
            operation = paymaster.funded(user_operation.parse(fields, version, draft=True), payer.address)
            return SponsorRequest(key, network, payer, operation, policy_id)
        for name, limit in zip(_LIMITS, payer.gas, strict=True):
            fields.setdefault(name, hex(limit))
        fields |= {"paymaster": "0x" + payer.address.hex(), "paymasterData": "0x"}
        return SponsorRequest(key, network, payer, user_operation.parse(fields, version, draft=True), policy_id)

    def _version(self, network: Network, given: Mapping[str, Any], entry_point: str | None) -> str:
        """As the entry point says, else as the fields do, else the default."""
        points = network.chain.entry_points
        if entry_point is not None:
            return user_operation.version_of(entry_point, points)
        if not _V06_ONLY.isdisjoint(given):
            return "0.6"
        known = [version for version in points if version in self._paymasters.versions(network)]
        if _DEFAULT_VERSION in known or not known:
            return _DEFAULT_VERSION
        newer = [version for version in known if version != "0.6"]
        return newer[0] if newer or not _V07_ONLY.isdisjoint(given) else known[0]

    # Sponsoring

    async def stub(self, request: SponsorRequest) -> Sponsorship:
        """For estimates: of the size and the form of the real one, and of no use on the chain. Nothing is reserved."""
        with self._noting(request):
            await self._decide(request, None)
        payer = request.paymaster
        terms = PaymasterTerms(payer.address, payer.chain_id, 2**48 - 1, 2**48 - 1)
        return Sponsorship(payer, paymaster.data_of(terms, paymaster.STUB_SIGNATURE), request.operation.paymaster_gas)

    async def sponsor(self, request: SponsorRequest) -> Sponsorship:
        with self._noting(request):
            return await self._sponsor(request)

    @contextmanager
    def _noting(self, request: SponsorRequest) -> Iterator[None]:
        """A refusal by a rule is noted on its way out."""
        try:
            yield
        except Forbidden as fault:
            if fault.details and "rule" in fault.details:
                self._refused(request.policy_id, request.operation.sender, fault.details["rule"], str(fault))
            raise

    async def _sponsor(self, request: SponsorRequest) -> Sponsorship:
        operation, payer = request.operation, request.paymaster
        price = await self._market.coin(request.network)
        wei = paymaster.worst_gas(operation) * operation.max_fee_wei
        worst = policy.cost(wei, price=price, decimals=request.network.chain.native.decimals)
        ready = await self._decide(request, worst)
        delegate = await self._delegate(request)
        counted = await self._sender_nonce(request)
        for late_s in range(TRIES):
            wanted = self._signed(
                request, ready, worst=worst, price=price, counted=counted, delegate=delegate, late_s=late_s
            )
            turn = request.policy_id if wanted.account_most is None else request.key.account.id
            async with self._turns.setdefault(turn, asyncio.Lock()):
                outcome = await self._ledger.reserve(wanted)
            telemetry.sponsorships_total.labels(request.network.id, outcome.kind).inc()
            match outcome.kind:
                case "granted" | "same":
                    return Sponsorship(payer, outcome.data, operation.paymaster_gas, outcome.worst)
                case "stale":
                    ready = await self._decide(request, worst, fresh=True)
                case "twice":
                    pass
                case refusal:
                    raise _refused(request, refusal, outcome.left)
        raise Unavailable("the policy changes too quickly; try again")

    async def _decide(self, request: SponsorRequest, worst: int | None, *, fresh: bool = False) -> EffectivePolicy:
        """The policy that lets the operation pass. A refusal is told only by the newest."""
        ready = await self._policies.ready(request.policy_id, account=request.key.account.id, fresh=fresh)
        refusal = await self._refusal(request, ready, worst)
        if refusal is not None and not fresh:
            ready = await self._policies.ready(request.policy_id, account=request.key.account.id, fresh=True)
            refusal = await self._refusal(request, ready, worst)
        if refusal is not None:
            telemetry.sponsorships_total.labels(request.network.id, refusal.rule).inc()
            raise _forbidden(refusal)
        return ready

    async def _refusal(self, request: SponsorRequest, ready: EffectivePolicy, worst: int | None) -> Refusal | None:
        if ready.policy.network != request.network.id:
            raise InvalidRequest(f"policy_id: the policy is for {ready.policy.network}, not for {request.network.id}")
        if ready.policy.status != "active":
            return Refusal("status", f"the policy is {ready.policy.status}")
        operation, rules = request.operation, ready.rules
        asked = PolicyOperation(
            sender=operation.sender,
            calls=paymaster.inner_calls(operation.call_data) if rules.reads_calls else None,
            max_fee_wei=operation.max_fee_wei,
            worst=worst,
            now=self._wall(),
        )
        refusal = policy.decide(rules, asked) or await self._overpriced(request)
        if refusal is not None:
            return refusal
        if rules.min_gas_efficiency is None or worst is None:
            return None
        return policy.too_wasteful(rules, expected_gas=await self._expected_gas(request), call_gas=operation.call_gas)

    def _signed(
        self,
        request: SponsorRequest,
        ready: EffectivePolicy,
        *,
        worst: int,
        price: int,
        counted: int,
        delegate: bytes | None,
        late_s: int,
    ) -> ReserveRequest:
        """The operation with a signature that nobody has seen yet."""
        operation, payer = request.operation, request.paymaster
        now = int(self._wall())
        life_s = min(ready.rules.expiry_seconds, LONGEST_S - BEFORE_S)
        if ready.rules.ends_at is not None:
            life_s = max(0, min(life_s, int(ready.rules.ends_at) - now))
        whenever = PaymasterTerms(payer.address, payer.chain_id, 0, 0, counted)
        terms = replace(whenever, valid_until=now + life_s - late_s, valid_after=now - BEFORE_S)
        data = paymaster.data_of(terms, payer.signer.sign(paymaster.message(operation, terms)))
        final = paymaster.funded(operation, payer.address, gas=operation.paymaster_gas, data=data)
        return ReserveRequest(
            policy=ready.policy.id,
            revision=ready.policy.revision,
            network=request.network.id,
            entry_point=payer.entry_point,
            sender=operation.sender,
            nonce=operation.nonce,
            digest=paymaster.hash_of(operation, whenever),
            op_hash=user_operation.hash_of(final, payer.entry_point, payer.chain_id, delegate=delegate),
            data=data,
            worst=worst,
            price=price,
            valid_until=terms.valid_until,
            fresh_until=now + min(life_s, max(1, life_s // FRESH)),
            block=self._final(request.network),
            at=datetime.datetime.fromtimestamp(now, datetime.UTC),
            account_most=self._most_of_day[request.key.account.plan],
        )

    # What the chain and the market say

    def _final(self, network: Network) -> int:
        """A block that is too old to have what is signed now. Without one, all blocks of the chain would be searched for it."""
        heads = self._internal_calls.route(network).heads
        if not heads.agreed:
            raise Unavailable(f"it is not known yet how far {network.id} is; try again shortly")
        return max(0, heads.final)

    async def _overpriced(self, request: SponsorRequest) -> Refusal | None:
        """Who sends the operation may be who includes it, and earns what it offers above the price: the operator's money."""
        fee = request.operation.max_fee_wei
        if fee <= request.paymaster.any_fee_wei:
            return None
        return policy.overpriced(fee, fast_wei=await self._market.fast_wei(request.network))

    async def _sender_nonce(self, request: SponsorRequest) -> int:
        """How often the paymaster of 0.6 has paid for the sender: its hash covers that."""
        if request.operation.version != "0.6":
            return 0
        data = abi.call("senderNonce(address)", request.operation.sender)
        called = {"to": "0x" + request.paymaster.address.hex(), "data": "0x" + data.hex()}
        found = abi.uint(abi.unhex(await self._ask(request.network, "eth_call", called, "latest")))
        if found is None:
            raise InternalError(f"the paymaster of {request.network.id} does not answer: is it deployed?")
        return found

    async def _delegate(self, request: SponsorRequest) -> bytes | None:
        """EIP-7702: where no authorization says what the sender delegates to, its code does."""
        operation = request.operation
        if not operation.is_delegated or operation.delegate is not None:
            return None
        code = (
            abi.unhex(await self._ask(request.network, "eth_getCode", "0x" + operation.sender.hex(), "latest")) or b""
        )
        return code[3:23] if code[:3] == _DELEGATION else None

    async def _expected_gas(self, request: SponsorRequest) -> int | None:
        """What the account's call is expected to use; of an account that is not there yet, what its calls are, one by one."""
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
        found = await self._internal_calls.call_many(request.network, [("eth_estimateGas", [call]) for call in calls])
        if not all(isinstance(each, str) for each in found):
            return None
        return sum(max(0, int(each, 16) - _TRANSACTION_GAS) for each in found)

    async def _ask(self, network: Network, method: str, *params: Any) -> Any:
        try:
            return await self._internal_calls.call(network, method, *params)
        except RpcError:
            return None


def _refused(request: SponsorRequest, rule: ReserveRefusal, left: int) -> Fault:
    """Why the ledger has not reserved."""
    match rule:
        case "absent":
            return absent(request.policy_id)
        case "used":
            return InvalidRequest(
                "user_operation.nonce: an operation of the sender with this nonce was sponsored and included"
            )
        case "max_total_usd" | "max_per_user_usd":
            whose = "the policy" if rule == "max_total_usd" else "the sender"
            return _forbidden(
                Refusal(
                    rule,
                    f"{whose} has {policy.usd(left)} USD left, less than the operation can cost",
                    policy.usd(left),
                )
            )
        case "sponsored_usd_per_day":
            said = f"the account has {policy.usd(left)} USD left today, less than the operation can cost"
            return Forbidden(
                f"refused by the plan's limit {rule}: {said}",
                details={"rule": rule, "left": policy.usd(left)},
            )
        case "max_per_user_per_day":
            return _forbidden(Refusal(rule, "the sender has had as many operations today as the policy allows", left))
        case "rate_limit":
            return _forbidden(Refusal(rule, f"the policy sponsors the next one in {left} s", 0), retry_after_s=left)
        case _:
            assert_never(rule)


def _forbidden(refusal: Refusal, **more: Any) -> Forbidden:
    details = {"rule": refusal.rule, **({} if refusal.left is None else {"left": refusal.left}), **more}
    return Forbidden(f"refused by the policy's rule {refusal.rule}: {refusal.message}", details=details)
