"""What each command of the command line does."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.config import (
    NOT_PART_OF_A_RUN,
    Config,
    ConfigError,
    Cost,
    Decode,
    Settings,
    load,
    override,
    settings_of,
)
from experiments.data import Corpus, check_length, load_corpus
from experiments.machine import limit_threads
from experiments.page import print_section
from experiments.progress import display

# JAX is imported inside the commands: --help and wrong settings need not wait for it.
PROFILED_STEPS = 5  # of `train --profile`, if the config does not say how many


def train(args: argparse.Namespace) -> None:
    """Train one model."""
    watch, profile = _flag(args, "watch"), _flag(args, "profile")
    config, lists = _settings(args, Config)
    if lists:
        raise ConfigError(f"{args.config} has a [sweep] table: use the command sweep")
    log = config.logging
    if watch and not log.watch:
        log = replace(log, watch=log.every)
    if profile and not log.profile:
        log = replace(log, profile=PROFILED_STEPS)
    config = replace(config, logging=log)
    corpus = _corpus(config)
    from experiments.sweep import run, run_directory

    directory = run_directory(config)
    looks = watch or profile or _looks(args.overrides)
    if looks and (directory / "summary.json").exists():
        raise ConfigError(
            f"{directory} is finished: there is nothing to look at; set another --name "
            "to train it again"
        )
    with display(Console(stderr=True)) as progress:
        summary = run(config, corpus, progress)
    rows = {"run": summary["id"], "status": summary["status"]}
    rows |= {"reason": summary.get("reason"), **summary["metrics"]}
    rows |= {f"{k} table, per byte": x for k, x in summary["baselines"].items()}
    print(
        "corpus: {name}, {bytes:,} bytes, sha256 {sha256}".format(**summary["corpus"])
    )
    _print_line(Console(), f"run in {directory}")
    known = [[name, value] for name, value in rows.items() if value is not None]
    _print_table(["losses in nats per token", ""], known)


def sweep(args: argparse.Namespace) -> None:
    """Run a whole experiment and write its report."""
    config, lists = _settings(args, Config)
    from experiments.sweep import sweep

    with display(Console(stderr=True)) as progress:
        _show_report(sweep(config, lists, progress, args.command))


def theory(args: argparse.Namespace) -> None:
    """Compare the exact law of the softmax with a simulation."""
    config, _ = _settings(args, Config)
    from experiments.evidence import plus_minus
    from experiments.sweep import theory

    with display(Console(stderr=True)) as progress:
        table = theory(config, progress)
    header = ["d_k", "scale", "trace", "simulated", "entropy", "simulated"]
    rows = []
    for row in table["rows"]:
        cells = [row["d_k"], row["scale"]]
        for value in (row["trace"], row["entropy"]):
            simulated = plus_minus(value["monte_carlo"], value["standard_error"])
            cells += [value["quadrature"], simulated]
        rows.append(cells)
    _print_table(header, rows)


def coord(args: argparse.Namespace) -> None:
    """Measure how the logits grow with d_k as training begins."""
    config, _ = _settings(args, Config)
    corpus = _corpus(config)
    from experiments.sweep import coord

    with display(Console(stderr=True)) as progress:
        table = coord(config, corpus, progress)
    header = ["slope of log std against log d_k"]
    header += [f"step {step}" for step in table["steps"]]
    rows = [[scale, *arm["slope"]] for scale, arm in table["scales"].items()]
    _print_table(header, rows)


def cost(args: argparse.Namespace) -> None:
    """Measure time and memory against other implementations."""
    config, _ = _settings(args, Cost)
    threads = limit_threads(config.threads)
    from experiments.cost import measure_cost
    from experiments.cost_page import sections

    with display(Console(stderr=True)) as progress:
        results = measure_cost(config, progress, threads, args.command)
    console = Console()
    for section in sections(results):
        print_section(section, console)
    directory = Path(config.out) / config.name
    _print_line(console, f"{directory}/cost.json, cost.md, cost.svg")


def decode(args: argparse.Namespace) -> None:
    """Measure a step of decoding on a cache against jax.nn."""
    config, _ = _settings(args, Decode)
    threads = limit_threads(config.threads)
    from experiments.decode import measure_decode

    with display(Console(stderr=True)) as progress:
        results = measure_decode(config, progress, threads, args.command)
    header = ("filled", "ms", "jax.nn ms", "jax.nn / ours", "least", "most", "differs")
    rows = [
        [row["filled"], row["ours_ms"], row["ms"], *row["ratio"], row["differs"]]
        for row in results["rows"]
    ]
    _print_table(header, rows)
    _print_line(Console(), f"{config.out}/{config.name}/decode.json")


def claim(args: argparse.Namespace) -> None:
    """Test what is said about attention."""
    settings, _ = _settings(args, settings_of(args.name))
    threads = limit_threads(0)
    from experiments.claims.run import run, sections_of

    with display(Console(stderr=True)) as progress:
        directory = run(args.name, settings, progress, threads, args.command)
    console = Console()
    for section in sections_of(directory):
        print_section(section, console)
    _print_line(console, f"{directory}/report.html, report.md, results.json")


def every_claim(args: argparse.Namespace) -> None:
    """Run every experiment about a claim, and write one report."""
    from experiments.claims.all import All, count, run_all

    settings, _ = _settings(args, All)
    threads = limit_threads(0)
    with display(Console(stderr=True)) as progress:
        directory, answers = run_all(settings, progress, threads, args.command)
    _print_table(["claim", "verdict"], [[x.claim, x.outcome] for x in answers])
    print(count(answers))
    _print_line(Console(), f"{directory}/report.html, verdicts.md")


def verdicts(args: argparse.Namespace) -> None:
    """Put the verdicts of a run of all experiments into a README."""
    from experiments.claims.all import into_readme

    into_readme(args.into, args.directory)
    print(f"{args.into} has the verdicts of {args.directory}")


def conformance(args: argparse.Namespace) -> None:
    """Hold attention functions against claims about edge cases."""
    from experiments.conformance import hold, table

    reports = hold(args.names, lambda name: print(f"{name} ...", file=sys.stderr))
    if args.details:
        print("\n\n".join(map(str, reports.values())))
    else:
        print(table(reports, args.all))


def report(args: argparse.Namespace) -> None:
    """Write the report of what has been run so far."""
    for directory in args.directories:
        files = ("sweep.json", "config.json", "*/config.json")
        if not any(any(directory.glob(pattern)) for pattern in files):
            raise ConfigError(f"{directory} holds no experiment")
    several = len(args.directories) > 1
    from experiments.report import write_report

    place = Path() if several else args.directories[0]
    _show_report(write_report(place, *args.directories), *args.directories)


def compare(args: argparse.Namespace) -> None:
    """Put runs beside each other, paired by seed."""
    from experiments.compare import read_entries, sections

    console = Console()
    for section in sections(read_entries(args.directories)):
        print_section(section, console)


def sample(args: argparse.Namespace) -> None:
    """Continue prompts with a trained model."""
    if not args.prompts:
        raise ConfigError("nothing to continue: give --prompt or --prompt-file")
    if not (args.directory / "config.json").exists():
        raise ConfigError(f"{args.directory} holds no training run")
    prompts = [x.read_bytes() if isinstance(x, Path) else x for x in args.prompts]
    from experiments.draw import Drawing
    from experiments.sample import EVERY, sample

    top_k = EVERY if args.top_k is None else args.top_k
    with display(Console(stderr=True)) as progress:
        texts = sample(
            args.directory,
            prompts,
            drawing=Drawing(args.temperature, top_k, args.top_p),
            max_new_tokens=args.tokens,
            seed=args.seed,
            progress=progress,
        )
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start=1):
        if len(prompts) > 1:
            print(f"--- {number} of {len(prompts)} ---")
        print((prompt + text).decode(errors="replace"))


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "train": train,
    "sweep": sweep,
    "theory": theory,
    "coord": coord,
    "cost": cost,
    "decode": decode,
    "report": report,
    "compare": compare,
    "sample": sample,
    "conformance": conformance,
    "all": every_claim,
    "verdicts": verdicts,
}
"""Those that are not experiments about a claim, which are all `claim`."""


def _settings(
    args: argparse.Namespace, cls: type[Settings]
) -> tuple[Settings, dict[str, list[Any]]]:
    """The config and the sweep of the file, with the command line's overrides."""
    config, lists = load(args.config)
    if not isinstance(config, cls):
        commands = {Config: "train or sweep", Cost: "cost", Decode: "decode"}
        use = commands.get(type(config)) or type(config).__module__.split(".")[-1]
        raise ConfigError(f"{args.config} is of another kind: use the command {use}")
    changed = override(config, args.overrides, prog=f"{args.prog} {args.config}")
    for path in lists:
        if attrgetter(path)(changed) != attrgetter(path)(config):
            raise ConfigError(f"'{path}' is varied by [sweep] and cannot be overridden")
    return changed, lists


def _flag(args: argparse.Namespace, name: str) -> bool:
    """Whether an option of a command was given, before CONFIG or behind it."""
    behind = f"--{name}" in args.overrides
    args.overrides = [x for x in args.overrides if x != f"--{name}"]
    return behind or getattr(args, name)


def _looks(overrides: Sequence[str]) -> bool:
    """Whether a setting is given that changes only who looks at a training."""
    names = {x[2:].split("=")[0].replace("-", "_") for x in overrides}
    return any(x in names for x in NOT_PART_OF_A_RUN if x.startswith("logging."))


def _corpus(config: Config) -> Corpus:
    corpus = load_corpus(config.data.source)
    check_length(corpus, config)
    return corpus


def _show_report(path: Path, *runs: Path) -> None:
    from experiments.report import print_tables

    console = Console()
    print_tables(console, *(runs or [path.parent]))
    _print_line(console, str(path))


def _print_line(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(*header)
    for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row))
    Console().print(table)
