"""The JSON-RPC data plane.

`rpc_service` checks, prices and admits the calls of clients; `forwarder` answers them. A `flight` is the state of one call to
an upstream, and the `dispatcher` of its network sends it and decides what replies mean. `networks` has the routes,
`network_state` the heads and cached replies, and `tracker` polls the heads.
"""
