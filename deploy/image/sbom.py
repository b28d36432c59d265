"""Prints what this image consists of, as a CycloneDX document: Debian's packages and those of this Python environment."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from typing import Any
from urllib.parse import quote

_FIELDS = "${binary:Package}\t${Version}\t${Architecture}\t${Homepage}\n"


def document() -> dict[str, Any]:
    found = sorted((*python_packages(), *debian_packages()), key=lambda component: component["purl"])
    own = next(component for component in found if component["name"] == "penstock")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": uuid.uuid4().urn,
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": {**own, "type": "application"},
        },
        "components": [component for component in found if component is not own],
    }


def python_packages() -> Iterator[dict[str, Any]]:
    for package in distributions():
        name = package.metadata["Name"].lower().replace("_", "-")
        component = _component(name, package.version, f"pkg:pypi/{name}@{quote(package.version)}")
        yield {**component, "licenses": [{"license": {"name": _licence(package)}}]}


def _licence(package: Distribution) -> str:
    fields = package.metadata.json
    named = [
        str(each).rpartition(" :: ")[2] for each in fields.get("classifier", ()) if str(each).startswith("License")
    ]
    said = str(fields.get("license_expression") or fields.get("license") or "")
    # Some packages put the whole text of their licence into the field.
    return said if said and "\n" not in said else ", ".join(named) or "unknown"


def debian_packages() -> Iterator[dict[str, Any]]:
    listed = subprocess.run(["dpkg-query", "--show", "-f", _FIELDS], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        package, version, architecture, _ = line.split("\t")
        name = package.partition(":")[0]
        yield _component(name, version, f"pkg:deb/debian/{name}@{quote(version)}?arch={architecture}")


def _component(name: str, version: str, purl: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


if __name__ == "__main__":
    print(json.dumps(document(), indent=1))
