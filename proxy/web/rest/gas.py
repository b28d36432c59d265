"""/gas: prices, policies and sponsorship. A policy of another account is a 404, like one that does not exist."""

from __future__ import annotations

import datetime
from typing import Any

from proxy.chains.evm import address, fees
from proxy.chains.evm.policy import usd
from proxy.chains.evm.user_operation import BadOperation
from proxy.chains.families import family_of
from proxy.core.iso_time import iso_of_unix, iso_seconds
from proxy.errors import InvalidRequest
from proxy.services.gas import GasPrices
from proxy.services.sponsor.policies import LimitMeter, Policy, PolicyService, PolicySpend, UserMeter, read_limits
from proxy.services.sponsor.refusals import RefusalLog, RefusedOperation
from proxy.services.sponsor.sponsorship import SponsorService, Sponsorship
from proxy.web.rest.endpoint import RestHandler, RestReply, RestRequest


class GasHandlers:
    def __init__(
        self,
        prices: GasPrices,
        policies: PolicyService,
        sponsor: SponsorService,
        refusals: RefusalLog,
    ) -> None:
        self._prices = prices
        self._policies = policies
        self._sponsor = sponsor
        self._refusals = refusals

    def handlers(self) -> dict[str, RestHandler]:
        return {
            "read_gas_prices": self.read_prices,
            "create_gas_policy": self.create,
            "list_gas_policies": self.list,
            "read_gas_policy": self.read,
            "update_gas_policy": self.update,
            "delete_gas_policy": self.delete,
            "read_gas_spend": self.spend,
            "list_gas_refusals": self.list_refusals,
            "sponsor_operation": self.sponsor,
        }

    async def read_prices(self, request: RestRequest) -> dict[str, Any]:
        prices = await self._prices.read(request.network())
        return {
            "chain": request.path["chain"],
            "block_number": prices.fees.block,
            "base_fee_gwei": fees.gwei(prices.fees.base_fee_wei),
            "estimates": {
                tier: {
                    "max_fee_gwei": fees.gwei(each.max_fee_wei),
                    "max_priority_fee_gwei": fees.gwei(each.max_priority_fee_wei),
                    "estimated_seconds": each.seconds,
                }
                for tier, each in prices.fees.estimates.items()
            },
            "updated_at": iso_of_unix(prices.at),
        }

    # Policies

    async def create(self, request: RestRequest) -> RestReply:
        body = request.body
        network = request.network(body["chain"])
        if "user_operations" not in family_of(network).features:
            raise InvalidRequest(f"chain: {network.id} has no user operations to sponsor", param="chain")
        policy = await self._policies.create(request.key, network, name=_name(body["name"]), given=body["rules"])
        return RestReply(_shown(request, policy), status=201)

    async def list(self, request: RestRequest) -> dict[str, Any]:
        policies, total = await self._policies.page(request.key, request.page, status=request.query["status"])
        totals = await self._policies.totals(policies)
        listed = [{**_shown(request, each), "spend": _total(each, totals[each.id])} for each in policies]
        return request.listed("policies", listed, total)

    async def read(self, request: RestRequest) -> dict[str, Any]:
        return _shown(request, await self._own(request))

    async def update(self, request: RestRequest) -> dict[str, Any]:
        body = request.body
        before = await self._own(request)
        name = _name(body["name"]) if "name" in body else None
        after = await self._policies.update(before, name=name, status=body.get("status"), changes=body.get("rules"))
        return _shown(request, after)

    async def delete(self, request: RestRequest) -> dict[str, Any]:
        policy = await self._own(request)
        await self._policies.delete(policy.id, account=policy.account)
        return {"id": policy.id, "deleted": True}

    async def spend(self, request: RestRequest) -> dict[str, Any]:
        policy = await self._own(request)
        spend = await self._policies.spend(policy, request.page)
        return {
            "policy_id": policy.id,
            **_total(policy, spend.total),
            "resets_at": _resets_at(spend),
            "days": [{"day": day.isoformat(), **_amounts(meter)} for day, meter in spend.days],
            "users": [_user(spend, each) for each in spend.users],
            "page": request.page.number,
            "total": spend.user_count,
        }

    async def list_refusals(self, request: RestRequest) -> dict[str, Any]:
        policy = await self._own(request)
        latest = await self._refusals.latest(policy.id, request.query["limit"])
        return {"policy_id": policy.id, "refusals": [_refused(each) for each in latest]}

    async def _own(self, request: RestRequest) -> Policy:
        """The account's policy that the path names, on a network that the key may use."""
        policy = await self._policies.read(request.key, request.path["id"])
        request.require_network(policy.network)
        return policy

    # Sponsorship

    async def sponsor(self, request: RestRequest) -> dict[str, Any]:
        body = request.body
        try:
            parsed = await self._sponsor.read(
                request.key,
                request.network(body["chain"]),
                body["user_operation"],
                policy_id=body["policy_id"],
                entry_point=body.get("entry_point"),
                completes=True,
            )
        except BadOperation as exc:
            raise InvalidRequest.naming(_named(exc)) from None
        sponsorship = await self._sponsor.sponsor(parsed)
        return {
            **fields_of(sponsorship),
            **_deployment(sponsorship),
            "entry_point": address.checksum(sponsorship.paymaster.entry_point),
            "sponsored_gas_usd": usd(sponsorship.worst),
        }


