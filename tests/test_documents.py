"""What is written in docstrings, the README and the configs works."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re

import pytest

import jattn

ROOT = pathlib.Path(__file__).parent.parent
MODULES = ["jattn"] + [
    module.name
    for module in pkgutil.walk_packages(jattn.__path__, "jattn.")
    if not module.name.endswith("__main__")
]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
README = ROOT / "README.md"
pytestmark = pytest.mark.usefixtures("quick_compiler")


def examples():
    for name in MODULES:
        module = importlib.import_module(name)
        for found in doctest.DocTestFinder(exclude_empty=True).find(module):
            if found.examples:
                yield pytest.param(found, id=found.name)


@pytest.mark.parametrize("example", list(examples()))
def test_an_example_prints_what_it_says(example):
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


def test_public_functions_have_examples_or_a_formula():
    modules = (jattn, jattn.masks, jattn.scores, jattn.diagnostics, jattn.testing)
    for module in modules:
        for name, value in vars(module).items():
            if inspect.isfunction(value):
                assert "Example:" in value.__doc__, name


def test_the_python_of_the_readme_runs():
    if not README.exists():
        pytest.skip("there is no README.md")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    names = {"__name__": "readme"}
    for block in blocks:
        if ">>>" in block:
            example = doctest.DocTestParser().get_doctest(
                block, names, "README", None, 0
            )
            runner = doctest.DocTestRunner()
            runner.run(example, clear_globs=False)
            assert not runner.failures
            names |= example.globs
        else:
            exec(compile(block, "README.md", "exec"), names)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda x: x.name)
def test_a_config_loads(path):
    config = pytest.importorskip("experiments.config")
    config.load(path)
