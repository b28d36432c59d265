"""/wallets: create, read and list. A wallet is its key's; somebody else's is not there."""

from __future__ import annotations

from typing import Any

from proxy.chains.evm import address
from proxy.chains.registry import Registry
from proxy.core.access import Key
from proxy.errors import InvalidRequest, NotFound
from proxy.services.wallets import Wallet, WalletService, WalletState
from proxy.web.rest.endpoint import RestHandler, RestReply, RestRequest
from proxy.web.timestamps import time_of


class WalletHandlers:
    def __init__(self, wallets: WalletService, chains: Registry) -> None:
        self._wallets = wallets
        self._networks = {network.id: network for network in chains.networks()}

    def answers(self) -> dict[str, RestHandler]:
        return {"create_wallet": self.create, "read_wallet": self.read, "list_wallets": self.list}

    async def create(self, asked: RestRequest) -> RestReply:
        body = asked.body
        network = asked.network(body["chain"])
        owner = _address(body["owner"], "owner")
        seen, is_new = await self._wallets.create(
            asked.key, network, owner=owner, salt=body.get("salt"), version=body.get("version")
        )
        return RestReply(self._shown(asked.key, seen), status=201 if is_new else 200)

    async def read(self, asked: RestRequest) -> dict[str, Any]:
        at = _address(asked.path["address"], "address")
        chain = asked.query["chain"]
        wanted = asked.network(chain) if chain is not None else None
        known = [wallet for wallet in await self._wallets.find(asked.key, at) if self._serves(wallet)]
        found = [wallet for wallet in known if wanted is None or wallet.network == wanted.id]
        if not found:
            raise NotFound("there is no such wallet")
        wallet = found[0] if len(found) == 1 else self._picked(asked.key, found)
        network = asked.network(self._word(asked.key, wallet.network))
        seen = await self._wallets.state(network, wallet)
        answer = self._shown(asked.key, seen)
        answer["nonce"] = seen.nonce
        if seen.is_deployed:
            answer["deployed_at"] = time_of(seen.wallet.deployed_at)
            answer["deploy_tx"] = None if seen.wallet.deploy_tx is None else "0x" + seen.wallet.deploy_tx.hex()
        return answer

    def _serves(self, wallet: Wallet) -> bool:
        """Whether its network, and its version there, are still configured."""
        network = self._networks.get(wallet.network)
        return network is not None and wallet.version in network.chain.entry_points

    def _picked(self, key: Key, found: list[Wallet]) -> Wallet:
        """Without a word about the chain an address that is on several is no answer."""
        words = [self._word(key, wallet.network) for wallet in found]
        raise InvalidRequest(f"parameter 'chain' is required: this wallet is on {', '.join(words)}")

    async def list(self, asked: RestRequest) -> dict[str, Any]:
        chain = asked.query["chain"]
        network = asked.network(chain) if chain is not None else None
        found, total = await self._wallets.page(asked.key, asked.page, network)
        return {
            "wallets": [self._summary(asked.key, seen) for seen in found],
            "page": asked.page.number,
            "total": total,
        }

    # How a wallet looks

    def _summary(self, key: Key, seen: WalletState) -> dict[str, Any]:
        wallet = seen.wallet
        return {
            "address": address.checksum(wallet.address),
            "owner": address.checksum(wallet.owner),
            "chain": self._word(key, wallet.network),
            "status": "deployed" if seen.is_deployed else "counterfactual",
            "created_at": time_of(wallet.created_at),
        }

    def _shown(self, key: Key, seen: WalletState) -> dict[str, Any]:
        wallet = seen.wallet
        chain = self._networks[wallet.network].chain
        return {
            **self._summary(key, seen),
            "factory": address.checksum(wallet.factory),
            "version": wallet.version,
            "entry_point": chain.entry_points[wallet.version],
        }

    def _word(self, key: Key, name: str) -> str:
        """The network as this key would name it; one that is configured no more by its old name."""
        network = self._networks.get(name)
        return name.replace("/", "-") if network is None else network.word(live=key.live)


def _address(text: str, name: str) -> bytes:
    found = address.parse(text)
    if found is None:
        raise InvalidRequest(f"{name}: must be an address, 0x and 40 hex digits")
    if address.is_mistyped(text):
        raise InvalidRequest(f"{name}: the checksum of {text} does not hold: it is mistyped")
    return found
