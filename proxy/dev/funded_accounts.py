"""The accounts that every Hardhat node funds. Their private keys are public; never use them on another chain.

The first ones are free to use on the development chain. The last four are taken: they deploy contracts, sign for the paymaster
and pay for the bundler.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from proxy.settings import CONFIG


@dataclass(frozen=True, slots=True)
class DevAccount:
    address: str
    private_key: str


ACCOUNTS = tuple(DevAccount(**account) for account in orjson.loads((CONFIG / "devnet" / "accounts.json").read_bytes()))
FUNDED, ALICE, BOB, CAROL = ACCOUNTS[:4]
# The bundler pays for bundles with its executor account and deploys its contracts with its utility account.
WORKING = BUNDLER_UTILITY, BUNDLER_EXECUTOR, PAYMASTER_SIGNER, DEPLOYER = ACCOUNTS[-4:]
