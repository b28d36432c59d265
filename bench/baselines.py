"""The baselines: nginx, nginx with Lua, HAProxy, a bare relay and an ordinary aiohttp application.

A baseline is a name, its requirements, and a function that writes its configuration and returns its command line. All run
on the same core, forward to the same stub over keep-alive connections, and log nothing.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench import debian_packages, machine, processes, tls_files
from bench.loaders import Stub, Target

KEY = "bench_key_of_the_baselines_0123456789abcdef"  # as long as a Penstock key
PATH = "/v1/rpc/ethereum/mainnet"
PACKAGES = ("nginx-light", "libnginx-mod-http-lua", "lua-cjson", "haproxy", "wrk")
TOOLS = Path(__file__).parent / "tools"

# At least as many idle upstream connections as any case has clients; otherwise nginx keeps closing and reopening them.
KEEPALIVE = 1024


@dataclass(frozen=True, slots=True)
class Start:
    """The ports a baseline listens on and forwards to, and a directory for its files."""

    port: int
    upstream_port: int
    workdir: Path
    workers: int = 1
    urls: tuple[str, ...] = ()  # of all its upstreams, for gateways that take several
    caches: bool = False


@dataclass(frozen=True, slots=True)
class Baseline:
    name: str
    label: str
    missing: Callable[[], str | None]  # reason why it cannot run here, or None
    command: Callable[[Start], list[str]]
    scheme: Literal["http", "https"] = "http"
    path: str = PATH


class Running:
    """A running baseline."""

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self.child: processes.Child | None = None

    def __repr__(self) -> str:
        return f"Running({self.baseline.name}, {self.child!r})"

    def start(
        self,
        upstream_port: int,
        *,
        cpus: Sequence[int],
        workdir: Path,
        workers: int = 1,
        urls: tuple[str, ...] = (),
        caches: bool = False,
    ) -> Target:
        if reason := self.baseline.missing():
            raise processes.StartFailed(reason)
        workdir.mkdir(parents=True)
        port = processes.free_port()
        argv = self.baseline.command(Start(port, upstream_port, workdir, workers, urls, caches))
        self.child = processes.start(self.baseline.name, argv, cpus=cpus, log=workdir / "log")
        processes.wait_until_listening(self.child, port)
        return Target("127.0.0.1", port, self.baseline.path, KEY, scheme=self.baseline.scheme)

    def stop(self) -> None:
        if self.child:
            self.child.stop()


# --- nginx ------------------------------------------------------------------------------------------------------------

NGINX = """\
{modules}
{user}
worker_processes {workers};
worker_rlimit_nofile {files};
pid "{workdir}/nginx.pid";
error_log "{workdir}/error.log" crit;
events {{ worker_connections {connections}; }}
http {{
    access_log off;
    keepalive_timeout 600s;
    keepalive_requests 1000000000;
    client_max_body_size 8m;
    client_body_buffer_size 1m;      # a 100 KB body stays in memory
    client_body_temp_path "{workdir}/body";
    proxy_temp_path "{workdir}/proxy";
    fastcgi_temp_path "{workdir}/fastcgi";
    uwsgi_temp_path "{workdir}/uwsgi";
    scgi_temp_path "{workdir}/scgi";
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_buffers 32 16k;            # a 100 KB reply stays in memory
    proxy_max_temp_file_size 0;      # a larger one is passed on as it arrives
    {http}
    {lua}
    upstream stub {{
        server 127.0.0.1:{upstream_port};
        keepalive {keepalive};
        keepalive_requests 1000000000;
        keepalive_timeout 600s;
    }}
    server {{
        listen 127.0.0.1:{port} {tls} backlog=4096 {reuseport};
        location / {{
            {access}
            proxy_pass {scheme}://stub;
        }}
    }}
}}
"""

LUA_INIT = """\
lua_package_cpath "{cpath};;";
    init_by_lua_block {{
        cjson = require "cjson.safe"
        keys = {{ ["{key}"] = true }}
    }}
"""

LUA_ACCESS = """\
access_by_lua_block {
                if not keys[ngx.var.http_x_api_key] then return ngx.exit(401) end
                ngx.req.read_body()
                local call = cjson.decode(ngx.req.get_body_data() or "")
                if not call or not (call.method or call[1]) then return ngx.exit(400) end
            }
