"""Generate the README's table of layers, its example plan, the list of ONNX operators, and the API reference.

    python docs/make_pages.py            # write them
    python docs/make_pages.py --check    # exit 1 if one is out of date

Needs a source tree: the table plans the test cases of every layer.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README, API, OPERATORS = ROOT / "README.md", ROOT / "docs" / "api.md", ROOT / "docs" / "operators.md"
SHOWN_PLAN = re.compile(r"(^\$ onchip (plan .*)\n)(?:[^`$].*\n)+", re.MULTILINE)
BEGIN, END = "<!-- layers:begin -->", "<!-- layers:end -->"

# Titles of the files of network/layers; "": listed under the previous title.
FAMILIES = {
    "linear": "matrix multiplication", "matmul": "", "conv": "convolutions", "pool": "pools and reductions",
    "norm": "norms", "activation": "activations", "function": "elementwise functions",
    "combine": "arithmetic, comparison, concatenation", "embedding": "embeddings", "recurrent": "recurrent",
    "shape": "shapes", "select": "indexing and resizing", "resize": "", "scan": "prefix sums",
    "argument": "argmax and top-k", "cast": "casts", "pixels": "",
}  # fmt: skip


# -- the layers ---------------------------------------------------------------------------------------------


def layers_table() -> str:
    """One line per family of layers: their names, where they run, and which can be trained."""
    from onchip.kernels.cpu import KERNELS as CPU
    from onchip.kernels.cuda import KERNELS as CUDA
    from onchip.network.layers import LAYERS
    from onchip.plan.device import KNOWN
    from onchip.runtime.cpu.backend import this_cpu

    on_cpu = {kind for kind in LAYERS if _is_planned(kind, this_cpu(), CPU)}
    on_gpu = {kind for kind in LAYERS if _is_planned(kind, KNOWN["h200"], CUDA)}
    trained = {kind for kind in LAYERS if _can_train(kind)}
    lines = ["| layers | CPU | GPU | train |", "| --- | --- | --- | --- |"]
    for title, kinds in _families(LAYERS):
        names = ", ".join(sorted(kinds, key=str.lower))
        cells = [f"**{title}**: {names}", *(_which(kinds, some) for some in (on_cpu, on_gpu, trained))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _families(layers: dict[str, Any]) -> Iterable[tuple[str, list[str]]]:
    """The layers of each title; a file without a title belongs to the previous one."""
    found: dict[str, list[str]] = {}
    for file, title in FAMILIES.items():
        title = title or list(found)[-1]
        here = [kind for kind, layer in layers.items() if layer.__module__.endswith(f".{file}")]
        found.setdefault(title, []).extend(here)
    missing = set(layers) - {kind for kinds in found.values() for kind in kinds}
    assert not missing, f"FAMILIES has no title for the file of {', '.join(sorted(missing))}"
    return found.items()


def _which(kinds: list[str], supported: set[str]) -> str:
    some = [kind for kind in sorted(kinds, key=str.lower) if kind in supported]
    return "yes" if len(some) == len(kinds) else ", ".join(some) or "-"


def _is_planned(kind: str, device: Any, kernels: Any) -> bool:
    """Whether the device's kernels support every test case of a layer."""
    from layer_cases import CASES, network
    from onchip.errors import OnchipError
    from onchip.plan.planner import make_plan

    cases = [case for case in CASES if case.layer.kind == kind]
    assert cases, f"tests/layer_cases.py has no case of {kind}"
    try:
        for case in cases:
            make_plan(network(case), device, kernels)
    except OnchipError:
        return False
    return True


def _can_train(kind: str) -> bool:
    """Whether the CPU and a GPU have kernels for a step through every test case of a layer."""
    from gradient_cases import GRADIENT_CASES
    from layer_cases import network
    from onchip.errors import OnchipError
    from onchip.network.training import TrainingStep
    from onchip.plan.device import KNOWN
    from onchip.plan.gradient.step import training_step
    from onchip.plan.kernel import Job
    from onchip.plan.planner import make_plan
    from onchip.runtime.cpu.backend import this_cpu
    from onchip.runtime.placement import kernels_for
    from training_steps import trained_through

    cases = [case for case in GRADIENT_CASES if case.layer.kind == kind]
    try:
        for case in cases:
            step = training_step(trained_through(network(case)), TrainingStep("mse"))
            for device in (this_cpu(), KNOWN["h200"]):
                make_plan(step, device, kernels_for(device), Job("fp32", 32)).check_layers()
    except OnchipError:
        return False
    return bool(cases)


# -- ONNX operators -----------------------------------------------------------------------------------------


