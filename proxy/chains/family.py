"""The interface between the request flow and a family of chains.

A family describes how calls refer to blocks, its heads, its addresses and the features it supports. The flow queries a call's
block, the lifetime of a result or the head in a reply through `Family`, never by the name of a method or a chain. A family is a
file (`config/families/*.toml`), and so are its networks and methods (`config/chains/*.toml`, `config/methods/*.toml`). The file
names a *reader* (`families.py`): `data` needs nothing but these files, and the others have code for what no table can say. A
method that is not in the files does not exist.

Two things limit how long a result stays true. A result that depends on the *head* is valid until the head moves. Data at or
below the *final* height cannot change, so such a result is valid forever. A tag (`latest`, and `finalized` as well) is a
moving head, never final data. An empty result proves nothing and is never cached.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from proxy.chains.lookups import NO_LOOKUPS, Lookups
from proxy.core.caching import Lifetime
from proxy.core.data_bounds import DataKind
from proxy.core.jsonrpc import STRICT, Dialect
from proxy.core.rest_routes import RestTransport
from proxy.core.upstream_errors import ErrorRule
from proxy.core.uri_calls import UriType

T = TypeVar("T")
MethodKind = Literal["read", "write", "filter", "subscription"]
CacheRule = Literal["never", "static", "hash", "block", "head"]
# `number`: the result is the head's number. `block`: the result is the head block if the call is about the latest block.
HeadResult = Literal["none", "number", "block"]
# The thing that the first param of a read names, if one upstream may know of it before the others do.
WriteSubject = Literal["none", "transaction", "sender"]
# How the params name the contracts that a call reaches. The first param is an object with `to`, an address, a signed
# transaction, a filter of logs, or a user operation; or the params are those of a subscription. `none`: the call reaches none.
# `any`: nothing says which.
ContractPlace = Literal["any", "none", "to", "address", "transaction", "filter", "subscription", "operation"]
# Services that work on some families only. A family without a feature gets a 404 or 400 there.
Feature = Literal["follower", "gas_prices", "nfts", "user_operations", "webhooks"]
# Which feed serves subscriptions (`services/feed/feeds.py`), and which reader serves tokens (`compose/data.py`).
FeedKind = Literal["evm", "svm", "stream"]
TokenKind = Literal["evm", "svm"]


@dataclass(frozen=True, slots=True)
class CacheCase:
    """The cache rule of calls that have one of these values at an index of their params, or under a name. `"null"` stands for a
    param that is left out."""

    at: int
    values: tuple[Any, ...]
    cache: CacheRule
    name: str = ""


@dataclass(frozen=True, slots=True)
class FinalResult:
    """The path of a value in a result, and the values that mean that the result is final. Without any, the value is the number
    of a block, and the result is final when that block is."""

    path: str
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class PageToken:
    """The position of the next page's token in params and results. Only the upstream that returned a token knows it.

    `params`: paths, one of which the params have. `code`: that of the error for a token that is not known."""

    params: tuple[str, ...]
    result: str
    code: int


@dataclass(frozen=True, slots=True)
class Method:
    """How one method behaves on every network of its family: a row of `config/methods/*.toml`.

    `price`: compute units per call. `scopes`: a key needs one of them; without any, the kind decides. `chains`: the chains that
    have the method; without any, all chains of the family.
    `kind`: a read may be repeated; a write is sent once; a filter belongs to the upstream that created it; a subscription
    needs a WebSocket, or streams server-sent events if it is a route.
    `block_at`: index of the block parameter in the params, if there is one. `block_name`: its name, if params are an object.
    `span`: that parameter is an object with a first and a last block.
    `history`: the result is a part of the chain's blocks, which upstreams keep when they prune old state: it costs the same at
    every block.
    `data`: the kind of data that an upstream needs for it. Without it, `blocks` if it is `history`, otherwise `state`.
    `cache`: what identifies the result. `static`: the network alone. `hash`: a hash in the params, so the block in the result
    decides the lifetime. `block`: the block parameter. `head`: only the head. `never`: the result is not cached.
    `cases`: other values of `cache`, by the value of a param.
    `final_if`: a path into the result (`lookups.py`) of a `hash` method, and the values with which it never changes again. A
    number there is that of a block. Without it, a result that is found by its hash never changes.
    `never_if`: a path into the result, and the values with which it is not cached at all.
    `volatile`: members of the result that differ between upstreams or change with every block: comparisons leave them out.
    `highest`: of several results at the pending block, which are numbers, the highest is right: an upstream that has seen less
        returns a lower one (nonces).
    `fresh`: results at a moving block are not cached, because the caller's own writes must show at once (nonces).
    `empty`: an empty result is doubtful if the upstream that returned it is behind.
    `head`: whether the result contains the head (see `HeadResult`).
    `names_block`: the result names the block that a transaction is in, perhaps before that block's head was seen.
    `after_object`: the first param is an object and the block parameter follows it.
    `splits`: the first param is a filter as of `eth_getLogs` or `trace_filter`. A range that an upstream refuses is split and
        joined.
    `creates_filter`: the result is the id of a new filter.
    `page_token`: a result may be one page of many, and the token of the next one belongs to its upstream.
    `private`: the call is meant for one upstream: no other may see it, even if that one refuses it.
    `same_as`: the read that returns the same as this poll of a filter, given the filter's own params.
    `identified`: the params of a write identify it, so that sending it twice is the same as once: see `Family.sent_id`.
    `about`: the first param names a transaction or its sender. The upstream that has received a write knows of both first.
    `contract`: how the params name contracts, for keys that are limited to some. Such a key may not call a method with `any`.
    `answer`: the result as JSON, the same for all callers. Such a call is never sent to an upstream.
    `own`: Penstock answers the call itself, from its index. Such a call is never sent to an upstream as it is.
    `sample`: params of a call to try, as JSON. The dashboard suggests methods that have them.
    """

    name: str
    price: int = 0
    kind: MethodKind = "read"
    scopes: tuple[str, ...] = ()
    chains: tuple[str, ...] = ()
    block_at: int | None = None
    block_name: str = ""
    span: bool = False
    history: bool = False
    data: DataKind | None = None
    cache: CacheRule = "never"
    cases: tuple[CacheCase, ...] = ()
    final_if: FinalResult | None = None
    never_if: FinalResult | None = None
    volatile: tuple[str, ...] = ()
    fresh: bool = False
    highest: bool = False
    empty: bool = False
    head: HeadResult = "none"
    names_block: bool = False
    after_object: bool = False
    splits: bool = False
    creates_filter: bool = False
    page_token: PageToken | None = None
    own: bool = False
    same_as: str = ""
    identified: bool = False
    private: bool = False
    about: WriteSubject = "none"
    contract: ContractPlace = "any"
    answer: str = ""
    sample: str = ""

    @property
    def data_kind(self) -> DataKind:
        return self.data or ("blocks" if self.history else "state")


# The methods of one family, by name.
MethodTable = Mapping[str, Method]


class BlockRef(msgspec.Struct, frozen=True, gc=False):
    """The block that a call is about: a `number`, a `hash`, a `tag`, or none.

    `tag` is set beside a number or a hash in families where a call combines it with a commitment. The tag `earliest` is
    reserved for the first block. A Struct, because creating a frozen dataclass takes 1 µs and this 0.05.
    """

    kind: Literal["number", "hash", "tag", "none"]
    number: int = -1
    tag: str = ""
    # The hash of a block, if the call is about the state or the logs of that block.
    block_hash: str = ""

    @property
    def moves(self) -> bool:
        """Whether it refers to a different block over time."""
        return self.kind == "tag" and self.tag != "earliest"


NONE = BlockRef("none")
HASH = BlockRef("hash")
FIRST = BlockRef("number", 0)


def _no_number(result: bytes) -> int | None:
    return None


def _decimal(number: int) -> bytes:
    return b"%d" % number


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReader:
    """How to find out the head of an upstream, and which chain it serves.

    `lookups`: the questions that the family's file lists. `read_number(result)`: the number in results of methods with a
    `Method.head`; None if there is none. `write_number(number)`: the reverse, as JSON. `newest_block(result)`: the newest block
    that a result of any method names; None if it names none.
    """

    read_number: Callable[[bytes], int | None]
    write_number: Callable[[int], bytes] = _decimal
    newest_block: Callable[[bytes], int | None] = _no_number
    lookups: Lookups = NO_LOOKUPS


@dataclass(frozen=True, slots=True)
class AddressFormat:
    """Addresses are bytes inside and text outside.

    `parse(text)`: the address, or None if the text is not one. `show(address)`: its canonical text. `description`: completes
    the sentence "an address is ...". `fold(text)`: equal for all spellings of one address, as a key for tables.
    """

    parse: Callable[[str], bytes | None]
    show: Callable[[bytes], str]
    description: str
    fold: Callable[[str], str] = str


class SubscriptionParams(msgspec.Struct, frozen=True):
    """The parsed params of a call that subscribes.

    `topic` and `detail` identify what to subscribe to; equal ones share one feed. `from_block`: replay from here. `event`:
    the name under which events are priced and counted. `notification`: the method of the messages that are sent.
    """

    topic: str
    detail: Any
    from_block: int | None
    event: str
    notification: bytes


@dataclass(frozen=True, slots=True)
class SubscriptionRules:
    """How clients subscribe. `read(method, params)` raises ValueError for invalid params. `numeric_ids`: ids are numbers.
    `echoes_ids`: there are no ids. Events have the form of replies to the call that subscribed, and its params end them."""

    feed: FeedKind
    read: Callable[[str, Any], SubscriptionParams]
    numeric_ids: bool = False
    echoes_ids: bool = False


class Refuted(Exception):
    """A reply contradicts the chain's hashes, or they cannot prove it. The text says why."""


