"""Makes a release: version, changelog, wheels, image, chart, checksums, parts list and provenance.

    make release VERSION=1.1.0                      # a dry run: everything is built below dist/release, nothing is changed
    make release VERSION=1.1.0 ARGS=--tag           # the same, then commit the version and tag it; prints the push to make
    make release VERSION=1.1.0 ARGS='--parts chart' # only some parts: wheels, image, chart

Everything is built from a copy of the last commit, so files that are not committed never get into a release. The workflow
`release.yml` publishes what a pushed tag names.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import wheels

ROOT = wheels.ROOT
PARTS = ("wheels", "image", "chart")
IMAGE_TOOLS = ("buildah", "mmdebstrap")
SEMVER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-(?:rc|beta)\.\d+)?")
HEADING = "## [Unreleased]"
# Files that contain the version, and the forms in which they do.
VERSIONED = (
    "proxy/__init__.py",
    "deploy/helm/penstock/Chart.yaml",
    "deploy/helm/rendered/default.yaml",
    "deploy/helm/rendered/production.yaml",
    "deploy/helm/rendered/gateway-api.yaml",
    "deploy/compose/compose.yaml",
    "deploy/image/Dockerfile",
    "docs/production.md",
    "docs/kubernetes.md",
    "tests/compose/compose.override.yaml",
)
FORMS = (
    '__version__ = "{}"',
    "version: {}",
    "appVersion: {}",
    'app.kubernetes.io/version: "{}"',
    "helm.sh/chart: penstock-{}",
    "penstock:{}",
)


class ReleaseFault(Exception):
    """The release cannot be made. The text says why and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Build a release. Without --tag it is a dry run.")
    parser.add_argument("version", help="such as 1.1.0, or 1.1.0-rc.1")
    parser.add_argument("--tag", action="store_true", help="commit the version and the changelog, and tag the commit")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="what to build (default: everything)")
    parser.add_argument("--tagged", action="store_true", help="build the commit that has the tag already, as CI does")
    parser.add_argument("--finish", type=Path, metavar="DIR", help="only write checksums and provenance of these files")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "release", help="default: dist/release")
    args = parser.parse_args()
    try:
        if args.finish:
            finish(args.finish, args.version, git("rev-parse", "HEAD"))
        else:
            _release(args)
    except ReleaseFault as exc:
        print(f"release: {exc}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as exc:
        print(f"release: {' '.join(map(str, exc.cmd))} failed", file=sys.stderr)
        return 1
    return 0


def _release(args: argparse.Namespace) -> None:
    if not args.tagged:
        check(args.version)
    check_tools(args.parts)
    commit = git("rev-parse", "HEAD")
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="penstock-release-") as place:
        source = Path(place)
        export(source)
        notes = notes_of(source, args.version) if args.tagged else set_version(source, args.version)
        (args.out / "NOTES.md").write_text(notes, "utf-8")
        build(source, args.out, args.version, args.parts)
        write_json(args.out / "penstock.cdx.json", parts_list(source, args.version))
    finish(args.out, args.version, commit)
    for file in sorted(args.out.iterdir()):
        print(f"{file.stat().st_size:>12,}  {file}")
    if args.tagged:
        return
    if not args.tag:
        print(f"a dry run: nothing was changed. Add --tag to commit the version and make the tag v{args.version}")
        return
    tag(args.version)


# Checks


def check(version: str) -> None:
    if not SEMVER.fullmatch(version):
        raise ReleaseFault(f"{version} is not a version: write MAJOR.MINOR.PATCH, such as 1.1.0")
    if f"v{version}" in git("tag", "--list").split():
        raise ReleaseFault(f"the tag v{version} exists already: choose the next version")
    if git("status", "--porcelain", "--untracked-files=no"):
        raise ReleaseFault("there are changes that are not committed: commit or stash them first")
    newest = max((numbers(name[1:]) for name in git("tag", "--list", "v*").split()), default=(0, 0, 0))
    if numbers(version) < newest:
        raise ReleaseFault(f"{version} is older than the newest tag, v{'.'.join(map(str, newest))}")
    if not unreleased((ROOT / "CHANGELOG.md").read_text("utf-8")):
        raise ReleaseFault("CHANGELOG.md has no entries under Unreleased: there is nothing to release")


def check_tools(parts: Sequence[str]) -> None:
    """The image is built last, after minutes in which the wheels are compiled."""
    missing = [tool for tool in IMAGE_TOOLS if shutil.which(tool) is None] if "image" in parts else []
    if missing:
        raise ReleaseFault(
            f"the image is built with {' and '.join(missing)}: on Debian, run apt-get install {' '.join(missing)}, "
            "or leave it out with ARGS='--parts wheels chart'"
        )


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("-")[0].split("."))


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


# Version and changelog


def export(place: Path) -> None:
    """Copy the last commit."""
    packed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "--extract", "--directory", place], input=packed, check=True)


