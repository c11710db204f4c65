"""The difference between two rungs: their kernels and the Python code that launches them. Needs no GPU."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onchip.errors import InputError
from onchip.kernels.cuda.common.program import Program
from onchip.ladders import find_ladder, ladder_devices
from onchip.ladders.frame import Rung
from onchip.network.names import known_name

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

RungClass = type[Rung[Any]]
SIDE_BY_SIDE = 160  # columns; a narrower terminal gets a unified diff
_FACTS = {"name", "idea", "why", "report_ms", "report_on", "nondeterministic"}  # shown elsewhere, like cost
_CONTEXT = 3  # unchanged lines around a change in a unified diff


@dataclass(frozen=True)
class Sources:
    """What is compared of two rungs: their kernels, or their Python code."""

    title: str
    before: tuple[str, ...]
    after: tuple[str, ...]


def find_rungs(ladder: str, device: str, names: tuple[str, str]) -> tuple[RungClass, RungClass]:
    """Two rungs of a ladder. "auto": the GPU's, if it has both."""
    devices = ladder_devices(ladder) if device == "auto" else (device,)
    ladders = {device: find_ladder(ladder, device) for device in reversed(devices)}
    rungs = [{rung.name: rung for rung in (*found.rungs, *found.over_ranks)} for found in ladders.values()]
    everyone = [name for known in rungs for name in known]
    first, second = (known_name(name, everyone, f"rung of the ladder {ladder}", f"onchip ladder {ladder} --list")
                     for name in names)  # fmt: skip
    for known in rungs:
        if first in known and second in known:
            return known[first], known[second]
    raise InputError("these rungs are on different devices", got=f"{first} and {second}", expected="two of one device",
                     hint=f"onchip ladder {ladder} --list")  # fmt: skip


def compare(before: RungClass, after: RungClass) -> list[Sources]:
    """The kernels with their template arguments, if the rungs have their own, and the code that launches them."""
    code = Sources("code", *map(tuple, _python_code(before, after)))
    if not _programs(before) and not _programs(after):
        return [code]
    return [Sources("kernels", *map(tuple, _kernel_code(before, after))), code]


# -- the sources -------------------------------------------------------------------------------------------


def _programs(rung: RungClass) -> tuple[Program, ...]:
    programs: tuple[Program, ...] = rung.programs() if hasattr(rung, "programs") else ()
    return programs


def _kernel_code(*rungs: RungClass) -> Iterator[list[str]]:
    """Per rung: its kernels' names with template arguments, then their files; of a file that all share, the kernels."""
    files = [list(dict.fromkeys(program.source for program in _programs(rung))) for rung in rungs]
    for rung, paths in zip(rungs, files, strict=True):
        names = dict.fromkeys(program.name_expression for program in _programs(rung))
        options = dict.fromkeys(option for program in _programs(rung) for option in program.options)
        lines = [*(f"// launches {name}" for name in names), *(f"// compiled with {option}" for option in options)]
        if all(other == files[0] for other in files):
            kernels = dict.fromkeys(name.partition("<")[0] for name in names)
            texts: Iterable[str] = (_kernel_text(path.read_text(), kernel) for path in paths for kernel in kernels)
        else:
            texts = (path.read_text() for path in paths)
        yield [*lines, *(line for text in texts if text for line in ["", *text.splitlines()])]


def _kernel_text(source: str, kernel: str) -> str:
    """The function `kernel` in a .cu file, with its comment and template line; "" if it is in another file."""
    found = re.search(rf"__global__[^;{{]*\b{re.escape(kernel)}\s*\(", source)
    if found is None:
        return ""
    start, end, depth = source.rfind("\n\n", 0, found.start()) + 2, source.index("{", found.end()) + 1, 1
    while depth:
        depth += {"{": 1, "}": -1}.get(source[end], 0)
        end += 1
    return source[start:end].strip("\n")


