"""Builds the package that `setup.cfg` describes. Adds the directories that are beside the code in a checkout, and the guide.

With PENSTOCK_COMPILE=1 the wheel also contains the hot path as machine code, so it is for one platform and version of Python.
This needs the tools of `penstock compile` and the package's requirements in the building environment (`make wheel`).
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

DATA = {"proxy.data.config": "config", "proxy.data.schemas": "schemas"}
# The variable that asks for machine code, and its former name.
COMPILE = ("PENSTOCK_COMPILE", "COMPILE_HOT_PATH")
# `proxy/compiled.py` looks for it beside the package.
COMPILED = "penstock_compiled"


class PlatformOrPure(Distribution):
    def has_ext_modules(self) -> bool:
        return any(name in os.environ for name in COMPILE)


class BuildWithGuide(build_py):
    def run(self) -> None:
        super().run()
        built = Path(self.build_lib).resolve()
        self.build_guide(built / "proxy" / "data" / "guide")
        if self.distribution.has_ext_modules():
            (built / COMPILED).mkdir(exist_ok=True)
            subprocess.run([sys.executable, "-m", "proxy", "compile"], cwd=built, check=True)

    def build_guide(self, site: Path) -> None:
        """Without mkdocs, which `pyproject.toml` requires of isolated builds, the package has no guide."""
        if find_spec("material") is None or not Path("mkdocs.yml").exists():
            self.warn("the guide is left out: it needs mkdocs-material")
            return
        words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(site)]
        subprocess.run(words, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)


setup(
    packages=[*find_packages(include=["proxy", "proxy.*"]), *DATA],
    package_dir=DATA,
    distclass=PlatformOrPure,
    cmdclass={"build_py": BuildWithGuide},
)
