"""The part of the composition root for people who are signed in: accounts and their keys, usage, and the operators' view."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Mapping
from typing import Any

from proxy.services.accounts.accounts import AccountService
from proxy.services.accounts.admission import Admission
from proxy.services.accounts.sign_in import SignIn
from proxy.services.fleet import Cordons, FleetView
from proxy.services.rpc.networks import Networks
from proxy.services.usage import UsageService
from proxy.settings import Settings, Tables
from proxy.store.fleet import FleetStore
from proxy.store.keys import KeyStore
from proxy.store.notices import Notices
from proxy.store.pool import Pool
from proxy.store.sessions import SessionStore
from proxy.tasks import Tasks
from proxy.web.api_spec import ApiSpec
from proxy.web.dashboard.account import AccountHandlers
from proxy.web.dashboard.admin import AdminHandlers
from proxy.web.dashboard.session_endpoint import Handler, SessionEndpoints
from proxy.web.dashboard.sign_in import SignInHandlers
from proxy.web.gate import Gate
from proxy.web.network_resolver import NetworkResolver
from proxy.web.rest.endpoint import RestHandler
from proxy.wire.mailer import Mailer

log = logging.getLogger("penstock.dashboard")


class DashboardFeature:
    def __init__(
        self,
        settings: Settings,
        tables: Tables,
        pool: Pool,
        notices: Notices,
        *,
        keys: KeyStore,
        usage: UsageService,
        networks: Networks,
        bundlers: Networks,
        figures: Callable[[], dict[str, Any]],
        tasks: Tasks,
    ) -> None:
        self._settings = settings
        self._tables = tables
        self._usage = usage
        self._tasks = tasks
        self._networks = [route.network for route in networks.routes.values()]
        store = SessionStore(pool, pepper=settings.keys.pepper)
        self.sign_in = SignIn(store, settings.dashboard, Mailer(settings.mail), tasks)
        self.accounts = AccountService(keys, usage, plans=tables.plans)
        fleet = FleetStore(pool)
        self.cordons = Cordons(fleet, notices, (networks, bundlers))
        self.fleet = FleetView(
            fleet,
            networks=networks,
            bundlers=bundlers,
            cordons=self.cordons,
            figures=figures,
            report_s=settings.dashboard.report_s,
        )

    def __repr__(self) -> str:
        return f"<DashboardFeature {self.fleet!r}>"

    def handlers(
        self,
        gate: Gate,
        admission: Admission,
        contract: ApiSpec,
        where: NetworkResolver,
        answers: Mapping[str, RestHandler],
    ) -> dict[str, Handler]:
        """By operation; `answers` are those of keys, of which some are there for people too."""
        signed = SessionEndpoints(gate, admission, contract, self.sign_in, self._settings.dashboard)
        plans = self._tables.plans
        return {
            **signed.handlers(SignInHandlers(self.sign_in, session_s=self._settings.dashboard.session_s).answers()),
            **signed.handlers(AccountHandlers(self.accounts, self._usage, plans, self._networks).answers()),
            **signed.handlers(AdminHandlers(self.accounts, self._usage, self.fleet, self.sign_in, plans).answers()),
            **signed.mirrored(answers, where),
        }

    def start(self) -> None:
        """The loops that look at the database."""
        self._tasks.start("usage", self._usage.run)
        self._tasks.start("old usage", self._usage.keep)
        self._tasks.start("old sessions", self.sign_in.keep)
        self._tasks.start("cordons", self.cordons.follow)
        self._tasks.start("fleet", self.fleet.run)

    def listens_on(self, host: str, port: int) -> None:
        """Where people reach it, if the settings do not say.

        Not under the name that a request gives: then links would lead where a stranger says.
        """
        if self.sign_in.url:
            return
        self.sign_in.url = url_of(host, port)
        if ipaddress.ip_address(host).is_unspecified:
            log.warning("sign-in links work on this machine only: set dashboard.url to where people reach it")

    async def close(self) -> None:
        await self._usage.close()
        await self.fleet.close()


def url_of(host: str, port: int) -> str:
    """Of an address that is listened on; all addresses of the machine have only one name that is surely its own."""
    address = ipaddress.ip_address(host)
    name = "localhost" if address.is_unspecified else f"[{host}]" if address.version == 6 else host
    return f"http://{name}:{port}"
