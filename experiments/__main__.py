"""Command line of the experiments: `python -m experiments COMMAND ...`."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from experiments.claims import NAMES
from experiments.config import (
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 2 if it was asked for something impossible."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = _parser().parse_args(argv)
        args.command = shlex.join(["python", "-m", "experiments", *argv])
        args.run(args)
    except ConfigError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except OSError as error:
        print("error:", _sentence(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = "starts again" if argv[:1] == ["cost"] else "continues from here"
        print(f"interrupted; the same command {again}", file=sys.stderr)
        return 130
    return 0


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
    if (watch or profile) and (directory / "summary.json").exists():
        raise ConfigError(f"{directory} is finished: there is nothing to look at")
    with display(Console(stderr=True)) as progress:
        summary = run(config, corpus, progress)
    rows = {"run": summary["id"], "status": summary["status"], **summary["metrics"]}
    rows |= {f"{k} table, per byte": x for k, x in summary["baselines"].items()}
    print(
        "corpus: {name}, {bytes:,} bytes, sha256 {sha256}".format(**summary["corpus"])
    )
    _print_line(Console(), f"run in {directory}")
    _print_table(["losses in nats per token", ""], [[k, v] for k, v in rows.items()])


def sweep(args: argparse.Namespace) -> None:
    """Run a whole experiment and write its report."""
    config, lists = _settings(args, Config)
    from experiments.sweep import sweep

    with display(Console(stderr=True)) as progress:
        _show_report(sweep(config, lists, progress, args.command))


def theory(args: argparse.Namespace) -> None:
    """Compare the exact law of the softmax with a simulation."""
    config, _ = _settings(args, Config)
    from experiments.sweep import theory

    with display(Console(stderr=True)) as progress:
        table = theory(config, progress)
    header = ["d_k", "scale", "trace", "simulated", "entropy", "simulated"]
    rows = []
    for row in table["rows"]:
        cells = [row["d_k"], row["scale"]]
        for value in (row["trace"], row["entropy"]):
            simulated = f"{value['monte_carlo']:.4f} ± {value['standard_error']:.4f}"
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
    header = ("filled", "ms", "jax.nn ms", "ratio", "least", "largest", "differs")
    rows = []
    for row in results["rows"]:
        ratios = sorted(1 / x for x in row["ratio"][1:])
        times = row["ours_ms"], row["ms"], 1 / row["ratio"][0]
        rows.append([row["filled"], *times, *ratios, row["differs"]])
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


def all(args: argparse.Namespace) -> None:
    """Run every experiment about a claim, and write one report."""
    from experiments.claims.all import All, run_all

    settings, _ = _settings(args, All)
    threads = limit_threads(0)
    with display(Console(stderr=True)) as progress:
        directory, section = run_all(settings, progress, threads, args.command)
    console = Console()
    print_section(section, console)
    _print_line(console, f"{directory}/report.html, verdicts.md")


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
    from experiments.sample import sample

    with display(Console(stderr=True)) as progress:
        texts = sample(
            args.directory,
            prompts,
            max_new_tokens=args.tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            progress=progress,
        )
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start=1):
        if len(prompts) > 1:
            print(f"--- {number} of {len(prompts)} ---")
        print((prompt + text).decode(errors="replace"))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report a wrong command line like any other impossible wish."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("python -m experiments", description="Attention experiments.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    parsers = {}
    functions = (train, sweep, theory, coord, cost, decode, report, compare, sample)
    for function in (*functions, conformance, all, verdicts):
        name, summary = function.__name__, function.__doc__
        parsers[name] = commands.add_parser(name, help=summary, description=summary)
        parsers[name].set_defaults(run=function, prog=parsers[name].prog)
    for name, summary in NAMES.items():
        parsers[name] = commands.add_parser(name, help=summary, description=summary)
        parsers[name].set_defaults(run=claim, name=name, prog=parsers[name].prog)
    named = ("train", "sweep", "theory", "coord", "cost", "decode", "all", *NAMES)
    for name in named:
        default = "configs/all.toml" if name == "all" else None
        nargs = None if default is None else "?"
        options: dict[str, Any] = {"metavar": "CONFIG", "help": "a TOML file"}
        parsers[name].add_argument("config", nargs=nargs, default=default, **options)
        overrides = parsers[name].add_argument(
            "overrides",
            nargs=argparse.REMAINDER,
            metavar="--KEY VALUE",
            help="settings to change, as in --optim.lr 1e-2; CONFIG --help lists them",
        )
        overrides.required = False  # Python 3.11 takes all that remains as required
    for name in ("sample", "verdicts"):
        metavar = "RUN_DIRECTORY" if name == "sample" else "DIRECTORY"
        parsers[name].add_argument("directory", type=Path, metavar=metavar)
    for name in ("report", "compare"):
        add = parsers[name].add_argument
        add("directories", type=Path, nargs="+", metavar="DIRECTORY")
    add = parsers["train"].add_argument
    add("--watch", action="store_true", help="look at attention as it is trained")
    add("--profile", action="store_true", help="write a trace of some steps")
    add = parsers["verdicts"].add_argument
    add("--into", type=Path, default=Path("README.md"), metavar="FILE")
    add = parsers["conformance"].add_argument
    add("names", nargs="*", metavar="NAME", help="jattn, jax.nn, torch, ...")
    add("--all", action="store_true", help="list what is wrong of nobody, too")
    add("--details", action="store_true", help="what was got and what was wanted")
    add = parsers["sample"].add_argument
    several: dict[str, Any] = dict(action="append", dest="prompts")
    add("--prompt", type=os.fsencode, metavar="TEXT", help="continue this", **several)
    add("--prompt-file", type=Path, metavar="FILE", help="or all of it", **several)
    add("--tokens", type=int, default=256, metavar="N", help="tokens to add")
    add("--temperature", type=float, default=0.8, metavar="X", help="0: greedy")
    add("--top-k", type=int, metavar="K", help="draw from the K most probable ones")
    add("--top-p", type=float, default=1.0, metavar="P", help="from a share of them")
    add("--seed", type=int, default=0, metavar="S", help="of the draws")
    return parser


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


def _corpus(config: Config) -> Corpus:
    corpus = load_corpus(config.data.source)
    check_length(corpus, config)
    return corpus


def _sentence(error: OSError) -> str:
    """What failed, and with which file."""
    if error.filename is None:
        return " ".join(str(error).split())
    return f"{error.filename}: {error.strerror}"


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


if __name__ == "__main__":
    sys.exit(main())
