"""Signing secrets at rest."""

from __future__ import annotations

import pytest

from proxy.store.postgres.secrets import SealBroken, Vault

KEY = "a key that is not in the database, 32 or more"


def test_secret_is_decrypted_for_its_webhook() -> None:
    vault = Vault(KEY)
    sealed = vault.seal("wh_1", b"s" * 32)
    assert vault.open("wh_1", sealed) == b"s" * 32
    assert Vault(KEY).open("wh_1", sealed) == b"s" * 32


def test_ciphertext_hides_the_secret_and_is_never_the_same_twice() -> None:
    vault = Vault(KEY)
    first, second = (vault.seal("wh_1", b"s" * 32) for _ in range(2))
    assert b"ssss" not in first
    assert first != second


def test_swapped_changed_or_foreign_ciphertext_is_refused() -> None:
    sealed = Vault(KEY).seal("wh_1", b"s" * 32)
    changed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for vault, name, found in (
        (Vault(KEY), "wh_2", sealed),
        (Vault(KEY), "wh_1", changed),
        (Vault(KEY), "wh_1", sealed[:8]),
        (Vault(KEY), "wh_1", b""),
        (Vault(KEY + "!"), "wh_1", sealed),
    ):
        with pytest.raises(SealBroken):
            vault.open(name, found)


def test_repr_of_the_vault_hides_its_key() -> None:
    assert KEY not in repr(Vault(KEY))
