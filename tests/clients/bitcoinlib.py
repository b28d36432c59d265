"""python-bitcoinlib with a URL and nothing else."""

import json
import sys

from bitcoin.rpc import JSONRPCError, RawProxy

task = json.load(sys.stdin)
proxy = RawProxy(service_url=task["url"])
try:
    proxy.getblockhash(9999999)
    wrong = None
except JSONRPCError as exc:
    wrong = exc.error["code"]
block = proxy.getblockhash(5)
json.dump(
    {
        "height": proxy.getblockcount(),
        "hash": block,
        "block": proxy.getblock(block),
        "txid": proxy.sendrawtransaction(task["raw"]) if task["raw"] else "",
        "wrong": wrong,
    },
    sys.stdout,
    default=float,
)
