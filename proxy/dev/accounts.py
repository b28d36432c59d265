"""The accounts that every hardhat node funds: known to everybody, worth nothing anywhere else.

The first ones are for whoever uses the development chain. The last four have work: they deploy, sign and bundle.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from proxy.settings import CONFIG


@dataclass(frozen=True, slots=True)
class DevAccount:
    address: str
    private_key: str


ACCOUNTS = tuple(DevAccount(**found) for found in orjson.loads((CONFIG / "devnet" / "accounts.json").read_bytes()))
FUNDED, ALICE, BOB, CAROL = ACCOUNTS[:4]
# A bundler pays with its executor's account and sets up its own contracts with the other.
WORKING = BUNDLER_UTILITY, BUNDLER_EXECUTOR, PAYMASTER_SIGNER, DEPLOYER = ACCOUNTS[-4:]
