"""The guide's page about a production host, run as root on a host of its own, under its systemd: from an empty database to a
call over TLS and an account holder who is signed in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests import booted_host
from tests.booted_host import BootedHost
from tests.certificates import Authority, Leaf
from tests.guide_pages import HOST_PAGE, blocks_of

NAME = "rpc.example.com"
ROLES = ("gateway", "follower", "deliverer")
MAILS = "/var/mail/received"
ARCHIVE, LIVE = f"/etc/letsencrypt/archive/{NAME}", f"/etc/letsencrypt/live/{NAME}"
# CAP_NET_BIND_SERVICE, the only right that the gateway has.
BIND_LOW_PORTS = 1 << 10

LACK = booted_host.lack()
pytestmark = [
    pytest.mark.skipif(bool(LACK), reason=LACK),
    pytest.mark.timeout(360),
]


@dataclass(frozen=True)
class WalkedHost:
    host: BootedHost
    authority: Authority
    output: str

    def request(self, path: str, body: Any = None, *words: str) -> tuple[int, Any]:
        """Send a request with curl on the host, with a jar for cookies; return status and JSON."""
        data = "" if body is None else f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
        script = (
            f"curl -s -w '\\n%{{http_code}}' -b /root/jar -c /root/jar {data} {' '.join(words)} https://{NAME}{path}"
        )
        text, status = self.host.output(script).rsplit("\n", 1)
        return int(status), json.loads(text)

    def printed(self, pattern: str) -> str:
        found = re.search(pattern, self.output)
        assert found is not None, self.output
        return found[1]

    def status_of(self, role: str) -> dict[str, str]:
        """The fields of /proc/PID/status of a role's main process."""
        text = self.host.output(f"cat /proc/$(systemctl show --property MainPID --value penstock@{role})/status")
        return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def page_script() -> str:
    """Every block that runs, for the network of the upstream on the host."""
    script = "\n".join(block.script(index) for index, block in enumerate(blocks_of(HOST_PAGE)) if not block.reason)
    return script.replace("ethereum/mainnet", "ethereum/sepolia").replace("--mode live", "--mode test")


def prepare(host: BootedHost, authority: Authority) -> None:
    """Prepare what the page's other blocks install, Postgres and a certificate, and start an upstream and a mail server."""
    host.output(f"""
        printf '127.0.0.1 localhost {NAME} smtp.example.com\n' >/etc/hosts
        cp /mnt/{authority.file.name} /usr/local/share/ca-certificates/test.crt && update-ca-certificates >/dev/null
        pg_createcluster $(ls /usr/lib/postgresql | tail -n 1) main >/dev/null
        systemctl enable --now --quiet postgresql
        install --directory --mode 700 /etc/letsencrypt/archive /etc/letsencrypt/live {ARCHIVE} {LIVE}
        for name in fullchain privkey; do ln -s {ARCHIVE}/$name.pem {LIVE}/$name.pem; done
    """)
    renew(host, authority.leaf(NAME))
    python, mail = "/opt/penstock/environment/bin/python", authority.leaf("smtp.example.com")
    host.start(python, "-m", "tests.compose.chain_stub")
    words = ("penstock", "the-password-of-this-user", MAILS)
    host.start(python, "-m", "tests.mail_program", f"/mnt/{mail.cert.name}", f"/mnt/{mail.key.name}", *words)


def renew(host: BootedHost, leaf: Leaf) -> None:
    """Put a certificate where certbot does, readable by root alone."""
    for file, name in ((leaf.cert, "fullchain"), (leaf.key, "privkey")):
        host.output(f"umask 077 && cp /mnt/{file.name} {ARCHIVE}/{name}.pem")


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WalkedHost]:
    directory, files = tmp_path_factory.mktemp("host"), tmp_path_factory.mktemp("files")
    authority = Authority(files)
    with booted_host.booted(directory, files) as host:
        prepare(host, authority)
        done = host.run(
            f"set -euo pipefail\nset -x\n{page_script()}",
            HOST_NAME=NAME,
            EMAIL="ops@example.com",
            UPSTREAM_URL="http://127.0.0.1:8545",
            within_s=240,
        )
        logs = "" if done.returncode == 0 else host.run("journalctl --no-pager --unit 'penstock@*' | tail -n 60").stdout
        assert done.returncode == 0, done.stdout[-8000:] + logs
        yield WalkedHost(host, authority, done.stdout)


