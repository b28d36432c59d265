"""The candidates of a run: started when a case needs them, reused by the next case, stopped at the end."""

import gzip
import http.client
import itertools
import json
import ssl
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bench import baselines, machine, service, tls_files
from bench.baselines import BASELINES, KEY, PATH
from bench.cases import ALL_HEALTHY, NO_VALKEY, OWN_RPC, RPC, Case, at_path
from bench.loaders import MARKER, DeepStub, Stub, Target
from bench.peers import PEERS
from bench.processes import StartFailed

# Penstock in another configuration than the case's, as its baseline.
OWN_PROFILES = {ALL_HEALTHY: "three", NO_VALKEY: "forward"}


class Member(NamedTuple):
    """A candidate in one configuration. Baselines have no profile: they are the same in every case."""

    name: str
    stub: str
    profile: str = ""
    workers: int = 1
    stem: str = RPC  # the path measured; one process serves all paths


class Candidates:
    def __init__(
        self,
        *,
        layout: machine.Layout,
        stubs: Mapping[str, Stub],
        peers: Mapping[str, Target],
        checkouts: Mapping[str, Path],
        settings: Mapping[str, service.Value],
        workdir: Path,
    ) -> None:
        self.layout, self.stubs, self.peers, self.settings, self.workdir = layout, stubs, peers, settings, workdir
        self.checkouts = checkouts  # of Penstock, by the name of the candidate
        self._running: dict[Member, tuple[baselines.Running | service.Service, Target]] = {}
        self._broken: dict[tuple[str, str], str] = {}  # by name and profile: failed starts are not retried
        self._serial = itertools.count()

    def __repr__(self) -> str:
        return f"Candidates({list(self._running)})"

    def member(self, name: str, case: Case, *, workers: int = 1) -> Member:
        if name == OWN_RPC:
            return Member("penstock", case.stub, case.profile, workers)
        if name in OWN_PROFILES:
            return Member("penstock", case.stub, OWN_PROFILES[name], workers)
        if name in self.checkouts:
            return Member(name, case.stub, case.profile, workers, case.stem)
        return Member(name, case.stub, case.profile if name in PEERS else "", workers)

    def target(self, member: Member, cpus: tuple[int, ...]) -> Target:
        """Return the address of a member, starting it if needed; raise StartFailed with the reason if it fails."""
        if member.name == "direct":
            return Target("127.0.0.1", self.stubs[member.stub].port, PATH, KEY)
        if member.name in self.peers:
            return self.peers[member.name]
        if member.stem != RPC:
            return at_path(self.target(member._replace(stem=RPC), cpus), member.stem)
        if member in self._running:
            return self._running[member][1]
        if reason := self._broken.get((member.name, member.profile)):
            raise StartFailed(reason)
        workdir = self.workdir / f"{next(self._serial)}-{member.name}"
        return (
            self._start_service(member, cpus, workdir)
            if member.name in self.checkouts
            else self._start(member, cpus, workdir)
        )

    def keep_only(self, members: set[Member]) -> None:
        """Stop all others: even an idle gateway uses some of the service's core."""
        wanted = {member._replace(stem=RPC) for member in members}
        for member in [each for each in self._running if each not in wanted]:
            self._running.pop(member)[0].stop()

    def stop(self) -> None:
        self.keep_only(set())

    def _start(self, member: Member, cpus: tuple[int, ...], workdir: Path) -> Target:
        running = baselines.Running({**BASELINES, **PEERS}[member.name])
        profile = service.PROFILES.get(member.profile, service.Profile(""))
        try:
            target = running.start(
                self.stubs[member.stub].port,
                cpus=cpus,
                workdir=workdir,
                workers=member.workers,
                urls=self._urls(member.stub, profile),
                caches=bool(profile.needs.get("cache.enabled")),
            )
        except StartFailed as error:
            running.stop()
            self._broken[member.name, member.profile] = str(error)
            raise
        except BaseException:
            running.stop()  # do not leave it running if start-up is interrupted
            raise
        self._running[member] = (running, target)
        return target

    def _urls(self, stub: str, profile: service.Profile) -> tuple[str, ...]:
        return tuple(self.stubs[name].url for name in (stub, *profile.stubs))

    def _stub_url(self, name: str) -> str:
        """The address of a stub. One with a deep history is started only when a case needs it."""
        stub = self.stubs[name]
        if isinstance(stub, DeepStub):
            stub.run()
        return stub.url

    def _start_service(self, member: Member, cpus: tuple[int, ...], workdir: Path) -> Target:
        profile = service.PROFILES[member.profile]
        root = self.checkouts[member.name]
        addresses = {setting: self.stubs[name].url for setting, name in profile.addresses.items()}
        settings = service.settings_for(profile, {**addresses, **self.settings}, root)
        if reason := service.missing(root):
            raise StartFailed(reason)
        running = service.Service(workdir, root)
        urls, others = self._urls(member.stub, profile), self.layout.load
        networks = {network: self._stub_url(name) for network, name in profile.networks.items()}
        try:
            base_url, key, other_key, free_keys = running.start(
                urls,
                connections=profile.connections,
                workers=member.workers,
                settings=settings,
                networks=networks,
                free_accounts=profile.free_accounts,
                cpu=cpus,
                others=others,
            )
        except StartFailed as error:
            running.stop()
            self._broken[member.name, member.profile] = reason = f"{error}{running.keep_log()}"
            raise StartFailed(reason) from error
        except BaseException:
            running.stop()  # do not leave it running if start-up is interrupted
            raise
        target = replace(
            parse_target(f"{base_url}/rpc/ethereum/mainnet", key), other_key=other_key, free_keys=free_keys
        )
        self._running[member] = (running, target)
        return target


