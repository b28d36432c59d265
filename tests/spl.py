"""Creates tokens on a Solana virtual machine with the real token programs, which write every account themselves.

The metadata program is not on the machine: its accounts are set directly, in the format that it writes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from solders.account import Account
from solders.instruction import AccountMeta, Instruction
from solders.keypair import Keypair
from solders.litesvm import LiteSVM
from solders.message import Message
from solders.pubkey import Pubkey
from solders.system_program import CreateAccountParams, create_account
from solders.transaction import Transaction
from solders.transaction_metadata import TransactionMetadata

from tests.svm_upstreams import PAYER

TOKEN = Pubkey.from_string("TokenkegQfeZyiNwAJbNbGKPFXCWuBvf9Ss623VQ5DA")
TOKEN_2022 = Pubkey.from_string("TokenzQdBNbLqP5VEhdkAS6EPFLC1PHnBqCXEpPxuEb")
METADATA = Pubkey.from_string("metaqbxxUerdq28cj1RbAWkYQm3ybzjb6a8bt518x1s")
# Instructions of the token programs, by their first byte.
INITIALIZE_MINT2, INITIALIZE_ACCOUNT3, MINT_TO, METADATA_POINTER = 20, 18, 7, 39
# The metadata interface identifies its instruction by a hash.
INITIALIZE_METADATA = bytes((210, 225, 30, 162, 88, 184, 77, 141))
MINT_BYTES, ACCOUNT_BYTES = 82, 165
# A mint with a metadata pointer: padding, account type, and the header and 64 bytes of one extension.
POINTED_BYTES = 165 + 1 + 4 + 64


def text(value: str) -> bytes:
    return struct.pack("<I", len(value.encode())) + value.encode()


@dataclass
class Bank:
    machine: LiteSVM
    made: int = field(default=100)

    def keypair(self) -> Keypair:
        self.made += 1
        return Keypair.from_seed(self.made.to_bytes(32, "big"))

    def send(self, *instructions: Instruction, signers: tuple[Keypair, ...] = ()) -> None:
        message = Message([*instructions], PAYER.pubkey())
        done = self.machine.send_transaction(Transaction([PAYER, *signers], message, self.machine.latest_blockhash()))
        assert isinstance(done, TransactionMetadata), done
        self.machine.expire_blockhash()

    def new_account(self, size: int, program: Pubkey, *, pays_for: int = 0) -> tuple[Keypair, Instruction]:
        keypair = self.keypair()
        lamports = self.machine.minimum_balance_for_rent_exemption(size + pays_for)
        return keypair, create_account(
            CreateAccountParams(
                from_pubkey=PAYER.pubkey(), to_pubkey=keypair.pubkey(), lamports=lamports, space=size, owner=program
            )
        )

    def new_mint(self, decimals: int, program: Pubkey = TOKEN) -> Pubkey:
        keypair, create = self.new_account(MINT_BYTES, program)
        self.send(create, self._initialize(keypair, decimals, program), signers=(keypair,))
        return keypair.pubkey()

    def new_named_mint(self, decimals: int, name: str, symbol: str) -> Pubkey:
        """A Token-2022 mint that contains its own name."""
        keypair, create = self.new_account(POINTED_BYTES, TOKEN_2022, pays_for=1000)
        mint, authority = keypair.pubkey(), PAYER.pubkey()
        pointer = Instruction(
            TOKEN_2022, bytes((METADATA_POINTER, 0)) + bytes(authority) + bytes(mint), [AccountMeta(mint, False, True)]
        )
        named = Instruction(
            TOKEN_2022,
            INITIALIZE_METADATA + text(name) + text(symbol) + text("https://example.com/t.json"),
            [
                AccountMeta(mint, False, True),
                AccountMeta(authority, False, False),
                AccountMeta(mint, False, False),
                AccountMeta(authority, True, False),
            ],
        )
        self.send(create, pointer, self._initialize(keypair, decimals, TOKEN_2022), named, signers=(keypair,))
        return mint

    def _initialize(self, mint: Keypair, decimals: int, program: Pubkey) -> Instruction:
        data = bytes((INITIALIZE_MINT2, decimals)) + bytes(PAYER.pubkey()) + b"\0"
        return Instruction(program, data, [AccountMeta(mint.pubkey(), False, True)])

    def give(self, mint: Pubkey, owner: Pubkey, amount: int, program: Pubkey = TOKEN) -> Pubkey:
        """Create a token account of the owner with this amount."""
        keypair, create = self.new_account(ACCOUNT_BYTES, program)
        account = keypair.pubkey()
        metas = [AccountMeta(account, False, True), AccountMeta(mint, False, False)]
        opened = Instruction(program, bytes((INITIALIZE_ACCOUNT3,)) + bytes(owner), metas)
        paid = Instruction(
            program,
            bytes((MINT_TO,)) + struct.pack("<Q", amount),
            [
                AccountMeta(mint, False, True),
                AccountMeta(account, False, True),
                AccountMeta(PAYER.pubkey(), True, False),
            ],
        )
        self.send(create, opened, *([paid] if amount else []), signers=(keypair,))
        return account

    def name(self, mint: Pubkey, name: str, symbol: str, *, about: Pubkey | None = None) -> None:
        """Set an account of the metadata program, padded like the program's own."""
        body = bytes((4,)) + bytes(PAYER.pubkey()) + bytes(about or mint)
        body += text(name.ljust(32, "\0")) + text(symbol.ljust(10, "\0")) + text("".ljust(200, "\0")) + bytes(300)
        account, _ = Pubkey.find_program_address([b"metadata", bytes(METADATA), bytes(mint)], METADATA)
        self.machine.set_account(account, Account(10**7, body, METADATA))
