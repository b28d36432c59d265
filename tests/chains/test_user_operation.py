"""User operations: both shapes field by field, and the hash that the EntryPoint computes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.chains.evm import user_operation
from proxy.chains.evm.user_operation import BadOperation

ENTRY_POINTS = {
    "0.6": "0x5FF137D4b0FDCD49DcA30c7CF57E578a026d2789",
    "0.7": "0x0000000071727De22E5E9d8BAf0edAc6f37da032",
    "0.8": "0x4337084D9E255Ff0702461CF8895CE9E3b5Ff108",
}
ADDRESS = "0x1234567890123456789012345678901234567890"
GAS = hex(6942069)
PLAIN = {
    "sender": ADDRESS,
    "nonce": "0x0",
    "callData": "0x",
    "callGasLimit": GAS,
    "verificationGasLimit": GAS,
    "preVerificationGas": GAS,
    "maxFeePerGas": hex(69420),
    "maxPriorityFeePerGas": hex(69),
    "signature": "0x",
}
V06 = {**PLAIN, "initCode": "0x", "paymasterAndData": "0x"}
FACTORY = {"factory": ADDRESS, "factoryData": "0xdeadbeef"}
PAYMASTER = {
    "paymaster": ADDRESS,
    "paymasterVerificationGasLimit": GAS,
    "paymasterPostOpGasLimit": GAS,
    "paymasterData": "0xdeadbeef",
}
AUTH = {
    "address": ADDRESS,
    "chainId": "0x1",
    "nonce": "0x0",
    "yParity": "0x0",
    "r": "0x" + "0" * 64,
    "s": "0x" + "0" * 64,
}
DELEGATED = {"factory": "0x7702", "factoryData": "0xdeadbeef", "eip7702Auth": AUTH}


def only(count: int) -> dict[str, str]:
    """The first so many of the paymaster's fields."""
    return dict(list(PAYMASTER.items())[:count])


# viem's own tests, on chain 1. Those of 0.6 and 0.7 have an entry point that is the sender's address.
VECTORS: list[tuple[str, str, dict[str, Any], str]] = [
    ("0.8", ENTRY_POINTS["0.8"], {}, "a2224e732a1d4e2f923c7c05d586a0aa6cbc42172ec02f31d35fa9a2b8ba9208"),
    ("0.8", ENTRY_POINTS["0.8"], FACTORY, "3146c70a9ef7538e9b9aca8b00ad4b127ca7eef7817a557f1801acbf8d68c206"),
    ("0.8", ENTRY_POINTS["0.8"], only(1), "364bff8f9104a3854dce4f61f8479ce3019a3bd23e1c8db4da0d7c22850835b9"),
    ("0.8", ENTRY_POINTS["0.8"], only(2), "9cb735eb4278caf0a9f53ad81e5f592e965c9d034f6e2780befa4cd09a990b04"),
    ("0.8", ENTRY_POINTS["0.8"], only(3), "745602113988c3a6f18215d96eecc85775998dcb190e374a0955e637d40fe018"),
    ("0.8", ENTRY_POINTS["0.8"], only(4), "f10ef9afcf27a4fd17e477cd19f37e588e3ff7d48eade07ab5b7eb8caf75667f"),
    (
        "0.8",
        ENTRY_POINTS["0.8"],
        {**PAYMASTER, **DELEGATED},
        "d96232eb5d02f483166b9b23dca3ec2b963d70f09b961fce348c51d306278462",
    ),
    ("0.7", ADDRESS, {}, "1903d62bb5dc75af6fed866aa46d8e80063d9e288aa7f2caad0ff1fcae22e40d"),
    ("0.7", ADDRESS, FACTORY, "46c1d51e831d50c1a93135f026a7d3f1921ed66e9c81da723dd3817a49f01bc1"),
    ("0.7", ADDRESS, only(1), "1f2cf8638ead0fc621c6fb1562b8222c06539efcec09be156191f72418ebb109"),
    ("0.7", ADDRESS, only(2), "950763d3ef84eb05b6cd1d95f3b736bb02988d643c6e11a76bf8beddc611cc95"),
    ("0.7", ADDRESS, only(3), "d6efc63c28df53b49dd6fa10cec0a92ac61f8c70e9a45265e39c955f9bf821ed"),
    ("0.7", ADDRESS, only(4), "265fc1350b3fc016d493f9533354cf1a758c0fb9ddbbfd8b19c987d4e8935eed"),
    ("0.6", ADDRESS, {}, "e331591ab320e956b5e93f04e1dcf706bc128bc7b510602d2e0553f8be25fcba"),
    (
        "0.6",
        ADDRESS,
        {"initCode": ADDRESS + "deadbeef"},
        "aa4a4fa863b3018e0e23291ca82a8747d06c6a92548eb9198f54f4a63540d06e",
    ),
    (
        "0.6",
        ADDRESS,
        {"paymasterAndData": ADDRESS},
        "72bb2d82af9e9da2079fab165bc219c967c6ca0a63dfa55f382c5914ba2f77c5",
    ),
]


