"""The readers of chain families: the code that a family's file names in `reader`. `data` has none (`tabled.py`)."""

from __future__ import annotations

from proxy.chains.evm.methods import EVM
from proxy.chains.family import Family
from proxy.chains.registry import Network
from proxy.chains.svm.methods import SVM

READERS: dict[str, Family] = {"evm": EVM, "svm": SVM}


def family_of(network: Network) -> Family:
    return network.rules
