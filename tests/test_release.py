"""The release script, in a clone of this repository: a dry run changes nothing; a tag is on a commit that names its version."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from proxy import __version__
from tests.service import ROOT

VERSION = "7.8.9"


def git(directory: Path, *words: str) -> str:
    named = ("-c", "user.name=Test", "-c", "user.email=test@example.com")
    return subprocess.run(
        ["git", *named, *words], cwd=directory, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The last commit, with this checkout's script and changelog, and an entry in that."""
    directory = tmp_path / "clone"
    git(ROOT, "clone", "--quiet", "--depth", "1", "--no-tags", f"file://{ROOT}", str(directory))
    git(directory, "config", "user.name", "Test")
    git(directory, "config", "user.email", "test@example.com")
    (directory / "deploy" / "release").mkdir(exist_ok=True)
    for name in ("release.py", "wheels.py"):
        (directory / "deploy" / "release" / name).write_text((ROOT / "deploy" / "release" / name).read_text())
    (directory / "proxy" / "commands" / "progress.py").write_text(
        (ROOT / "proxy" / "commands" / "progress.py").read_text()
    )
    changelog = directory / "CHANGELOG.md"
    changelog.write_text(
        "# Changelog\n\n## [Unreleased]\n\nSoon.\n\n### Added\n\n- A thing.\n\n## [0.1.0] - 2020-01-01\n\n- Old.\n"
    )
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "--message", "Prepare")
    return directory


def released(
    clone: Path, *words: str, version: str = VERSION, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    script = clone / "deploy" / "release" / "release.py"
    environ = os.environ if path is None else {**os.environ, "PATH": path}
    return subprocess.run(
        [sys.executable, script, version, *words], cwd=clone, capture_output=True, text=True, check=False, env=environ
    )


def test_dry_run_builds_below_one_directory_and_changes_nothing(clone: Path, tmp_path: Path) -> None:
    before, out = git(clone, "rev-parse", "HEAD"), tmp_path / "out"
    done = released(clone, "--parts", "chart", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "a dry run" in done.stdout
    assert (git(clone, "rev-parse", "HEAD"), git(clone, "tag"), git(clone, "status", "--porcelain")) == (before, "", "")
    files = {file.name for file in out.iterdir()}
    assert files == {"NOTES.md", f"penstock-{VERSION}.tgz", "penstock.cdx.json", "provenance.intoto.json", "SHA256SUMS"}
    assert (out / "NOTES.md").read_text() == "### Added\n\n- A thing."
    with tarfile.open(out / f"penstock-{VERSION}.tgz") as chart:
        described = chart.extractfile("penstock/Chart.yaml")
        assert described is not None
        facts = yaml.safe_load(described.read())
        assert (facts["version"], facts["appVersion"]) == (VERSION, VERSION)
        assert "penstock/values.yaml" in chart.getnames()


def test_checksums_and_provenance_name_every_file(clone: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert released(clone, "--parts", "chart", "--out", str(out)).returncode == 0
    lines = [line.split("  ") for line in (out / "SHA256SUMS").read_text().splitlines()]
    sums = {name: digest for digest, name in lines}
    assert sums.keys() == {file.name for file in out.iterdir()} - {"SHA256SUMS"}
    assert all(hashlib.sha256((out / name).read_bytes()).hexdigest() == digest for name, digest in sums.items())
    made = json.loads((out / "provenance.intoto.json").read_text())
    assert {each["name"]: each["digest"]["sha256"] for each in made["subject"]}.items() < sums.items()
    [source] = made["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == {"gitCommit": git(clone, "rev-parse", "HEAD")}


def test_parts_list_has_every_locked_package_with_its_hashes(clone: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert released(clone, "--parts", "--out", str(out)).returncode == 0
    parts = json.loads((out / "penstock.cdx.json").read_text())["components"]
    lock = (clone / "requirements" / "serve.txt").read_text()
    assert {(part["name"], part["version"]) for part in parts} == {
        *re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.MULTILINE)
    }
    assert sum(len(part["hashes"]) for part in parts) == lock.count("sha256:")


def test_tag_is_on_a_commit_that_names_the_version(clone: Path, tmp_path: Path) -> None:
    done = released(clone, "--parts", "--tag", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert git(clone, "describe", "--exact-match") == f"v{VERSION}"
    assert f'__version__ = "{VERSION}"' in (clone / "proxy" / "__init__.py").read_text()
    changelog = (clone / "CHANGELOG.md").read_text()
    assert re.search(
        rf"## \[Unreleased\]\n\n## \[{VERSION}\] - \d{{4}}-\d\d-\d\d\n\n### Added\n\n- A thing.\n\n## \[0.1.0\]",
        changelog,
    )
    # The previous version is named nowhere else.
    named = [file for room in ("docs", "deploy") for file in (clone / room).rglob("*") if file.is_file()]
    assert not [file for file in named if f"penstock:{__version__}".encode() in file.read_bytes()]
    # CI builds the commit that has the tag.
    again = released(clone, "--tagged", "--parts", "--out", str(tmp_path / "ci"))
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "ci" / "NOTES.md").read_text() == "### Added\n\n- A thing."


def test_wrong_version_is_refused(clone: Path, tmp_path: Path) -> None:
    git(clone, "tag", "v2.0.0")
    wrong = {"1.0": "is not a version", "v1.0.0": "is not a version", "2.0.0": "exists already", "1.9.9": "older than"}
    for version, text in wrong.items():
        done = released(clone, "--parts", "--out", str(tmp_path / "out"), version=version)
        assert (done.returncode, text in done.stderr) == (1, True), done.stderr


def test_missing_tools_are_named_before_anything_is_built(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("git", "tar"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    done = released(clone, "--out", str(tmp_path / "out"), path=str(tmp_path / "bin"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "apt-get install buildah mmdebstrap" in done.stderr
    assert "ARGS='--parts wheels chart'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_uncommitted_changes_and_an_empty_changelog_are_refused(clone: Path, tmp_path: Path) -> None:
    changelog = clone / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## [Unreleased]\n")
    assert "not committed" in released(clone, "--parts", "--out", str(tmp_path / "out")).stderr
    git(clone, "commit", "--all", "--quiet", "--message", "Empty")
    assert "no entries" in released(clone, "--parts", "--out", str(tmp_path / "out")).stderr


def test_workflows_are_valid_and_call_what_exists() -> None:
    workflows = ROOT / ".github" / "workflows"
    release = yaml.safe_load((workflows / "release.yml").read_text())
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads the key `on` as true
    assert {*release["jobs"]["publish"]["needs"]} == release["jobs"].keys() - {"publish"}
    called = release["jobs"]["wheels"]["uses"].removeprefix("./")
    assert "workflow_call" in yaml.safe_load((ROOT / called).read_text())[True]
    targets = {*re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    for file in workflows.glob("*.yml"):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            for step in job.get("steps", ()):
                words = re.findall(r"\bmake (?:\w+=\S+ )*([a-z-]+)", step.get("run", ""))
                assert {*words} <= targets, (file.name, words)