class Unprovable(Refuted):
    """There is nothing to prove at the moment, or the upstream does not have the proof. It is no upstream's fault."""


class NeverProvable(Unprovable):
    """No hash can prove the reply, whichever upstream gives it and however often it is asked."""


class ProofSource(Protocol):
    """One upstream, as a proof asks it. `head`: the newest block that enough upstreams have."""

    @property
    def head(self) -> int: ...
    async def ask(self, method: str, params: Sequence[Any]) -> Any:
        """The decoded result."""

    async def ask_or_none(self, method: str, params: Sequence[Any]) -> Any:
        """The decoded result; None if the upstream returns an error."""

    async def confirm(self, ref: str, block_hash: str) -> bool:
        """Whether enough upstreams have this block under this number or tag."""

    async def off_loop(self, check: Callable[..., T], *values: Any) -> T:
        """Run a slow check outside the event loop."""


class Prover(Protocol):
    """Proves replies by the hashes of the chain. `covers`: whether it can do so for a method."""

    def covers(self, method: str) -> bool: ...
    def needs(self, method: str) -> Collection[str]:
        """The methods that an upstream must offer for the proof."""

    def why_not(self, method: str, params: Any) -> str:
        """Why a call with these params can never be proven; empty if it may be."""

    async def prove(self, method: str, params: Sequence[Any], source: ProofSource) -> bytes:
        """The proven result as JSON. Raises Refuted."""


