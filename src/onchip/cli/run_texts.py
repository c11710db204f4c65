"""onchip run MODEL --text TEXT: the labels of sentences on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from onchip.cli.output import print_device, print_json
from onchip.errors import InputError, printable

if TYPE_CHECKING:
    from onchip.cli.run_request import RunRequest

_USED = ("model", "text", "top", "device", "precision", "threads", "without", "tables")  # options that apply


def run_texts(request: RunRequest, texts: Sequence[str], as_json: bool, verbose: int) -> None:
    """Print the most likely classes of each text, with their probabilities."""
    from onchip.formats.tables.csv_writer import check_top, top_classes
    from onchip.runtime.engine import compile
    from onchip.text.text_rows import encode_texts

    _check_options(request)
    if not all(text.strip() for text in texts):
        hint = '--text "a waste of time"'
        raise InputError("a text is empty", got='--text ""', expected="at least one word", hint=hint)
    request = request.with_model(has_texts=True)
    net = request.network()
    if not net.meaning.classes:
        raise InputError(f"network '{net.name}' has no class names", got="--text", expected="a text classifier",
                         hint="onchip train sentiment -o net.onnx")  # fmt: skip
    if request.top is not None:
        check_top(request.top, net.meaning.classes)
    ids = encode_texts(texts, net)
    job = request.job(len(texts))
    engine = compile(net, request.device, job.precision, request.threads, job.batch, job.without, job.tables)
    answers = top_classes(engine(ids), net.meaning.classes, request.top or 1)
    print_device(engine.chosen, engine.plan, verbose, 0.0)
    if as_json:
        print_json({
            "model": request.model, "device": engine.chosen,
            "answers": [{"text": text, "classes": each} for text, each in zip(texts, answers, strict=True)],
        })  # fmt: skip
        return
    for answer in answers:
        print(", ".join(f"{printable(label)} {share:.2f}" for label, share in answer))


def _check_options(request: RunRequest) -> None:
    """InputError for options that only rows of a file have."""
    for field in fields(request):
        value, default = getattr(request, field.name), _DEFAULTS.get(field.name)
        if field.name not in _USED and value not in (default, None, False):
            name = "INPUT" if field.name == "rows" else f"--{field.name.replace('_', '-')}"
            got, hint = f"--text and {name} {value}", "sentences in a file: onchip run MODEL sentences.txt -o out.csv"
            raise InputError("--text needs no rows and writes no file", got=got, expected="--text", hint=hint)


_DEFAULTS = {"deadline": 120.0, "io": ""}
