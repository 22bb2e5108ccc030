"""Command line of the experiments: `python -m experiments COMMAND ...`."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from experiments.claims import NAMES
from experiments.commands import COMMANDS, claim
from experiments.config import ConfigError

EVERYTHING = "configs/all.toml"
INTERRUPTED = 130  # exit code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 2 if it was asked for something impossible."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        args = _parser().parse_args(_with_config(argv))
        args.command = shlex.join(["python", "-m", "experiments", *argv])
        args.run(args)
    except ConfigError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except OSError as error:
        print("error:", _sentence(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted{_again(argv)}", file=sys.stderr)
        return INTERRUPTED
    return 0


def _again(argv: Sequence[str]) -> str:
    """What the same command does after an interrupt."""
    command, *_ = [*argv, ""]
    if command in ("train", "sweep", "all", *NAMES):
        return "; the same command continues from here"
    if command in ("theory", "coord", "cost", "decode"):
        return "; the same command starts again"
    return ""


def _with_config(argv: list[str]) -> list[str]:
    """`all` may come without its CONFIG, settings behind it or not."""
    behind = argv[1] if len(argv) > 1 else "--"
    left_out = behind.startswith("--") and behind != "--help"
    return ["all", EVERYTHING, *argv[1:]] if argv[:1] == ["all"] and left_out else argv


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report a wrong command line like any other impossible wish."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("python -m experiments", description="Attention experiments.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    parsers: dict[str, argparse.ArgumentParser] = {}
    found = {name: (run, run.__doc__) for name, run in COMMANDS.items()}
    found |= {name: (claim, summary) for name, summary in NAMES.items()}
    for name, (run, summary) in found.items():
        parsers[name] = commands.add_parser(name, help=summary, description=summary)
        parsers[name].set_defaults(run=run, name=name, prog=parsers[name].prog)
    named = ("train", "sweep", "theory", "coord", "cost", "decode", "all", *NAMES)
    for name in named:
        default = f", {EVERYTHING} if none is given" * (name == "all")
        parsers[name].add_argument(
            "config", metavar="CONFIG", help=f"a TOML file{default}"
        )
        overrides = parsers[name].add_argument(
            "overrides",
            nargs=argparse.REMAINDER,
            metavar="--KEY VALUE",
            help="settings to change, as in --optim.lr 1e-2; CONFIG --help lists them",
        )
        overrides.required = False  # Python 3.11 takes all that remains as required
    _add_options(parsers)
    return parser


def _add_options(parsers: dict[str, argparse.ArgumentParser]) -> None:
    """What commands take besides a CONFIG."""
    for name in ("sample", "verdicts"):
        metavar = "RUN_DIRECTORY" if name == "sample" else "DIRECTORY"
        parsers[name].add_argument("directory", type=Path, metavar=metavar)
    place = "of runs; the page of one goes into it, that of several is ./report.html"
    for name, text in (("report", place), ("compare", "of runs")):
        add = parsers[name].add_argument
        add("directories", type=Path, nargs="+", metavar="DIRECTORY", help=text)
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


def _sentence(error: OSError) -> str:
    """What failed, and with which file."""
    if error.filename is None:
        return " ".join(str(error).split())
    return f"{error.filename}: {error.strerror}"


if __name__ == "__main__":
    code = main()
    if code == INTERRUPTED:
        # What XLA still computes would crash if the interpreter were taken down.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