@pytest.mark.parametrize(("version", "entry_point", "more", "expected"), VECTORS)
def test_hash_is_that_of_the_published_vectors(
    version: str, entry_point: str, more: dict[str, Any], expected: str
) -> None:
    operation = user_operation.parse({**PLAIN, **more}, version, draft=True)
    assert user_operation.hash_of(operation, bytes.fromhex(entry_point[2:]), 1).hex() == expected


def test_delegate_that_the_chain_knows_stands_for_one_in_the_operation() -> None:
    entry_point = bytes.fromhex(ENTRY_POINTS["0.8"][2:])
    said = user_operation.parse({**PLAIN, **DELEGATED}, "0.8")
    unsaid = user_operation.parse({**PLAIN, "factory": "0x7702", "factoryData": "0xdeadbeef"}, "0.8")
    assert unsaid.is_delegated
    known = user_operation.hash_of(unsaid, entry_point, 1, delegate=bytes.fromhex(ADDRESS[2:]))
    assert known == user_operation.hash_of(said, entry_point, 1)
    assert known != user_operation.hash_of(unsaid, entry_point, 1)


def test_paymaster_and_its_limits_are_read_from_either_shape() -> None:
    new = user_operation.parse({**PLAIN, **PAYMASTER}, "0.7")
    old = user_operation.parse({**V06, "paymasterAndData": ADDRESS + "beef"}, "0.6")
    assert new.paymaster == old.paymaster == bytes.fromhex(ADDRESS[2:])
    assert new.paymaster_gas == (6942069, 6942069)
    assert old.paymaster_gas == (0, 0)
    assert user_operation.parse(PLAIN, "0.7").paymaster is None
    assert user_operation.parse({**PLAIN, **FACTORY}, "0.7").factory == bytes.fromhex(ADDRESS[2:])
    assert user_operation.parse({**PLAIN, **DELEGATED}, "0.8").factory is None


@pytest.mark.parametrize("version", ["0.6", "0.7", "0.8"])
def test_both_forms_are_the_same_operation_for_every_version(version: str) -> None:
    gas = PAYMASTER["paymasterVerificationGasLimit"], PAYMASTER["paymasterPostOpGasLimit"]
    limits = "" if version == "0.6" else "".join(limit[2:].rjust(32, "0") for limit in gas)
    paid = PAYMASTER["paymaster"] + limits + PAYMASTER["paymasterData"][2:]
    packed = {"initCode": FACTORY["factory"] + FACTORY["factoryData"][2:], "paymasterAndData": paid}
    separate = user_operation.parse({**PLAIN, **FACTORY, **PAYMASTER}, version)
    assert user_operation.parse({**PLAIN, **packed}, version) == separate
    assert user_operation.parse({**PLAIN, **packed, **FACTORY, **PAYMASTER}, version) == separate
    assert user_operation.in_shape_of({**PLAIN, **packed}, version).keys() == (
        {*PLAIN, "initCode", "paymasterAndData"} if version == "0.6" else {*PLAIN, *FACTORY, *PAYMASTER}
    )
    empty = {"initCode": "0x", "paymasterAndData": "0x"}
    assert user_operation.parse({**PLAIN, **empty}, version).factory is None


