"""Which entry point an account uses, if a request does not say.

A signature for another entry point's paymaster is useless, yet reserves money. So the version is never guessed: it follows from
the factory in the operation, from our record of the wallet, or from the account itself. Our record is certain, because a
wallet's address follows from its factory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.chains.evm import abi, user_operation
from proxy.chains.evm.address import parse
from proxy.chains.evm.user_operation import BadOperation
from proxy.chains.registry import Network
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.sponsor.paymasters import Paymasters
from proxy.store.wallets import WalletStore

# Fields that exist in only one of the two shapes.
_V06_ONLY = frozenset({"initCode", "paymasterAndData"})
_V07_ONLY = frozenset(
    {
        *("factory", "factoryData", "eip7702Auth", "paymaster", "paymasterData"),
        *("paymasterVerificationGasLimit", "paymasterPostOpGasLimit"),
    }
)
_ENTRY_POINT = "0x" + abi.call("entryPoint()").hex()


class AccountVersions:
    def __init__(self, wallets: WalletStore, internal_calls: InternalCalls, paymasters: Paymasters) -> None:
        self._wallets = wallets
        self._internal_calls = internal_calls
        self._paymasters = paymasters

    def __repr__(self) -> str:
        return f"<AccountVersions {self._wallets!r}>"

    async def find(self, network: Network, given: Mapping[str, Any], entry_point: str | None) -> str:
        """The version. Raises BadOperation if it is not certain."""
        points = network.chain.entry_points
        if entry_point is not None:
            return user_operation.version_of(entry_point, points)
        if not self._paymasters.versions(network):
            return user_operation.VERSIONS[-1]  # Any will do: there is nothing to sign with.
        possible = _by_shape(given, [version for version in points if version in user_operation.VERSIONS])
        known = await self._known(network, given)
        if known is not None and known not in possible:
            raise BadOperation(f"sender: the account uses entry point {known}, whose operations have other fields")
        served = [version for version in possible if version in self._paymasters.versions(network)]
        certain = [known] if known is not None else possible if len(possible) == 1 else served
        if len(certain) > 1:
            choices = ", ".join(points[version] for version in certain)
            raise BadOperation(
                f"entryPoint: is missing, and the account may use any of {choices}: name the one it uses"
            )
        return certain[0] if certain else possible[-1]

    async def _known(self, network: Network, given: Mapping[str, Any]) -> str | None:
        sender = given.get("sender")
        account = parse(sender) if isinstance(sender, str) else None
        if account is None:
            return None
        return (
            _by_factory(network, given)
            or await self._wallets.version_of(network.id, account)
            or await self._by_account(network, sender)
        )

    async def _by_account(self, network: Network, sender: Any) -> str | None:
        """Deployed accounts report their entry point, if they have this function."""
        try:
            call = {"to": sender, "data": _ENTRY_POINT}
            word = abi.unhex(await self._internal_calls.call(network, "eth_call", call, "latest"))
        except RpcError:
            return None
        reported = b"" if word is None else word[12:32]
        points = network.chain.entry_points.items()
        return next((version for version, point in points if bytes.fromhex(point[2:]) == reported), None)


def _by_shape(given: Mapping[str, Any], versions: list[str]) -> list[str]:
    """The versions whose operations can have these fields."""
    named = {name for name, value in given.items() if value is not None}
    if named & _V06_ONLY:
        return ["0.6"]
    return [version for version in versions if version != "0.6"] if named & _V07_ONLY else versions


def _by_factory(network: Network, given: Mapping[str, Any]) -> str | None:
    """The version of the factory that deploys the account, if it is one of ours."""
    factory = given.get("factory") or given.get("initCode")
    if not isinstance(factory, str):
        return None
    factories = network.chain.factories.items()
    return next((version for version, known in factories if known.lower() == factory[:42].lower()), None)
