"""Every experiment about a claim, and one page for all of them."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.claims import NAMES
from experiments.claims.claim import Answer
from experiments.claims.run import MODELS, answers_of, run, sections_of
from experiments.config import ConfigError, load
from experiments.evidence import FAILS, HOLDS, OPEN, PART
from experiments.files import damaged, write_text
from experiments.page import Section, Table, html_page, markdown
from experiments.progress import Prefixed, Progress
from experiments.settings import Name, Text

TITLE = "What is said about attention, tested"
HOW = (
    "Each claim is held against an experiment of about a minute: small models, real "
    "text or exact arithmetic, seeds and intervals. A verdict follows from a rule, "
    "which stands with it below, and says no more than these models and budgets show. "
    "Behind ± stands half of a 95 % interval; none is corrected for looking at several."
)
REPORT, VERDICTS = "report.html", "verdicts.md"
BEGIN, END = "<!-- claims -->", "<!-- end of claims -->"


@dataclass(frozen=True)
class All:
    """Which experiments are run, and where their results go."""

    name: Name = "all"  # directory of all of it, inside out
    out: Text = "runs"  # directory of all experiments
    configs: tuple[Text, ...] = tuple(f"configs/{x}.toml" for x in NAMES)  # one each


def run_all(
    settings: All, progress: Progress, threads: str, command: str = ""
) -> tuple[Path, list[Answer]]:
    """Run what is missing, and write report.html and verdicts.md.

    All configs are read before anything is run: that each value is possible, and each
    name free. Whether the settings of one experiment fit together it says itself,
    before it computes, when it is its turn.

    Args:
        settings: which experiments.
        progress: where to say how far it is.
        threads: how many CPU threads there are, in words.
        command: what was typed to get here.

    Returns:
        The directory, and what came of every claim.

    Raises:
        ConfigError: a config is missing, is of another kind, has an impossible value
            or a name that is taken, and nothing has been run; or its settings do not
            fit together, and those before it have been.
    """
    directory = Path(settings.out) / settings.name
    found = [_with_name(path, directory) for path in settings.configs]
    names = [config.name for _, config in found]
    taken = [MODELS, REPORT, VERDICTS]
    if len({*taken, *names}) < len(taken) + len(names):
        raise ConfigError(
            f"the names {names} must differ from each other and from {taken}: each is "
            "a directory beside them; set name in a config"
        )
    done = []
    for number, (name, config) in enumerate(found, start=1):
        prefixed = Prefixed(progress, f"{number}/{len(found)} {name}")
        done.append(run(name, config, prefixed, threads, command))
    answers = [answer for path in done for answer in answers_of(path)]
    rows = [(x.claim, x.outcome, x.number, x.source) for x in answers]
    table = Table("Claims", ("claim", "verdict", "number", "said by"), rows)
    first = Section("verdicts", "Verdicts", [HOW, table])
    page = [first, *(section for path in done for section in sections_of(path))]
    write_text(directory / REPORT, html_page(TITLE, count(answers), page))
    write_text(directory / VERDICTS, markdown(first))
    return directory, answers


def into_readme(readme: Path, directory: Path) -> None:
    """Put the verdicts of a finished run between the marks of a README.

    Raises:
        ConfigError: it has no marks, or there is no table of verdicts.
    """
    text = readme.read_text(encoding="utf-8")
    path = directory / VERDICTS
    _, head, rows = path.read_text(encoding="utf-8").partition("| claim")
    if not head:
        raise damaged(path, "it has no table of claims")
    table = (head + rows).strip()
    pattern = re.compile(f"{BEGIN}.*?{END}", re.DOTALL)
    if not pattern.search(text):
        raise ConfigError(f"{readme} has no part between {BEGIN} and {END}")
    block = f"{BEGIN}\n{table}\n{END}"
    write_text(readme, pattern.sub(lambda _: block, text))


def _with_name(path: str, directory: Path) -> tuple[str, Any]:
    """The name of the experiment of a config; its settings, moved to `directory`."""
    config, _ = load(path)
    name = type(config).__module__.split(".")[-1]
    if name not in NAMES:
        raise ConfigError(f"{path} is not the config of an experiment about a claim")
    return name, dataclasses.replace(config, out=str(directory))


def count(answers: list[Answer]) -> str:
    """How many claims came out how."""
    outcomes = [answer.outcome for answer in answers]
    counts = {
        outcome: outcomes.count(outcome) for outcome in (HOLDS, PART, FAILS, OPEN)
    }
    parts = ", ".join(f"{count} × {name}" for name, count in counts.items() if count)
    return f"Of {len(answers)} claims: {parts}."
