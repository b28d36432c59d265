"""Builds the package that `setup.cfg` describes. Adds the directories that are beside the code in a checkout."""

from setuptools import find_packages, setup

DATA = {"proxy.data.config": "config", "proxy.data.schemas": "schemas"}

setup(packages=[*find_packages(include=["proxy", "proxy.*"]), *DATA], package_dir=DATA)