@dataclass(frozen=True, slots=True)
class Detection:
    """Methods that name an upstream's client and list its groups of methods, and methods that are tried one by one."""

    client: str
    modules: str
    probes: tuple[str, ...] = ()


def _no_id(params: bytes) -> bytes | None:
    return None


def _no_subjects(params: bytes) -> tuple[str, ...]:
    return ()


def _no_subject(method: Method, params: bytes) -> str:
    return ""


def _any_contract(method: Method, params: bytes) -> None:
    return None


def _chain_id(network: str, chain_id: int | None) -> int | None:
    return chain_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. All functions are pure and accept any bytes that a caller may send.

    `block_ref(method, params)`: the block that a call is about, from its raw params.
    `lifetime(method, params, result, ref, head, final)`: how long a good result may be cached.
    `kept_blocks`: how many blocks' state an ordinary upstream keeps; 0 if it keeps that of all.
    `lag_blocks`: how many blocks an upstream may be behind; 0 if the settings say so. `facts`: those of networks whose file
    does not say otherwise.
    `is_empty(method, result)`: whether an upstream that is behind would return the same.
    `error_rules`: what errors of its nodes mean, before the rules that hold for all (`core/upstream_errors.py`).
    `error_members`: members of errors that clients get beside the code, the message and the data.
    `volatile`: members of results that some nodes leave out, or that differ between nodes that are right. Comparisons leave
    them out, in addition to those of the method.
    `rest`: its upstreams serve REST routes, and its methods are those routes (`core/rest_routes.py`); None for JSON-RPC.
    `uri_params`: the types of parameters in calls in the form of a URL (`core/uri_calls.py`); empty without such calls.
    `dialect`: the JSON-RPC that its clients speak. `batches`: its upstreams accept batches.
    `at_head`: reads that depend on the head go to upstreams that have it. Otherwise a small lag is accepted.
    `sends_to_all`: a write that is `identified` is sent to every upstream.
    `sent_id(params)`: derives the result of a repeated write that is `identified`; None if it cannot.
    `sent_subjects(params)`: the names under which reads may ask for a write: those of the transaction and of its sender.
    `subject(method, params)`: the name of that kind in a read with an `about`; empty if it is none, or the block is fixed.
    `contracts(method, params)`: the contracts that a call reaches, folded; None if it may reach any.
    `last_block(params, head)`: the last block of a method that `splits`.
    `within_head(params, head)`: params of such a method, or of a new filter, that end near the head.
    `latest`: the tag of the head block; empty if the family has none.
    `standard_errors`: upstream errors are translated to the API's codes (`core/upstream_errors.py`); otherwise they pass
    unchanged.
    `socket_calls`: WebSocket upstreams reply to calls too. Otherwise they carry subscriptions only.
    `list_id(network name, chain id)`: the number by which token lists identify the network.
    `at_block(method, params, number)`: the params with this block in place of the head's tag.
    `prover`: proves replies by the chain's hashes, where they can.
    `refused`: well-known methods that are left out on purpose, with the reason and what to call instead.
    `detection`: how an upstream is asked for its client and its methods.
    """

    name: str
    block_ref: Callable[[Method, bytes], BlockRef]
    lifetime: Callable[[Method, bytes, bytes, BlockRef, int, int], Lifetime]
    is_empty: Callable[[Method, bytes], bool]
    head: HeadReader
    addresses: AddressFormat
    title: str = ""
    kept_blocks: int = 0
    lag_blocks: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    error_rules: tuple[ErrorRule, ...] = ()
    error_members: tuple[str, ...] = ()
    volatile: frozenset[str] = frozenset()
    rest: RestTransport | None = None
    uri_params: Mapping[str, UriType] = field(default_factory=dict)
    dialect: Dialect = STRICT
    batches: bool = True
    at_head: bool = False
    sends_to_all: bool = False
    sent_id: Callable[[bytes], bytes | None] = _no_id
    sent_subjects: Callable[[bytes], tuple[str, ...]] = _no_subjects
    subject: Callable[[Method, bytes], str] = _no_subject
    contracts: Callable[[Method, bytes], Sequence[str] | None] = _any_contract
    last_block: Callable[[bytes, int], int] | None = None
    within_head: Callable[[bytes, int], bytes] | None = None
    latest: str = ""
    standard_errors: bool = False
    socket_calls: bool = True
    subscriptions: SubscriptionRules | None = None
    tokens: TokenKind | None = None
    features: frozenset[Feature] = frozenset()
    list_id: Callable[[str, int | None], int | None] = _chain_id
    at_block: Callable[[Method, bytes, int], bytes] | None = None
    prover: Prover | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    detection: Detection | None = None

    def is_archive(self, ref: BlockRef, head: int) -> bool:
        """Whether the call reads state that an ordinary upstream has pruned. A hash may be any block: it counts as recent."""
        if ref.tag == "earliest":
            return True
        return self.kept_blocks > 0 and ref.kind == "number" and head - ref.number >= self.kept_blocks
