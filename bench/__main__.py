"""Run the benchmark cases, all or some of them. bench/README.md describes the method."""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench import attacks, baselines, guide_table, loaders, machine, peers, plot, report, service, summary
from bench.bodies import BIG
from bench.candidates import Candidates, parse_target
from bench.cases import (
    CASES,
    FAR_MS,
    HUGE,
    LATE_EVERY,
    LIMITED_AT_ONCE,
    LIMITED_MS,
    OTHER_CHECKOUT,
    Case,
    against,
)
from bench.loaders import DeadStub, DeepStub, Stub, Target, ValkeyStub
from bench.processes import StartFailed
from bench.runner import Runner

HOME = Path(__file__).parent
SMALL_RESULT = 66  # a 32-byte word in hex: a reply of about 100 bytes
SLOW_US = 1000


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.list:
        print("\n".join(f"{case.name:<10} {case.title}" for case in CASES))
        return 0
    chosen = _chosen(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all children are stopped
    if not options.no_install and (outcome := baselines.install()):
        print(outcome)
    machine.raise_file_limit()
    layout, pair = machine.layouts()
    facts = machine.facts(layout)
    facts |= {"rounds": options.rounds, "seconds": options.seconds, "settings": options.set}
    with _runner(options, layout, pair) as runner:
        for case in chosen:
            try:
                runner.run(case)
            except StartFailed as error:
                runner.skip(case.name, str(error))
    print("\n" + report.text(facts, runner.figures, runner.skips))
    _store(_output(options, chosen), facts, runner)
    return 0


def _chosen(options: argparse.Namespace) -> list[Case]:
    chosen = [case for case in CASES if not options.cases or case.name in options.cases]
    if not options.against:
        return chosen
    # Of the other cases, this one compares instructions.
    named = [case for case in chosen if case.is_comparable or (case.kind == "upstreams" and options.cases)]
    return [against(case) if case.is_comparable else case for case in named]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("cases", nargs="*", type=_case, metavar="CASE", help="cases to run (default: all; see --list)")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per case (default: 3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per measurement (default: 2)")
    parser.add_argument(
        "--full", action="store_true", help="100,000 reads and calls in the case upstreams instead of 20,000"
    )
    parser.add_argument("--no-install", action="store_true", help="skip missing baselines instead of installing them")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="directory for report.json, report.svg and summary.md (default: bench/ for a full run, else .penstock/bench/)",
    )
    _add_candidates(parser)
    _add_changes(parser)
    return parser


def _add_candidates(parser: argparse.ArgumentParser) -> None:
    """The options for what Penstock is compared with."""
    parser.add_argument(
        "--peer",
        type=_peer,
        action="append",
        default=[],
        metavar="NAME=URL",
        help="another gateway on 127.0.0.1 that forwards to the small stub (see --stub-port)",
    )
    parser.add_argument(
        "--peers", action="store_true", help=f"also run these, if they are on PATH: {', '.join(peers.PEERS)}"
    )
    parser.add_argument(
        "--against",
        type=_checkout,
        metavar="DIR",
        help="compare the CPU time per call with another checkout, which is compiled like this one; no other candidates",
    )
    parser.add_argument("--stub-port", type=int, default=0, metavar="PORT", help="the small stub's port (default: any)")


def _add_changes(parser: argparse.ArgumentParser) -> None:
    """The options for a part of the cases, or for other settings."""
    parser.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change a Penstock setting for the whole run",
    )
    parser.add_argument(
        "--attack",
        choices=attacks.TITLES,
        action="append",
        default=[],
        metavar="NAME",
        help=f"run only this attack of the case attacks: {', '.join(attacks.TITLES)}",
    )


def _case(name: str) -> str:
    if name not in {case.name for case in CASES}:
        raise argparse.ArgumentTypeError(f"unknown case {name!r}; choose from {', '.join(case.name for case in CASES)}")
    return name


def _peer(text: str) -> tuple[str, Target]:
    name, _, url = text.partition("=")
    try:
        return name, parse_target(url, baselines.KEY)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _checkout(text: str) -> Path:
    if reason := service.missing(root := Path(text).resolve()):
        raise argparse.ArgumentTypeError(reason)
    return root


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or "." not in name:
        raise argparse.ArgumentTypeError(f"{text!r} must have the form SECTION.KEY=VALUE")
    return name, value


@contextlib.contextmanager
def _runner(options: argparse.Namespace, layout: machine.Layout, pair: machine.Layout | None) -> Iterator[Runner]:
    """Start the stubs in a temporary directory; stop them and all candidates on exit, whatever happens."""
    stubs = {
        "small": Stub("small", size=SMALL_RESULT),
        "large": Stub("large", size=BIG),
        "slow": Stub("slow", size=SMALL_RESULT, delay_us=SLOW_US),
        "tls": baselines.TlsStub("tls", size=SMALL_RESULT),
        "tls-large": baselines.TlsStub("tls-large", size=BIG),
        "huge": Stub("huge", size=HUGE),
        "far": Stub("far", size=SMALL_RESULT, delay_us=FAR_MS * 1000),
        "late": Stub("late", size=SMALL_RESULT, delay_us=FAR_MS * 1000, late_every=LATE_EVERY),
        "late-too": Stub("late-too", size=SMALL_RESULT, delay_us=FAR_MS * 1000, late_every=LATE_EVERY),
        "small-too": Stub("small-too", size=SMALL_RESULT),
        "small-third": Stub("small-third", size=SMALL_RESULT),
        "dead": DeadStub("dead", size=SMALL_RESULT),
        "valkey": ValkeyStub("valkey", size=0),
        "evm": DeepStub("evm", size=0),
        "svm": DeepStub("svm", size=0),
        "limited": Stub("limited", size=SMALL_RESULT, delay_us=LIMITED_MS * 1000, at_once=LIMITED_AT_ONCE),
    }
    settings: Mapping[str, service.Value] = dict(options.set)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", ignore_cleanup_errors=True) as made:
        workdir = Path(made)
        os.chmod(workdir, 0o755)  # when root starts the embedded database, it runs as another user
        checkouts = {"penstock": service.ROOT} | ({OTHER_CHECKOUT: options.against} if options.against else {})
        candidates = Candidates(
            layout=layout,
            stubs=stubs,
            peers=dict(options.peer),
            checkouts=checkouts,
            settings=settings,
            workdir=workdir,
        )
        try:
            for name, stub in stubs.items():
                stub.start(layout.stub, port=options.stub_port if name == "small" else 0, workdir=workdir)
            gateways = tuple(peers.PEERS) if options.peers else ()
            yield Runner(
                candidates,
                layout,
                pair,
                options.rounds,
                options.seconds,
                workdir,
                options.attack,
                gateways,
                full=options.full,
            )
        finally:
            candidates.stop()
            for stub in stubs.values():
                stub.stop()


def _output(options: argparse.Namespace, chosen: Sequence[Case]) -> Path:
    """A partial run must not replace the full report in bench/."""
    if options.output:
        return Path(options.output)
    return HOME if len(chosen) == len(CASES) else loaders.BUILD


def _store(folder: Path, facts: dict[str, object], runner: Runner) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    report.write_json(folder / "report.json", facts, runner.figures, runner.skips)
    plot.write(folder / "report.svg", facts, runner.figures)
    summary.write(folder / "summary.md", facts, runner.figures)
    if folder == HOME:
        guide_table.write(folder)
    print(f"\nwrote report.json, report.svg and summary.md to {os.path.relpath(folder)}/")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted: everything was stopped, no report was written")
