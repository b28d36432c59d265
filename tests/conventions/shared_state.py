"""Finds the state that outlives a step of work: attributes and module variables that hold a container, a queue or a lock.

Read from the source, without running it. A container counts if code of its module, or of any module if it is public, puts
something into it: a table that is built once and only read is not state. Semaphores, locks, queues, pools and caches count in
any case, and so do objects of our own classes in `core/` that have such state. Threads of the default executor are shared as
well: each function that uses them counts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from tests.conventions.source import modules, ring_of

# The rooms whose state is looked for, and the modules outside of rooms that hold state for them.
ROOMS = ("core", "services", "store", "web", "wire")
SUPPORT = ("proxy.connection_queue", "proxy.memory_budget", "proxy.request_threads", "proxy.turn_queue")
CONTAINERS = {
    *(
        "OrderedDict",
        "WeakKeyDictionary",
        "WeakSet",
        "WeakValueDictionary",
        "bytearray",
        "deque",
        "dict",
        "list",
        "set",
    ),
}
# These are shared places whether or not something is put into them. Reading a Counter or a defaultdict adds an entry.
ALWAYS = {
    *("BoundedSemaphore", "Condition", "Counter", "LifoQueue", "Lock", "PriorityQueue", "ProcessPoolExecutor", "Queue"),
    *("RLock", "RoundRobin", "Semaphore", "SimpleMemoryCache", "SimpleQueue", "ThreadPoolExecutor", "cache"),
    *("defaultdict", "lru_cache", "mmap"),
}
GROWING = {
    *("add", "append", "appendleft", "extend", "insert", "put", "put_nowait", "setdefault", "update"),
}
DEFAULT_EXECUTOR = "default executor"
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Owner:
    """A class or a module, and what it assigns to its attributes or variables: the kinds of container in each value."""

    module: str
    name: str
    containers: dict[str, set[str]] = field(default_factory=dict)

    def place(self, attribute: str) -> str:
        path = self.module.removeprefix("proxy.").replace(".", "/")
        return f"{path}:{self.name}.{attribute}" if self.name else f"{path}:{attribute}"


@cache
def found() -> dict[str, str]:
    """The places of shared state, with the kind of each: `services/rpc/flights:Flights.waiting` -> `dict`."""
    scope = [module for module in modules() if ring_of(module) in ROOMS or module in SUPPORT]
    owners = [owner for module in scope for owner in owners_in(module)]
    grown = {module: grown_in(modules()[module]) for module in modules()}
    everywhere = set[str]().union(*grown.values())
    stateful = {
        owner.name
        for owner in owners
        if owner.name and (ring_of(owner.module) == "core" or owner.module in SUPPORT)
        for attribute, kinds in owner.containers.items()
        if kinds & ALWAYS or (kinds & CONTAINERS and attribute in everywhere)
    }
    places = {}
    for owner in owners:
        for attribute, kinds in owner.containers.items():
            names = grown[owner.module] if attribute.startswith("_") else everywhere
            if shown := kinds & (ALWAYS | stateful) or (kinds & CONTAINERS if attribute in names else set()):
                places[owner.place(attribute)] = min(shown)
    return places | {place: DEFAULT_EXECUTOR for module in scope for place in executor_uses(module)}


def owners_in(module: str) -> Iterator[Owner]:
    tree = modules()[module]
    whole = Owner(module, "")
    for node in tree.body:
        note(whole, node, is_module=True)
    yield whole
    yield from (owner_of(module, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def owner_of(module: str, given: ast.ClassDef) -> Owner:
    owner = Owner(module, given.name)
    for node in given.body:
        note(owner, node, is_module=False)
        if isinstance(node, AnyFunction):
            for part in ast.walk(node):
                for name, value in assigned(part):
                    if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and name.value.id == "self":
                        owner.containers.setdefault(name.attr, set()).update(kinds_of(value))
    return owner


def note(owner: Owner, node: ast.stmt, *, is_module: bool) -> None:
    """The variables of a module or a class, and its functions that remember their results."""
    for name, value in assigned(node):
        # Besides `field(default_factory=dict)`, a class variable is a constant.
        if isinstance(name, ast.Name) and (is_module or called_by(value) == "field"):
            owner.containers.setdefault(name.id, set()).update(kinds_of(value))
    if isinstance(node, AnyFunction):
        owner.containers.setdefault(node.name, set()).update(set(map(called, node.decorator_list)) & ALWAYS)


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets of an assignment with their values, also of `a, b = x, y` and `a = b = x`."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def kinds_of(value: ast.expr) -> set[str]:
    """The containers that an expression makes, also inside of another: `{name: Semaphore(1) for name in names}`."""
    kinds = set[str]()
    for node in ast.walk(value):
        match node:
            case ast.Call(func=ast.Name(id="field"), keywords=keywords):
                kinds |= {called(each.value) for each in keywords if each.arg == "default_factory"}
            case ast.Call(func=function):
                kinds.add(called(function))
            case ast.Dict() | ast.DictComp() | ast.List() | ast.ListComp() | ast.Set() | ast.SetComp():
                kinds.add(type(node).__name__.removesuffix("Comp").lower())
            case _:
                pass
    return kinds


def called_by(value: ast.expr) -> str:
    return called(value.func) if isinstance(value, ast.Call) else ""


def called(function: ast.expr) -> str:
    """The last name of what is called: `deque` for collections.deque[int]."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value) | ast.Call(func=value):
            return called(value)
        case _:
            return ""