def operators_page() -> str:
    """Every ONNX operator that is read, by the file that reads it."""
    import onchip.formats.onnx.reader  # noqa: F401 - registers them
    from onchip.formats.onnx.ops.base import FOLDS, READERS

    families: dict[str, list[str]] = {}
    for operator, read in READERS.items():
        if operator.isidentifier() or "." in operator:
            families.setdefault(read.__module__.rpartition(".")[2], []).append(operator)
    lines = [
        f"| {family.replace('_', ' ')} | {', '.join(sorted(names))} |" for family, names in sorted(families.items())
    ]
    constant = sorted(set(FOLDS) - set(READERS))
    return "\n".join([
        "# ONNX operators",
        "",
        "Generated by `python docs/make_pages.py`. onchip reads these operators of opset 6 and later; older files are",
        "converted. Not every attribute of each is supported: an error names the node and the attribute. A file with",
        "other operators is refused with a list of all of them, and nothing runs. See",
        "[your own model](tutorials/import.md).",
        "",
        "| family | operators |",
        "| --- | --- |",
        *lines,
        "",
        "Among constants, which are computed when the file is read, also:",
        _wrap(", ".join(constant) + "."),
        "",
    ])  # fmt: skip


# -- the reference ------------------------------------------------------------------------------------------


def api_page() -> str:
    """Every public name with its signature and docstring; for a class also its methods and properties."""
    import onchip

    parts = [
        "# API reference",
        "Generated by `python docs/make_pages.py`. Names are imported when they are first used: `import onchip` is\n"
        "quick and touches no device. All errors are `OnchipError`s.",
        _wrap(" · ".join(f"[{name}](#{name.lower()})" for name in onchip.__all__)),
    ]
    for name in onchip.__all__:
        parts += _entry(name, getattr(onchip, name))
    return "\n\n".join(parts) + "\n"


def _entry(name: str, thing: Any) -> list[str]:
    parts = [f"## {name}", f"```python\n{_signature(f'onchip.{name}', thing)}\n```", _doc(thing)]
    members = [_member(*member) for member in inspect.getmembers(thing)] if inspect.isclass(thing) else []
    if shown := [member for member in members if member]:
        parts.append("\n".join(shown))
    return [part for part in parts if part]


def _member(name: str, member: Any) -> str:
    """One line for a documented method or property of onchip; "" for others."""
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    is_ours = inspect.isfunction(function) and function.__module__.startswith("onchip.")
    if not is_ours or (name.startswith("_") and name != "__call__") or not function.__doc__:
        return ""
    shown = "engine" if name == "__call__" else f".{name}"
    called = shown if isinstance(member, property) else f"{shown}{_parameters(member)}"
    return _wrap(f"- `{called}`: {inspect.getdoc(function).partition(chr(10) * 2)[0]}")


def _wrap(text: str) -> str:
    """Text, or a list item, in lines of at most 120 columns."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _signature(name: str, thing: Any) -> str:
    """The signature on one line or, if too long, one line per parameter."""
    parameters, result = _parameters(thing), inspect.signature(thing).return_annotation
    writes = "" if inspect.isclass(thing) or result is inspect.Signature.empty else f" -> {result}"
    if len(name + parameters + writes) <= 110:
        return f"{name}{parameters}{writes}"
    lines = [f"    {_parameter(each)},\n" for each in _shown(thing)]
    return f"{name}(\n{''.join(lines)}){writes}"


def _parameters(thing: Any) -> str:
    return f"({', '.join(map(_parameter, _shown(thing)))})"


def _shown(thing: Any) -> list[Any]:
    """The parameters, with a * before the keyword-only ones."""
    found: list[Any] = []
    for parameter in inspect.signature(thing).parameters.values():
        is_named = parameter.kind is parameter.KEYWORD_ONLY
        if is_named and not any(each == "*" or getattr(each, "kind", None) is each.VAR_POSITIONAL for each in found):
            found.append("*")
        if parameter.name != "self":
            found.append(parameter)
    return found


def _parameter(parameter: Any) -> str:
    if parameter == "*":
        return "*"
    text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {parameter.annotation}"
    return text if parameter.default is parameter.empty else f"{text} = {parameter.default!r}"


def _doc(thing: Any) -> str:
    """The docstring: its first paragraph as text, the rest verbatim, to keep its columns."""
    first, _, rest = (inspect.getdoc(thing) or "").partition("\n\n")
    return _wrap(first) + (f"\n\n```text\n{rest.strip()}\n```" if rest.strip() else "")


# -- the files ----------------------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    """The up-to-date content of each file."""
    readme = README.read_text()
    begin, end = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    readme = f"{readme[:begin]}\n\n{layers_table()}\n\n{readme[end:]}"
    return {README: SHOWN_PLAN.sub(lambda found: found[1] + _printed(found[2]), readme),
            API: api_page(), OPERATORS: operators_page()}  # fmt: skip


def _printed(command: str) -> str:
    """The output of an onchip command."""
    from onchip.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(shlex.split(command))
    return out.getvalue()


def main(arguments: list[str]) -> int:
    code = 0
    for path, text in pages().items():
        if path.exists() and path.read_text() == text:
            continue
        if arguments == ["--check"]:
            print(f"{path} is out of date", file=sys.stderr)
            code = 1
        else:
            path.write_text(text)
    return code


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    sys.exit(main(sys.argv[1:]))