@pytest.mark.parametrize("code", ["0x7702", "0x7702" + "0" * 36])
def test_packed_marker_of_a_delegated_account_is_read(code: str) -> None:
    assert user_operation.parse({**PLAIN, "initCode": code}, "0.8").is_delegated
    assert user_operation.parse({**PLAIN, "initCode": code, "factory": "0x7702"}, "0.8").is_delegated


@pytest.mark.parametrize("name", V06)
def test_field_that_is_missing_is_named_for_0_6(name: str) -> None:
    with pytest.raises(BadOperation, match=f"^{name}: is missing$"):
        user_operation.parse({field: value for field, value in V06.items() if field != name}, "0.6")


@pytest.mark.parametrize("name", PLAIN)
def test_field_that_is_missing_is_named_for_0_7(name: str) -> None:
    with pytest.raises(BadOperation, match=f"^{name}: is missing$"):
        user_operation.parse({field: value for field, value in PLAIN.items() if field != name}, "0.7")


@pytest.mark.parametrize("name", PLAIN)
def test_null_is_the_same_as_missing(name: str) -> None:
    with pytest.raises(BadOperation, match=f"^{name}: is missing$"):
        user_operation.parse({**PLAIN, name: None}, "0.7")


@pytest.mark.parametrize(
    ("version", "more", "message"),
    [
        ("0.7", {"factory": ADDRESS}, "factoryData: is missing; factory and factoryData come together"),
        ("0.7", {"factoryData": "0xff"}, "factory: is missing; factory and factoryData come together"),
        ("0.7", {"paymasterVerificationGasLimit": "0x1"}, "paymaster: is missing; "),
        ("0.7", {"paymasterData": "0xff"}, "paymaster: is missing; paymaster, paymasterVerificationGasLimit, "),
        ("0.7", only(1), "paymasterVerificationGasLimit: is missing; "),
        ("0.7", only(3), "paymasterData: is missing; "),
        ("0.7", {"initCode": "0xdeadbeef"}, "initCode: must be 0x, or begin with an address of 20 bytes"),
        ("0.7", {"initCode": ADDRESS + "00", **FACTORY}, "initCode: contradicts factoryData"),
        ("0.7", {"initCode": "0x" + "dd" * 20, **FACTORY}, "initCode: contradicts factory"),
        ("0.7", {"paymasterAndData": ADDRESS + "beef"}, "paymasterAndData: must be 0x, or the paymaster of 20 bytes"),
        ("0.7", {"paymasterAndData": ADDRESS + "00" * 32, **PAYMASTER}, "paymasterAndData: contradicts paymasterVer"),
        ("0.6", {"initCode": ADDRESS + "00", **FACTORY}, "initCode: contradicts factory and factoryData"),
        ("0.6", {"paymasterAndData": "0x", "paymasterData": "0xff"}, "paymaster: is missing; "),
        ("0.6", {"eip7702Auth": AUTH}, "eip7702Auth: is not a field of an operation for entry point 0.6"),
        ("0.7", {"Sender": ADDRESS}, "Sender: is not a field of an operation for entry point 0.7"),
        ("0.6", {"initCode": "0xdeadbeef"}, "initCode: must be 0x, or begin with an address of 20 bytes"),
        ("0.6", {"paymasterAndData": "0x00"}, "paymasterAndData: must be 0x, or begin with an address of 20 bytes"),
        ("0.7", {"sender": "0x1234"}, "sender: must be an address, 0x and 40 hex digits, not '0x1234'"),
        ("0.7", {"sender": 5}, "sender: must be an address, 0x and 40 hex digits, not a JSON number"),
        ("0.7", {"nonce": "7"}, "nonce: must be a hex number such as 0x5208, not '7'"),
        ("0.7", {"nonce": "0x"}, "nonce: must be a hex number such as 0x5208, not '0x'"),
        ("0.7", {"nonce": "0x" + "f" * 65}, "nonce: must be a hex number such as 0x5208, not '0xffff"),
        ("0.7", {"nonce": True}, "nonce: must be a hex number such as 0x5208, not true or false"),
        ("0.7", {"callGasLimit": "0x1" + "0" * 32}, "callGasLimit: must fit into 128 bits"),
        ("0.7", {"maxFeePerGas": "-0x1"}, "maxFeePerGas: must be a hex number such as 0x5208, not '-0x1'"),
        ("0.7", {"callData": "0xzz"}, "callData: must be bytes in hex, 0x and two digits each, not '0xzz'"),
        ("0.7", {"callData": "0xabc"}, "callData: has an odd number of hex digits"),
        ("0.7", {"callData": "\u0660x"}, "callData: must be bytes in hex, 0x and two digits each, not '\\\\u0660x'"),
        ("0.7", {"signature": ["0x"]}, "signature: must be bytes in hex, 0x and two digits each, not an array"),
        ("0.8", {"eip7702Auth": "0x"}, "eip7702Auth: must be an object"),
        ("0.8", {"eip7702Auth": {**AUTH, "r": None}}, "eip7702Auth.r: is missing"),
        ("0.8", {"eip7702Auth": {**AUTH, "v": "0x1"}}, "eip7702Auth.v: is not a field of an authorization"),
        ("0.8", {"eip7702Auth": {**AUTH, "address": "0x"}}, "eip7702Auth.address: must be an address"),
        ("0.8", {"eip7702Auth": {**AUTH, "s": "s"}}, "eip7702Auth.s: must be a hex number"),
    ],
)
def test_field_that_is_wrong_is_named(version: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOperation) as caught:
        user_operation.parse({**(V06 if version == "0.6" else PLAIN), **more}, version)
    assert str(caught.value).startswith(message)