"""


# TLS for clients, and to the upstream. Sessions of clients are not resumed in either candidate: each handshake is a full one.
SERVER_TLS = f"""\
ssl_certificate "{tls_files.CERT}";
    ssl_certificate_key "{tls_files.KEY}";
    ssl_protocols TLSv1.2 TLSv1.3;
"""
CLIENT_TLS = f"""\
proxy_ssl_protocols TLSv1.2 TLSv1.3;
    proxy_ssl_trusted_certificate "{tls_files.CERT}";
    proxy_ssl_verify on;
    proxy_ssl_name localhost;
    proxy_ssl_session_reuse on;
"""
GZIP = "gzip on; gzip_types application/json; gzip_proxied any; gzip_min_length 1024;"


def _nginx_config(
    start: Start,
    *,
    modules: str = "",
    lua: str = "",
    access: str = "",
    http: str = "",
    tls: str = "",
    scheme: str = "http",
) -> Path:
    config = start.workdir / "nginx.conf"
    files = machine.raise_file_limit()
    config.write_text(
        NGINX.format(
            modules=modules,
            user="user root;" if os.geteuid() == 0 else "",  # the worker must reach its temporary directories
            workers=start.workers,
            files=files,
            connections=min(files, 16384),
            workdir=start.workdir,
            lua=lua,
            access=access,
            http=http,
            tls=tls,
            scheme=scheme,
            upstream_port=start.upstream_port,
            port=start.port,
            reuseport="reuseport" if start.workers > 1 else "",
            keepalive=KEEPALIVE,
        )
    )
    return config


def _nginx_argv(start: Start, config: Path) -> list[str]:
    nginx = machine.find_tool("nginx") or "nginx"
    return [
        nginx,
        "-p",
        str(start.workdir),
        "-c",
        str(config),
        "-e",
        str(start.workdir / "start.log"),
        "-g",
        "daemon off;",
    ]


def _nginx(start: Start) -> list[str]:
    return _nginx_argv(start, _nginx_config(start))


def _nginx_tls(start: Start) -> list[str]:
    return _nginx_argv(start, _nginx_config(start, http=SERVER_TLS, tls="ssl"))


def _nginx_upstream_tls(start: Start) -> list[str]:
    return _nginx_argv(start, _nginx_config(start, http=CLIENT_TLS, scheme="https"))


def _nginx_gzip(start: Start) -> list[str]:
    return _nginx_argv(start, _nginx_config(start, http=GZIP))


def terminator(start: Start) -> list[str]:
    """nginx in front of a stub: the stub itself has no TLS."""
    tls_files.make()
    return _nginx_tls(start)


def _nginx_lua(start: Start) -> list[str]:
    modules = _nginx_modules()
    loads = "\n".join(f'load_module "{modules / name}";' for name in ("ndk_http_module.so", "ngx_http_lua_module.so"))
    cpath = ";".join(str(path.parent / "?.so") for path in _cjson())
    config = _nginx_config(start, modules=loads, lua=LUA_INIT.format(cpath=cpath, key=KEY), access=LUA_ACCESS)
    return _nginx_argv(start, config)


def _nginx_modules() -> Path:
    done = subprocess.run([machine.find_tool("nginx") or "nginx", "-V"], capture_output=True, text=True, check=False)
    match = re.search(r"--modules-path=(\S+)", done.stderr)
    return Path(match.group(1) if match else "/usr/lib/nginx/modules")


def _cjson() -> list[Path]:
    """Find lua-cjson for LuaJIT (Lua 5.1 ABI); the directory name includes the architecture."""
    return sorted(Path("/usr/lib").glob("*/lua/5.1/cjson.so"))


def _nginx_missing() -> str | None:
    return None if machine.find_tool("nginx") else "nginx is not installed"


def _nginx_lua_missing() -> str | None:
    if reason := _nginx_missing():
        return reason
    if not (_nginx_modules() / "ngx_http_lua_module.so").exists():
        return "nginx's Lua module is not installed (Debian: libnginx-mod-http-lua)"
    return None if _cjson() else "cjson for Lua 5.1 is not installed (Debian: lua-cjson)"


# --- HAProxy ----------------------------------------------------------------------------------------------------------

HAPROXY = """\
global
    nbthread {workers}
    maxconn 4096
