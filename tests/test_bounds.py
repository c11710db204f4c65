"""Modules that a package keeps to itself change without notice: where one is used, the package has an upper bound."""

import ast
import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from bounds import oldest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INTERNAL = ("numba.core.", "numba.np.", "typer.core.")  # besides names that begin with an underscore
WHEELS = {"sklearn": "scikit-learn", "cuda": "cuda-bindings"}  # modules whose package has another name
PINNED = {"llvmlite": "numba"}  # modules whose versions another package chooses


def bounds():
    """The requirements of each package: of onchip itself, and of its extras."""
    found = {}
    for requirement in chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        name = re.match(r"[\w-]+", requirement)[0]
        if name != "onchip":
            found.setdefault(name, []).append(requirement)
    return found


def named(tree):
    """What code imports, loads by name or reads of a module, as dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield dotted(node).removeprefix("self.")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def dotted(node):
    """a.b.c of a chain of attributes; .b.c where it does not begin with a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([getattr(node, "id", ""), *reversed(parts)])


def internals(tree, packages):
    """The dotted names of `packages` that are not public."""
    for name in named(tree):
        if re.fullmatch(r"\w+(\.\w+)+", name) and name.partition(".")[0] in packages:
            is_private = any(re.match(r"_[a-zA-Z]", part) for part in name.split("."))
            if is_private or f"{name}.".startswith(INTERNAL):
                yield name


def used():
    """Packages whose internals onchip uses, with one of the places each."""
    known = {*bounds(), *WHEELS, *PINNED}
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for name in internals(ast.parse(path.read_text()), known):
            module = name.partition(".")[0]
            found.setdefault(PINNED.get(module, WHEELS.get(module, module)), f"{path.name}: {name}")
    return found


def test_packages_whose_internals_are_used_have_an_upper_bound():
    found = used()
    assert {"numba", "typer", "scikit-learn", "torch"} <= set(found)
    for package, where in found.items():
        for requirement in bounds()[package]:
            assert re.search(r"<\d|==", requirement), f"{requirement} has no upper bound; {where}"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from numba.core import types", "numba.core.types"),
        ("import numba.core.cgutils as c", "numba.core.cgutils"),
        ("from numba import _dynfunc", "numba._dynfunc"),
        ("load('numba.np.arrayobj')", "numba.np.arrayobj"),
        ("self.torch._C.f()", "torch._C.f"),
    ],
)
def test_what_counts_as_internal(code, name):
    assert name in set(internals(ast.parse(code), {"numba", "torch"}))


@pytest.mark.parametrize("code", ["import numba", "from numba import njit", "torch.nn.Linear", "torch.__version__"])
def test_what_does_not(code):
    assert not set(internals(ast.parse(code), {"numba", "torch"}))


def test_every_package_has_a_lower_bound_to_try():
    for package, requirements in bounds().items():
        for requirement in requirements:
            assert oldest(requirement).startswith(f"{package}=="), requirement