def set_version(place: Path, version: str) -> str:
    """Write the version into every file that names it, and move the changelog's entries below it. Returns those entries."""
    old = re.search(r'__version__ = "(.+)"', (place / VERSIONED[0]).read_text("utf-8"))
    if old is None:
        raise ReleaseFault(f"{VERSIONED[0]} has no __version__")
    for name in VERSIONED:
        text = (place / name).read_text("utf-8")
        for form in FORMS:
            text = re.sub(re.escape(form.format(old[1])) + r"(?![\w.-])", form.format(version), text)
        (place / name).write_text(text, "utf-8")
    changelog = place / "CHANGELOG.md"
    text = changelog.read_text("utf-8")
    notes = unreleased(text)
    before, _, section = text.partition(HEADING)
    _, mark, older = section.partition("\n## [")
    dated = f"## [{version}] - {datetime.now(UTC):%Y-%m-%d}"
    changelog.write_text(f"{before}{HEADING}\n\n{dated}\n\n{notes}\n{mark}{older}", "utf-8")
    return notes


def notes_of(place: Path, version: str) -> str:
    """The changelog's entries of a version that was tagged."""
    if f'__version__ = "{version}"' not in (place / VERSIONED[0]).read_text("utf-8"):
        raise ReleaseFault(f"{VERSIONED[0]} names another version than {version}: tag the commit that names it")
    section = (place / "CHANGELOG.md").read_text("utf-8").partition(f"## [{version}] - ")[2].partition("\n## [")[0]
    if not section:
        raise ReleaseFault(f"CHANGELOG.md has no section for {version}")
    return section.partition("\n")[2].strip()


def unreleased(changelog: str) -> str:
    """The entries under Unreleased, without the announcement of the next version."""
    section = changelog.partition(HEADING)[2].partition("\n## [")[0]
    return section[section.find("###") :].strip() if "###" in section else ""


# Parts


def build(source: Path, out: Path, version: str, parts: Sequence[str]) -> None:
    if "wheels" in parts:
        wheels.build(source, out)
    if "chart" in parts:
        pack_chart(source / "deploy" / "helm" / "penstock", out / f"penstock-{version}.tgz")
    if "image" in parts:
        subprocess.run([source / "deploy" / "image" / "build"], check=True)
        shutil.copy(source / "dist" / "sbom.cdx.json", out / "image.cdx.json")
        target = f"docker-archive:{out / f'penstock-{version}-image.tar'}:penstock:{version}"
        subprocess.run(["buildah", "push", "--quiet", f"localhost/penstock:{version}", target], check=True)


def pack_chart(chart: Path, file: Path) -> None:
    """Pack the chart as `helm package` does, with the same bytes every time."""
    with (
        file.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in sorted(each for each in chart.rglob("*") if each.is_file()):
            entry = archive.gettarinfo(path, f"penstock/{path.relative_to(chart)}")
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            with path.open("rb") as content:
                archive.addfile(entry, content)


def parts_list(source: Path, version: str) -> dict[str, Any]:
    """The packages that the wheels need, with their hashes, as a CycloneDX document."""
    own = f"pkg:pypi/penstock@{version}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, own).urn,
        "version": 1,
        "metadata": {
            "component": {"type": "application", "bom-ref": own, "name": "penstock", "version": version, "purl": own}
        },
        "components": list(locked((source / "requirements" / "serve.txt").read_text("utf-8"))),
    }


def locked(text: str) -> Iterator[dict[str, Any]]:
    for name, version, rest in re.findall(
        r"^([\w.-]+)==([\w.+!-]+)((?:.*\\\n)?(?:    --hash=.*\n)*)", text, re.MULTILINE
    ):
        purl = f"pkg:pypi/{name}@{version}"
        hashes = [{"alg": "SHA-256", "content": found} for found in re.findall(r"sha256:([0-9a-f]{64})", rest)]
        yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, "hashes": hashes}


# Checksums and provenance


def finish(out: Path, version: str, commit: str) -> None:
    """Write the checksums of all files, and who built them from what (SLSA provenance 1.0, in an in-toto statement)."""
    provenance, checksums = out / "provenance.intoto.json", out / "SHA256SUMS"
    for old in (provenance, checksums):
        old.unlink(missing_ok=True)
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(out.iterdir())}
    write_json(provenance, statement(sums, version, commit))
    sums[provenance.name] = hashlib.sha256(provenance.read_bytes()).hexdigest()
    checksums.write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())), "utf-8")


def statement(sums: dict[str, str], version: str, commit: str) -> dict[str, Any]:
    environ = os.environ
    repository = (
        f"{environ['GITHUB_SERVER_URL']}/{environ['GITHUB_REPOSITORY']}" if "GITHUB_REPOSITORY" in environ else "local"
    )
    run = f"{repository}/actions/runs/{environ['GITHUB_RUN_ID']}" if "GITHUB_RUN_ID" in environ else "local"
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sums.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": f"{repository}/deploy/release/release.py",
                "externalParameters": {"version": version},
                "resolvedDependencies": [{"uri": f"git+{repository}", "digest": {"gitCommit": commit}}],
            },
            "runDetails": {
                "builder": {"id": run},
                "metadata": {"finishedOn": datetime.now(UTC).isoformat(timespec="seconds")},
            },
        },
    }


def write_json(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def tag(version: str) -> None:
    set_version(ROOT, version)
    git("add", "CHANGELOG.md", *VERSIONED)
    git("commit", "--quiet", "--message", f"Release {version}")
    git("tag", "--annotate", f"v{version}", "--message", f"Penstock {version}")
    print(f"tagged v{version}. To publish it: git push --follow-tags")


if __name__ == "__main__":
    sys.exit(main())