defaults
    mode http
    timeout connect 5s
    timeout client 600s
    timeout server 600s
    timeout http-keep-alive 600s
    timeout queue 300ms
    option http-keep-alive
    http-reuse always
frontend front
    bind 127.0.0.1:{port} backlog 4096
    default_backend stub
backend stub
    server one 127.0.0.1:{upstream_port} pool-max-conn {keepalive} {limit}
"""


def _haproxy(start: Start, *, limit: str = "") -> list[str]:
    config = start.workdir / "haproxy.cfg"
    fields = {"workers": start.workers, "port": start.port, "upstream_port": start.upstream_port}
    config.write_text(HAPROXY.format(**fields, keepalive=KEEPALIVE, limit=limit))
    return [machine.find_tool("haproxy") or "haproxy", "-db", "-q", "-f", str(config)]


def _haproxy_queue(start: Start) -> list[str]:
    """As many upstream connections as the upstream can use; other calls wait for a moment and then get a 503."""
    return _haproxy(start, limit="maxconn 64")


def _haproxy_missing() -> str | None:
    return None if machine.find_tool("haproxy") else "haproxy is not installed"


# --- Python -----------------------------------------------------------------------------------------------------------


def _relay(start: Start) -> list[str]:
    return [sys.executable, str(TOOLS / "relay.py"), str(start.port), str(start.upstream_port)]


def _plain(start: Start) -> list[str]:
    return [sys.executable, str(TOOLS / "plain.py"), str(start.port), str(start.upstream_port), KEY]


BASELINES = {
    baseline.name: baseline
    for baseline in (
        Baseline("nginx", "nginx", _nginx_missing, _nginx),
        Baseline("nginx+tls", "nginx, listen ssl", _nginx_missing, _nginx_tls, scheme="https"),
        Baseline("nginx+upstream-tls", "nginx, proxy_ssl", _nginx_missing, _nginx_upstream_tls),
        Baseline("nginx+gzip", "nginx, gzip on", _nginx_missing, _nginx_gzip),
        Baseline("nginx+lua", "nginx + Lua (JSON, key)", _nginx_lua_missing, _nginx_lua),
        Baseline("haproxy", "HAProxy", _haproxy_missing, _haproxy),
        Baseline("haproxy+queue", "HAProxy with a limit and a queue", _haproxy_missing, _haproxy_queue),
        Baseline("relay", "bare uvloop relay (the limit)", lambda: None, _relay),
        Baseline("plain", "ordinary aiohttp", lambda: None, _plain),
    )
}


class TlsStub(Stub):
    """A stub behind nginx as its TLS terminator, both on the stub's core."""

    def __init__(self, name: str, *, size: int) -> None:
        super().__init__(name, size=size)
        self._terminator: processes.Child | None = None

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def start(self, cpu: int, *, port: int, workdir: Path) -> None:
        if reason := _nginx_missing():
            print(f"no TLS upstream: {reason}")
            return
        super().start(cpu, port=0, workdir=workdir)
        place = workdir / f"terminator-{self.name}"
        place.mkdir()
        inner, self.port = self.port, processes.free_port()
        argv = terminator(Start(self.port, inner, place))
        self._terminator = processes.start(f"terminator-{self.name}", argv, cpus=[cpu], log=place / "log")
        processes.wait_until_listening(self._terminator, self.port)

    def stop(self) -> None:
        if self._terminator:
            self._terminator.stop()
        super().stop()


# --- installation -----------------------------------------------------------------------------------------------------


def install() -> str:
    """Install missing baselines if possible without asking (as root on Debian); return what was done, or why not."""
    if not (_nginx_missing() or _nginx_lua_missing() or _haproxy_missing() or not machine.find_tool("wrk")):
        return ""
    if fault := debian_packages.install(*PACKAGES):
        return f"could not install some baselines: {fault}"
    return f"installed {shlex.join(PACKAGES)}"
