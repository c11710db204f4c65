"""What a page reads of files from elsewhere, checked first: a damaged file is an error, not a wrong page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onchip.bench.report.results import Results
from onchip.errors import FormatError

MOST = 1e30  # of any quantity: times, rates, bytes, flop

Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _is_amount(value: Any) -> bool:
    """A finite number of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST


def _is_positive(value: Any) -> bool:
    return _is_amount(value) and value >= 1 / MOST


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


_ROW: Mapping[str, Check] = {
    **dict.fromkeys(("workload", "case", "engine", "precision", "unit", "setting"), _is_text),
    **dict.fromkeys(("median_ms", "rate"), _optional(_is_positive)),
    **dict.fromkeys(("p20_ms", "p80_ms", "floor_ms", "error"), _optional(_is_amount)),
    "samples_ms": lambda value: all(map(_is_positive, value)), "threads": _optional(_is_count),
    "extra": lambda value: all(_is_text(each) or _is_amount(each) for each in value.values()),
}  # fmt: skip
_MACHINE: Mapping[str, Check] = {
    "name": _optional(_is_text), "device": _optional(_is_text), "cores": _optional(_is_count),
    "launch_us": _optional(_is_amount), "peak": _optional(lambda value: not _wrong(value, _PEAK)),
}  # fmt: skip
_PEAK: Mapping[str, Check] = {
    "flops": lambda value: isinstance(value, dict) and all(map(_is_positive, value.values())),
    "bandwidth": _is_positive, "cache_bandwidth": _is_positive,
}  # fmt: skip
_PROFILE: Mapping[str, Check] = {
    **dict.fromkeys(("network", "device", "precision"), _is_text), **dict.fromkeys(("calls", "rows"), _is_count),
    **dict.fromkeys(("call_us", "kernel_us"), _is_amount),
    **dict.fromkeys(("peak_flops", "bandwidth", "cache_bandwidth"), _is_positive),
    "kernels": lambda value: isinstance(value, list),
}  # fmt: skip
_KERNEL: Mapping[str, Check] = {
    "kernel": _is_text, "layers": _is_texts,
    **dict.fromkeys(("mean_us", "share", "nbytes", "flop", "of_floor", "estimate_us"), _is_amount),
}  # fmt: skip
_EPOCH: Mapping[str, Check] = {
    "epoch": _is_count,
    **dict.fromkeys(("loss", "accuracy", "validation_loss", "validation_accuracy"), _optional(
        lambda value: _is_amount(abs(value) if isinstance(value, int | float) else value))),
}  # fmt: skip


def _wrong(found: Any, checks: Mapping[str, Check]) -> list[str]:
    """The names of values that are missing or of another kind."""
    if not isinstance(found, dict):
        return list(checks)
    return [name for name, check in checks.items() if not check(found.get(name))]


def check_results(path: Path, results: Results) -> Results:
    wrong = _wrong(results.machine, _MACHINE)
    for row in results.rows:
        wrong += [f"{name} of a row" for name in _wrong(vars(row), _ROW)]
    _refuse(path, wrong, "a result file", "write it with onchip bench")
    return results


def check_profile(path: Path, profile: Any) -> dict[str, Any]:
    wrong = _wrong(profile, _PROFILE)
    wrong += [f"{name} of a kernel" for each in ([] if wrong else profile["kernels"]) for name in _wrong(each, _KERNEL)]
    _refuse(path, wrong, "a profile of this version", f"onchip profile MODEL --json > {path}")
    return dict(profile)


def check_epochs(path: Path, epochs: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    wrong = [name for each in epochs for name in _wrong(each, _EPOCH)]
    _refuse(path, wrong, "a training log", f"onchip train digits --log {path}")
    return tuple(epochs)


def _refuse(path: Path, wrong: list[str], what: str, hint: str) -> None:
    if wrong:
        raise FormatError(f"{path} is not {what}", got=f"no {wrong[0]}, or a bad one", expected=what, hint=hint)
