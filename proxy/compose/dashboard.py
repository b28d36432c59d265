"""Builds the dashboard feature: sign-in, accounts and their keys, usage, and the operators' view of the fleet."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Mapping
from typing import Any

from proxy.compose.accounts import AccountsFeature, known_uses
from proxy.core.dashboard_links import site_of
from proxy.services.accounts.account_mails import AccountMails
from proxy.services.accounts.accounts import AccountService
from proxy.services.accounts.action_log import ActionLog
from proxy.services.accounts.admission import Admission
from proxy.services.accounts.email_change import EmailChange
from proxy.services.accounts.metering import Meters
from proxy.services.accounts.removal import AccountRemoval
from proxy.services.accounts.second_factor import SecondFactor
from proxy.services.accounts.session_rates import SessionRates
from proxy.services.accounts.sign_in import SignIn
from proxy.services.accounts.team import Team
from proxy.services.announcements import Announcements
from proxy.services.canaries import CanaryWatch
from proxy.services.fleet import Cordons, FleetView
from proxy.services.method_matrix import MethodMatrix
from proxy.services.rpc.networks import Networks
from proxy.services.upstream_history import UpstreamHistory
from proxy.settings import Settings, Tables
from proxy.store.postgres.actions import ActionStore
from proxy.store.postgres.announcements import AnnouncementStore
from proxy.store.postgres.fleet import FleetStore
from proxy.store.postgres.local_copy import CopyDirectory
from proxy.store.postgres.members import MemberStore
from proxy.store.postgres.notices import Notices
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.request_store import RequestStore
from proxy.store.postgres.second_factors import SecondFactorStore
from proxy.store.postgres.secrets import vault_of
from proxy.store.postgres.sessions import SessionStore
from proxy.store.postgres.upstream_samples import UpstreamSamples
from proxy.store.postgres.usage import UsageStore
from proxy.store.postgres.webhooks import WebhookStore
from proxy.store.shared_memory.bucket_table import SharedBucketTable
from proxy.tasks import Tasks
from proxy.web.api_middleware import ApiMiddleware, Handler
from proxy.web.api_spec import ApiSpec
from proxy.web.dashboard.account import AccountHandlers
from proxy.web.dashboard.admin import AdminHandlers
from proxy.web.dashboard.announcements import AnnouncementHandlers
from proxy.web.dashboard.network_list import network_list
from proxy.web.dashboard.page_reads import PageReads
from proxy.web.dashboard.people import PeopleHandlers
from proxy.web.dashboard.sandbox_handlers import SandboxHandlers
from proxy.web.dashboard.session_endpoint import SessionEndpoints, SessionHandler
from proxy.web.dashboard.sign_in import SignInHandlers
from proxy.web.dashboard.upstream_charts import UpstreamChartHandlers
from proxy.web.network_resolver import NetworkResolver
from proxy.web.rest.endpoint import RestEndpoints, RestHandler
from proxy.web.sandbox import Sandbox
from proxy.wire.mailer import Mailer

log = logging.getLogger("penstock.dashboard")


class DashboardFeature:
    def __init__(
        self,
        settings: Settings,
        tables: Tables,
        pool: Pool,
        accounts: AccountsFeature,
        *,
        networks: Networks,
        bundlers: Networks,
        relays: Networks,
        addresses: SharedBucketTable,
        figures: Callable[[], dict[str, Any]],
        tasks: Tasks,
        copies: CopyDirectory | None = None,
        index_pools: Mapping[str, Pool] | None = None,
    ) -> None:
        """`index_pools`: the databases of networks whose index is not in the main one."""
        self._settings = settings
        self._tables = tables
        self._usage = accounts.usage
        self._keyring = accounts.keyring
        self._tasks = tasks
        self._networks = [route.network for route in networks.routes.values()]
        sessions = SessionStore(pool, pepper=settings.keys.pepper, previous_pepper=settings.keys.previous_pepper)
        self._mails = mails = AccountMails(Mailer(settings.mail), tasks)
        factor = SecondFactor(SecondFactorStore(pool, vault_of(settings)))
        self.sign_in = SignIn(sessions, factor, settings.dashboard, mails)
        self.emails = EmailChange(self.sign_in, sessions, accounts.keys, settings.dashboard, mails)
        self.team = Team(MemberStore(pool), sessions, self.sign_in, mails, settings.dashboard)
        self.rates = SessionRates(settings.dashboard.requests_per_second, addresses)
        self.accounts = AccountService(accounts.keys, accounts.usage, plans=tables.plans, uses=known_uses(tables))
        self.removal = AccountRemoval(accounts.keys, WebhookStore(pool))
        self.actions = ActionLog(ActionStore(pool))
        self.announcements = Announcements(AnnouncementStore(pool))
        self.sandbox = Sandbox(accounts.admission, self.sign_in, settings.keys.pepper)
        self.matrix = MethodMatrix(UsageStore(pool), RequestStore(pool), tables.plans)
        copy = copies.copy_of("cordons") if copies else None
        fleet = FleetStore(pool, index_pools)
        kinds = {"upstream": networks, "bundler": bundlers, "relay": relays}
        self.cordons = Cordons(fleet, kinds.values(), copy=copy)
        report_s = settings.dashboard.report_s
        self.fleet = FleetView(fleet, networks=kinds, cordons=self.cordons, figures=figures, report_s=report_s)
        self.canaries = CanaryWatch(fleet, ActionStore(pool))
        self.history = UpstreamHistory(UpstreamSamples(pool), self.fleet.read, report_s=report_s)

    def __repr__(self) -> str:
        return f"<DashboardFeature {self.fleet!r}>"

    def handlers(
        self,
        api: ApiMiddleware,
        admission: Admission,
        spec: ApiSpec,
        resolver: NetworkResolver,
        rest: Mapping[str, RestHandler],
        *,
        operator: Mapping[str, SessionHandler],
        meters: Meters,
        with_key: RestEndpoints,
    ) -> dict[str, Handler]:
        """The handlers, by operation id. `rest`: the handlers for keys, some of which are mirrored under /account. `operator`:
        further handlers of operators. `meters`: charge accounts for upstream calls. `with_key`: serves requests with a key."""
        dashboard = self._settings.dashboard
        endpoints = SessionEndpoints(api, admission, spec, self.sign_in, self.actions, dashboard, self.rates, with_key)
        plans = self._tables.plans
        networks = network_list(self._networks, self._tables.methods, self._settings.follower.follows)
        session_s = self._settings.dashboard.session_s
        signing = SignInHandlers(self.sign_in, self.emails, self.actions, session_s=session_s)
        handlers = {
            **endpoints.wrapped(signing.handlers()),
            **endpoints.wrapped(PeopleHandlers(self.team, self.accounts, signing).handlers()),
            **endpoints.wrapped(
                AccountHandlers(
                    self.accounts, self.removal, self.sign_in, self._usage, self.actions, plans, networks
                ).handlers()
            ),
            **endpoints.wrapped(
                AdminHandlers(
                    self.accounts, self.removal, self._usage, self.fleet, self.sign_in, self.actions, plans
                ).handlers()
            ),
            **endpoints.wrapped(SandboxHandlers(self.accounts, self.sandbox).handlers()),
            **endpoints.wrapped(AnnouncementHandlers(self.announcements).handlers()),
            **endpoints.wrapped(UpstreamChartHandlers(self.history, self.matrix).handlers()),
            **endpoints.wrapped(operator),
            **endpoints.mirrored(rest, resolver, keyring=self._keyring, meters=meters),
        }
        return handlers | endpoints.wrapped(PageReads(spec, endpoints.readers, site=site_of(dashboard.url)).handlers())

    def start(self, notices: Notices) -> None:
        """Start the loops that use the database."""
        self.cordons.listen(notices)
        self._tasks.start("old sessions", self.sign_in.keep)
        self._tasks.start("old members", self.team.keep)
        self._tasks.start("old actions", self.actions.keep)
        self._tasks.start("cordons", self.cordons.follow)
        self._tasks.start("fleet", self.fleet.run)
        if self.cordons.canaries:
            self._tasks.start("canaries", self.canaries.run)
        self._tasks.start("upstream history", self.history.run)

    def listens_on(self, scheme: str, host: str, port: int) -> None:
        """Derive the dashboard's URL from the listening address, if the settings have none.

        The Host header of a request is not used: an attacker could then make sign-in links lead elsewhere.
        """
        if self.sign_in.url:
            return
        self.sign_in.url = url_of(scheme, host, port)
        if ipaddress.ip_address(host).is_unspecified:
            log.warning("sign-in links work on this machine only: set dashboard.url to the dashboard's public URL")

    async def drain(self, within_s: float) -> None:
        """Send the mails that requests have begun."""
        await self._mails.drain(within_s)

    async def close(self) -> None:
        await self.fleet.close()


def url_of(scheme: str, host: str, port: int) -> str:
    """The URL of a listening address; for the unspecified address, localhost is the only name that is certain to work."""
    address = ipaddress.ip_address(host)
    name = "localhost" if address.is_unspecified else f"[{host}]" if address.version == 6 else host
    return f"{scheme}://{name}:{port}"
