"""Builds the package that `setup.cfg` describes. Adds the directories that are beside the code in a checkout, and the guide."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

DATA = {"proxy.data.config": "config", "proxy.data.schemas": "schemas"}


class BuildWithGuide(build_py):
    """Without mkdocs, which `pyproject.toml` requires of isolated builds, the package has no guide."""

    def run(self) -> None:
        super().run()
        if find_spec("material") is None or not Path("mkdocs.yml").exists():
            self.warn("the guide is left out: it needs mkdocs-material")
            return
        site = Path(self.build_lib).resolve() / "proxy" / "data" / "guide"
        words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(site)]
        subprocess.run(words, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)


setup(
    packages=[*find_packages(include=["proxy", "proxy.*"]), *DATA],
    package_dir=DATA,
    cmdclass={"build_py": BuildWithGuide},
)
