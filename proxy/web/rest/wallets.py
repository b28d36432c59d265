"""/wallets: create, read and list. A wallet of another key is a 404, like one that does not exist."""

from __future__ import annotations

from typing import Any

from proxy.chains.evm import address, factories
from proxy.errors import InvalidRequest, NotFound
from proxy.services.wallets import Wallet, WalletService, WalletState
from proxy.web.rest.endpoint import RestHandler, RestReply, RestRequest
from proxy.web.timestamps import time_of


class WalletHandlers:
    def __init__(self, wallets: WalletService) -> None:
        self._wallets = wallets

    def handlers(self) -> dict[str, RestHandler]:
        return {"create_wallet": self.create, "read_wallet": self.read, "list_wallets": self.list}

    async def create(self, request: RestRequest) -> RestReply:
        body = request.body
        network = request.network(body["chain"])
        owner = _address(body["owner"], "owner")
        state, is_new = await self._wallets.create(
            request.key, network, owner=owner, salt=body.get("salt"), version=body.get("version")
        )
        return RestReply(_shown(request, state), status=201 if is_new else 200)

    async def read(self, request: RestRequest) -> dict[str, Any]:
        at = _address(request.path["address"], "address")
        chain = request.query["chain"]
        wanted = request.network(chain) if chain is not None else None
        known = [wallet for wallet in await self._wallets.find(request.key, at) if _is_served(request, wallet)]
        known = [wallet for wallet in known if _may_use(request, wallet)] or known
        matching = [wallet for wallet in known if wanted is None or wallet.network == wanted.id]
        if not matching:
            raise NotFound("there is no such wallet")
        # A wallet usually has the same address on several chains. Without `chain`, the one that was created first is returned.
        wallet = matching[0]
        network = request.network(request.network_word(wallet.network))
        state = await self._wallets.state(network, wallet)
        chains = [request.network_word(each.network) for each in known]
        reply = {**_shown(request, state), "chains": chains, "nonce": state.nonce}
        if state.is_deployed:
            reply["deployed_at"] = time_of(state.wallet.deployed_at)
            reply["deploy_tx"] = None if state.wallet.deploy_tx is None else "0x" + state.wallet.deploy_tx.hex()
        else:
            code = factories.init_code(wallet.factory, wallet.owner, wallet.salt)
            reply |= {"init_code": "0x" + code.hex(), "factory_data": "0x" + code[20:].hex()}
        return reply

    async def list(self, request: RestRequest) -> dict[str, Any]:
        chain = request.query["chain"]
        network = request.known_network(chain) if chain is not None else None
        states, total = await self._wallets.page(request.key, request.page, network)
        return request.listed("wallets", [_summary(request, state) for state in states], total)


def _is_served(request: RestRequest, wallet: Wallet) -> bool:
    """Whether the wallet's network, and its version there, are still configured."""
    network = request.resolver.configured(wallet.network)
    return network is not None and wallet.version in network.chain.entry_points


def _may_use(request: RestRequest, wallet: Wallet) -> bool:
    """Whether the key may be used on the wallet's network. It may have been limited after it created the wallet."""
    limits = request.key.restrictions
    return limits is None or limits.has_network(wallet.network)


def _summary(request: RestRequest, state: WalletState) -> dict[str, Any]:
    wallet = state.wallet
    return {
        "address": address.checksum(wallet.address),
        "owner": address.checksum(wallet.owner),
        "chain": request.network_word(wallet.network),
        "status": "deployed" if state.is_deployed else "counterfactual",
        "created_at": time_of(wallet.created_at),
    }


def _shown(request: RestRequest, state: WalletState) -> dict[str, Any]:
    wallet = state.wallet
    network = request.resolver.configured(wallet.network)
    assert network is not None
    return {
        **_summary(request, state),
        "factory": address.checksum(wallet.factory),
        "version": wallet.version,
        "entry_point": network.chain.entry_points[wallet.version],
    }


def _address(text: str, name: str) -> bytes:
    parsed = address.parse(text)
    if parsed is None:
        raise InvalidRequest(f"{name}: must be an address: 0x and 40 hex digits", param=name)
    if address.is_mistyped(text):
        raise InvalidRequest(
            f"{name}: the checksum of {text} is wrong; check the address for typing errors", param=name
        )
    return parsed