def test_limits_of_a_paymaster_that_is_not_there_may_be_zero() -> None:
    """As viem passes on what a bundler has estimated."""
    more = {"paymasterVerificationGasLimit": "0x0", "paymasterPostOpGasLimit": "0x0", "factoryData": "0x"}
    assert user_operation.parse({**PLAIN, **more}, "0.7") == user_operation.parse(PLAIN, "0.7")


@pytest.mark.parametrize("name", ["factoryData", "paymasterData"])
def test_data_of_a_contract_that_is_not_there_is_nothing_only_without_a_byte(name: str) -> None:
    with pytest.raises(BadOperation, match=rf"^{name.removesuffix('Data')}: is missing; "):
        user_operation.parse({**PLAIN, name: "0x00"}, "0.7")


@pytest.mark.parametrize("given", [None, [], "0x", 1])
def test_operation_that_is_no_object_is_refused(given: Any) -> None:
    with pytest.raises(BadOperation, match=r"^userOperation: must be an object$"):
        user_operation.parse(given, "0.7")


def test_long_text_is_not_repeated_whole() -> None:
    with pytest.raises(BadOperation) as caught:
        user_operation.parse({**PLAIN, "sender": "x" * 100_000}, "0.7")
    assert len(str(caught.value)) < 150


def test_draft_needs_only_what_an_estimate_cannot_do_without() -> None:
    draft = {name: PLAIN[name] for name in ("sender", "nonce", "callData")}
    operation = user_operation.parse(draft, "0.7", draft=True)
    assert (operation.call_gas, operation.max_fee_wei, operation.signature) == (0, 0, b"")
    assert user_operation.parse({**draft, "paymaster": ADDRESS}, "0.7", draft=True).paymaster is not None
    with pytest.raises(BadOperation, match=r"^paymaster: is missing"):
        user_operation.parse({**draft, "paymasterData": "0x01"}, "0.7", draft=True)
    with pytest.raises(BadOperation, match=r"^callData: is missing$"):
        user_operation.parse({"sender": ADDRESS, "nonce": "0x0"}, "0.6", draft=True)


