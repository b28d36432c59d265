"""/gas: prices, policies and sponsorship. A policy is its account's; somebody else's is not there."""

from __future__ import annotations

import datetime
from typing import Any

from proxy.chains.evm import address, fees, policy
from proxy.chains.evm.user_operation import BadOperation
from proxy.chains.families import family_of
from proxy.chains.registry import Registry
from proxy.core.access import Key
from proxy.core.iso_time import iso_of_unix, iso_seconds
from proxy.errors import InvalidRequest
from proxy.services.gas import GasPrices
from proxy.services.sponsor.policies import LimitMeter, Policy, PolicyService, PolicySpend, UserMeter
from proxy.services.sponsor.refusals import RefusalLog, RefusedOperation
from proxy.services.sponsor.sponsorship import SponsorService, Sponsorship
from proxy.web.rest.endpoint import RestHandler, RestReply, RestRequest


class GasHandlers:
    def __init__(
        self,
        prices: GasPrices,
        policies: PolicyService,
        sponsoring: SponsorService,
        refusals: RefusalLog,
        *,
        chains: Registry,
    ) -> None:
        self._prices = prices
        self._policies = policies
        self._sponsoring = sponsoring
        self._refusals = refusals
        self._networks = {network.id: network for network in chains.networks()}

    def answers(self) -> dict[str, RestHandler]:
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

    async def read_prices(self, asked: RestRequest) -> dict[str, Any]:
        found = await self._prices.read(asked.network())
        return {
            "chain": asked.path["chain"],
            "block_number": found.fees.block,
            "base_fee_gwei": fees.gwei(found.fees.base_fee_wei),
            "estimates": {
                tier: {
                    "max_fee_gwei": fees.gwei(each.max_fee_wei),
                    "max_priority_fee_gwei": fees.gwei(each.max_priority_fee_wei),
                    "estimated_seconds": each.seconds,
                }
                for tier, each in found.fees.estimates.items()
            },
            "updated_at": iso_of_unix(found.at),
        }

    # Policies

    async def create(self, asked: RestRequest) -> RestReply:
        body = asked.body
        network = asked.network(body["chain"])
        if "user_operations" not in family_of(network).features:
            raise InvalidRequest(f"chain: there are no operations to sponsor on {network.id}")
        made = await self._policies.create(asked.key, network, name=_name(body["name"]), given=body["rules"])
        return RestReply(self._shown(asked.key, made), status=201)

    async def list(self, asked: RestRequest) -> dict[str, Any]:
        found, total = await self._policies.page(asked.key, asked.page, status=asked.query["status"])
        return {
            "policies": [self._shown(asked.key, each) for each in found],
            "page": asked.page.number,
            "total": total,
        }

    async def read(self, asked: RestRequest) -> dict[str, Any]:
        return self._shown(asked.key, await self._own(asked))

    async def update(self, asked: RestRequest) -> dict[str, Any]:
        body = asked.body
        before = await self._own(asked)
        name = _name(body["name"]) if "name" in body else None
        after = await self._policies.update(before, name=name, status=body.get("status"), changes=body.get("rules"))
        return self._shown(asked.key, after)

    async def delete(self, asked: RestRequest) -> dict[str, Any]:
        found = await self._own(asked)
        await self._policies.delete(found.id, account=found.account)
        return {"id": found.id, "deleted": True}

    async def spend(self, asked: RestRequest) -> dict[str, Any]:
        found = await self._own(asked)
        spend = await self._policies.spend(found, asked.page)
        return {
            "policy_id": found.id,
            **_amounts(spend.total),
            "left_usd": _left(spend.rules.max_total, spend.total.used),
            "reset": spend.rules.reset,
            "resets_at": _resets_at(spend),
            "days": [{"day": day.isoformat(), **_amounts(meter)} for day, meter in spend.days],
            "users": [_user(spend, each) for each in spend.users],
            "page": asked.page.number,
            "total": spend.user_count,
        }

    async def list_refusals(self, asked: RestRequest) -> dict[str, Any]:
        found = await self._own(asked)
        latest = await self._refusals.latest(found.id, asked.query["limit"])
        return {"policy_id": found.id, "refusals": [_refused(each) for each in latest]}

    async def _own(self, asked: RestRequest) -> Policy:
        """The policy that the path names; on a network that the key may use."""
        found = await self._policies.read(asked.key, asked.path["id"])
        if (network := self._networks.get(found.network)) is not None:
            asked.network(network.word(live=asked.key.live))
        return found

    # Sponsorship

    async def sponsor(self, asked: RestRequest) -> dict[str, Any]:
        body = asked.body
        try:
            request = self._sponsoring.read(
                asked.key,
                asked.network(body["chain"]),
                body["user_operation"],
                policy_id=body["policy_id"],
                entry_point=body.get("entry_point"),
            )
        except BadOperation as exc:
            raise InvalidRequest(_named(exc)) from None
        found = await self._sponsoring.sponsor(request)
        return {**fields_of(found), "sponsored_gas_usd": policy.usd(found.worst)}

    # How a policy looks

    def _shown(self, key: Key, found: Policy) -> dict[str, Any]:
        return {
            "id": found.id,
            "name": found.name,
            "chain": self._word(key, found.network),
            "network": found.network,
            "rules": found.rules,
            "status": found.status,
            "created_at": iso_seconds(found.created_at),
            "updated_at": iso_seconds(found.updated_at),
        }

    def _word(self, key: Key, name: str) -> str:
        """The network as this key would name it; one that is configured no more by its old name."""
        network = self._networks.get(name)
        return name.replace("/", "-") if network is None else network.word(live=key.live)


def fields_of(found: Sponsorship) -> dict[str, str]:
    """The paymaster's members of an operation; of one for 0.6, also both in its one field."""
    payer, data = found.paymaster, found.data.hex()
    verification, post_op = found.gas
    fields = {
        "paymaster": address.checksum(payer.address),
        "paymasterData": "0x" + data,
        "paymasterVerificationGasLimit": hex(verification),
        "paymasterPostOpGasLimit": hex(post_op),
    }
    if payer.version == "0.6":
        fields["paymasterAndData"] = "0x" + payer.address.hex() + data
    return fields


def _named(fault: BadOperation) -> str:
    """The fault under the name that the field has in this request."""
    text = str(fault)
    if text.startswith("entryPoint:"):
        return text.replace("entryPoint", "entry_point", 1)
    return f"user_operation.{text}"


def _name(text: str) -> str:
    name = text.strip()
    if not name or not name.isprintable():
        raise InvalidRequest("name: must be printable characters")
    return name


def _amounts(meter: LimitMeter) -> dict[str, Any]:
    return {
        "reserved_usd": policy.usd(meter.reserved),
        "spent_usd": policy.usd(meter.spent),
        "operations": meter.operations,
    }


def _left(most: int | None, used: int) -> str | None:
    return None if most is None else policy.usd(max(0, most - used))


def _user(spend: PolicySpend, user: UserMeter) -> dict[str, Any]:
    most = spend.rules.max_per_user_per_day
    return {
        "sender": address.checksum(user.sender),
        **_amounts(user.meter),
        "left_usd": _left(spend.rules.max_per_user, user.meter.used),
        "operations_left_today": None if most is None else max(0, most - user.operations_today),
    }


def _refused(found: RefusedOperation) -> dict[str, Any]:
    return {
        "at": iso_seconds(found.at),
        "rule": found.rule,
        "sender": address.checksum(found.sender),
        "message": found.message,
    }


def _resets_at(spend: PolicySpend) -> str | None:
    """The first moment of the next span."""
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
