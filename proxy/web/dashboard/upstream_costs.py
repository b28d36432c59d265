"""Costs and budgets of upstreams, how those on trial compare, and their promotion: /admin/costs and more, for operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.core.credits import in_usd
from proxy.core.trials import Trial
from proxy.core.upstream_health import UpstreamHealth
from proxy.services.cost_report import Costs
from proxy.services.fleet import FleetView
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest
from proxy.web.rest.endpoint import RestReply
from proxy.web.timestamps import time_of


class CostHandlers:
    def __init__(self, costs: Costs, fleet: FleetView) -> None:
        self._costs = costs
        self._fleet = fleet

    def handlers(self) -> dict[str, SessionHandler]:
        return {
            "admin_read_costs": self.read,
            "admin_set_budget": self.set_budget,
            "admin_list_trials": self.trials,
            "admin_promote": self.promote,
            "admin_withdraw": self.withdraw,
        }

    async def read(self, request: SessionRequest) -> dict[str, Any]:
        costs = await self._costs.read(request.query["days"])
        return {
            "first_day": costs.first.isoformat(),
            "last_day": costs.last.isoformat(),
            "total": _spent(costs.total),
            "own": _spent(costs.own),
            "saved_usd": in_usd(costs.saved),
            "saved_by_joins_usd": in_usd(costs.saved_by_joins),
            "upstreams": [{"upstream": each["name"], **_spent(each)} for each in costs.upstreams],
            "methods": [_method(each) for each in costs.methods],
            "accounts": [_account(each) for each in costs.accounts],
            "budgets": [_budget(each) for each in await self._costs.budgets()],
        }

    async def set_budget(self, request: SessionRequest) -> RestReply:
        name, by = request.body["name"], request.who.name
        before, row = await self._costs.set_budget(name, request.body["credits"], by)
        data = {"name": name, "credits": row["credits"], "settings_credits": row["settings"]}
        return RestReply(data, subject=name, changes=({"credits": before}, {"credits": row["credits"]}))

    async def trials(self, _request: SessionRequest) -> dict[str, Any]:
        ids = self._fleet.cordons.canary_ids
        return {"trials": [_trial(each, ids.get(each.label)) for each in await self._fleet.trials()]}

    async def promote(self, request: SessionRequest) -> RestReply:
        anyway = request.body.get("anyway", False)
        return _promoted(await self._fleet.promote(request.path["id"], by=request.who.name, anyway=anyway))

    async def withdraw(self, request: SessionRequest) -> RestReply:
        return _promoted(await self._fleet.withdraw(request.path["id"], by=request.who.name))


def _promoted(promoted: tuple[UpstreamHealth, float]) -> RestReply:
    health, before = promoted
    data = {"id": health.upstream_id, "label": health.label, "share": health.share}
    return RestReply(data, subject=health.label, changes=({"share": before}, {"share": health.share}))


def _spent(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"calls": row["calls"], "credits": row["credits"], "cost_usd": in_usd(row["nanos"])}


def _method(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "network": row["network"],
        "method": row["method"],
        **_spent(row),
        "hits": row["hits"],
        "saved_usd": in_usd(row["saved"]),
        "joins": row["joins"],
        "saved_by_joins_usd": in_usd(row["saved_by_joins"]),
    }


def _account(row: Mapping[str, Any]) -> dict[str, Any]:
    revenue = row["revenue"]
    return {
        "account_id": row["id"],
        "account_name": row["name"],
        "plan": row["plan"],
        "requests": row["requests"],
        "units": row["units"],
        **_spent(row),
        "revenue_usd": None if revenue is None else in_usd(revenue),
        "margin_usd": None if revenue is None else in_usd(revenue - row["nanos"]),
    }


def _budget(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: row[name] for name in ("name", "per", "hard", "credits", "used")},
        "ends_at": time_of(row["ends"]),
        "runs_out_at": time_of(row["runs_out"]),
        "settings_credits": row["settings"],
        "set_by": row["set_by"],
        "set_at": time_of(row["set_at"]),
    }


def _trial(trial: Trial, upstream_id: str | None) -> dict[str, Any]:
    return {
        "id": upstream_id,
        "label": trial.label,
        "share": trial.share,
        "verdict": trial.verdict,
        "ready": trial.is_ready,
        "skipped": trial.skipped,
        "bounds": trial.bounds or None,
        "rate": trial.rate or None,
        "methods": trial.rows,
    }
