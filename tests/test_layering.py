"""Imports point downwards."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "jattn"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = [
    {"jattn.core"},
    {"jattn.masks", "jattn.scores", "jattn.rope"},
    {"jattn.algorithms"},
    {"jattn.prepare", "jattn.execute", "jattn.choice", "jattn.dispatch"},
    {"jattn.reports", "jattn.foreign"},
    {
        "jattn.diagnostics",
        "jattn.tuning",
        "jattn.counting",
        "jattn.explanation",
        "jattn.selfcheck",
        "jattn.__main__",
        "jattn.drawing",
        "jattn.display",
        "jattn.adapter",
        "jattn.cache",
        "jattn.cache_arguments",
        "jattn.cache_slots",
        "jattn.layer",
        "jattn.layer_cache",
        "jattn.layer_call",
        "jattn.compat",
        "jattn.testing",
    },
    {"jattn.nnx", "jattn.linen"},
]
"""From the lowest to the highest."""

CORE = [
    "letters",
    "spec",
    "rules",
    "softmax",
    "stats",
    "varying",
    "product",
    "boundary",
    "arguments",
    "dropout",
    "tile",
    "plan",
    "angles",
    "rotary",
    "heads",
]
"""The files of the core, each of which may import those before it."""


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path):
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                place = PACKAGE.parent / whole.replace(".", "/")
                is_module = place.is_dir() or place.with_suffix(".py").exists()
                yield whole if is_module else node.module


def exports(path):
    """The functions and classes that a package makes public."""
    return {
        alias.asname
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module != module_of(path)
        for alias in node.names
        if alias.asname
    }


def within(module, parents):
    return any(module == x or module.startswith(x + ".") for x in parents)


def layer_of(module):
    found = [n for n, names in enumerate(LAYERS) if within(module, names)]
    return found[0] if found else len(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_module_imports_its_own_layer_or_lower(path):
    if path == PACKAGE / "__init__.py":
        layer = layer_of("jattn.tuning")
    else:
        layer = layer_of(module_of(path))
        assert layer < len(LAYERS), "give the module a layer"
    for name in imports_of(path):
        if within(name, ["jattn"]) and name != "jattn":
            assert layer_of(name) <= layer, name
            if layer == layer_of("jattn.algorithms"):
                assert not within(name, LAYERS[1]), "algorithms import the core only"


@pytest.mark.parametrize("path", [p for p in FILES if "core" in p.parts], ids=module_of)
def test_the_core_imports_jax_numpy_and_lower_files_of_the_core(path):
    if path.stem == "__init__":
        return
    place = CORE.index(path.stem)
    lower = [f"jattn.core.{name}" for name in CORE[:place]]
    for name in imports_of(path):
        known = within(name, ["jax", "numpy", *lower])
        assert known or name.split(".")[0] in STANDARD, name


STANDARD = {
    "dataclasses",
    "collections",
    "typing",
    "itertools",
    "re",
    "difflib",
    "functools",
    "math",
    "string",
}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_nothing_private_of_jax_and_flax_only_in_its_own_folder(path):
    for name in imports_of(path):
        assert not within(name, ["jax._src"]), name
        if within(name, ["flax"]):
            assert path.parent in (PACKAGE / "nnx", PACKAGE / "linen"), name
    assert "jax._src" not in path.read_text()


@pytest.mark.parametrize(
    "folder",
    [path.parent for path in FILES if path.stem == "__init__" and exports(path)],
    ids=module_of,
)
def test_no_module_has_the_name_of_a_public_function(folder):
    names = exports(folder / "__init__.py")
    assert not names & {path.stem for path in folder.glob("[a-z]*.py")}
