"""The deployment recipe: transactions in order, and the addresses of the contracts they create.

Nothing is sent here. An address depends on the deployer and its nonce, or on the code (CREATE2), so it is the same at every
start.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from proxy.dev.encoding import (
    CREATE2_PROXY,
    CREATE2_PROXY_COST_WEI,
    CREATE2_PROXY_MAKER,
    CREATE2_PROXY_TRANSACTION,
    arguments,
    call,
    create2_address,
    created_address,
    raw,
)
from proxy.dev.funded_accounts import DEPLOYER, DevAccount
from proxy.dev.npm_packages import DEVNET

# Contracts of this repository. Others come from npm packages, because canonical addresses require the published bytecode.
ARTIFACTS = DEVNET / "artifacts"
# Gas limits of all transactions, larger than any of them needs. Fixed, so that the chain need not estimate.
DEPLOY_GAS = 10_000_000
CALL_GAS = 1_000_000


@dataclass(frozen=True, slots=True)
class RecipeStep:
    """A JSON-RPC call. `sends`: its result is a transaction hash."""

    what: str
    method: str
    params: list[Any]
    sends: bool = True


@dataclass(frozen=True, slots=True)
class Artifact:
    name: str
    abi: list[dict[str, Any]]
    bytecode: bytes
    placed: str | None

    @classmethod
    def named(cls, name: str, home: Path = DEVNET) -> Artifact:
        """Load an artifact of this repository, or of an npm package: `EntryPoint-0.6` is in the package of that version."""
        path = ARTIFACTS / f"{name}.json"
        if not path.exists():
            theirs, _, version = name.partition("-")
            path = home / "node_modules" / f"erc4337-{version}" / "artifacts" / f"{theirs}.json"
        artifact = orjson.loads(path.read_bytes())
        return cls(name, artifact["abi"], raw(artifact["bytecode"]), artifact.get("placed"))

    def with_arguments(self, *values: Any) -> bytes:
        """Return the creation code: the bytecode followed by the constructor's arguments."""
        takes: list[dict[str, str]] = next(
            (entry["inputs"] for entry in self.abi if entry["type"] == "constructor"), []
        )
        return self.bytecode + arguments([entry["type"] for entry in takes], values)


class Recipe:
    """Deployment steps, in order."""

    def __init__(self, home: Path = DEVNET) -> None:
        self._home = home
        self.steps: list[RecipeStep] = []
        self._sent: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Recipe of {len(self.steps)} steps>"

    def create(self, artifact: str, *values: Any) -> str:
        address = created_address(DEPLOYER.address, self._sent[DEPLOYER.address])
        data = Artifact.named(artifact, self._home).with_arguments(*values)
        self._send(f"deploy {artifact}", DEPLOYER, to=None, data=data, gas=DEPLOY_GAS)
        return address

    def create2(self, artifact: str, *values: Any, salt: bytes = bytes(32)) -> str:
        code = Artifact.named(artifact, self._home).with_arguments(*values)
        self._send(f"deploy {artifact}", DEPLOYER, to=CREATE2_PROXY, data=salt + code, gas=DEPLOY_GAS)
        return create2_address(salt, code)

    def create2_proxy(self) -> None:
        self._send("pay for the CREATE2 proxy", DEPLOYER, to=CREATE2_PROXY_MAKER, value_wei=CREATE2_PROXY_COST_WEI)
        self.steps.append(RecipeStep("deploy the CREATE2 proxy", "eth_sendRawTransaction", [CREATE2_PROXY_TRANSACTION]))

    def place(self, artifact: str, address: str) -> str:
        """Put code at an address without a transaction."""
        code = Artifact.named(artifact, self._home).placed
        self.steps.append(RecipeStep(f"place {artifact}", "hardhat_setCode", [address, code], sends=False))
        return address

    def call(self, to: str, signature: str, *values: Any, sender: DevAccount = DEPLOYER, value_wei: int = 0) -> None:
        self._send(signature, sender, to=to, data=call(signature, *values), value_wei=value_wei)

    def _send(
        self,
        what: str,
        sender: DevAccount,
        *,
        to: str | None,
        data: bytes = b"",
        value_wei: int = 0,
        gas: int = CALL_GAS,
    ) -> None:
        nonce = self._sent[sender.address]
        self._sent[sender.address] += 1
        sent = {"from": sender.address, "nonce": hex(nonce), "gas": hex(gas), "value": hex(value_wei)}
        sent |= {"data": "0x" + data.hex()} | ({} if to is None else {"to": to})
        self.steps.append(RecipeStep(what, "eth_sendTransaction", [sent]))
