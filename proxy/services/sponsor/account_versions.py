"""Completes requests for sponsorship: the account's entry point, and the init code of a new wallet.

The entry point follows from the factory in the operation, from our record of the wallet, or from the account itself. Our
record is certain, because a wallet's address follows from its factory. An account about which nothing is known gets the
default version, and the answer names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.chains.evm import abi, factories, user_operation
from proxy.chains.evm.address import parse
from proxy.chains.registry import Network
from proxy.core.access import Key
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.sponsor.paymasters import Paymasters
from proxy.store.postgres.wallets import WalletStore

_ENTRY_POINT = "0x" + abi.call("entryPoint()").hex()


class AccountVersions:
    def __init__(
        self, wallets: WalletStore, internal_calls: InternalCalls, paymasters: Paymasters, *, default: str
    ) -> None:
        """`default`: the version of accounts that do not show theirs."""
        self._default = default
        self._wallets = wallets
        self._internal_calls = internal_calls
        self._paymasters = paymasters

    def __repr__(self) -> str:
        return f"<AccountVersions {self._wallets!r}>"

    async def find(self, network: Network, given: Mapping[str, Any], entry_point: str | None) -> str:
        """The version. Raises BadOperation if the entry point that the request names is not supported."""
        points = network.chain.entry_points
        if entry_point is not None:
            return user_operation.version_of(entry_point, points)
        served = self._paymasters.versions(network)
        if not served:
            return user_operation.VERSIONS[-1]  # Any will do: there is nothing to sign with.
        known = await self._known(network, given)
        if known is not None:
            return known
        # Entry point 0.6 has no delegated accounts.
        possible = [version for version in served if version != "0.6" or not user_operation.has_delegation(given)]
        return self._default if self._default in possible or not possible else possible[-1]

    async def init_code(self, key: Key, network: Network, sender: bytes) -> bytes:
        """The init code of a wallet that the key's lineage has created here and that is not deployed; empty for others."""
        wallets = [each for each in await self._wallets.find(key.lineage, sender) if each.network == network.id]
        if not wallets:
            return b""
        code = await self._internal_calls.call(network, "eth_getCode", "0x" + sender.hex(), "latest", fresh=True)
        return b"" if abi.unhex(code) else factories.init_code(wallets[0].factory, wallets[0].owner, wallets[0].salt)

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


def _by_factory(network: Network, given: Mapping[str, Any]) -> str | None:
    """The version of the factory that deploys the account, if it is one of ours."""
    factory = given.get("factory") or given.get("initCode")
    if not isinstance(factory, str):
        return None
    known_factories = network.chain.factories.items()
    return next((version for version, known in known_factories if known.lower() == factory[:42].lower()), None)
