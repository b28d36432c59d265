"""The alert rules, the board and the unit in `deploy/`: every metric they use exists, and their tools accept them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import yaml
from prometheus_client import REGISTRY

from proxy import settings
from proxy.telemetry import CallCollector, Scrape
from tests import programs
from tests.service import ROOT

DEPLOY = ROOT / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
BOARD = orjson.loads((DEPLOY / "grafana" / "penstock.json").read_bytes())
METRIC = re.compile(r"\bpenstock_\w+")
# Suffixes of the series of a metric. Counters are announced without theirs.
SERIES = re.compile(r"_(bucket|total|sum|count)$")


def rules() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def queries() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ()))


def test_every_metric_of_a_query_exists(tmp_path: Path) -> None:
    """A metric without a value yet is not in the reply to a scrape, so the registries are compared."""
    families = [*REGISTRY.collect(), *CallCollector(tmp_path).collect(), *Scrape(tmp_path).families()]
    used = {SERIES.sub("", name) for query in queries() for name in METRIC.findall(query)}
    assert len(used) > 25
    assert used - {family.name for family in families} == set()


# Units that are no base units of Prometheus, and other words that a name must not end with.
OTHER_UNITS = re.compile(r"_(ms|millis\w*|minutes|hours|days|us|ns|kb|mb|kilobytes|megabytes|percent|total_count)$")


def test_metrics_are_named_as_prometheus_recommends(tmp_path: Path) -> None:
    families = [*REGISTRY.collect(), *CallCollector(tmp_path).collect(), *Scrape(tmp_path).families()]
    ours = [family for family in families if not family.name.startswith(("python_", "process_"))]
    assert len(ours) > 40
    for family in ours:
        assert re.fullmatch(r"penstock_[a-z][a-z0-9_]*[a-z0-9]", family.name), family.name
        assert not OTHER_UNITS.search(family.name), family.name
        # A counter's series get the suffix _total; the names of others must not look like one.
        assert not SERIES.search(family.name), family.name
        assert family.type != "histogram" or family.name.endswith(("_seconds", "_bytes")), family.name
        assert family.documentation, family.name


def test_every_alert_has_a_section_in_the_runbook() -> None:
    sections = {
        line[3:].lower() for line in (ROOT / "docs" / "runbook.md").read_text().splitlines() if line.startswith("## ")
    }
    alerts = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules() if "alert" in rule}
    assert {name.lower() for name in alerts} == sections
    page = "{{ $externalLabels.penstock_url }}/docs/guide/runbook/#"
    assert alerts == {name: f"{page}{name.lower()}" for name in alerts}


def test_panels_have_titles_and_do_not_overlap() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(places)
    assert all(panel["title"] for panel in BOARD["panels"])


def test_board_begins_with_figures_and_follows_its_variables() -> None:
    first, *rest = BOARD["panels"]
    assert (first["type"], first["gridPos"]["y"]) == ("row", 0)
    stats = [panel for panel in rest if panel["type"] == "stat"]
    assert {panel["gridPos"]["y"] for panel in stats} == {1}
    assert sum(panel["gridPos"]["w"] for panel in stats) == 24
    assert [each["name"] for each in BOARD["templating"]["list"]] == ["datasource", "network", "host"]
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            for metric, matchers in re.findall(r"\b(penstock_\w+)(\{[^}]*\})?", target["expr"]):
                assert 'instance=~"$host"' in matchers, panel["title"]
                of_network = metric.startswith(("penstock_call", "penstock_upstream_", "penstock_follower_"))
                assert not of_network or "$network" in matchers, panel["title"]


@programs.needs("promtool")
def test_rules_pass_their_tests() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "rules_test.yml"], cwd=DEPLOY / "prometheus", capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_example_variables_are_settings_and_roles_have_their_own_ports() -> None:
    unit = (DEPLOY / "systemd" / "penstock@.service").read_text()
    ports = set()
    for role in ("gateway", "follower", "deliverer"):
        given = {"DATABASE_URL": "postgresql:///penstock", "PENSTOCK_KEYS__PEPPER": "0" * 32}
        for name in re.findall(r"^EnvironmentFile=-/etc/default/(\S+)$", unit, re.MULTILINE):
            file = DEPLOY / "systemd" / "default" / name.replace("%i", role)
            lines = file.read_text().splitlines() if file.exists() else []
            # A comment that has no space is a variable to uncomment.
            found = [line.removeprefix("#") for line in lines if re.match(r"#?\w+=", line)]
            given |= dict(line.split("=", 1) for line in found)
        ports.add(settings.load(environ=given).metrics.port)
    assert len(ports) == 3


@programs.needs("systemd-analyze")
def test_unit_is_valid_and_hardened(tmp_path: Path) -> None:
    unit = tmp_path / "penstock@gateway.service"
    text = (DEPLOY / "systemd" / "penstock@.service").read_text()
    unit.write_text(text.replace("/opt/penstock/bin/penstock", "/bin/true"))
    subprocess.run(["systemd-analyze", "verify", unit], check=True, capture_output=True)
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", unit], capture_output=True, text=True, check=True
    )
    exposure = re.search(r"exposure level.*: (\d+\.\d)", done.stdout)
    assert exposure is not None
    assert float(exposure[1]) < 2.0
