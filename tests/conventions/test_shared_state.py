"""Nothing is shared without an owner: every container, queue, lock, pool and cache is keyed by account with a fair share, or
belongs to one client, or is listed with the reason why one account cannot fill it.

A new one fails this test. Give each account its share (`core/fair_permits.py`, `connection_queue.py`, `turn_queue.py`,
`memory_budget.py`), and add a line here; or add the reason why it needs none. `path:Class` stands for all attributes of a
class.
"""

from __future__ import annotations

from tests.conventions.shared_state import found

# One account cannot take the share of another.
BY_ACCOUNT = {
    "connection_queue:ConnectionQueue": "a client holds no more places than are free, and has a queue of its own",
    "core/trials:MethodTrial": "counts, and eight names of members",
    "core/trials:Trial": "one entry for each method of the family, and four accounts for each outcome",
    "core/data_bounds:DataBounds": "one entry for each kind of data",
    "core/batch_sizes:BatchSizes._smaller": "one entry for each client, 10,000 clients",
    "core/caching:OwnedBytes": "bytes by account, in 256 places",
    "core/caching:ReplyCache": "the account that has most loses its replies first",
    "core/fair_permits:FairPermits": "a client holds no more permits than are free",
    "core/delivery_concurrency:Lanes": "an account has its own window at each receiver, and leaves places to others",
    "core/delivery_concurrency:PlaceTally": "one count for each kind of lane",
    "core/retry_budget:RetryBudget": "retries of each client, 10,000 clients",
    "memory_budget:BudgetLine": "an account holds no more than stays free",
    "memory_budget:MemoryBudget": "an account holds no more than stays free, and has its own queue",
    "request_threads:RequestThreads": "a client holds no more threads than are free",
    "request_threads:request_threads": "a client holds no more threads than are free",
    "request_threads:compression_threads": "a client holds no more threads than are free",
    "services/accounts/metering:Meters": "the turns of each account",
    "services/accounts/metering:_AccountTurns": "the turns of one account",
    "services/accounts/quotas:Quotas": "accounts whose lease runs low, each once",
    "services/accounts/sign_in:SignIn._hashing": "strangers and known places wait apart; attempts are limited",
    "services/bundler/lookup:OperationLookup._wide": "searches of an account leave places to others",
    "services/delivery/deliverer:Deliverer._changed_accounts": "accounts whose limits have changed, each once",
    "services/events/enrichment:MetadataLanes": "a lane for each account; each takes a batch and its timeout at most",
    "services/feed/account_queue:AccountQueue": "accounts in turn",
    "services/feed/feed_terms:AccountSemaphores": "one for each account",
    "services/feed/svm_poller:SvmPoller._resting": "accounts without units, each once",
    "services/request_recorder:RequestRecorder": "512 records of an account at once, within the memory budget",
    "services/rpc/batch_admission:WaitingBatches": "within the memory budget; the account that holds most makes room",
    "services/rpc/block_waits:BlockWaits": "512 calls of an account, of 4,096, and no more than are free",
    "services/rpc/dispatcher:Dispatcher.budget": "retries of each client",
    "services/rpc/rest_waits:RestWaits": "512 calls of an account, of 4,096, and no more than are free",
    "services/rpc/own_methods:OwnMethods._permits": "64 calls of an account, of 1,024, and no more than are free",
    "services/rpc/verifier:Verifier": "8 calls of an account at a time, 256 that wait",
    "services/sponsor/refusals:RefusalLog": "few refusals of each policy; policies are limited by the plan",
    "services/sponsor/sponsorship:SponsorService._locks": "one lock for each sender of a policy",
    "services/usage:UsageService._reading": "16 reads of an account, and no more at a time than are free",
    "services/webhooks/backtest:Backtest": "4 back-tests of an account",
    "store/shared_memory/account_counts:AccountCounts": "numbers by account, in the memory of the host",
    "store/valkey/cache:BoundedMemory": "the account that has most loses its entries first",
    "store/valkey/cache:DataCache._connections": "a client holds no more connections than are free",
    "store/valkey/fleet_counts:FleetCounts": "one number for each account with sockets",
    "store/valkey/lease_client:LeaseClient": "one entry for each account or key in use",
    "store/valkey/lease_client:BucketAsks": "the calls of one account that wait for its lease",
    "store/shared_memory/leased_buckets:LeasedBuckets": "the rates of each account and key",
    "store/postgres/pool:Pool._queue": "a client holds no more connections than are free",
    "core/round_robin:RoundRobin": "clients have a queue each, and take turns",
    "turn_queue:TurnQueue": "clients have a queue each, and take turns",
    "web/fault_injection:FaultInjection": "128 requests of an account, and no more than are free",
    "web/front/connection_limiter:ConnectionLimiter": "connections of each address, `connections_per_address`",
    "web/websocket/client_sockets:ClientSockets": "sockets of an account are limited by its plan",
    "web/websocket/large_messages:LargeMessages": "sockets of an account that wait, each once",
    "web/websocket/unit_allowance:UnitAllowance": "sockets of one key that wait, each once",
    "wire/rest_upstream:RestUpstream": "calls on connections of one upstream, limited by its settings, and in its queue",
    "wire/call_queue:CallQueue": "places are reserved for clients that hold few; the greediest makes room",
    "wire/fetcher:Fetcher._turns": "a client holds no more connections than are free",
    "wire/outbound_guard:GuardedResolver": "a client holds no more lookups than are free",
    "wire/waiting_calls:WaitingCalls": "clients have a queue each, and the one with fewest calls in flight is next",
}

