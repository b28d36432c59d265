"""/admin: accounts and plans, the health of upstreams, followers and pending deliveries, for operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from proxy.core.upstream_health import UpstreamHealth
from proxy.request_threads import request_threads
from proxy.services.accounts.accounts import AccountService, limits_in
from proxy.services.accounts.action_log import ActionFilter, ActionLog
from proxy.services.accounts.removal import AccountRemoval
from proxy.services.accounts.sign_in import SignIn
from proxy.services.fleet import FleetView
from proxy.services.usage import UsageService
from proxy.settings import Plan
from proxy.web.dashboard import charts
from proxy.web.dashboard.account import live_of, shown_key
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest
from proxy.web.rest.endpoint import RestReply
from proxy.web.timestamps import moment_of, time_of

_LIMITS = ("requests_per_second", "units_per_second", "requests_per_day")
_WORKER = ("worker", "host", "pid", "connections", "keys")


class AdminHandlers:
    def __init__(
        self,
        accounts: AccountService,
        removal: AccountRemoval,
        usage: UsageService,
        fleet: FleetView,
        sign_in: SignIn,
        actions: ActionLog,
        plans: Mapping[str, Plan],
    ) -> None:
        self._accounts = accounts
        self._removal = removal
        self._usage = usage
        self._fleet = fleet
        self._sign_in = sign_in
        self._actions = actions
        self._plans = plans

    def handlers(self) -> dict[str, SessionHandler]:
        return {
            "admin_list_accounts": self.list_accounts,
            "admin_create_account": self.create_account,
            "admin_read_account": self.read_account,
            "admin_update_account": self.update_account,
            "admin_delete_account": self.delete_account,
            "admin_list_keys": self.list_keys,
            "admin_make_link": self.make_link,
            "admin_list_plans": self.list_plans,
            "admin_list_networks": self.list_networks,
            "admin_cordon": self.cordon,
            "admin_uncordon": self.uncordon,
            "admin_list_actions": self.list_actions,
            "admin_list_processes": self.list_processes,
            "admin_list_followers": self.list_followers,
            "admin_read_deliveries": self.read_deliveries,
            "admin_read_usage": self.usage,
            "admin_read_live": self.live,
        }

    # Accounts and plans

    async def list_accounts(self, request: SessionRequest) -> dict[str, Any]:
        rows, total = await self._accounts.page(request.query["search"], request.page)
        return {"accounts": [_account(row) for row in rows], "page": request.page.number, "total": total}

    async def create_account(self, request: SessionRequest) -> RestReply:
        body = request.body
        row = await self._accounts.create(
            name=body["name"], email=body["email"], plan=body.get("plan", "free"), own=limits_in(body)
        )
        return RestReply(_account(row), status=201)

    async def read_account(self, request: SessionRequest) -> dict[str, Any]:
        row = await self._accounts.read(request.path["id"])
        today = await self._accounts.today(row)
        return {**_account(row), "used_today": today.used}

    async def update_account(self, request: SessionRequest) -> dict[str, Any]:
        body = request.body
        row = await self._accounts.update(
            request.path["id"],
            name=body.get("name"),
            email=body.get("email"),
            plan=body.get("plan"),
            own=limits_in(body),
            disabled=body.get("disabled"),
        )
        return _account(row)

    async def delete_account(self, request: SessionRequest) -> dict[str, Any]:
        await self._removal.remove(request.path["id"])
        return {"deleted": True}

    async def list_keys(self, request: SessionRequest) -> dict[str, Any]:
        await self._accounts.read(request.path["id"])
        return {"keys": [shown_key(row) for row in await self._accounts.keys(request.path["id"])]}

    async def make_link(self, request: SessionRequest) -> RestReply:
        url, until = await self._sign_in.link(request.path["id"])
        return RestReply({"url": url, "expires_at": until}, status=201)

    async def list_plans(self, _request: SessionRequest) -> dict[str, Any]:
        return {"plans": [{"name": name, **asdict(plan)} for name, plan in self._plans.items()]}

    # Upstreams

    async def list_networks(self, _request: SessionRequest) -> dict[str, Any]:
        views, networks = await self._fleet.read()
        return {"workers": len(views), "networks": _with_iso_times(networks)}

    async def cordon(self, request: SessionRequest) -> RestReply:
        reason = request.body.get("reason", "").strip()
        health = await self._fleet.cordon(
            request.path["id"], reason=reason, by=request.who.name, last=request.body.get("last", False)
        )
        return _cordoned(health, {"cordoned": True, "reason": reason})

    async def uncordon(self, request: SessionRequest) -> RestReply:
        health = await self._fleet.uncordon(request.path["id"])
        return _cordoned(health, {"cordoned": False})

    # The log of actions

    async def list_actions(self, request: SessionRequest) -> dict[str, Any]:
        query = request.query
        wanted = ActionFilter(
            account=query["account"],
            by=query["by"],
            name=query["name"],
            action=query["action"],
            since=moment_of(query["since"], "since") if query["since"] else None,
            until=moment_of(query["until"], "until") if query["until"] else None,
            before_id=int(query["cursor"]) if query["cursor"] else None,
        )
        actions, after = await self._actions.search(wanted, query["limit"])
        return {"actions": [_action(row) for row in actions], "next_cursor": None if after is None else str(after)}

    # Processes

    async def list_processes(self, _request: SessionRequest) -> dict[str, Any]:
        return {"processes": [_process(each) for each in await self._fleet.processes()]}

    async def list_followers(self, _request: SessionRequest) -> dict[str, Any]:
        return {"followers": [_follower(row) for row in await self._fleet.followers()]}

    async def read_deliveries(self, _request: SessionRequest) -> dict[str, Any]:
        waiting, webhooks = await self._fleet.deliveries()
        return {**waiting, "oldest_due_at": time_of(waiting["oldest_due_at"]), "webhooks": webhooks}

    # Usage

    async def usage(self, request: SessionRequest) -> dict[str, Any]:
        wanted = charts.wanted_of(request.query, request.query["account"])
        lines = await self._usage.chart(wanted)
        labels = await self._accounts.names([line.name for line in lines]) if wanted.by == "account" else {}
        chart = await request_threads.run(lambda: charts.chart_of(wanted, lines, labels))
        return {**chart, "flush_s": self._usage.flush_s}

    async def live(self, _request: SessionRequest) -> dict[str, Any]:
        views, networks = await self._fleet.read()
        return {
            **await live_of(self._usage, None),
            "workers": [
                {**{name: view.get(name) for name in _WORKER}, "seen_at": time_of(view["seen_at"])} for view in views
            ],
            "networks": _with_iso_times(networks),
        }


def _cordoned(health: UpstreamHealth, after: dict[str, Any]) -> RestReply:
    data = {"id": health.upstream_id, "label": health.label, "cordoned": health.cordoned}
    return RestReply(data, subject=health.label, changes=({"cordoned": not after["cordoned"]}, after))


def _action(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "id": str(row["id"]), "at": time_of(row["at"])}


def _account(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "name": row["name"],
        "email": row["email"],
        "plan": row["plan"],
        "disabled": row["disabled"],
        "limits": {name: row[name] for name in _LIMITS},
        "active_keys": row.get("active_keys"),
        "used_today": row.get("used_today"),
        "created_at": time_of(row["created_at"]),
    }


def _with_iso_times(networks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for network in networks:
        for upstream in network["upstreams"]:
            if upstream["cordon"] is not None:
                upstream["cordon"]["at"] = time_of(upstream["cordon"]["at"])
    return networks


def _process(report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "host": report["host"],
        "instance": report["instance"],
        "role": report["role"],
        "pid": report["pid"],
        "version": report["version"],
        "started_at": time_of(datetime.fromtimestamp(report["started_at"], UTC)),
        "follows": [
            {"network": network, **each, "lag_blocks": max(0, each["head"] - each["block"])}
            for network, each in sorted(report["follows"].items())
        ],
        # Processes of an earlier version do not report them.
        "backfills": report.get("backfills", []),
        "valkey": report["valkey"],
    }


def _follower(row: Mapping[str, Any]) -> dict[str, Any]:
    block, tip = row["block"], row["tip"]
    halted = "stopped" if row["fault"] else "stuck" if row["stuck"] else ""
    return {
        "network": row["network"],
        "state": halted or ("waiting" if block is None else "following"),
        "fault": row["fault"] or row["stuck"],
        "first_block": row["first_block"],
        "block": block,
        "block_time": time_of(row["block_time"]),
        "tip": tip,
        "lag_blocks": max(0, tip - block) if tip is not None and block is not None else None,
        "updated_at": time_of(row["changed_at"]),
    }
