"""The choice, the order and the grouping of test files. The uncompiled pass runs only files with compiled code; long files
start first; files that share a service run in one process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from proxy.compiled import MODULES

ROOT = Path(__file__).resolve().parent.parent
# Files of one row share a service, or other work, that takes seconds to start. They form a unit: one process runs them, one
# after the other.
TOGETHER = (
    (
        # Reads what the recipe deployed, before other files mint and transfer.
        "tests/dev/test_contracts.py",
        "tests/flows/test_clients.py",
        "tests/flows/test_socket_clients.py",
        "tests/flows/test_url_clients.py",
        "tests/flows/test_limits.py",
        "tests/flows/test_api_spec_fuzz.py",
        "tests/flows/test_command_line.py",
        "tests/flows/test_capture.py",
        "tests/flows/test_gas_policies.py",
        "tests/flows/test_generated_clients.py",
        "tests/flows/test_keys.py",
        "tests/flows/test_tokens.py",
        "tests/flows/test_quotas.py",
        "tests/flows/test_webhooks_api.py",
        "tests/flows/test_webhook_events.py",
        "tests/flows/test_deliveries.py",
        "tests/flows/test_errors.py",
        "tests/flows/test_secrets.py",
        "tests/flows/test_operations.py",
        "tests/flows/test_board.py",
        "tests/flows/test_collections.py",
        "tests/flows/test_first_call.py",
        "tests/flows/test_mcp.py",
        "tests/test_doctor.py",
        "tests/dev/test_indexing.py",
    ),
    ("tests/fleet/test_fleet_limits.py", "tests/fleet/test_fleet_heads.py", "tests/fleet/test_fleet_caps.py"),
    ("tests/flows/test_follower.py", "tests/flows/test_read_after_webhook.py"),
    ("tests/flows/test_smart_wallets.py", "tests/flows/test_sponsor.py", "tests/flows/test_guide.py"),
    (
        "tests/browser/test_page.py",
        "tests/browser/test_user_flows.py",
        "tests/browser/test_sign_in.py",
        "tests/browser/test_cross_origin_page.py",
        "tests/browser/test_reference.py",
        "tests/browser/test_loading.py",
        "tests/browser/test_errors.py",
        "tests/browser/test_team.py",
    ),
    (
        "tests/dashboard/test_sign_in.py",
        "tests/dashboard/test_commands.py",
        "tests/dashboard/test_usage.py",
        "tests/dashboard/test_second_factor.py",
        "tests/dashboard/test_keys.py",
        "tests/dashboard/test_email_change.py",
        "tests/dashboard/test_fleet.py",
        "tests/dashboard/test_members.py",
        "tests/dashboard/test_activity.py",
        "tests/dashboard/test_removal.py",
        "tests/dashboard/test_rates.py",
        "tests/dashboard/test_code_limits.py",
        "tests/dashboard/test_account_isolation.py",
        "tests/dashboard/test_account_keys.py",
        "tests/dashboard/test_alert_settings.py",
        "tests/dashboard/test_announcements.py",
        "tests/dashboard/test_contradictions.py",
        "tests/dashboard/test_costs.py",
        "tests/dashboard/test_methods.py",
        "tests/dashboard/test_sandbox.py",
        "tests/dashboard/test_page_reads.py",
    ),
    (
        # They read every module of the project.
        "tests/conventions/test_compiled.py",
        "tests/conventions/test_imports.py",
        "tests/conventions/test_modules.py",
        "tests/conventions/test_names.py",
    ),
)
# A long unit that starts last leaves the other processes idle. The first files of the units that take longest, in the order
# of their duration.
LONG = (
    "tests/dev/test_contracts.py",
    "tests/browser/test_page.py",
    "tests/costs/test_cost_matrix.py",
    "tests/dashboard/test_sign_in.py",
    "tests/flows/test_dev.py",
    "tests/flows/test_smart_wallets.py",
    "tests/flows/test_serve.py",
    "tests/fleet/test_fleet_limits.py",
    "tests/conventions/test_compiled.py",
    "tests/flows/test_upstream_faults.py",
    "tests/flows/test_real_reorgs.py",
    "tests/dev/test_package.py",
    "tests/store/test_ledger_machine.py",
    "tests/flows/test_web3_modules.py",
    "tests/isolation/test_hostile_calls.py",
    "tests/isolation/test_overload.py",
    "tests/flows/test_verified.py",
    "tests/flows/test_follower.py",
    "tests/follower/test_backfill.py",
    "tests/flows/test_nft_metadata.py",
    "tests/follower/test_failover.py",
    "tests/web/test_request_headers_fuzz.py",
    "tests/isolation/test_upstream_words.py",
    "tests/flows/test_worker_faults.py",
    "tests/dev/test_bundler.py",
    "tests/flows/test_front.py",
    "tests/flows/test_balancer.py",
    "tests/delivery/test_deliverer.py",
    "tests/web/test_front_backpressure.py",
    "tests/isolation/test_large_batches.py",
    "tests/flows/test_feed_heads.py",
    "tests/flows/test_bundler.py",
    "tests/flows/test_upgrade.py",
    "tests/follower/test_network_follower.py",
    "tests/flows/test_socket_events.py",
    "tests/flows/test_faults.py",
    "tests/conventions/test_grammar.py",
    "tests/follower/test_random_chains.py",
    "tests/flows/test_upstream_branches.py",
    "tests/flows/test_pepper.py",
    "tests/follower/test_events.py",
    "tests/flows/test_random_real_reads.py",
    "tests/flows/test_solana_polling.py",
    "tests/isolation/test_slow_readers.py",
    "tests/wire/test_hazards.py",
    "tests/flows/test_sockets.py",
    "tests/delivery/test_audit.py",
    "tests/web/test_front_differential.py",
    "tests/web/test_envelope.py",
    "tests/isolation/test_socket_floods.py",
    "tests/web/test_front_framing.py",
)
_UNITS = {file: files[0] for files in TOGETHER for file in files}
_PLACES = {file: index for index, file in enumerate(LONG)}
_PLACES_IN_UNITS = {file: index for files in TOGETHER for index, file in enumerate(files)}


def place_of(file: Path) -> tuple[int, int]:
    """The sort key of a test file: long units in the order of the table, all others after them; and its place in its unit."""
    name = str(file.relative_to(ROOT))
    return _PLACES.get(unit_of(name), len(LONG)), _PLACES_IN_UNITS.get(name, 0)


def unit_of(file: str) -> str:
    """The name of the files that run in one process with this one."""
    return _UNITS.get(file, file)


def unit_at(file: Path) -> str:
    return unit_of(str(file.relative_to(ROOT)))


def runs_compiled_code(file: Path) -> bool:
    """Whether a test file imports a compiled module, directly or through other modules."""
    seen = {_name_of(file)}
    todo = [*seen]
    while todo:
        found = _imports_of(todo.pop()) - seen
        seen |= found
        todo += found
    return not seen.isdisjoint(MODULES)


@cache
def _files() -> dict[str, Path]:
    return {_name_of(file): file for room in ("proxy", "tests") for file in (ROOT / room).rglob("*.py")}


def _name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _imports_of(module: str) -> frozenset[str]:
    """The modules of this project that a module imports when it runs."""
    found: set[str] = set()
    for node in _runtime_nodes(ast.parse(_files()[module].read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found & _files().keys())


def _runtime_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node outside of `if TYPE_CHECKING` blocks."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            todo += node.orelse
            continue
        yield node
        todo += ast.iter_child_nodes(node)