# Ends with the request, call, socket or connection that it belongs to, and has the bound of its input.
OF_ONE_CLIENT = {
    "core/bounded_json:JsonReader": "one body, within the bounds of its outline",
    "core/bounded_json:LongText": "one list of a body, within the bounds of its reader",
    "core/event_stream:EventReader": "one event of an upstream, 1 MB",
    "core/encodings:MessageInflater": "one message, `sockets.max_message_bytes`",
    "core/portfolio:TokenList": "the list of one wallet: 10,000 tokens, or 6 MB of accounts",
    "core/usage:ChartLine": "one chart: a point for each step of its time span",
    "core/verification:Ballot": "one verified call: a vote for each upstream",
    "services/method_matrix:MatrixCell": "one page for operators",
    "services/rpc/batch_admission:BatchAdmission": "one batch, `rpc.max_batch` items",
    "services/rpc/batches:CallBatch": "one batch, `rpc.max_batch` items",
    "services/rpc/flights:Flight": "one call, with 128 callers; attempts are few",
    "services/rpc/held_body:HeldBody": "one result, within the memory budget",
    "services/rpc/logs:SplitLogQuery": "one call: the pieces that it pays for, 25 MB of logs",
    "services/rpc/upstream_batch:UpstreamBatch": "one reply, 25 MB",
    "services/rpc/verifier:VerifiedCall": "one call: the upstreams that were asked",
    "services/webhooks/webhooks:AddressSet": "the addresses of one request",
    "services/webhooks/webhooks:PackedAddresses": "the addresses of one request",
    "services/rpc/streamed_reply:StreamedReply": "one reply, 256 KB before its upstream is paused",
    "web/front/reply_stream:ReplyStream": "one reply, within the memory budget",
    "web/front/request_headers:RequestHeaders": "the policies of one request, each method once",
    "web/rpc/event_streams:EventClient": "one stream, `sockets.max_queue_bytes`, and the memory budget",
    "web/rest/endpoint:RestReply": "the headers of one reply",
    "web/rest/endpoint:RestRequest": "the networks of one request",
    "web/websocket/backlog:Backlog": "one socket, `sockets.max_unread_bytes` of events",
    "web/websocket/frames:FrameReader": "one message, `sockets.max_message_bytes`",
    "web/websocket/socket_calls:SocketCalls": "one socket, `sockets.max_message_bytes` of calls under way",
    "web/websocket/socket_output:SocketOutput": "one socket, `sockets.max_unread_bytes`, and the memory budget",
    "web/websocket/faulty_subscription:FaultySubscription": "one subscription, 1,000 events",
    "web/websocket/subscriptions:Subscription": "one subscription, 1,000 early events",
    "web/websocket/subscriptions:SubscriptionIds": "one socket, 1,000 counts",
    "web/websocket/subscriptions:Subscriptions": "one socket; subscriptions are limited by the plan",
    "wire/http_connection:HttpConnection": "one reply, 25 MB, within the memory budget",
    "wire/receiver_connection:ReceiverConnection": "the beginning of one reply, 4 KB",
}

