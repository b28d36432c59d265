"""Builds the package. `setup.cfg` describes it; this adds the directories that are beside the code in a checkout."""

from setuptools import find_packages, setup

DATA = {
    "proxy.data.config": (
        *("*.toml", "chains/*.toml", "factories/*", "methods/*.toml", "tokens/*"),
        *("devnet/*.json", "devnet/*.mjs", "devnet/artifacts/*.json", "devnet/bundler/*.json", "devnet/bundler/*.cjs"),
    ),
    "proxy.data.schemas": ("**/*.json", "sql/queries/*.sql", "sql/migrations/*.sql"),
}

setup(
    packages=[*find_packages(include=["proxy", "proxy.*"]), *DATA],
    package_dir={name: name.rpartition(".")[2] for name in DATA},
    package_data={name: list(patterns) for name, patterns in DATA.items()},
)
