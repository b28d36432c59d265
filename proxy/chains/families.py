"""The families by name: an explicit table, not a registry that modules add themselves to."""

from __future__ import annotations

from proxy.chains.evm.methods import EVM
from proxy.chains.family import Family
from proxy.chains.svm.methods import SVM

FAMILIES: dict[str, Family] = {family.name: family for family in (EVM, SVM)}