# One account cannot fill it, or others do not notice if it does.
REASONS = {
    "web/docs/client_code:ClientCode": "the types of the API spec, in a command that writes clients",
    # Keyed by networks, upstreams, methods or other names from the configuration.
    "core/exemplars:Exemplars": "one entry for each operation and status",
    "core/fixed_replies:FixedReplies": "the replies of the settings, 1,000 at most",
    "core/fleet:UpstreamView": "one histogram for each upstream",
    "core/routing:UpstreamGroup._due": "one number for each upstream that is being promoted",
    "services/rpc/network_state:NetworkState.group": "the upstreams of one network",
    "services/cost_report:Costs": "one entry for each budget of the settings",
    "core/latency_histogram:LatencyHistogram": "a fixed number of buckets",
    "core/rest_routes:_Branch": "the routes of one family",
    "core/rest_routes:RouteTable": "the routes of one family",
    "core/reply_sets:_field": "as many as a set has replies",
    "core/reply_sets:_shape": "as many as a set has replies",
    "core/upstream_health:UpstreamHealth": "methods of the family's table",
    "services/events/finality:FinalityGate": "two tags",
    "services/events/notifications:Notifications": "one entry for each loop",
    "services/feed/topics:Feeds": "one feed for each network",
    "services/contradictions:ContradictionLog": "64 wrong replies of upstreams, each once",
    "services/fleet:UpstreamWatch": "one state for each upstream",
    "services/gas:GasPrices": "one entry for each network",
    "services/multicall:Multicall": "one entry for each network",
    "services/prices:PriceService._warned_at": "one entry for each source",
    "services/readiness:Readiness": "one entry for each database",
    "services/rpc/network_state:NetworkState.on_doubt": "the tracker of the network",
    "services/rpc/network_state:NetworkState.tip_lines": "one line for each word that names the network",
    "services/rpc/networks:Route": "one entry for each set of scopes that keys have, 2^scopes at most",
    "services/rpc/bound_checks:BoundChecks": "one entry for each upstream and kind of data",
    "services/rpc/method_checks:MethodChecks": "one entry for each upstream",
    "services/rpc/shadow:Shadow": "64 reads of any client wait; more are skipped, and no client waits for them",
    "services/rpc/stream_checks:StreamChecks": "one entry for each upstream",
    "services/rpc/tracker:Tracker": "one entry for each upstream",
    "services/sponsor/settlement:SettlementSink": "one count for each chain",
    "core/credits:CallPrices": "one price for each method of the family",
    "core/credits:CreditMeter.counts": "the methods and keys that were used in the last seconds",
    "core/credits:CreditTable": "read from a file",
    "core/budgets:CreditBudget": "calls that wait for a lease, for two seconds",
    "services/budget_leases:Budgets": "one entry for each budget of the settings",
    "services/spending_log:SpendingLog": "a row for each upstream, method and key; while Postgres is away, no more of them",
    "services/usage:UsageService._operations": "one tally for each network and operation",
    "store/postgres/index_reads:IndexReads": "one position for each network",
    "store/postgres/transfers:TransferStore": "one number for each network",
    "services/follower/sinks:BlockHistory": "the blocks of one write",
    "core/head_rhythm:HeadRhythm": "the last 16 intervals between blocks of one network",
    "services/follower/network_follower:NetworkFollower.rhythm": "one network",
    "services/follower/staged_holdings:StagedHoldings": "sums of one back-fill, 150,000 and those of one write",
    "services/follower/backfill:Coins": "the coins of one range of blocks",
    "services/follower/backfill:BackfillProgress": "the gaps of one back-fill",
    "services/follower/range_lanes:RangeWork": "the upstreams of one network",
    "services/follower/range_lanes:WorkList": "the ranges of one back-fill",
    "services/rpc/own_methods:OwnMethods._handlers": "the methods of the program",
    "store/postgres/notices:Notices": "one entry for each channel of our own",
    "store/postgres/pool:_reported": "one entry for each kind of error",
    "store/postgres/replica:ReplicaReads": "one replica",
    "store/valkey/upstream_leases:UpstreamLeases": "one mark for each upstream",
    "web/api_spec:load": "one document",
    "web/dashboard/session_endpoint:SessionEndpoints": "the operations of the API spec",
    "web/dashboard/static_files:shipped_files": "the files of the package",
    "web/rest/endpoint:RestEndpoints": "the operations of the API spec",
    "web/docs/guide_files:GuideFiles": "the files of the package",
    "web/docs/local_examples:LocalExamples": "one network for each family",
    "web/docs/pages:page_files": "the files of the package",
    "web/request_ids:stem": "one value",
    "web/websocket/socket_context:EventKind": "one tally for each network",
    "wire/fetcher:Fetcher._sessions": "two sessions",
    "wire/upstream:Upstream": "connections of one upstream, limited by its settings",
    "wire/http_upstream:HttpUpstream": "connections of one upstream, limited by its settings",
    # Keyed by blocks, and bounded.
    "core/head_chain:HeadChain": "the last blocks of one network",
    "core/heads:Branch": "the last blocks of one network",
    "core/heads:RecentHashes": "the last blocks of one network",
    "core/holdings:HoldingChanges": "the transfers of the blocks that are written together",
    "core/replica_age:ReplicaAge": "a few samples",
    "services/events/watch:WebhookWatch": "held for one refresh of a network's webhooks, by the follower",
    "services/feed/blocks:BlockSource": "512 blocks of one network",
    "services/feed/dispatch:HeadDispatch._unsent": "heads of one network that are being sent",
    "services/feed/dispatch:LogDispatch._queue": "10,000 blocks of one network",
    "services/feed/dispatch:LogDispatch._sent": "the last blocks of one network, 32 MB",
    "services/feed/dispatch:SentBlock": "the logs of one block that match a filter",
    "services/feed/head_watcher:HeadInbox": "64 heads of one network",
    "services/feed/pending:PendingChannel._sent": "16,384 hashes of pending transactions",
    "services/feed/pending:PendingTransactions": "2,048 hashes of pending transactions",
    "services/feed/topics:FeedEvent": "one frame for each subscription id that the event is sent to",
    "services/feed/walk:ChainWalk": "the last blocks of one network",
    "services/follower/block_reader:BlockReader": "doubted blocks of one network",
    "services/rpc/network_state:NetworkState._branch": "the last blocks of one network",
    "services/rpc/network_state:NetworkState.hashes": "the last blocks of one network",
    "store/postgres/blocks:LeaderSession": "statements of the one follower of a network",
    # Subscriptions: each account's are limited by its plan, and count in its memory.
    "services/feed/dispatch:HeadDispatch.listeners": "one entry for each subscription",
    "services/feed/dispatch:LogDispatch._listeners": "one entry for each subscription",
    "services/feed/dispatch:LogDispatch._unused": "filters of subscriptions that have ended, for a few turns of the loop",
    "services/feed/evm_feed:EvmFeed": "one entry for each subscription that starts",
    "services/feed/listeners:Listeners": "one entry for each subscription",
    "services/feed/svm_feed:SvmFeed._channels": "one entry for each subscription",
    "services/feed/stream_feed:StreamFeed": "64 streams, 8 of an account, and no more than are free",
    "services/feed/stream_feed:StreamChannel": "64 hashes of events of one stream, and the labels of upstreams",
    "services/feed/event_sources:_Inbox": "1,000 events of one stream",
    "services/feed/svm_poller:SvmPoller._accounts": "one entry for each subscription",
    "services/feed/svm_poller:SvmPoller._busy": "one entry for each subscription",
    "services/feed/svm_poller:SvmPoller._due_at": "one entry for each subscription",
    "services/feed/svm_poller:SvmPoller._held": "one entry for each subscription",
    "services/feed/svm_poller:SvmPoller._polls": "one entry for each subscription",
    "services/feed/svm_poller:SvmPoller._signatures": "one entry for each subscription",
    "services/feed/syncing:SyncingStatus": "one entry for each subscription",
    "web/websocket/socket_context:SocketContext._filters": "one entry for each filter of open subscriptions",
    "wire/upstream_stream:UpstreamStream": "one subscription upstream for each topic",
    # Keys and accounts, which plans limit.
    "core/access:Key": "the tallies of one key",
    "core/usage:KeyTallies": "the tallies of the keys that were used in the last second",
    "core/usage:Tally": "a fixed number of buckets",
    "core/usage:UsageSums": "a fixed number of buckets",
    "services/accounts/keyring:Keyring": "one entry for each key; raw keys are kept only if they are valid",
    "services/delivery/deliverer:Deliverer._finished_attempts": "attempts that the lanes have let start",
    # Flights: each belongs to a request under way, which the account has paid for.
    "services/prices:PriceService._flights": "one entry for each lookup under way",
    "services/relays/private_senders:PrivateSenders._reads": "one entry for each account with a call under way",
    "services/rpc/network_state:NetworkState.flights": "one entry for each call under way",
    "services/rpc/null_searches:NullSearches": "one entry for each call under way",
    "store/valkey/cache:DataCache._flights": "one entry for each lookup under way; a refused one is repeated by its waiters",
    "wire/upstream:UpstreamConnection": "the calls in flight on one connection, limited by its depth",
    "wire/websocket_client:WebSocketClient": "calls that the queue of the upstream has let pass",
    "wire/websocket_upstream:WebSocketUpstream": "calls that the queue of the upstream has let pass",
    "wire/write_buffer:WriteBuffer": "the writes of one turn of the loop",
    "web/websocket/socket_output:FlushQueue": "sockets with unsent frames, each once, written in slices",
    "store/valkey/valkey_link:ValkeyLink": "commands for limits: one at a time for each account",
    "services/rpc/reply_checks:_checks": "an account has 8 calls at a time, a candidate one, and checks take milliseconds",
    # Caches that only save work. An account can replace the entries of others, at a higher cost than it causes.
    "core/caching:_digests": "8,192 digests; computing one takes a microsecond",
    "core/encodings:EncodedResults": "compressed forms of cached replies; compressing one again takes less than a call",
    "core/delivery_concurrency:receiver_of": "10,000 URLs; parsing one takes microseconds",
    "core/lru_cache:LruCache": "bounded by its limit; each use is listed by itself",
    "core/near_names:near_names": "one table for each set of methods in the settings; clients cannot add any",
    "core/signatures:key_of": "10,000 secrets; decoding one takes a microsecond",
    "core/webhook_faults:_plan_of": "1,000 plans; parsing one takes microseconds",
    "services/bundler/lookup:OperationLookup._misses": "10,000 operations; without it a search covers more blocks",
    "services/delivery/deliverer:Deliverer._secrets": "10,000 secrets; opening one takes microseconds",
    "services/events/drafting:EventDrafter": "tokens of one network; they are read again",
    "services/events/enrichment:EventEnricher": "events that were set aside; one that is dropped is tried again",
    "services/events/mined_lookups:MinedLookups": "when transactions were asked for; one that is dropped is asked for again",
    "services/relays/private_senders:PrivateSenders._lists": "100,000 hashes; a list is read again, once in five seconds",
    "services/rpc/shared_cache:SharedCache": "the last 4,096 names, for a reorganisation",
    "services/sponsor/policies:PolicyService": "100,000 entries; reading a policy again takes a query and short steps",
    "store/valkey/fleet_failures:FleetFailures": "1,000 addresses a second; more are counted by each host alone",
    "store/valkey/shared_replies:SharedReplies": "results to write; one that is dropped is written by its next caller",
    "store/postgres/usage:UsageStore": "200,000 numbers of series; they are read again",
    "web/front/front_context:FrontContext": "compressed forms of cached replies; see EncodedResults",
    "web/front/record_starts:RecordSplitter": "1,024 beginnings of replies of upstreams; parsing one takes 10 µs",
    "web/front/request_headers:RequestHeaderReader": "8,192 header blocks, names and lines; parsing one takes 30 µs",
    "wire/http1:_kind": "1,024 names of headers; upstreams use few",
    "wire/http1:read_known_headers": "64 header blocks of upstreams",
    "wire/receiver:Receiver": "10,000 URLs; checking one takes microseconds",
    "wire/receiver_connection:ReceiverConnections": "idle connections of an account and a receiver, for 1.5 s",
    # Our own work.
    "services/usage:UsageService._waiting": "rows of the last second; while Postgres is away 100,000, of the newest minutes",
    "store/shared_memory/host_memory:HostMemory": "fixed regions, which grow with the number of accounts",
    "store/postgres/local_copy:LocalCopy": "held for one write of a file",
    "store/postgres/request_store:RequestStore": "the days that have a table",
    "web/packed_files:DerivedFile": "held while one file is compressed, once",
    # Threads of the default executor.
    "services/accounts/sign_in:_in_thread()": "two at a time, see SignIn._hashing",
    "services/usage:table()": "two at a time, see UsageService._reading",
    "store/postgres/local_copy:_attempt()": "our own files",
    "store/postgres/local_copy:read()": "our own files",
    "store/postgres/usage:chart()": "two at a time, see UsageService._reading",
    "store/postgres/usage_spool:send()": "our own files",
    "store/postgres/usage_spool:write()": "our own files",
    "web/docs/guide_files:file()": "files of the package, each once",
    "web/packed_files:reply()": "files of the package, each once",
}