def test_first_call_is_answered_over_tls(walked: WalkedHost) -> None:
    assert '"result":"0x10"' in walked.output.replace(" ", "")


def test_services_are_active_without_faults(walked: WalkedHost) -> None:
    for role in ROLES:
        assert walked.host.output(f"systemctl is-active penstock@{role}") == "active"
        assert walked.host.output(f"systemctl show --property NRestarts --value penstock@{role}") == "0"
        assert walked.host.output(f"systemctl is-enabled penstock@{role}") == "enabled"


def test_processes_have_no_rights_but_the_port(walked: WalkedHost) -> None:
    for role in ROLES:
        status = walked.status_of(role)
        assert "0" not in status["Uid"].split()
        expected = BIND_LOW_PORTS if role == "gateway" else 0
        for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(status[name], 16) in (0, expected), (role, name)
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_secrets_stay_readable_by_root_alone(walked: WalkedHost) -> None:
    modes = walked.host.output("stat --format %a /etc/penstock /etc/penstock/penstock.toml /run/penstock-gateway")
    assert modes.split() == ["700", "600", "700"]
    for path in (
        "/etc/penstock/penstock.toml",
        "/run/penstock-gateway/penstock.toml",
        "/run/penstock-gateway/tls/privkey.pem",
    ):
        assert walked.host.run(f"runuser -u nobody -- cat {path}").returncode != 0, path
        assert walked.host.run(f"cat {path}").returncode == 0, path


def test_link_signs_the_account_holder_in_once(walked: WalkedHost) -> None:
    link = walked.printed(r"url +(https://\S+)")
    assert link.startswith(f"https://{NAME}/#token=")
    token = {"token": link.partition("=")[2]}
    status, found = walked.request("/v1/account/sign-in/redeem", token)
    assert (status, found["account"]["email"]) == (200, "ops@example.com")
    assert walked.request("/v1/account/session")[0] == 200
    assert walked.request("/v1/account/sign-in/redeem", token)[0] == 401


def test_password_and_operator_token_sign_in(walked: WalkedHost) -> None:
    given = {"email": "ops@example.com", "password": "a long pass phrase of theirs"}
    assert walked.request("/v1/account/sign-in", given)[0] == 200
    token = walked.printed(r"\btoken +(adm_\S+)")
    assert walked.request("/v1/admin/networks", None, f"-H 'Authorization: Bearer {token}'")[0] == 200


def test_link_arrives_by_mail(walked: WalkedHost) -> None:
    assert walked.request("/v1/account/sign-in/link", {"email": "ops@example.com"})[0] in (200, 202)
    wait = f"for i in $(seq 300); do cat {MAILS}/new/* 2>/dev/null && exit; sleep 0.2; done"
    mail = walked.host.output(f"{wait}; journalctl --no-pager -n 60; exit 1")
    assert "To: ops@example.com" in mail
    assert f"https://{NAME}/#token" in mail.replace("=\n", "").replace("=3D", "=")


def test_check_shows_every_part_as_up(walked: WalkedHost) -> None:
    for part in ("database", "mail", "ethereum/sepolia#1"):
        assert re.search(rf"^{part}\s+up\b", walked.output, re.MULTILINE), walked.output


def test_reload_applies_changed_settings(walked: WalkedHost) -> None:
    head = f"curl -s -D - -o /dev/null https://{NAME}/healthz"
    assert "max-age=31536000" in walked.host.output(head)
    walked.host.output("sed -i s/31536000/777/ /etc/penstock/penstock.toml && systemctl reload penstock@gateway")
    walked.host.output(f"for i in $(seq 100); do {head} | grep max-age=777 && exit; sleep 0.2; done; exit 1")


def test_reload_uses_a_renewed_certificate(walked: WalkedHost) -> None:
    leaf = walked.authority.leaf(NAME)
    renew(walked.host, leaf)
    walked.host.output("systemctl reload penstock@gateway")
    shown = f"openssl s_client -connect {NAME}:443 </dev/null 2>/dev/null | openssl x509 -noout -serial"
    wanted = f"serial={leaf.serial:X}"
    script = f"for i in $(seq 100); do {shown} | grep -i '^serial=0*{leaf.serial:x}$' && exit; sleep 0.2; done; exit 1"
    assert walked.host.run(script).returncode == 0, wanted


def test_backup_was_written(walked: WalkedHost) -> None:
    assert int(walked.host.output("stat --format %s /var/backups/penstock-*.dump")) > 10_000
