"""/account: the account, its keys, its usage and its remaining daily quota, for the account holder, signed in or with a key."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from aiohttp import web

from proxy.core import access
from proxy.core.directives import allowed_to
from proxy.core.usage import ChartLine, times_of
from proxy.request_threads import request_threads
from proxy.services.accounts.accounts import (
    NEVER,
    AccountService,
    KeyDetailChange,
    directives_in,
    limits_in,
    restrictions_in,
)
from proxy.services.accounts.action_log import ActionLog
from proxy.services.accounts.removal import AccountRemoval
from proxy.services.accounts.sign_in import SignIn
from proxy.services.usage import UsageQuery, UsageService
from proxy.settings import Plan
from proxy.web.dashboard import charts
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest
from proxy.web.rest.endpoint import RestReply
from proxy.web.timestamps import moment_of, time_of

# The time span of the live chart.
LIVE = datetime.timedelta(minutes=30)


class AccountHandlers:
    def __init__(
        self,
        accounts: AccountService,
        removal: AccountRemoval,
        sign_in: SignIn,
        usage: UsageService,
        actions: ActionLog,
        plans: Mapping[str, Plan],
        networks: Mapping[str, Any],
    ) -> None:
        """`networks`: the members of a reply that describe the networks with upstreams (`network_list.py`)."""
        self._accounts = accounts
        self._removal = removal
        self._sign_in = sign_in
        self._usage = usage
        self._actions = actions
        self._plans = plans
        self._networks = networks

    def handlers(self) -> dict[str, SessionHandler]:
        return {
            "read_account": self.read,
            "delete_account": self.delete,
            "update_own_account": self.update,
            "list_actions": self.list_actions,
            "list_keys": self.list_keys,
            "create_key": self.create_key,
            "read_key": self.read_key,
            "update_key": self.update_key,
            "revoke_key": self.revoke_key,
            "rotate_key": self.rotate_key,
            "read_usage": self.usage,
            "export_usage": self.export,
            "read_live": self.live,
        }

    async def read(self, request: SessionRequest) -> dict[str, Any]:
        row = await self._accounts.read(request.who.id)
        limits = self._accounts.limits_of(row)
        plan = self._plans.get(row["plan"], self._plans["free"])
        return {
            "account": {
                "id": row["id"],
                "name": row["name"],
                "email": row["email"],
                "plan": row["plan"],
                "has_password": request.who.has_password,
                "has_second_factor": request.who.has_second_factor,
                "record_params": row["record_params"],
                "created_at": time_of(row["created_at"]),
            },
            "limits": asdict(limits),
            "today": await self._today(row),
            "plan": {"name": row["plan"], **asdict(plan)},
            "used": await self._accounts.used(request.who.id),
            "plans": [{"name": name, **asdict(each)} for name, each in self._plans.items()],
            **self._networks,
        }

    async def delete(self, request: SessionRequest) -> dict[str, Any]:
        body = request.body
        current, code = body.get("current_password"), body.get("code")
        await self._removal.remove_confirmed(
            request.who.id, body["email"], lambda: self._sign_in.prove_wholly(request.signed_in, current, code)
        )
        return {"deleted": True}

    async def update(self, request: SessionRequest) -> dict[str, Any]:
        await self._accounts.record_params(request.who.id, wanted=request.body["record_params"])
        return await self.read(request)

    async def list_actions(self, request: SessionRequest) -> dict[str, Any]:
        rows, total = await self._actions.page(request.who.id, request.page)
        shown = [_shown_action(row) for row in rows]
        return {"actions": shown, "page": request.page.number, "limit": request.page.limit, "total": total}

    async def _today(self, row: dict[str, Any]) -> dict[str, Any]:
        today = await self._accounts.today(row)
        return {"used": today.used, "left": today.left, "resets_at": time_of(today.resets_at)}

    # Keys

    async def list_keys(self, request: SessionRequest) -> dict[str, Any]:
        return {"keys": [shown_key(row) for row in await self._accounts.keys(request.who.id)]}

    async def create_key(self, request: SessionRequest) -> RestReply:
        body = request.body
        row, key = await self._accounts.create_key(
            request.who.id,
            name=body["name"],
            mode=body["mode"],
            scopes=body.get("scopes", ()),
            own=limits_in(body),
            restrictions=restrictions_in(body),
            details=_details_in(body),
            directives=directives_in(body),
            by=request.grantor,
        )
        return RestReply({**shown_key(row), "key": key}, status=201)

    async def read_key(self, request: SessionRequest) -> dict[str, Any]:
        return shown_key(await self._accounts.key(request.who.id, request.path["id"]))

    async def update_key(self, request: SessionRequest) -> dict[str, Any]:
        body = request.body
        row = await self._accounts.update_key(
            request.who.id,
            request.path["id"],
            name=body.get("name"),
            scopes=body.get("scopes"),
            own=limits_in(body),
            restrictions=restrictions_in(body),
            details=_details_in(body),
            directives=directives_in(body),
            status=body.get("status"),
            fault=body.get("fault"),
            by=request.grantor,
        )
        return shown_key(row)

    async def rotate_key(self, request: SessionRequest) -> RestReply:
        overlap_s = request.body.get("overlap_s", 86_400)
        row, key = await self._accounts.rotate_key(
            request.who.id, request.path["id"], overlap_s=overlap_s, by=request.grantor
        )
        return RestReply({**shown_key(row), "key": key}, status=201)

    async def revoke_key(self, request: SessionRequest) -> dict[str, Any]:
        await self._accounts.revoke_key(request.who.id, request.path["id"], by=request.grantor)
        return {"id": request.path["id"], "revoked": True}

    # Usage

    async def usage(self, request: SessionRequest) -> dict[str, Any]:
        wanted = charts.wanted_of(request.query, request.who.id)
        lines = await self._usage.chart(wanted)
        labels = {}
        if wanted.by == "key":
            labels = {row["id"]: row["name"] for row in await self._accounts.keys(request.who.id)}
        chart = await request_threads.run(lambda: charts.chart_of(wanted, lines, labels))
        today = await self._today(await self._accounts.read(request.who.id))
        return {**chart, "flush_s": self._usage.flush_s, "today": today}

    async def export(self, request: SessionRequest) -> web.Response:
        wanted = charts.wanted_of(request.query, request.who.id)
        body = await self._usage.table(wanted, charts.csv_of)
        name = f"usage-{wanted.first:%Y%m%d}-{wanted.last:%Y%m%d}-{wanted.step}.csv"
        return web.Response(
            body=body,
            content_type="text/csv",
            charset="utf-8",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )

    async def live(self, request: SessionRequest) -> dict[str, Any]:
        row = await self._accounts.read(request.who.id)
        return {**await live_of(self._usage, request.who.id), "today": await self._today(row)}


async def live_of(usage: UsageService, account: str | None) -> dict[str, Any]:
    """Usage of the last minutes, of one account or, for None, of all."""
    now = datetime.datetime.now(datetime.UTC)
    first = (now - LIVE).replace(second=0, microsecond=0)
    lines = await usage.chart(UsageQuery(step="minute", first=first, last=now, account=account))
    times = times_of(int(first.timestamp()), int(now.timestamp()) + 1, "minute")
    line = lines[0] if lines else ChartLine("")
    return {"at": time_of(now), "flush_s": usage.flush_s, "times": times, "minutes": charts.columns_of(line, times)}


def _shown_action(row: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of the account's log. The address of an operator is left out."""
    return {**row, "at": time_of(row["at"]), "address": "" if row["by"] == "operator" else row["address"]}


