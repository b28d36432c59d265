"""The Helm chart, as rendered for its default and production values: valid for Kubernetes, and consistent with the program."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml

from proxy import __version__, settings
from tests.service import ROOT
from tests.test_deploy import parsed

CHART = ROOT / "deploy" / "helm" / "penstock"
RENDERED = ROOT / "deploy" / "helm" / "rendered"
VALUES = {"default": (), "production": ("-f", str(CHART / "values-production.yaml"))}
ROLES = {"gateway", "follower", "deliverer"}
# The oldest version that the chart accepts, and the newest that the validator knows.
VERSIONS = ("1.27", kubernetes_validate.latest_version())
HELM = shutil.which("helm")

# The route of the Gateway API, which is rendered alone.
ROUTE = [
    "--set",
    "gatewayApi.enabled=true,gatewayApi.host=rpc.example.com,gatewayApi.gateways[0].name=public",
    "--show-only",
    "templates/ingress.yaml",
]

needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed")
every_values = pytest.mark.parametrize("values", VALUES)
Object = dict[str, Any]


@cache
def rendered(values: str) -> tuple[Object, ...]:
    return tuple(each for each in yaml.safe_load_all((RENDERED / f"{values}.yaml").read_text()) if each)


def objects(values: str, *kinds: str) -> list[Object]:
    return [each for each in rendered(values) if not kinds or each["kind"] in kinds]


def given(values: str) -> Object:
    """The values of the chart, as far as the production file does not replace whole lists."""
    base = yaml.safe_load((CHART / "values.yaml").read_text())
    return _merged(base, yaml.safe_load((CHART / "values-production.yaml").read_text())) if VALUES[values] else base


def _merged(base: Object, over: Object) -> Object:
    both = {key: _merged(base[key], over[key]) for key in base.keys() & over.keys() if isinstance(over[key], dict)}
    return {**base, **over, **both}


def pods(values: str) -> Iterator[tuple[str, Object, Object]]:
    """The parts of the service, each with the specification of its pod and of the only container."""
    for workload in objects(values, "Deployment", "Job"):
        pod = workload["spec"]["template"]["spec"]
        [container] = pod["containers"]
        yield container["name"], pod, container


@needs_helm
@pytest.mark.parametrize(("file", "more"), [*VALUES.items(), ("gateway-api", ROUTE)])
def test_rendered_files_are_those_of_the_chart(file: str, more: Sequence[str]) -> None:
    assert HELM is not None
    subprocess.run([HELM, "lint", "--strict", CHART, *VALUES.get(file, ())], check=True, capture_output=True)
    words = ["template", "penstock", str(CHART), "--kube-version", "1.30.0", "--namespace", "penstock", *more]
    done = subprocess.run([HELM, *words], check=True, capture_output=True, text=True)
    assert done.stdout == (RENDERED / f"{file}.yaml").read_text(), "run make chart"


def test_public_name_leads_to_the_gateways() -> None:
    assert not objects("default", "Ingress")
    [ingress] = objects("production", "Ingress")
    [service] = [each for each in objects("production", "Service") if each["metadata"]["name"] == "penstock-gateway"]
    [rule] = ingress["spec"]["rules"]
    assert ingress["spec"]["tls"] == [{"hosts": [rule["host"]], "secretName": "penstock-tls"}]
    [path] = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": "http"}}
    assert {port["name"] for port in service["spec"]["ports"]} == {"http"}
    # Links in mails start with the same name, and the controller's addresses are trusted.
    wanted = given("production")["settings"]
    assert wanted["dashboard"]["url"] == f"https://{rule['host']}/"
    assert wanted["server"]["trusted_proxies"]


def test_route_of_the_gateway_api_leads_to_the_gateways() -> None:
    [route] = rendered("gateway-api")
    assert (route["kind"], route["apiVersion"]) == ("HTTPRoute", "gateway.networking.k8s.io/v1")
    assert route["spec"]["parentRefs"] == [{"name": "public"}]
    [rule] = route["spec"]["rules"]
    [service] = [each for each in objects("default", "Service") if each["metadata"]["name"] == "penstock-gateway"]
    assert rule["backendRefs"] == [{"name": "penstock-gateway", "port": service["spec"]["ports"][0]["port"]}]


@every_values
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_for_kubernetes(values: str, version: str) -> None:
    for each in objects(values):
        # This kind belongs to the Prometheus operator.
        if each["kind"] != "ServiceMonitor":
            kubernetes_validate.validate(each, version, strict=True)


@every_values
def test_chart_has_every_part(values: str) -> None:
    assert {part for part, _, _ in pods(values)} == ROLES | {"migration"}
    for kind in ("Deployment", "PodDisruptionBudget", "NetworkPolicy"):
        assert {each["metadata"]["name"] for each in objects(values, kind)} == {f"penstock-{role}" for role in ROLES}
    [scaler] = objects(values, "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == "penstock-gateway"
    [migration] = objects(values, "Job")
    assert migration["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert len(objects(values, "ServiceMonitor")) == (values == "production")


def test_guide_names_services_of_the_chart() -> None:
    named = re.findall(r"service/(\S+) \d+:(\d+)", (ROOT / "docs" / "kubernetes.md").read_text())
    served = {
        (each["metadata"]["name"], str(each["spec"]["ports"][0]["port"])) for each in objects("default", "Service")
    }
    assert named
    assert {*named} <= served


@every_values
def test_arguments_and_variables_are_those_of_the_program(values: str) -> None:
    for part, _, container in pods(values):
        assert getattr(parsed(container["args"]), "role", "migration") == part
        found = settings.load(environ=dict(environment(container)))
        assert found.server.drain_s == given(values)["settings"]["server"]["drain_s"]
        assert part != "gateway" or found.server.workers == given(values)["gateway"]["workers"]
        assert container["image"].endswith(f"/penstock:{__version__}")


def environment(container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The variables of a container, with examples for those that come from secrets."""
    yield "PENSTOCK_KEYS__PEPPER", "0" * 32
    for variable in container["env"]:
        yield variable["name"], variable.get("value", "postgresql://penstock@postgres/penstock")


