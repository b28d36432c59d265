"""JSON-RPC upstreams on a real Solana virtual machine (LiteSVM, from the package solders)."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any, cast

import orjson
from aiohttp import web
from solders.account import Account
from solders.hash import Hash
from solders.keypair import Keypair
from solders.litesvm import LiteSVM
from solders.message import Message
from solders.pubkey import Pubkey
from solders.system_program import TransferParams, transfer
from solders.transaction import Transaction, VersionedTransaction
from solders.transaction_metadata import FailedTransactionMetadata

from proxy.web.websocket.frames import frame
from tests.feed_upstreams import FeedUpstream
from tests.rpc_upstreams import Call, Chain, Refused, ScriptedUpstream, value_of

PAYER = Keypair.from_seed(bytes([1] * 32))
PAYEE = Keypair.from_seed(bytes([2] * 32)).pubkey()


def signed_transfer(blockhash: str, lamports: int) -> str:
    """A signed transfer from PAYER to PAYEE, encoded for sendTransaction."""
    instruction = transfer(TransferParams(from_pubkey=PAYER.pubkey(), to_pubkey=PAYEE, lamports=lamports))
    signed = Transaction([PAYER], Message([instruction], PAYER.pubkey()), Hash.from_string(blockhash))
    return base64.b64encode(bytes(signed)).decode()


def _new_machine() -> LiteSVM:
    machine = LiteSVM()
    machine.airdrop(PAYER.pubkey(), 10**10)
    return machine


@dataclass
class SvmChain(Chain):
    """One machine. `head` is its finalized slot; its newest slot is `lead` slots ahead."""

    lead: int = 32
    machine: LiteSVM = field(default_factory=_new_machine)
    landed: dict[str, int] = field(default_factory=dict)
    # By signature: the accounts of a transaction that landed, and its logs.
    sent: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)
    # Transactions land in the newest slot, and not at once in the finalized one.
    lands_ahead: bool = False

    def send(self, raw: str) -> str:
        """The signature. Raises Refused if the simulation fails, as a node does."""
        transaction = VersionedTransaction.from_bytes(base64.b64decode(raw))
        done = self.machine.send_transaction(transaction)
        if isinstance(done, FailedTransactionMetadata):
            err = str(done.err()).rpartition(".")[2]
            data = {"accounts": None, "err": err, "logs": done.meta().logs(), "unitsConsumed": 0}
            raise Refused(-32002, f"Transaction simulation failed: {err}", data=data)
        signature = str(transaction.signatures[0])
        self.landed[signature] = self.head + self.lead if self.lands_ahead else self.head
        self.sent[signature] = [str(key) for key in transaction.message.account_keys], done.logs()
        return signature


class SvmUpstream(ScriptedUpstream):
    @property
    def svm(self) -> SvmChain:
        return cast(SvmChain, self.chain)

    def _result(self, call: Call) -> Any:
        if (own := self.answers.get(call.method)) is not None:
            return own(call.params)
        answer = getattr(self, f"_{call.method}", None)
        if answer is None:
            return value_of(call.method, call.params)
        config = next((each for each in reversed(call.params) if isinstance(each, dict)), {})
        return answer(call.params, self._slot(config.get("commitment", "finalized")))

    def _slot(self, commitment: str) -> int:
        return self.head if commitment == "finalized" else self.head + self.svm.lead

    def _getSlot(self, params: list[Any], slot: int) -> int:
        return slot

    def _getHealth(self, params: list[Any], slot: int) -> str:
        return "ok"

    def _getGenesisHash(self, params: list[Any], slot: int) -> str:
        return self.chain.identity

    def _getLatestBlockhash(self, params: list[Any], slot: int) -> Any:
        return _in_context(
            slot, {"blockhash": str(self.svm.machine.latest_blockhash()), "lastValidBlockHeight": slot + 150}
        )

    def _getBalance(self, params: list[Any], slot: int) -> Any:
        return _in_context(slot, self.svm.machine.get_balance(Pubkey.from_string(params[0])) or 0)

    def _getAccountInfo(self, params: list[Any], slot: int) -> Any:
        return _in_context(slot, _shown(self.svm.machine.get_account(Pubkey.from_string(params[0])), {}))

    def _getMultipleAccounts(self, params: list[Any], slot: int) -> Any:
        if len(params[0]) > 100:
            raise Refused(-32602, "Too many inputs provided; max 100")
        found = [self.svm.machine.get_account(Pubkey.from_string(each)) for each in params[0]]
        return _in_context(slot, [_shown(each, params[1] if len(params) > 1 else {}) for each in found])

    def _getTokenAccountsByOwner(self, params: list[Any], slot: int) -> Any:
        """Like a validator: by the owner field of the account, without mints."""
        owner, program = bytes(Pubkey.from_string(params[0])), Pubkey.from_string(params[1]["programId"])
        accounts = self.svm.machine.get_program_accounts(program)
        held = [(key, each) for key, each in accounts if len(each.data) >= 165 and each.data[32:64] == owner]
        found = [
            {"pubkey": str(key), "account": _shown(each, params[2])} for key, each in held if is_token_account(each)
        ]
        return _in_context(slot, found)

    def _getMinimumBalanceForRentExemption(self, params: list[Any], slot: int) -> int:
        return self.svm.machine.minimum_balance_for_rent_exemption(params[0])

    def _getTransaction(self, params: list[Any], slot: int) -> Any:
        landed = self.svm.landed.get(params[0])
        if landed is None or landed > slot:
            return None
        return {"slot": landed, "transaction": [params[0]], "meta": self._meta(params[0])}

    def _meta(self, signature: str) -> dict[str, Any] | None:
        return {"err": None, "logMessages": self.svm.sent[signature][1]} if signature in self.svm.sent else None

    def _getSignatureStatuses(self, params: list[Any], slot: int) -> Any:
        return _in_context(self._slot("processed"), [self._status(each) for each in params[0]])

    def _status(self, signature: str) -> dict[str, Any] | None:
        landed = self.svm.landed.get(signature)
        if landed is None:
            return None
        return {"slot": landed, "err": None, "confirmations": 1, "confirmationStatus": self._certainty(landed)}

    def _certainty(self, landed: int) -> str:
        """A slot is confirmed when the next one is there."""
        if landed <= self.head:
            return "finalized"
        return "confirmed" if landed < self.head + self.svm.lead else "processed"

    def _getSignaturesForAddress(self, params: list[Any], slot: int) -> Any:
        config = params[1] if len(params) > 1 else {}
        found = [
            name for name, (keys, _) in self.svm.sent.items() if params[0] in keys and self.svm.landed[name] <= slot
        ]
        if (until := config.get("until")) in found:
            found = found[found.index(until) + 1 :]
        newest = found[::-1][: config.get("limit", 1000)]
        return [{"signature": name, "slot": self.svm.landed[name], "err": None} for name in newest]

    def _getProgramAccounts(self, params: list[Any], slot: int) -> Any:
        config = params[1] if len(params) > 1 else {}
        accounts = self.svm.machine.get_program_accounts(Pubkey.from_string(params[0]))
        found = [{"pubkey": str(key), "account": _shown(each, config)} for key, each in accounts]
        return _in_context(slot, found) if config.get("withContext") else found

    def _getBlocks(self, params: list[Any], slot: int) -> list[int]:
        return list(range(params[0], min(params[1], slot) + 1))

    def _getBlock(self, params: list[Any], slot: int) -> Any:
        names = [name for name, landed in self.svm.landed.items() if landed == params[0] and name in self.svm.sent]
        return {
            "transactions": [
                {
                    "transaction": {"signatures": [name], "message": {"accountKeys": self.svm.sent[name][0]}},
                    "meta": self._meta(name),
                }
                for name in names
            ]
        }

    def _getEpochInfo(self, params: list[Any], slot: int) -> Any:
        return {"absoluteSlot": slot, "blockHeight": slot, "epoch": 0, "slotIndex": slot, "slotsInEpoch": 432_000}

    def _getBlockHeight(self, params: list[Any], slot: int) -> int:
        return slot

    def _sendTransaction(self, params: list[Any], slot: int) -> str:
        return self.svm.send(params[0])


class SvmFeedUpstream(FeedUpstream, SvmUpstream):
    """`landed`: a signature's notification comes in one piece with its confirmation. `waiting`: calls answered later."""

    landed = False
    waiting: list[tuple[web.WebSocketResponse, dict[str, Any]]] | None = None

    async def _answer_on(self, socket: web.WebSocketResponse, call: dict[str, Any]) -> None:
        if self.waiting is not None:
            self.waiting.append((socket, call))
            return
        if not self.landed:
            await super()._answer_on(socket, call)
            return
        self.subscribed += 1
        params = {
            "subscription": self.subscription_id(self.subscribed),
            "result": {"context": {"slot": 5}, "value": {"err": None}},
        }
        reply = {"jsonrpc": "2.0", "id": call["id"], "result": params["subscription"]}
        notification = {"jsonrpc": "2.0", "method": "signatureNotification", "params": params}
        transport = self._sockets[socket].transport
        assert transport is not None
        transport.write(frame(orjson.dumps(reply)) + frame(orjson.dumps(notification)))

    async def answer_all(self) -> None:
        waiting, self.waiting = self.waiting or [], None
        for socket, call in waiting:
            await self._answer_on(socket, call)

    def subscription_id(self, serial: int) -> int:
        return 100 + serial

    def notification_method(self, method: str) -> str:
        return method.replace("Subscribe", "Notification")

    async def slot(self, number: int) -> None:
        await self.notify(
            lambda method, _: method == "slotSubscribe", {"parent": number - 1, "root": number - 32, "slot": number}
        )

    async def change(self, kind: str, params: list[Any], value: Any, slot: int = 5) -> None:
        result = {"context": {"slot": slot}, "value": value}
        await self.notify(lambda method, given: (method, given) == (kind, params), result)


def is_token_account(account: Account) -> bool:
    """Whether this is a token account and not a mint: with extensions, byte 165 is the account type."""
    return len(account.data) == 165 or account.data[165] == 2


def _shown(account: Account | None, config: dict[str, Any]) -> dict[str, Any] | None:
    if account is None:
        return None
    cut = config.get("dataSlice", {"offset": 0, "length": len(account.data)})
    data = account.data[cut["offset"] : cut["offset"] + cut["length"]]
    return {
        "lamports": account.lamports,
        "owner": str(account.owner),
        "data": [base64.b64encode(data).decode(), "base64"],
        "executable": account.executable,
        "rentEpoch": account.rent_epoch,
        "space": len(account.data),
    }


def _in_context(slot: int, value: Any) -> dict[str, Any]:
    return {"context": {"apiVersion": "2.2.0", "slot": slot}, "value": value}
