"""Settings: precedence of sources, refused values, and masked secrets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy import settings
from proxy.__main__ import main
from proxy.errors import StartError
from proxy.settings import Settings
from proxy.settings.masking import masked_value
from tests.service import command

DATABASE = "postgresql://penstock:hunter2@db.example.com/penstock"
PEPPER = "a-pepper-that-must-never-be-shown-x"
UPSTREAM = "https://user:swordfish@upstream.example.com/v2/opensesame"
SECRETS = ("hunter2", PEPPER, "swordfish", "opensesame")
# Settings without a default.
GIVEN = {"DATABASE_URL": DATABASE, "PENSTOCK_KEYS__PEPPER": PEPPER}

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to(text: str) -> Path:
        path = tmp_path / "own.toml"
        path.write_text(text, "utf-8")
        return path

    return to


def load(path: Path | None = None, overrides: Mapping[str, Any] | None = None, **environ: str) -> Settings:
    return settings.load(path, environ=GIVEN | environ, overrides=overrides)


def faults(path: Path | None = None, environ: Mapping[str, str] = GIVEN) -> tuple[str, ...]:
    with pytest.raises(StartError) as caught:
        settings.load(path, environ=environ)
    return caught.value.faults


# Sources of a value


def test_defaults_need_only_a_database_and_a_pepper() -> None:
    found = load()
    assert (found.database.url, found.keys.pepper) == (DATABASE, PEPPER)
    assert (found.server.port, found.server.workers, found.server.drain_s) == (8545, 0, 20.0)
    assert found.upstreams == ()


def test_file_overrides_the_defaults(write: Write) -> None:
    found = load(write("[server]\nport = 9000\n"))
    assert (found.server.port, found.server.host) == (9000, "127.0.0.1")


def test_environment_overrides_the_file(write: Write) -> None:
    path = write('[server]\nport = 9000\nhost = "::1"\n')
    found = load(path, PENSTOCK_SERVER__PORT="9001")
    assert (found.server.port, found.server.host) == (9001, "::1")


def test_overrides_take_precedence_over_everything(write: Write) -> None:
    path = write("[server]\nport = 9000\n")
    assert load(path, {"server": {"port": 9002}}, PENSTOCK_SERVER__PORT="9001").server.port == 9002


def test_defaults_of_a_command_give_way_to_the_file_and_the_environment(write: Write) -> None:
    defaults = {"metrics": {"port": 0}, "server": {"workers": 1}}
    path = write("[metrics]\nport = 9111\n")
    found = settings.load(path, environ=GIVEN | {"PENSTOCK_SERVER__WORKERS": "3"}, defaults=defaults)
    assert (found.metrics.port, found.server.workers) == (9111, 3)
    found = settings.load(environ=GIVEN, defaults=defaults)
    assert (found.metrics.port, found.server.workers) == (0, 1)


def test_environment_replaces_an_invalid_value_in_the_file(write: Write) -> None:
    assert load(write('[server]\nport = "x"\n'), PENSTOCK_SERVER__PORT="9001").server.port == 9001


def test_database_url_is_accepted_and_the_prefixed_name_wins() -> None:
    assert load(PENSTOCK_DATABASE__URL="postgres://other/db").database.url == "postgres://other/db"
    assert load(DATABASE_URL="postgres://other/db").database.url == "postgres://other/db"


def test_empty_database_url_is_ignored() -> None:
    assert faults(environ={**GIVEN, "DATABASE_URL": ""})[0].startswith("database.url: ")


@pytest.mark.parametrize(
    ("name", "text", "section", "key", "value"),
    [
        ("SERVER__PORT", "0", "server", "port", 0),
        ("SERVER__PORT", "65_535", "server", "port", 65535),
        ("SERVER__DRAIN_S", "5", "server", "drain_s", 5.0),
        ("SERVER__DRAIN_S", "0.5", "server", "drain_s", 0.5),
        ("SERVER__DEV", "true", "server", "dev", True),
        ("LOG__ACCESS", "false", "log", "access", False),
        ("LOG__LEVEL", "debug", "log", "level", "debug"),
        ("SERVER__HOST", "0.0.0.0", "server", "host", "0.0.0.0"),
        ("SERVER__HOST", "8545", "server", "host", "8545"),
        ("SERVER__TRUSTED_PROXIES", '["10.0.0.0/8", "::1/128"]', "server", "trusted_proxies", ("10.0.0.0/8", "::1/128")),
        ("server__port", "1", "server", "port", 1),
    ],
)  # fmt: skip
def test_environment_is_parsed_as_the_type_of_its_key(
    name: str, text: str, section: str, key: str, value: object
) -> None:
    found = getattr(getattr(load(None, None, **{f"PENSTOCK_{name}": text}), section), key)
    assert found == value
    assert type(found) is type(value)


def test_integer_written_as_a_decimal_is_accepted(write: Write) -> None:
    assert load(write("[server]\nport = 9000.0\ndrain_s = 3\n")).server.port == 9000


@pytest.mark.parametrize("name", ["PENSTOCK_DATA", "PENSTOCK_BLOCK_TIME_MS", "PENSTOCK_DEVNET_LOG"])
def test_variables_of_the_development_service_are_not_settings(name: str) -> None:
    assert load(None, None, **{name: "somewhere"}).server.port == 8545


def test_variables_without_the_prefix_are_ignored() -> None:
    assert load(SERVER__PORT="1", PENSTOCKX_SERVER__PORT="1", PATH="x").server.port == 8545


def test_upstreams_are_kept_in_order(write: Write) -> None:
    block = '[[upstreams]]\nnetwork = "ethereum/{}"\nurl = "https://example.com/{}"\n'
    found = load(write(block.format("mainnet", 1) + block.format("mainnet", 2) + block.format("sepolia", 3)))
    assert [upstream.url[-1] for upstream in found.upstreams] == ["1", "2", "3"]
    assert list(settings.network_faults(found.tree, settings.load_tables())) == []


def test_settings_survive_serialization_to_a_worker(write: Write) -> None:
    found = load(write(f'[[upstreams]]\nnetwork = "eth/mainnet"\nurl = "{UPSTREAM}"\n'), PENSTOCK_SERVER__PORT="9")
    assert settings.from_tree(orjson.loads(orjson.dumps(found.tree))) == found


# Refused values


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("colour = 1", "colour"),
        ("[colours]\nred = 1", "colours"),
        ("[server]\nprot = 1", "server.prot: there is no such key"),
        ('[server]\nport = "x"', "server.port: "),
        ("[server]\nport = 65536", "server.port: "),
        ("[server]\nport = -1", "server.port: "),
        ("[server]\nport = 99999999999999999999999", "server.port: "),
        ("[server]\nport = 1979-05-27", "server.port: "),
        ("[server]\nheader_timeout_s = 0", "server.header_timeout_s: "),
        ("[server]\nheader_timeout_s = nan", "server.header_timeout_s: "),
        ("[server]\nheader_timeout_s = inf", "server.header_timeout_s: "),
        ("[server]\nheader_timeout_s = true", "server.header_timeout_s: "),
        ('[server]\nhost = ""', "server.host: "),
        ('[server]\ntrusted_proxies = ["10.0.0.0/8", "10.0.0.1/8"]', "server.trusted_proxies.1: "),
        ('[server]\ntrusted_proxies = "10.0.0.0/8"', "server.trusted_proxies: "),
        ("[server]\ntrusted_proxies = [1]", "server.trusted_proxies.0: "),
        ('[log]\nlevel = "loud"', "log.level: "),
        ("[database]\npool_size = 1", "database.pool_size: "),
        ("database = 3", "database: "),
        ("server = 3", "server: "),
        ('[[upstreams]]\nurl = "https://example.com"', 'upstreams.0: "network" is a required property'),
        ('[[upstreams]]\nnetwork = "ethereum"\nurl = "https://example.com"', "upstreams.0.network: "),
        ('[[upstreams]]\nnetwork = "a/b"\nurl = "ftp://example.com"', "upstreams.0.url: "),
    ],
)
def test_invalid_value_in_a_file_is_refused_by_name(write: Write, text: str, named: str) -> None:
    assert [fault for fault in faults(write(text)) if named in fault]


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("PENSTOCK_SERVER__PORT", "x", "server.port: "),
        ("PENSTOCK_SERVER__PORT", "true", "server.port: "),
        ("PENSTOCK_SERVER__PORT", "", "server.port: "),
        ("PENSTOCK_SERVER__DRAIN_S", "true", "server.drain_s: "),
        ("PENSTOCK_SERVER__DEV", "yes", "server.dev: "),
        ("PENSTOCK_SERVER__TRUSTED_PROXIES", "10.0.0.0/8", "server.trusted_proxies: "),
        ("PENSTOCK_SERVER__PROT", "1", "PENSTOCK_SERVER__PROT: there is no setting server.prot"),
        ("PENSTOCK_SERVR__PORT", "1", "PENSTOCK_SERVR__PORT: there is no setting servr.port"),
        ("PENSTOCK_PORT", "1", "PENSTOCK_PORT: settings are named PENSTOCK_SECTION__KEY"),
        ("PENSTOCK_", "1", "PENSTOCK_: settings are named"),
        ("PENSTOCK_UPSTREAMS", "x", "PENSTOCK_UPSTREAMS: settings are named"),
    ],
)
def test_invalid_value_in_the_environment_is_refused_by_name(name: str, text: str, named: str) -> None:
    (fault,) = faults(environ={**GIVEN, name: text})
    assert fault.startswith(named)


def test_every_fault_is_reported_at_once(write: Write) -> None:
    path = write('[server]\nport = "x"\nprot = 1\ntrusted_proxies = ["nowhere"]\n[log]\nlevel = "loud"\n')
    found = "\n".join(faults(path, {"PENSTOCK_NO__SUCH": "1"}))
    for named in ("server.port", "server.prot", "server.trusted_proxies.0", "log.level", "PENSTOCK_NO__SUCH",
                  "database.url", "keys.pepper"):  # fmt: skip
        assert named in found


def test_file_that_cannot_be_read_or_parsed_is_named(write: Write, tmp_path: Path) -> None:
    assert "absent.toml: cannot be read" in faults(tmp_path / "absent.toml")[0]
    assert "own.toml: not valid TOML" in faults(write("[server\n"))[0]
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "bytes.toml: not valid TOML" in faults(tmp_path / "bytes.toml")[0]


def test_upstream_of_an_unknown_network_is_a_fault(write: Write) -> None:
    found = load(write('[[upstreams]]\nnetwork = "ethereum/nowhere"\nurl = "https://example.com"\n'))
    (fault,) = settings.network_faults(found.tree, settings.load_tables())
    assert fault.startswith("upstreams.0.network: there is no network ethereum/nowhere")


def test_solana_network_with_websocket_upstreams_only_is_a_fault(write: Write) -> None:
    upstream = '[[upstreams]]\nnetwork = "solana/mainnet"\nurl = "{}://example.com"\n'
    found = load(write(upstream.format("wss")))
    (fault,) = settings.network_faults(found.tree, settings.load_tables())
    assert fault.startswith("upstreams: solana/mainnet needs an http or https upstream")
    both = load(write(upstream.format("wss") + upstream.format("https")))
    assert list(settings.network_faults(both.tree, settings.load_tables())) == []


@pytest.mark.parametrize(
    ("hosts", "operator", "has_fault"),
    [
        (("one.example.com", "two.example.com"), "", True),
        (("127.0.0.1:1", "127.0.0.1:2"), "", True),
        (("a.example.com", "b.example.net"), "", False),
        (("a.example.com", "b.example.net"), 'operator = "same"', True),
    ],
)
def test_quorum_of_more_operators_than_there_are_is_reported(
    write: Write, hosts: tuple[str, ...], operator: str, has_fault: bool
) -> None:
    rule = '[[verify]]\nnetwork = "ethereum/mainnet"\nmethods = ["eth_call"]\nby = "quorum 2/3"\n'
    blocks = [f'[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "https://{host}/"\n{operator}\n' for host in hosts]
    found = load(write("".join(blocks) + rule))
    reported = list(settings.network_faults(found.tree, settings.load_tables()))
    assert [fault.partition(" needs upstreams of 2 operators")[0] for fault in reported] == (
        ["verify.0.by: quorum 2/3"] if has_fault else []
    )


def assert_reported(write: Write, text: str, fault: str) -> None:
    """Settings with this text have one fault of their networks, which begins so, or none."""
    reported = [*settings.network_faults(load(write(text)).tree, settings.load_tables())]
    assert [each[: len(fault)] for each in reported] == [fault] * bool(fault)


@pytest.mark.parametrize(
    ("line", "other", "fault"),
    [
        ("requests_per_second = 5", True, ""),
        ("", True, "upstreams.0.shadow: needs a limit"),
        ("requests_per_second = 5", False, "upstreams.0.shadow: ethereum/mainnet needs an upstream without shadow"),
    ],
)
def test_upstream_on_trial_needs_a_limit_and_another_upstream(write: Write, line: str, other: bool, fault: str) -> None:
    upstream = '[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "https://{}.example.com"\n'
    second = upstream.format("b") if other else ""
    assert_reported(write, f"{upstream.format('a')}shadow = 0.05\n{line}\n{second}", fault)


@pytest.mark.parametrize(
    ("rates", "fault"),
    [
        ('eth_getLogs = 5, "trace_*" = 2.5', ""),
        ("eth_getLog = 5", "upstreams.0.method_rates: ethereum/mainnet has no method eth_getLog"),
        ('"nothing_*" = 5', "upstreams.0.method_rates: ethereum/mainnet has no method nothing_*"),
    ],
)
def test_limit_of_a_method_that_does_not_exist_is_reported(write: Write, rates: str, fault: str) -> None:
    upstream = '[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "https://a.example.com"\n'
    assert_reported(write, f"{upstream}method_rates = {{ {rates} }}\n", fault)


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ('prefer = ["region=eu"]', ""),
        ('require = ["client=geth", "operator=example.com"]\nmethods = ["trace_*"]', ""),
        ("", "routing.0: changes nothing"),
        ("above = { error_rate = 1.0 }", "routing.0.above.error_rate: can never match"),
        (
            'prefer = ["region=eu"]\nlabels = ["region=eu"]',
            "routing.0: labels, then and dry_run are for limits: add above",
        ),
        ('avoid = ["region=eu"]\nabove = { lag_blocks = 1 }', "routing.0: has limits and labels to choose by"),
        ('labels = ["region=us"]\nabove = { lag_blocks = 1 }', "routing.0.labels: no upstream of ethereum/mainnet has"),
        ('avoid = ["region=us"]', "routing.0.avoid: no upstream of ethereum/mainnet has the label region=us"),
        ("above = { cost_usd = 0.1 }", "routing.0.above.cost_usd: can never match"),
        ('prefer = ["region=eu"]\nmethods = ["eth_cal"]', "routing.0.methods: ethereum/mainnet has no method eth_cal"),
    ],
)
def test_rule_that_does_nothing_is_reported(write: Write, rule: str, fault: str) -> None:
    upstream = '[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "https://a.example.com"\nlabels = ["region=eu"]\n'
    assert_reported(write, f'{upstream}[[routing]]\nnetwork = "ethereum/mainnet"\n{rule}\n', fault)


@pytest.mark.parametrize(
    ("cost", "rule", "dearest"),
    [
        ('cost = "chainstack"', "above = { cost_usd = 0.00002 }", ""),
        # A read of an old block costs two units, at 15 dollars a million.
        ('cost = "chainstack"', "above = { cost_usd = 0.00003 }", "0.00003"),
        ('credits = { "*" = 20, "trace_*" = 40 }', 'above = { cost_usd = 0.00001 }\nmethods = ["eth_call"]', "0.00001"),
        ('credits = { "*" = 20, "trace_*" = 40 }', "above = { cost_usd = 0.00001 }", ""),
    ],
)
def test_limit_above_the_cost_of_any_call_is_reported(write: Write, cost: str, rule: str, dearest: str) -> None:
    price = 'credit_price = "0.50"\n' if cost.startswith("credits") else ""
    upstream = f'[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "https://a.example.com"\n{cost}\n{price}'
    fault = f"routing.0.above.cost_usd: can never match: the dearest of these calls costs {dearest} US dollars"
    assert_reported(write, f'{upstream}[[routing]]\nnetwork = "ethereum/mainnet"\n{rule}\n', dearest and fault)


@pytest.mark.parametrize(
    "labels", ['require = ["region=eu", "name=two"]', 'labels = ["region=eu", "name=two"]\nabove = { lag_blocks = 1 }']
)
def test_rule_for_labels_that_no_upstream_has_together_is_reported(write: Write, labels: str) -> None:
    one = '[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "https://a.example.com"\nlabels = ["region=eu"]\n'
    two = '[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "https://b.example.com"\nname = "two"\n'
    rule = f'[[routing]]\nnetwork = "ethereum/mainnet"\n{labels}\n'
    name = labels.partition(" ")[0]
    fault = f"routing.0.{name}: can never match: no upstream of ethereum/mainnet has all of region=eu, name=two"
    assert_reported(write, f"{one}{two}{rule}", fault)


@pytest.mark.parametrize(
    ("policies", "cost", "fault"),
    [
        ("ms_per_cent = 20000", "alchemy", ""),
        ("equally_fast = 2", "", "cost_routing.0: changes nothing: no upstream of ethereum/mainnet has a cost"),
        (
            'ms_per_cent = 1\n[[cost_routing]]\nnetwork = "ethereum/mainnet"',
            "alchemy",
            "cost_routing.1.network: ethereum/mainnet has another policy",
        ),
    ],
)
def test_cost_policy_that_does_nothing_is_reported(write: Write, policies: str, cost: str, fault: str) -> None:
    upstream = '[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "https://a.example.com"\n'
    upstream += f'cost = "{cost}"\n' if cost else ""
    assert_reported(write, f'{upstream}[[cost_routing]]\nnetwork = "ethereum/mainnet"\n{policies}\n', fault)


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        ("method = \"eth_call\"\nresult = '1'", ""),
        ("method = \"eth_cal\"\nresult = '1'", "replies.0.method: ethereum/mainnet has no method eth_cal"),
        ('method = "eth_call"', "replies.0: needs either result or error, as JSON"),
        ("method = \"eth_call\"\nresult = '0x1'", "replies.0.result: must be JSON, such as"),
        ("method = \"eth_call\"\nerror = '1'", "replies.0.error: must be JSON like"),
        ("method = \"eth_call\"\nresult = '1'\nparams = '1'", "replies.0.params: must be JSON like"),
    ],
)
def test_reply_of_the_settings_must_be_json(write: Write, reply: str, fault: str) -> None:
    found = load(write(f'[[replies]]\nnetwork = "ethereum/mainnet"\n{reply}\n'))
    reported = [*settings.network_faults(found.tree, settings.load_tables()), ""]
    assert reported[0].startswith(fault)
    assert len(reported) == (2 if fault else 1)


@pytest.mark.parametrize("limits", ["{ lag = 1 }", "{}", "{ lag_blocks = -1 }"])
def test_limits_of_a_rule_must_be_known(write: Write, limits: str) -> None:
    path = write(f'[[routing]]\nnetwork = "ethereum/mainnet"\nabove = {limits}\n')
    assert [fault.partition(":")[0].startswith("routing.0.above") for fault in faults(path)] == [True]


@pytest.mark.parametrize("name", ["Infura", "two words", "-", "x" * 64, "\\n"])
def test_operator_of_an_upstream_must_be_a_plain_name(write: Write, name: str) -> None:
    path = write(f'[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "https://a.b"\noperator = "{name}"\n')
    assert [fault.partition(":")[0] for fault in faults(path)] == ["upstreams.0.operator"]


@pytest.mark.parametrize("line", ['name = "1"', 'name = "Two"', 'labels = ["a b"]', f"labels = {['x'] * 9}"])
def test_name_and_labels_of_an_upstream_must_be_plain(write: Write, line: str) -> None:
    path = write(f'[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "https://a.b"\n{line}\n')
    assert [fault for fault in faults(path) if fault.startswith(f"upstreams.0.{line.partition(' ')[0]}")]


def test_upstreams_of_a_network_have_different_names(write: Write) -> None:
    block = '[[upstreams]]\nnetwork = "{}"\nurl = "https://{}.example.com"\nname = "one"\n'
    found = load(write(block.format("ethereum/mainnet", "a") + block.format("base/mainnet", "b")))
    assert list(settings.network_faults(found.tree, settings.load_tables())) == []
    found = load(write(block.format("ethereum/mainnet", "a") + block.format("ethereum/mainnet", "b")))
    (fault,) = settings.network_faults(found.tree, settings.load_tables())
    assert fault == "upstreams.1.name: ethereum/mainnet has another one named one"


def test_unknown_networks_are_reported_with_all_other_faults(write: Write) -> None:
    path = write("""
        [server]
        port = "x"
        [follower]
        networks = ["*", "no/where", 7]
        start = { "not/there" = 1 }
        [prices]
        feeds = 3
        [[upstreams]]
        network = 5
        [[upstreams]]
        network = "nowhere"
        url = "https://example.com"
        [[upstreams]]
        network = "ethereum/nowhere"
        url = "https://example.com"
        [[paymasters]]
        network = "ethereum/mainnet"
        entry_point = "9.9"
        address = "0x0000000000000000000000000000000000000000"
        signer_env = "NOT_THERE"
        """)
    with pytest.raises(StartError) as failed:
        settings.load_with_tables(path, environ=GIVEN)
    found = {fault.split(": ")[fault.startswith(f"{path}:")] for fault in failed.value.faults}
    assert found >= {
        *("server.port", "follower.networks", "follower.networks.2", "follower.start", "prices.feeds"),
        *("upstreams.0", "upstreams.0.network", "upstreams.1.network", "upstreams.2.network"),
        *("paymasters.0", "paymasters.0.entry_point"),
    }


# Secrets


def test_secrets_are_masked_and_other_settings_are_shown(write: Write) -> None:
    headers = '{ Authorization = "Bearer swordfish" }'
    path = write(f'[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "{UPSTREAM}"\nheaders = {headers}\n')
    shown = dict(settings.masked(load(path)))
    assert {name for name, value in shown.items() if "********" in value} == {
        *("database.url", "keys.pepper", "upstreams.0.url", "upstreams.0.headers.Authorization"),
    }  # fmt: skip
    assert shown["server.port"] == "8545"
    assert shown["upstreams.0.network"] == '"ethereum/mainnet"'
    assert not [secret for secret in SECRETS if secret in repr(shown)]


@pytest.mark.parametrize(
    "text",
    [
        f'[database]\nurl = "mysql://penstock:{SECRETS[0]}@db"',
        f'database = "{DATABASE}"',
        f'database = ["{DATABASE}"]',
        f'keys = "{PEPPER}"',
        '[keys]\npepper = "hunter2"',
        f'[keys]\npepper = ["{PEPPER}"]',
        f'upstreams = "{UPSTREAM}"',
        f'upstreams = ["{UPSTREAM}"]',
        f'[upstreams]\nurl = "{UPSTREAM}"',
        f'[[upstreams]]\nnetwork = 1\nurl = "{UPSTREAM}"',
        f'[[upstreams]]\nnetwork = "a/b"\nurl = "ftp{UPSTREAM}"',
        f'[[upstreams]]\nnetwork = "a/b"\nurl = ["{UPSTREAM}"]',
        f'[[upstreams]]\nnetwork = "a/b"\nuri = "{UPSTREAM}"',
        '[[upstreams]]\nnetwork = "a/b"\nurl = "https://a.b"\nheaders = "swordfish"',
        '[[upstreams]]\nnetwork = "a/b"\nurl = "https://a.b"\nheaders = { Authorization = ["swordfish"] }',
        '[[upstreams]]\nnetwork = "a/b"\nurl = "https://a.b"\nheaders = { Authorization = "swordfish\\r\\n" }',
    ],
)
def test_message_about_a_secret_does_not_repeat_it(write: Write, text: str) -> None:
    found = "\n".join(faults(write(text), {}))
    assert not [secret for secret in SECRETS if secret in found]


def test_invalid_address_block_is_named(write: Write) -> None:
    path = write('[egress]\nallow = ["127.0.0.1/8", "10.0.0.0/8"]\ndeny = ["x"]\n')
    assert [fault.split(": ")[0] for fault in faults(path)] == ["egress.allow.0", "egress.deny.0"]


def test_price_of_an_unknown_network_is_a_fault(write: Write) -> None:
    feed = '{ network = "no/where", feed = "0x5f4eC3Df9cbd43714FE2740f5E3616155c5b8419" }'
    path = write(
        f"[prices]\nfeeds = [{feed}]\n"
        'fixed = [{ network = "eth/mainnet", usd = "1.5" }, { network = "no/where", usd = "1" }]\n'
    )
    found = list(settings.network_faults(load(path).tree, settings.load_tables()))
    assert [fault.split(": ")[0] for fault in found] == ["prices.feeds.0.network", "prices.fixed.1.network"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:pw@db.example:5432/penstock", "postgresql://me:********@db.example:5432/penstock"),
        (
            "postgresql://me@/penstock?host=/run/pg&password=pw",
            "postgresql://me@/penstock?host=/run/pg&password=********",
        ),
        ("postgresql://a:b@c@h/d", "postgresql://a:********@h/d"),
        ("rediss://:pw@cache.example/0", "rediss://:********@cache.example/0"),
        ("https://node.example/v2/key?token=pw", "https://node.example/********?token=********"),
        ("https://node.example", "https://node.example"),
    ],
)
def test_only_the_secrets_of_a_url_are_masked(url: str, shown: str) -> None:
    assert orjson.loads(masked_value(url)) == shown


@pytest.mark.parametrize("value", ["open sesame", "http:/", 7, "https://[half"])
def test_other_secrets_are_masked_whole(value: Any) -> None:
    assert masked_value(value) == "********"


def test_key_of_the_price_api_is_masked(write: Write) -> None:
    found = dict(settings.masked(load(write('[prices]\nurl = "https://swordfish.example.com"\nkey = "opensesame"\n'))))
    assert (found["prices.key"], found["prices.url"]) == ("********", '"https://swordfish.example.com"')
    shown = "".join(faults(write('[prices]\nurl = "swordfish"\nkey = "open sesame"\n')))
    assert "swordfish" not in shown
    assert "sesame" not in shown


# The files and the command


def test_every_setting_is_documented_in_the_default_file() -> None:
    section = ""
    for line in (settings.CONFIG / "default.toml").read_text("utf-8").splitlines():
        if line.startswith("["):
            section = line
        elif re.match(r"[a-z_]+ = ", line) and line != "port = 8545":
            assert "  #" in line or " # " in line, f"{section} {line}"
    schema = orjson.loads((settings.SCHEMAS / "config" / "settings.json").read_bytes())["properties"]
    tree = load().tree
    for name, part in schema.items():
        if part["type"] == "object":
            assert set(tree[name]) == set(part["properties"]) == set(part["required"])


def test_check_prints_the_effective_settings_masked(write: Write) -> None:
    path = write(f'[server]\nport = 9000\n[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "{UPSTREAM}"\n')
    done = command("check", "--offline", "--config", str(path), env=GIVEN)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "server.port = 9000" in lines
    assert 'upstreams.0.url = "https://user:********@upstream.example.com/********"' in lines
    assert not [secret for secret in SECRETS if secret in done.stdout]


def test_check_names_every_fault_and_exits_with_status_two(write: Write) -> None:
    path = write('[server]\nport = "x"\n[[upstreams]]\nnetwork = "no/where"\nurl = "https://example.com"\n')
    done = command("check", "--config", str(path), env={**GIVEN, "PENSTOCK_LOG__LEVEL": "loud"})
    assert (done.returncode, done.stdout) == (2, "")
    lines = [line.removeprefix("penstock: ") for line in done.stderr.splitlines()]
    named = {line.split(": ")[line.startswith(f"{path}:")] for line in lines}
    assert named == {"log.level", "server.port", "upstreams.0.network"}


def test_serve_refuses_to_start_with_invalid_settings() -> None:
    done = command("serve", env={**GIVEN, "PENSTOCK_SERVER__PORT": "x"})
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: server.port: ")


# Signing keys of paymasters


SIGNER = "0x" + "4b" * 32
PAYMASTER = """
[[paymasters]]
network = "ethereum/mainnet"
entry_point = "0.7"
address = "0x13947328D52E7d9751e93FD0274A2bFae5CbCb12"
"""


def test_signing_key_is_read_from_the_environment_or_a_file(write: Write, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(SIGNER + "\n")
    for where in ('signer_env = "PAYMASTER_SIGNER"', f'signer_file = "{tmp_path / "key"}"'):
        found = load(write(PAYMASTER + where))
        assert settings.signer_key(found.paymasters[0], {"PAYMASTER_SIGNER": SIGNER}).hex() == SIGNER[2:]
        assert SIGNER[2:] not in str(found.tree) + str(found) + str(dict(settings.masked(found)))


@pytest.mark.parametrize(
    ("text", "environ", "named"),
    [
        ('signer_env = "NOT_THERE"', {}, "paymasters.0: there is no signing key in NOT_THERE"),
        ('signer_file = "/nowhere/key"', {}, "paymasters.0: there is no signing key in /nowhere/key"),
        ('signer_env = "SIGNER"', {"SIGNER": SIGNER[:-1]}, "paymasters.0: SIGNER does not contain a private key"),
        ('signer_env = "SIGNER"', {"SIGNER": "0x" + "00" * 32}, "paymasters.0: SIGNER does not contain a private key"),
        ('signer_env = "SIGNER"', {"SIGNER": "0x" + "ff" * 32}, "paymasters.0: SIGNER does not contain a private key"),
        (
            f'signer_env = "SIGNER"{PAYMASTER}signer_env = "SIGNER"',
            {"SIGNER": SIGNER},
            "paymasters.1: there is already",
        ),
    ],
)
def test_missing_or_invalid_signing_key_is_named_without_its_value(
    write: Write, text: str, environ: dict[str, str], named: str
) -> None:
    found = load(write(PAYMASTER + text))
    faults = list(settings.paymaster_faults(found.tree, settings.load_tables(), environ))
    assert [fault for fault in faults if fault.startswith(named)], faults
    assert not [fault for fault in faults for value in environ.values() if value[2:10] in fault]


def test_paymaster_needs_exactly_one_source_for_its_key(write: Write) -> None:
    for text in (PAYMASTER, PAYMASTER + 'signer_env = "A"\nsigner_file = "b"'):
        assert faults(write(text))[0].startswith("paymasters.0")
    assert faults(write(PAYMASTER + 'signer_env = "PENSTOCK_SIGNER"'))[0].startswith("paymasters.0.signer_env")


def test_check_names_the_file_and_the_line_of_each_fault(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        '[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "https://a.example.com"\nshadow = 0.1\n\n'
        '[[routing]]\nnetwork = "ethereum/mainnet"\nabove = { error_rate = 1.5 }\n'
    )
    first = path.read_text().splitlines().index("shadow = 0.1") + 1
    assert main(["check", "--config", str(path)]) == 2
    printed = capsys.readouterr().err
    assert f"{path}:{first}: upstreams.0.shadow: needs a limit" in printed
    assert f"{path}:{first + 4}: routing.0.above.error_rate: can never match" in printed