def _details_in(body: Mapping[str, Any]) -> KeyDetailChange:
    """Owner, note and expiry in a request body: an absent one is left unchanged, and null removes the expiry."""
    expires_at = None
    if "expires_at" in body:
        expires_at = NEVER if body["expires_at"] is None else moment_of(body["expires_at"], "expires_at")
    return KeyDetailChange(owner=body.get("owner"), note=body.get("note"), expires_at=expires_at)


def shown_key(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "name": row["name"],
        "hint": row["hint"],
        "mode": row["mode"],
        "scopes": access.scope_names(access.scope_bits(row["scopes"])),
        "status": row["status"],
        "requests_per_second": row["requests_per_second"],
        "units_per_second": row["units_per_second"],
        "allowed_ips": row["allowed_ips"],
        "allowed_origins": row["allowed_origins"],
        "allowed_networks": row["allowed_networks"],
        "allowed_methods": row["allowed_methods"],
        "allowed_contracts": row["allowed_contracts"],
        "allow_in_url": row["allow_in_url"],
        "private_transactions": row["private_transactions"],
        "owner": row["owner"],
        "note": row["note"],
        "directives": sorted(allowed_to(row["directives"])),
        "fault": row["fault"],
        "lineage_id": row["lineage_id"],
        "created_at": time_of(row["created_at"]),
        "expires_at": time_of(row["expires_at"]),
        "last_used_at": time_of(row.get("last_used_at")),
    }
