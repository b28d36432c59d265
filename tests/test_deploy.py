"""The compose file and the image's files in `deploy/`: they name files, commands, settings and services that exist."""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy import __version__, settings
from proxy.__main__ import COMMANDS
from tests.service import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "penstock" in service["image"]}
# Written by the operator, with `penstock init`.
OWN_FILE = "./penstock.toml"


def parsed(words: list[str]) -> argparse.Namespace:
    """The arguments as the program parses them. Exits if it refuses them."""
    parser = argparse.ArgumentParser()
    import_module(f"proxy.commands.{COMMANDS[words[0]]}").register(parser.add_subparsers())
    return parser.parse_args(words)


def test_long_steps_of_make_say_what_they_do() -> None:
    """Silent commands that install or build something for minutes come after a line that says so."""
    recipes = re.findall(r"^[^\s#].*:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    long = re.compile(r"-m venv|pip install -q|npm ci|mkdocs build --quiet")
    found = [each for each in recipes if each.startswith("\t@") and long.search(each)]
    assert len(found) >= 7
    for recipe in found:
        assert re.search(r'echo "(?:creating|installing|building) ', long.split(recipe)[0]), recipe


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


def defaults() -> settings.Settings:
    given = {"DATABASE_URL": "postgresql:///penstock", "PENSTOCK_KEYS__PEPPER": "0" * 32}
    return settings.load(environ={**given, **environment(OURS["gateway"])})


def environment(service: dict[str, Any]) -> dict[str, str]:
    return dict(service.get("environment", {}))


def test_compose_has_every_part() -> None:
    assert OURS.keys() == {"migrate", "gateway", "follower", "deliverer"}
    assert SERVICES.keys() - OURS.keys() == {"postgres", "valkey", "valkey-limits", "prometheus", "grafana"}
    assert SERVICES["gateway"]["deploy"]["replicas"] == 2
    assert OURS["gateway"]["image"] == f"${{PENSTOCK_IMAGE:-localhost/penstock:{__version__}}}"
    pages = [ROOT / "docs" / name for name in ("kubernetes.md", "production.md")]
    for file in (DEPLOY / "image" / "Dockerfile", *pages):
        assert {*re.findall(r"localhost/penstock:(\S+)", file.read_text())} == {__version__}, file.name


@pytest.mark.parametrize("name", sorted(OURS))
def test_commands_and_settings_of_containers_exist(name: str) -> None:
    args = parsed(OURS[name]["command"])
    assert getattr(args, "role", "migrate") == name
    found = defaults()
    assert found.valkey.cache_url == "redis://valkey:6379/0"
    assert found.valkey.limits_url == "redis://valkey-limits:6379/0"
    assert OURS[name]["read_only"]
    assert seconds(OURS[name]["stop_grace_period"]) > found.server.drain_s


def test_containers_wait_for_services_that_exist() -> None:
    for service in SERVICES.values():
        waits = service.get("depends_on", {})
        assert {*waits} <= SERVICES.keys()
        for other, how in waits.items() if isinstance(waits, dict) else ():
            assert how["condition"] != "service_healthy" or "healthcheck" in SERVICES[other]


def test_mounted_files_exist_and_volumes_are_declared() -> None:
    for service in SERVICES.values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            known = source in COMPOSE["volumes"] or source == OWN_FILE or (DEPLOY / "compose" / source).is_file()
            assert known, mount


def test_prometheus_scrapes_every_role() -> None:
    scrape = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())["scrape_configs"][0]
    found = scrape["dns_sd_configs"][0]
    assert {*found["names"]} == OURS.keys() - {"migrate"}
    assert found["port"] == defaults().metrics.port
    provisioned = yaml.safe_load((DEPLOY / "compose" / "grafana" / "dashboards.yaml").read_text())
    [target] = [mount.split(":")[1] for mount in SERVICES["grafana"]["volumes"] if "penstock.json" in mount]
    assert str(Path(target).parent) == provisioned["providers"][0]["options"]["path"]


def test_image_gets_every_file_that_its_build_copies() -> None:
    allowed = (DEPLOY / "image" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in allowed if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    copied = re.findall(r"^COPY (\S+)", (DEPLOY / "image" / "Dockerfile").read_text(), re.MULTILINE)
    assert {name for name in copied if not name.startswith(("-", "."))} <= kept


def test_script_that_builds_the_image_is_valid() -> None:
    subprocess.run(["bash", "-n", DEPLOY / "image" / "build"], check=True)


def test_parts_list_names_every_package_once() -> None:
    sbom = runpy.run_path(str(DEPLOY / "image" / "sbom.py"))
    packages = list(sbom["python_packages"]())
    assert {"aiohttp", "asyncpg", "uvloop"} <= {each["name"] for each in packages}
    assert all(each["purl"] == f"pkg:pypi/{each['name']}@{each['version']}" for each in packages)
    assert all(each["licenses"][0]["license"]["name"] for each in packages)