# One account can fill it and others notice. Every line is a fault to be fixed; none may be added.
KNOWN_FAULTS: dict[str, str] = {}
TABLES = (BY_ACCOUNT, OF_ONE_CLIENT, REASONS, KNOWN_FAULTS)


def covering(place: str) -> list[str]:
    """The entries for a place: its own, and that of its class."""
    names = {place, place.rpartition(".")[0]}
    return [name for table in TABLES for name in table if name in names]


def test_everything_that_is_shared_has_an_owner_or_a_reason() -> None:
    unlisted = [f"{place} ({kind})" for place, kind in found().items() if not covering(place)]
    assert not unlisted, "give each account its share and list it, or list the reason why it needs none"


def test_nothing_is_listed_twice_or_no_longer_there() -> None:
    covered = [name for place in found() for name in covering(place)]
    assert not {name for table in TABLES for name in table} - {*covered}
    assert not [place for place in found() if len(covering(place)) > 1]


def test_places_are_found_in_every_form() -> None:
    """A check that finds nothing proves nothing."""
    kinds = found()
    assert kinds["store/postgres/pool:Pool._queue"] == "ConnectionQueue"
    assert kinds["wire/fetcher:Fetcher._turns"] == "ConnectionQueue", "inside of a dict"
    assert kinds["services/bundler/lookup:OperationLookup._wide"] in ("ConnectionQueue", "defaultdict")
    assert kinds["web/front/request_headers:RequestHeaderReader._names"] == "dict"
    assert kinds["services/rpc/reply_checks:_checks"] == "ThreadPoolExecutor", "a variable of a module"
    assert kinds["wire/http1:_kind"] == "lru_cache"
    assert kinds["core/usage:ChartLine.points"] == "dict", "a field of a dataclass"
    assert "default executor" in kinds.values()
