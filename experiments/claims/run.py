"""One experiment about a claim from its settings to its page."""

from pathlib import Path
from typing import Any

from experiments.claims.claim import Answer, Claim, find
from experiments.claims.store import Store
from experiments.config import ConfigError, to_dict
from experiments.files import read_json, write_json, write_text
from experiments.lock import hold
from experiments.machine import describe
from experiments.page import Finding, Part, Section, Table, html_page, markdown
from experiments.progress import Progress

MODELS = "models"
"""The directory, beside those of the experiments, of the models that they share."""


def run(
    name: str, settings: Any, progress: Progress, threads: str, command: str = ""
) -> Path:
    """Measure what is missing, and write results.json, report.html and report.md.

    Args:
        name: of the experiment.
        settings: of its config.
        progress: where to say how far it is.
        threads: how many CPU threads there are, in words.
        command: what was typed to get here.

    Returns:
        The directory.

    Raises:
        ConfigError: a setting does not fit, or the directory holds something else.
    """
    directory = Path(settings.out) / settings.name
    with hold(directory):
        _refuse_another(directory, name)
        store = Store(directory, Path(settings.out) / MODELS, progress)
        results = find(name).measure(settings, store)
        write_json(
            directory / "results.json",
            {
                "experiment": name,
                "command": command,
                "settings": to_dict(settings),
                "machine": describe(threads),
                "results": results,
            },
        )
        sections = sections_of(directory)
        title = find(name).title
        answer = " ".join(x.sentence for x in answers_of(directory))
        write_text(directory / "report.html", html_page(title, answer, sections))
        write_text(directory / "report.md", "\n\n".join(map(markdown, sections)))
    progress.finish(f"{name}  finished")
    return directory


def answers_of(directory: Path) -> list[Answer]:
    """What came of the claims of a finished experiment."""
    claim, kept = _read(directory)
    return claim.answers(kept["results"])


def sections_of(directory: Path) -> list[Section]:
    """The page of a finished experiment."""
    claim, kept = _read(directory)
    name = kept["experiment"]
    results = kept["results"]
    facts = Table(
        "Settings and machine",
        ("what", "value"),
        [
            (key, str(value))
            for part in ("settings", "machine")
            for key, value in kept[part].items()
        ],
        folded=True,
    )
    found = [as_finding(answer) for answer in claim.answers(results)]
    parts: list[Part] = [claim.design, *found, *claim.parts(results), facts]
    return [Section(name, claim.title, parts)]


def as_finding(answer: Answer) -> Finding:
    """An answer as a part of a page."""
    return Finding(
        f"{answer.claim.removesuffix('.')}: {answer.outcome}",
        f"{answer.sentence} {answer.number}",
        f"Said by: {answer.source}. Rule: {answer.rule}.",
    )


def _read(directory: Path) -> tuple[Claim, dict[str, Any]]:
    kept = read_json(directory / "results.json")
    return find(kept["experiment"]), kept


def _refuse_another(directory: Path, name: str) -> None:
    path = directory / "results.json"
    if path.exists() and (held := read_json(path)["experiment"]) != name:
        raise ConfigError(f"{directory} holds results of {held}; set another --name")