def parse_target(url: str, key: str) -> Target:
    """Parse a loopback http URL. The bench sends load to this machine only."""
    parts = urlsplit(url)
    host = {"localhost": "127.0.0.1"}.get(parts.hostname or "", parts.hostname or "")
    if parts.scheme not in ("http", "https") or not host.startswith("127."):
        raise ValueError(f"{url}: must be an http:// or https:// address on 127.0.0.1")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(host, parts.port or 80, path, key, scheme="https" if parts.scheme == "https" else "http")


def probe(target: Target, case: Case, number: int) -> str:
    """Send one call before the load starts, check the whole reply, and return its X-Cache header."""
    digits = f"9{number:0{len(MARKER) - 1}d}"
    head, _, body = case.template(target).decode().replace(MARKER, digits).partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    verb, path, _ = first.split(" ")
    headers = dict(line.split(": ", 1) for line in lines)
    connection = http.client.HTTPConnection(target.host, target.port, timeout=10)
    if target.scheme == "https":
        context = ssl.create_default_context(cafile=tls_files.CERT)
        connection = http.client.HTTPSConnection(target.host, target.port, timeout=10, context=context)
    try:
        connection.request(verb, path, body or None, headers)
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise StartFailed(f"no reply to a single call: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise StartFailed(f"status {response.status}: {content[:200].decode(errors='replace')}")
    if response.headers.get("Content-Encoding") == "gzip":
        content = gzip.decompress(content)
    elif "Accept-Encoding" in headers:
        raise StartFailed("the reply is not compressed")
    if body:
        _check_ids(json.loads(body), content)
    elif case.expect.encode() not in content:
        raise StartFailed(f"the reply has no {case.expect}: {content[:200].decode(errors='replace')}")
    return response.headers.get("X-Cache", "")


def _check_ids(calls: Any, content: bytes) -> None:
    try:
        replies = json.loads(content)
        pairs = zip(calls, replies, strict=True) if isinstance(calls, list) else [(calls, replies)]
        wrong = [reply for call, reply in pairs if reply.get("id") != call["id"] or "result" not in reply]
    except (ValueError, AttributeError) as error:
        raise StartFailed(f"reply is not JSON-RPC: {content[:200].decode(errors='replace')}") from error
    if wrong:
        raise StartFailed(f"wrong id or no result: {str(wrong[0])[:200]}")
