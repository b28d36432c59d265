"""A host of its own for one test: Debian's systemd as process 1, in new namespaces, on a throw-away copy of this machine.

Writes go to an overlay in memory, the only network is its own loopback, and nothing of this machine's services runs in it. So
units run under the real systemd with their real sandbox. Needs root, systemd and Debian's Postgres. The package is not
installed: `/opt/penstock/bin/penstock` runs the checkout.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.service import ROOT, children, end_with_the_tests

SYSTEMD = "/lib/systemd/systemd"
BOOT_S = 60.0
# The host's own services and settings of systemd, and clusters of Postgres, are left behind.
EMPTIED = (
    "etc/systemd/system",
    "etc/postgresql",
    "var/lib/postgresql",
    "etc/penstock",
    "etc/letsencrypt",
    "opt/penstock",
)
# Debian's services that this host has no use for, because it has no hardware, no other network and no users.
MASKED = (
    "systemd-networkd",
    "systemd-networkd-wait-online",
    "systemd-resolved",
    "systemd-udevd",
    "systemd-timesyncd",
    "getty@tty1",
)
LAUNCHER = """#!/bin/sh
PYTHONPATH=/opt/penstock/checkout PYTHONDONTWRITEBYTECODE=1 exec /opt/penstock/environment/bin/python -c \\
    'import sys; from proxy.__main__ import main; sys.argv[0] = "penstock"; sys.exit(main())' "$@"
"""
BOOT = """
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$PLACE"
mkdir "$PLACE/upper" "$PLACE/work" "$PLACE/root"
root="$PLACE/root"
mount -t overlay -o "lowerdir=/,upperdir=$PLACE/upper,workdir=$PLACE/work" overlay "$root"
for name in $EMPTIED; do rm -rf "$root/$name"; mkdir -p "$root/$name"; done
for name in $MASKED; do ln -s /dev/null "$root/etc/systemd/system/$name.service"; done
mkdir -p "$root/opt/penstock/bin" "$root/opt/penstock/checkout" "$root/opt/penstock/environment"
mount --bind "$CHECKOUT" "$root/opt/penstock/checkout"
mount --bind "$ENVIRONMENT" "$root/opt/penstock/environment"
printf '%s' "$LAUNCHER" >"$root/opt/penstock/bin/penstock"
chmod 755 "$root/opt/penstock/bin/penstock"
mount --bind "$FILES" "$root/mnt"
# A minimal Debian lacks the package procps.
rm -f "$root/usr/bin/kill"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for name in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$name"; done
chmod 1777 "$root/tmp"
for name in null zero full random urandom tty; do touch "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"; done
mkdir "$root/dev/pts" "$root/dev/shm" "$root/run/lock" "$root/old"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
# A known machine: on a first boot, systemd would enable every service that is installed.
echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
ip link set lo up
cd "$root"
pivot_root . old
umount --lazy /old
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin "$SYSTEMD" --log-target=journal --unit=multi-user.target
"""


# The features of the kernel that a boot needs.
TRIED = """
mount -t cgroup2 cgroup2 /mnt
ip link set lo up
mount -t tmpfs tmpfs /media
mkdir /media/upper /media/work /media/root
mount -t overlay -o lowerdir=/,upperdir=/media/upper,workdir=/media/work overlay /media/root
"""


def lack() -> str:
    """The reason why no host can be booted here; empty if one can."""
    if os.geteuid() != 0:
        return "needs root"
    if not os.path.exists(SYSTEMD) or shutil.which("pg_createcluster") is None:
        return "needs Debian's systemd and Postgres"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "--cgroup", "sh", "-ec", TRIED],
        capture_output=True,
        check=False,
    )
    return "needs the right to mount a cgroup2 hierarchy and an overlay of this machine" if tried.returncode else ""


@dataclass(frozen=True)
class BootedHost:
    # Process 1 of the host, by its id outside.
    init: int

    def words(self, *words: str) -> list[str]:
        return [
            "nsenter",
            "--target",
            str(self.init),
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--cgroup",
            "--pid",
            *words,
        ]

    def run(self, script: str, *, within_s: float = 120.0, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run commands as root in a shell of the host, in its checkout."""
        whole = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **environ}
        return subprocess.run(
            self.words("bash", "-c", f"cd /opt/penstock/checkout\n{script}"),
            env=whole,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=within_s,
            check=False,
        )

    def output(self, script: str) -> str:
        """The output of commands that must succeed."""
        done = self.run(f"set -euo pipefail\n{script}")
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()

    def start(self, *words: str) -> None:
        """Start a program in the background, as a unit of the host."""
        self.output(f"systemd-run --quiet --collect --setenv=PYTHONPATH=/opt/penstock/checkout {shlex.join(words)}")

    def state(self) -> str:
        return self.run("systemctl is-system-running").stdout.strip()


@contextmanager
def booted(directory: Path, files: Path) -> Iterator[BootedHost]:
    """Boot a host; `directory`: an empty one; `files`: the host's /mnt. All of its processes end with the host."""
    environ = {
        **os.environ,
        "PLACE": str(directory),
        "FILES": str(files),
        "CHECKOUT": str(ROOT),
        "ENVIRONMENT": sys.prefix,
        "LAUNCHER": LAUNCHER,
        "SYSTEMD": SYSTEMD,
        "EMPTIED": " ".join(EMPTIED),
        "MASKED": " ".join(MASKED),
    }
    log = (directory.parent / "boot.log").open("w+")
    unshare = [
        "unshare",
        "--mount",
        "--uts",
        "--ipc",
        "--net",
        "--cgroup",
        "--pid",
        "--fork",
        "--kill-child",
        "bash",
        "-c",
        BOOT,
    ]
    process = subprocess.Popen(
        unshare, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=end_with_the_tests
    )
    try:
        yield _ready(process, Path(log.name))
    finally:
        process.kill()
        process.wait()
        log.close()


def _ready(process: subprocess.Popen[bytes], log: Path) -> BootedHost:
    end = time.monotonic() + BOOT_S
    while time.monotonic() < end and process.poll() is None:
        found = [pid for pid, line in children(process.pid) if line.startswith(SYSTEMD)]
        if found and (host := BootedHost(found[0])).state() in ("running", "degraded"):
            return host
        time.sleep(0.1)
    raise AssertionError(f"the host did not boot:\n{log.read_text()}")