def _python_code(*rungs: RungClass) -> Iterator[list[str]]:
    """Per rung: attributes, the methods that one of the rungs defines itself, and functions of its module they use."""
    methods = dict.fromkeys(name for rung in rungs for name, value in vars(rung).items()
                             if _is_method(value) and not _is_fact(name))  # fmt: skip
    for rung in rungs:
        attributes = _attributes(rung)
        head = "\n".join([f"class {rung.__name__}:", *attributes])
        own = [inspect.getsource(getattr(rung, name)) for name in methods if hasattr(rung, name)]
        used = _functions_used([*attributes, *own], rung.__module__)
        yield [line for text in [head, *own, *used] for line in [*text.rstrip().splitlines(), ""]]


def _is_fact(name: str) -> bool:
    return name in _FACTS or name.startswith("cost")


def _is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)


def _attributes(rung: RungClass) -> list[str]:
    """The source lines of the class's attributes, without names and explanations."""
    source = textwrap.dedent(inspect.getsource(rung))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    lines = []
    for each in node.body:
        if isinstance(each, ast.Assign):
            names = (node.id for target in each.targets for node in ast.walk(target) if isinstance(node, ast.Name))
            if not any(map(_is_fact, names)):
                lines.append("    " + (ast.get_source_segment(source, each) or ""))
    return lines


def _functions_used(texts: Sequence[str], module: str) -> list[str]:
    """The source of the module's functions that these texts use, directly or not, in the module's order."""
    known, used, pending = vars(sys.modules[module]), dict[str, tuple[int, str]](), list(texts)
    while pending:
        for name in set(re.findall(r"\b[A-Za-z_]\w*", pending.pop())) - set(used):
            function = inspect.unwrap(known.get(name))  # type: ignore[arg-type]
            if inspect.isfunction(function) and function.__module__ == module and function.__name__ != "<lambda>":
                lines, start = inspect.getsourcelines(function)
                used[name] = start, "".join(lines)
                pending.append(used[name][1])
    return [text for _, text in sorted(used.values())]


# -- display -----------------------------------------------------------------------------------------------


def show_diff(before: RungClass, after: RungClass, width: int) -> RenderableType:
    """Rich output: side by side if `width` columns are enough, else unified."""
    from rich.console import Group
    from rich.text import Text

    heads = [Text(f"{sign} {rung.name}: {rung.idea}" + (f"; {rung.why}" if rung.why else ""), style)
             for sign, rung, style in (("-", before, "red"), ("+", after, "green"))]  # fmt: skip
    shown: list[RenderableType] = [*heads]
    for sources in compare(before, after):
        if width >= SIDE_BY_SIDE:
            shown.append(_side_by_side(sources, before.name, after.name))
        else:
            shown.append(_unified(sources, before.name, after.name))
    return Group(*shown)


def _unified(sources: Sources, before: str, after: str) -> Text:
    from rich.text import Text

    lines = list(difflib.unified_diff(sources.before, sources.after, f"{before} ({sources.title})",
                                      f"{after} ({sources.title})", lineterm="", n=_CONTEXT))  # fmt: skip
    if not lines:
        return Text(f"the same {sources.title}")
    styles = {"-": "red", "+": "green", "@": "cyan"}
    return Text("\n").join(Text(line, styles.get(line[:1], "")) for line in ["", *lines])


def _side_by_side(sources: Sources, before: str, after: str) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(f"{before} ({sources.title})", f"{after} ({sources.title})", box=SIMPLE_HEAD, expand=True)
    for column in table.columns:
        column.ratio, column.overflow = 1, "fold"
    matcher = difflib.SequenceMatcher(None, sources.before, sources.after, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        left, right = sources.before[a:b], sources.after[c:d]
        for i in range(max(len(left), len(right))):
            old, new = (lines[i] if i < len(lines) else "" for lines in (left, right))
            styles = ("", "") if kind == "equal" else ("red", "green")
            table.add_row(Text(old, styles[0]), Text(new, styles[1]))
    return table