@every_values
def test_secrets_are_only_referred_to(values: str) -> None:
    assert not objects(values, "Secret", "ConfigMap")
    for _, pod, container in pods(values):
        secret = {each["name"] for each in container["env"] if "valueFrom" in each}
        assert "DATABASE_URL" in secret
        assert not [
            each for each in container["env"] if each["name"].endswith(("PEPPER", "PASSWORD")) and "value" in each
        ]
        assert pod["volumes"][0]["secret"]["secretName"] == "penstock-settings"


@every_values
def test_containers_have_no_privileges(values: str) -> None:
    for _, pod, container in pods(values):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        # Otherwise variables such as PENSTOCK_PORT are taken for settings, and the start is refused.
        assert pod["enableServiceLinks"] is False
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"].keys() == {"cpu", "memory"}


@every_values
def test_pods_have_time_to_drain(values: str) -> None:
    wanted = given(values)
    unlisted_s, drain_s = wanted["unlistedSeconds"], wanted["settings"]["server"]["drain_s"]
    for part, pod, container in pods(values):
        if part in ROLES:
            assert pod["terminationGracePeriodSeconds"] > unlisted_s + drain_s
        if part == "gateway":
            assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(unlisted_s)]


@every_values
def test_probes_use_ports_of_their_container(values: str) -> None:
    paths = {"gateway": {"/healthz", "/readyz"}}
    for part, _, container in pods(values):
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        found = [probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")]
        assert {probe["port"] for probe in found} <= ports.keys()
        assert part not in ROLES or {probe["path"] for probe in found} == paths.get(part, {"/metrics"})
        assert {"http": 8545, "metrics": 9545}.items() >= ports.items()


@every_values
def test_selectors_find_pods(values: str) -> None:
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in objects(values, "Deployment")]
    for each in objects(values, "Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment"):
        spec = each["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        wanted = selector.get("matchLabels", selector)
        assert [found for found in labels if wanted.items() <= found.items()], each["metadata"]["name"]
