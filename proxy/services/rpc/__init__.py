"""The JSON-RPC data plane: a call from its admission to its reply.

Five objects meet here, and each is changed by its own methods only:

* A `Caller` (`flights`) waits for the reply to one call and keeps what the reply needs: the `ReplyWriter` of a client
  connection (web/front), a `BatchItem` (`batches`), a message of a socket, or a coroutine (`calls`).
* A `Call` (`flights`) is an immutable value: the method's policy, the params, the account, and what its upstream must have.
* A `Flight` (`flights`) is the state of one call under way: its attempts, its waiters, and a table of its transitions.
* A `Dispatcher` (`dispatcher`), one for each network, decides about flights: which upstream gets them, what replies mean, and
  when to retry, hedge or give up. It does so with the `NetworkState` (`network_state`): heads, cached replies, equal calls.
* An `Upstream` (wire/upstream) has the connections, the queue and the health of one node.

`RpcService` (`rpc_service`) checks, prices and charges a call and passes it to the `Forwarder` (`forwarder`), which answers it
from the cache, lets it join an equal flight, or makes a `Call` and a `Flight`. The dispatcher of the `Route` (`networks`) sends
the flight, and the flight delivers the outcome to its callers:

    Caller -> RpcService -> Forwarder -> Flight -> Dispatcher -> Upstream
       ^                                    |          ^             |
       +------------- outcome --------------+          +--- reply ---+

An answered call is described by a `FinishedCall` (`finished_call`), and web/call_accounting counts, logs and records it.

Two strategies skip the flight in the usual case and become flights in every other: a plain read (web/front/short_call), and a
batch of plain reads (`upstream_batch`). Others take a flight over, because one upstream alone cannot answer it: `logs`,
`block_waits`, `rest_waits`, `verifier`, `filter_ids`, `broadcasts`. `upstream_batch` sends several flights in one request.
`tracker` polls the heads that the network's state is built from.
"""
