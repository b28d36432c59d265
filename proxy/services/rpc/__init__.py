"""The JSON-RPC data plane: one service in a few rooms.

`networks` is what is known before a call: upstreams, methods, prices. `calls` decides. `flights` are calls under way,
`convoys` several in one request. `logs` cuts ranges, `filters` leads back to an upstream, `tracker` watches the heads.
"""