def test_entry_point_is_found_in_any_case() -> None:
    for version, entry_point in ENTRY_POINTS.items():
        for text in (entry_point, entry_point.lower(), "0x" + entry_point[2:].upper()):
            assert user_operation.version_of(text, ENTRY_POINTS) == version


def test_error_for_an_unknown_entry_point_lists_the_known_ones() -> None:
    with pytest.raises(BadOperation) as caught:
        user_operation.version_of(ADDRESS, ENTRY_POINTS)
    assert str(caught.value) == (
        f"entryPoint: {ADDRESS} is not supported here; supported: {', '.join(ENTRY_POINTS.values())}"
    )
    with pytest.raises(BadOperation, match=r"^entryPoint: must be an address, not '0.7'$"):
        user_operation.version_of("0.7", ENTRY_POINTS)
    with pytest.raises(BadOperation, match=r"supported: none$"):
        user_operation.version_of(ADDRESS, {})


NUMBERS = st.integers(0, 2**128 - 1).map(hex)
DATA = st.binary(max_size=80).map(lambda data: "0x" + data.hex())
FIELDS = {**dict.fromkeys(PLAIN, NUMBERS), "sender": st.just(ADDRESS), "callData": DATA, "signature": DATA}


@given(
    st.fixed_dictionaries(FIELDS), st.sampled_from(["0.7", "0.8"]), st.sampled_from(sorted(set(FIELDS) - {"signature"}))
)
def test_hash_covers_every_field_but_the_signature(fields: dict[str, str], version: str, changed: str) -> None:
    entry_point = bytes.fromhex(ENTRY_POINTS[version][2:])
    before = user_operation.hash_of(user_operation.parse(fields, version), entry_point, 1)
    assert before == user_operation.hash_of(
        user_operation.parse({**fields, "signature": "0x00"}, version), entry_point, 1
    )
    other = ENTRY_POINTS["0.6"] if changed == "sender" else fields[changed] + "00" if changed == "callData" else None
    other = other or hex((int(fields[changed], 16) + 1) % 2**128)
    assert before != user_operation.hash_of(user_operation.parse({**fields, changed: other}, version), entry_point, 1)
    assert before != user_operation.hash_of(user_operation.parse(fields, version), entry_point, 2)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


@given(VALUES, st.sampled_from(user_operation.VERSIONS))
def test_any_value_is_no_operation(value: Any, version: str) -> None:
    with pytest.raises(BadOperation):
        user_operation.parse(value, version)


@given(VALUES.filter(lambda value: not isinstance(value, str)), st.sampled_from(sorted(PLAIN)))
def test_any_value_in_a_field_is_a_fault_that_names_it(value: Any, name: str) -> None:
    with pytest.raises(BadOperation, match=f"^{name}: "):
        user_operation.parse({**PLAIN, name: value}, "0.7")


DELEGATE = bytes(range(20))


def test_delegate_is_read_from_a_delegation_indicator() -> None:
    """EIP-7702: 0xef0100 and the address."""
    assert user_operation.delegate_of(bytes.fromhex("ef0100") + DELEGATE) == DELEGATE


@pytest.mark.parametrize(
    "code",
    [
        b"",
        bytes.fromhex("ef0100"),
        bytes.fromhex("ef0100") + DELEGATE[:19],
        bytes.fromhex("ef0100") + DELEGATE + b"\0",
        bytes.fromhex("ef0101") + DELEGATE,
        bytes.fromhex("6080604052"),
    ],
)
def test_other_code_delegates_to_nothing(code: bytes) -> None:
    assert user_operation.delegate_of(code) is None
