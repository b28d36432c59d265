"""Addresses in paths, of holders and contracts; also given as ENS names on networks that have them."""

from __future__ import annotations

from typing import Protocol

from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.errors import InvalidRequest, NotFound
from proxy.web.rest.endpoint import RestRequest


class NameResolver(Protocol):
    async def resolve(self, network: Network, text: str) -> bytes | None:
        """The address of a name. Raises ValueError, with the reason, if the text is not a valid name."""
        ...

    def are_on(self, network: Network) -> bool:
        """Whether the network has names."""
        ...


class PathAddresses:
    def __init__(self, names: NameResolver | None) -> None:
        self._names = names

    async def of(self, request: RestRequest, network: Network, parameter: str = "address") -> bytes:
        """The address in the path; an error names the parameter."""
        text = request.path[parameter]
        if (parsed := family_of(network).addresses.parse(text)) is not None:
            return parsed
        if "." not in text or self._names is None or not self._names.are_on(network):
            raise not_an_address(network, parameter)
        try:
            resolved = await self._names.resolve(network, text)
        except ValueError as exc:
            raise InvalidRequest(f"parameter {parameter!r}: {exc}", param=parameter) from None
        if resolved is None:
            raise NotFound(
                f"parameter {parameter!r}: the name does not resolve to an address on {network.id}",
                param=parameter,
                reason="resource",
            )
        return resolved

    async def contract(self, request: RestRequest, network: Network) -> bytes:
        """The contract in the path. Raises if the key may not be used for it."""
        contract = await self.of(request, network, "contract")
        request.require_contract(network, contract)
        return contract


def not_an_address(network: Network, parameter: str) -> InvalidRequest:
    form = family_of(network).addresses.description
    return InvalidRequest(
        f"parameter {parameter!r}: is not an address of {network.id}, which is {form}", param=parameter
    )
