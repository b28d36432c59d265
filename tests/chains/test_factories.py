"""Addresses of future contracts: EIP-1014's examples, and SimpleAccount factories."""

from __future__ import annotations

import pytest
import sha3

from proxy.chains.evm import address, factories
from tests.shipped_tables import TABLES

CHAIN = next(chain for chain in TABLES.chains.chains.values() if len(chain.factories) == 3)
OWNER = bytes.fromhex("f39Fd6e51aad88F6F4ce6aB8827279cffFb92266")


@pytest.mark.parametrize(
    ("deployer", "salt", "code", "expected"),
    [
        ("00" * 20, "00" * 32, "00", "0x4D1A2e2bB4F88F0250f26Ffff098B0b30B26BF38"),
        ("deadbeef" + "00" * 16, "00" * 32, "00", "0xB928f69Bb1D91Cd65274e3c79d8986362984fDA3"),
        (
            "deadbeef" + "00" * 16,
            "00" * 12 + "feed" + "00" * 18,
            "00",
            "0xD04116cDd17beBE565EB2422F2497E06cC1C9833",
        ),
        ("00" * 20, "00" * 32, "deadbeef", "0x70f2b2914A2a4b783FaEFb75f459A580616Fcb5e"),
        ("00" * 16 + "deadbeef", "00" * 28 + "cafebabe", "deadbeef", "0x60f3f640a8508fC6a86d45DF051962668E1e8AC7"),
        (
            "00" * 16 + "deadbeef",
            "00" * 28 + "cafebabe",
            "deadbeef" * 11,
            "0x1d8bfDC5D46DC4f61D6b6115972536eBE6A8854C",
        ),
        ("00" * 20, "00" * 32, "", "0xE33C0C7F7df4809055C3ebA6c09CFe4BaF1BD9e0"),
    ],
)
def test_create2_gives_the_addresses_of_eip_1014(deployer: str, salt: str, code: str, expected: str) -> None:
    code_hash = sha3.keccak_256(bytes.fromhex(code)).digest()
    found = address.create2(bytes.fromhex(deployer), bytes.fromhex(salt), code_hash)
    assert address.checksum(found) == expected


def test_created_contract_is_where_its_creators_nonce_puts_it() -> None:
    """The first contract of each factory, as explorers show it."""
    implementations = {
        version: address.checksum(factory.implementation)
        for version, factory in factories.of_chain(CHAIN, TABLES.proxies).items()
    }
    assert implementations["0.6"] == "0x8ABB13360b87Be5EEb1B98647A016adD927a136c"
    for nonce in (0, 128):
        with pytest.raises(ValueError, match="nonces"):
            address.created(OWNER, nonce)


def test_wallets_differ_by_owner_salt_and_version() -> None:
    known = factories.of_chain(CHAIN, TABLES.proxies)
    owners = [OWNER, bytes(20), b"\xff" * 20]
    salts = [0, 1, 2**256 - 1]
    found = {factory.wallet(owner, salt) for factory in known.values() for owner in owners for salt in salts}
    assert len(found) == 27
    again = factories.of_chain(CHAIN, TABLES.proxies)["0.7"]
    assert again.wallet(OWNER, 1) == known["0.7"].wallet(OWNER, 1)


def test_chain_without_factories_has_none() -> None:
    bare = next(chain for chain in TABLES.chains.chains.values() if not chain.factories)
    assert factories.of_chain(bare, TABLES.proxies) == {}


@pytest.mark.parametrize(
    ("text", "number"),
    [(None, 0), ("0", 0), ("1", 1), ("007", 7), ("0x2a", 42), ("0X2A", 42), (str(2**256 - 1), 2**256 - 1)],
)
def test_salt_that_is_a_number_is_taken_as_it_is(text: str | None, number: int) -> None:
    assert factories.salt_of(text) == number


@pytest.mark.parametrize("text", ["savings", "0x", "0xg", "-1", "1.0", "1e3", "0x 1", "0x_1", "1_0", "٣", "²", " 1"])
def test_salt_of_any_other_text_is_its_hash(text: str) -> None:
    assert factories.salt_of(text) == int.from_bytes(sha3.keccak_256(text.encode()).digest(), "big")


@pytest.mark.parametrize("text", [str(2**256), "0x1" + "0" * 64, "9" * 256])
def test_salt_beyond_256_bits_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be below 2\*\*256"):
        factories.salt_of(text)
