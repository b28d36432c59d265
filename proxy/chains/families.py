"""The chain families. One line here makes a family available."""

from __future__ import annotations

from proxy.chains.evm.methods import EVM
from proxy.chains.family import Family
from proxy.chains.registry import Network
from proxy.chains.svm.methods import SVM

FAMILIES: dict[str, Family] = {family.name: family for family in (EVM, SVM)}


def family_of(network: Network) -> Family:
    return FAMILIES[network.family]