def _shown(request: RestRequest, policy: Policy) -> dict[str, Any]:
    return {
        "id": policy.id,
        "name": policy.name,
        "chain": request.network_word(policy.network),
        "network": policy.network,
        "rules": policy.rules,
        "status": policy.status,
        "created_at": iso_seconds(policy.created_at),
        "updated_at": iso_seconds(policy.updated_at),
    }


def fields_of(sponsorship: Sponsorship) -> dict[str, str]:
    """The paymaster's fields of an operation; for 0.6 also the combined `paymasterAndData`."""
    payer, data = sponsorship.paymaster, sponsorship.data.hex()
    verification, post_op = sponsorship.operation.paymaster_gas
    fields = {
        "paymaster": address.checksum(payer.address),
        "paymasterData": "0x" + data,
        "paymasterVerificationGasLimit": hex(verification),
        "paymasterPostOpGasLimit": hex(post_op),
    }
    if payer.version == "0.6":
        fields["paymasterAndData"] = "0x" + payer.address.hex() + data
    return fields


def _deployment(sponsorship: Sponsorship) -> dict[str, str]:
    """The fields that deploy the sender with the operation, in the shape of its version; none if it is deployed."""
    factory, code = sponsorship.operation.factory, sponsorship.operation.init_code
    if factory is None:
        return {}
    if sponsorship.paymaster.version == "0.6":
        return {"initCode": "0x" + code.hex()}
    return {"factory": address.checksum(factory), "factoryData": "0x" + code[20:].hex()}


def _named(fault: BadOperation) -> str:
    """The error message, with the field named as in this request."""
    text = str(fault)
    if text.startswith("entryPoint:"):
        return text.replace("entryPoint", "entry_point", 1)
    return f"user_operation.{text}"


def _name(text: str) -> str:
    name = text.strip()
    if not name or not name.isprintable():
        raise InvalidRequest(
            "name: must contain only printable characters, and at least one that is not a space", param="name"
        )
    return name


def _amounts(meter: LimitMeter) -> dict[str, Any]:
    return {
        "reserved_usd": usd(meter.reserved),
        "spent_usd": usd(meter.spent),
        "operations": meter.operations,
    }


def _total(policy: Policy, meter: LimitMeter) -> dict[str, Any]:
    rules = read_limits(policy.rules)
    return {**_amounts(meter), "left_usd": _left(rules.max_total, meter.used), "reset": rules.reset}


def _left(most: int | None, used: int) -> str | None:
    return None if most is None else usd(max(0, most - used))


def _user(spend: PolicySpend, user: UserMeter) -> dict[str, Any]:
    most = spend.rules.max_per_user_per_day
    return {
        "sender": address.checksum(user.sender),
        **_amounts(user.meter),
        "left_usd": _left(spend.rules.max_per_user, user.meter.used),
        "operations_left_today": None if most is None else max(0, most - user.operations_today),
    }


def _refused(refused: RefusedOperation) -> dict[str, Any]:
    return {
        "at": iso_seconds(refused.at),
        "rule": refused.rule,
        "sender": address.checksum(refused.sender),
        "message": refused.message,
    }


def _resets_at(spend: PolicySpend) -> str | None:
    """When the next period of the spending limit begins."""
    day = spend.day
    match spend.rules.reset:
        case "never":
            return None
        case "daily":
            next_day = day + datetime.timedelta(days=1)
        case "weekly":
            next_day = day + datetime.timedelta(days=7 - day.weekday())
        case _:
            next_day = (day.replace(day=1) + datetime.timedelta(days=32)).replace(day=1)
    return f"{next_day.isoformat()}T00:00:00Z"
