"""cosmpy, unmodified: state, and a payment that it signs and follows into a block. Its client keeps the host of a URL only, so
its parts are given the whole URL."""

import json
import sys

from cosmpy.aerial.client import LedgerClient
from cosmpy.aerial.config import NetworkConfig
from cosmpy.aerial.wallet import LocalWallet
from cosmpy.auth.rest_client import AuthRestClient
from cosmpy.bank.rest_client import BankRestClient
from cosmpy.common.rest_client import RestClient
from cosmpy.consensus.rest_client import ConsensusRestClient
from cosmpy.crypto.address import Address
from cosmpy.crypto.keypairs import PrivateKey
from cosmpy.params.rest_client import ParamsRestClient
from cosmpy.staking.rest_client import StakingRestClient
from cosmpy.tendermint.rest_client import CosmosBaseTendermintRestClient
from cosmpy.tx.rest_client import TxRestClient

task = json.load(sys.stdin)
config = NetworkConfig(
    chain_id=task["chain"],
    url="rest+http://127.0.0.1",
    fee_minimum_gas_price=0,
    fee_denomination="stake",
    staking_denomination="stake",
)
client, rest = LedgerClient(config, query_interval_secs=1, query_timeout_secs=30), RestClient(task["url"])
client.auth, client.bank, client.txs = AuthRestClient(rest), BankRestClient(rest), TxRestClient(rest)
client.params, client.consensus = ParamsRestClient(rest), ConsensusRestClient(rest)
client.staking, client.tendermint = StakingRestClient(rest), CosmosBaseTendermintRestClient(rest)

wallet = LocalWallet(PrivateKey(bytes.fromhex(task["private_key"])), prefix="cosmos")
to = Address(task["to"])
before = client.query_bank_balance(to)
sent = client.send_tokens(to, 5, "stake", wallet, memo="from cosmpy").wait_to_complete()
assert sent.response is not None
found = {
    "address": str(wallet.address()),
    "code": sent.response.code,
    "sent_at": sent.response.height,
    "received": client.query_bank_balance(to) - before,
    "sequence": client.query_account(wallet.address()).sequence,
    "validators": len(client.query_validators()),
    "height": client.query_latest_block().height,
    "block": client.query_block(sent.response.height).height,
}
json.dump(found, sys.stdout)