def executor_uses(module: str) -> Iterator[str]:
    """The functions that have work done by the threads of the default executor."""
    path = module.removeprefix("proxy.").replace(".", "/")
    for function in ast.walk(modules()[module]):
        if isinstance(function, AnyFunction) and any(map(uses_executor, ast.walk(function))):
            yield f"{path}:{function.name}()"


def uses_executor(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="run_in_executor"), args=[ast.Constant(value=None), *_]):
            return True
        case ast.Call(func=ast.Attribute(attr="to_thread")):
            return True
        case _:
            return False


def grown_in(tree: ast.Module) -> set[str]:
    """The names of attributes and module variables that code of this module puts something into."""
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    return set[str]().union(*map(grown_by, functions))


def grown_by(function: ast.AST) -> set[str]:
    """The same for one function, also under a local name: `waiting = self._waiting`."""
    aliases: dict[str, set[str]] = {}
    for node in ast.walk(function):
        for name, value in assigned(node):
            if isinstance(name, ast.Name):
                aliases.setdefault(name.id, set()).update(names_in(value))
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            aliases.setdefault(node.target.id, set()).update(names_in(node.iter))
        if isinstance(node, ast.NamedExpr):
            aliases.setdefault(node.target.id, set()).update(names_in(node.value))
    grown = set[str]()
    for node in ast.walk(function):
        for target in growth(node):
            for found_name in names_in(target):
                grown |= {found_name} | aliases.get(found_name, set())
    return grown


def growth(node: ast.AST) -> Iterator[ast.expr]:
    """The containers that a statement or call puts something into."""
    match node:
        case ast.Assign(targets=targets):
            yield from (each.value for each in targets if isinstance(each, ast.Subscript))
        case ast.AnnAssign(target=ast.Subscript(value=value)) | ast.AugAssign(target=ast.Subscript(value=value)):
            yield value
        case ast.AugAssign(target=ast.Attribute() as target, op=ast.Add() | ast.BitOr()):
            yield target
        case ast.Call(func=ast.Name(id="heappush") | ast.Attribute(attr="heappush"), args=[first, *_]):
            yield first
        case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in GROWING:
            yield value
        case _:
            pass


def names_in(value: ast.expr) -> set[str]:
    """The attribute or variable that an expression reads, also an entry of it: `_waiting` for self._waiting[client]."""
    match value:
        case ast.Attribute(attr=attr):
            return {attr}
        case ast.Name(id=name):
            return {name}
        case ast.Call(func=ast.Attribute(value=inner)) | ast.Subscript(value=inner) | ast.Await(value=inner):
            return names_in(inner)
        case ast.Call(func=ast.Name(), args=[inner, *_]):
            return names_in(inner)
        case ast.BoolOp(values=values):
            return set[str]().union(*map(names_in, values))
        case ast.IfExp(body=body, orelse=other):
            return names_in(body) | names_in(other)
        case _:
            return set()
