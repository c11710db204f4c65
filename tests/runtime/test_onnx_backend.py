"""ONNX's own test suite, run by onchip: every case of every operator that the reader knows.

A case is claimed if each of its operators is in READERS. It passes, or EXCLUDED says why it cannot; an exclusion that
excludes nothing, or something that would pass, fails. On a GPU the same cases run with ONNX's tolerances, which are for
fp32, and their networks with onchip's tolerances in every precision.
"""

from __future__ import annotations

import re
import unittest
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test
import pytest
from onnx import helper
from onnx.backend.test.loader import load_model_tests

from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from every_network import PRECISIONS, compile_ahead, different_plans, programs_of
from onchip.errors import DeviceError, FormatError, InputError
from onchip.formats.onnx.ops.base import READERS
from onchip.network.graph import Network
from onchip.plan.device import H200
from onchip.plan.plan import Plan
from onchip.runtime import onnx_backend
from onchip.runtime.engine import Engine, compile
from onchip.runtime.onnx_backend import OnchipBackend
from onnx_models import F32, model, numbers, op
from random_networks import MANY_ROWS, ROWS, faults

# Cases are found by their names, which end in the device: test_add_uint16_cpu.
EXCLUDED = {
    r"^test_(add|sub|mul|div|max|min|mod|top_k|equal|greater|less)_(equal_)?uint(16|32|64)_": "no uint but uint8",
    r"^test_pow_types_.*_uint(32|64)_": "no uint but uint8",
    r"^test_cast.*(FLOAT[48]E|INT[24]_|STRING)": "files have no values of 2, 4 or 8 bits but bytes, and no strings",
    r"^test_castlike_((B?FLOAT16|FLOAT|DOUBLE)(_to)?_){2}": "the value to be like has rows of its own",
    r"^test_training_dropout(_default)?(_mask)?_cpu|_training_mode_": "training",
    r"_zero_ratio_mask_|^test_dropout_default_mask|^test_maxpool_with_argmax": "a layer has one output",
    r"^test_layer_normalization_.*(?<!expanded)(?<!ver18)_cpu": "a layer has one output",
    r"^test_resize_.*tf_crop_and_resize": "a resize takes all of a picture",
    r"^test_resize_downsample_scales_(linear|cubic)_align_corners_": "corners are those of whole numbers of pixels",
    r"^test_split_zero_size_splits": "nothing to select",
    r"^test_constant_cpu|^test_shape_": "the output is a constant",
    r"^test_pow_types_int": "powers are of floats",
    r"^test_identity_(sequence|opt)": "values are tensors",
    r"^test_center_crop_pad_.*expanded": "it would compute with the batch",
    r"^test_lstm_with_peephole": "an LSTM's gates do not see its cell",
    r"^test_equal_string": "there are no strings",
    r"^test_attention_24_.*mode3.*_expanded": "a pad is a constant",
    r"^test_onehot_": "the depth is a constant",
    r"^test_(gather|scatter)_elements_.*negative": "ids of a table count from its front",
    r"^test_scatter_elements_with_reduction_(max|min|mul)": "what is put somewhere is put or added",
    r"^test_(de)?quantizelinear_(.*_)?(e4m3fn|e5m2|float4e2m1|u?int[24]|uint16|blocked)": "other ints, blocks",
    r"^test_dynamicquantizelinear": "it would mix the rows of the batch",
    r"^test_dft_(inverse|irfft)": "sums of floats leave no exact zeros, and the inverse takes all bins",
    r"^test_nllloss_.*(?<!no)_weight.*_expanded": "weights have no batch",
    r"^test_maxpool_2d_uint8": "pools take floats",
    r"^test_reduce_.*_(bool_inputs|empty_set(_bool|_expanded)?)_cpu": "reductions take floats, at least one",
}
LEAST = 968  # cases that pass, whatever the version of onnx brings
MAX_NUMBERS = 1 << 16  # elements of a checked row: a case whose whole input is one row may have millions


@pytest.fixture(scope="module")
def claimed() -> set[str]:
    """The names of the cases whose operators are all known."""
    names = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the suite, which divides by zero to generate its data
        for kind in ("node", "simple", "pytorch-converted", "pytorch-operator"):
            for case in load_model_tests(kind=kind):
                proto = case.model or onnx.load(Path(case.model_dir) / "model.onnx", load_external_data=False)
                if proto.graph.node and all(node.op_type in READERS for node in proto.graph.node):
                    names.add(f"{case.name}_cpu")
    return names


class CaseResult(unittest.TestResult):
    """The results of the cases, and the running one."""

    case = ""

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        self.case = test.id().split(".")[-1]
        super().startTest(test)


def run_cases(names: list[str], result: unittest.TestResult | None = None) -> unittest.TestResult:
    """names  with the device at the end"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suite = onnx.backend.test.BackendTest(OnchipBackend, __name__)
    suite.include(f"^({'|'.join(names)})$")
    result = result or unittest.TestResult()
    for tests in suite.test_cases.values():
        for name in names:
            if hasattr(tests, name):
                tests(name).run(result)
    return result


def is_excluded(name: str, patterns: Iterable[str] = EXCLUDED) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def assert_passed(result: unittest.TestResult) -> None:
    wrong = [f"{test}: {trace.strip().splitlines()[-1]}" for test, trace in (*result.failures, *result.errors)]
    assert not wrong, f"{len(wrong)} of {result.testsRun} fail:\n" + "\n".join(wrong)
    assert not result.skipped


@pytest.fixture(scope="module")
def ran(claimed) -> tuple[CaseResult, dict[str, Network]]:
    """The cases on the CPU, and their networks, by name."""
    found, result = {}, CaseResult()

    def remember(net: Network, device: str) -> Engine:
        found[result.case] = net
        return compile(net, device)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(onnx_backend, "compile", remember)
        run_cases(sorted(name for name in claimed if not is_excluded(name)), result)
    return result, found


def test_onnx_own_suite(claimed, ran, record_property):
    result, _ = ran
    assert_passed(result)
    passed = result.testsRun
    print(f"ONNX backend suite: {passed} cases pass, {len(claimed) - passed} are excluded")
    record_property("onnx_cases", passed)
    assert passed == sum(not is_excluded(name) for name in claimed) >= LEAST


def test_no_exclusion_is_stale(claimed):
    for pattern in EXCLUDED:
        assert any(re.search(pattern, name) for name in claimed), f"{pattern!r} excludes nothing"
    names = sorted(name for name in claimed if is_excluded(name))
    result = run_cases(names)
    failed = {test.id().split(".")[-1] for test, _ in (*result.failures, *result.errors)}
    assert sorted(set(names) - failed) == [], "these pass, and are excluded"


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def networks(ran) -> dict[str, Network]:
    return ran[1]


def test_a_gpu_takes_all_of_them(networks):
    for net in networks.values():
        assert different_plans(net, ["fp32"])  # PlanError for an unsupported one


@pytest.fixture(scope="module")
def on_gpu(networks) -> dict[str, dict[str, Plan]]:
    """Case -> precision -> plan; the kernels are compiled on all cores."""
    taken = {name: different_plans(net) for name, net in networks.items()}
    plans = [plan for by_precision in taken.values() for plan in by_precision.values()]
    compile_ahead(programs_of(plans, (1, 2, 7, ROWS, MANY_ROWS)), H200.arch)
    return taken


@pytest.mark.gpu
def test_onnx_own_suite_on_a_gpu(on_gpu):
    names = [name.removesuffix("cpu") + "cuda" for name in on_gpu]
    result = run_cases(names)
    assert_passed(result)
    assert result.testsRun == len(names)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_networks_of_the_suite_keep_the_promise_on_a_gpu(networks, on_gpu, precision):
    """On random rows: the suite's are too few for a baseline error."""
    wrong, verified = [], 0
    for name in (name for name, plans in on_gpu.items() if precision in plans):
        net = networks[name]
        if max(given.row_size for given in net.types.values()) <= MAX_NUMBERS:
            wrong += [f"{name}: {fault}" for fault in faults(net, compile(net, "cuda", precision), 0, (0, ROWS))]
            verified += 1
    assert not wrong, "\n".join(wrong)
    assert verified >= (LEAST - 20 if precision == "fp32" else 15)


@needs_gxx
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", ["test_softmax_axis_1_cpu", "test_reduce_mean_keepdims_random_cpu", "test_Conv1d_cpu"])
def test_a_network_of_the_suite_on_an_emulated_gpu(networks, monkeypatch, case, precision):
    emulate_device(monkeypatch)
    assert faults(networks[case], compile(networks[case], "cuda", precision), 0, (0,)) == []


# -- the backend itself --------------------------------------------------------------------------------------------


def test_run_model_and_run_node():
    x, w = numbers(3, 4), numbers(4, 2, seed=1)
    (y,) = OnchipBackend.run_model(model([op("MatMul", "x w")], {"w": w}), [x])
    np.testing.assert_allclose(y, x @ w, rtol=1e-5)
    (y,) = OnchipBackend.run_node(op("Add", "a b"), [x, x])
    np.testing.assert_array_equal(y, x + x)
    (y,) = OnchipBackend.run_node(op("Softmax", "x"), [x.reshape(3, 2, 2, 1)], opset_version=13)
    np.testing.assert_allclose(y, np.ones((3, 2, 2, 1)))


def test_operands_are_bound_once_and_batches_vary():
    proto = model([op("Gemm", "x w")], x=("N", 4))
    proto.graph.input.append(helper.make_tensor_value_info("w", F32, (4, 2)))
    rep, w = OnchipBackend.prepare(proto), numbers(4, 2, seed=1)
    for rows in (1, 5):
        x = numbers(rows, 4, seed=rows)
        np.testing.assert_allclose(rep.run([x, w])[0], x @ w, rtol=1e-5)
    with pytest.raises(InputError, match="operands changed"):
        rep.run([x, 2 * w])


def test_several_outputs_and_one_row():
    proto = model([op("Relu", "x", "y"), op("Concat", "y y", "z", axis=0)], x=(3, 4), outputs=("y", "z"))
    x = numbers(3, 4)
    y, z = OnchipBackend.prepare(proto).run([x])
    np.testing.assert_array_equal(y, x.clip(0))
    np.testing.assert_array_equal(z, np.concatenate([x, x]).clip(0))


def test_channels_are_never_taken_for_the_batch():
    nodes = [op("BatchNormalization", "x c c c c", "n"), op("Concat", "n n", axis=0)]
    with pytest.raises(FormatError, match="axis 0 is the batch"):
        OnchipBackend.run_model(model(nodes, {"c": np.ones(3, "f4")}, (3, 3)), [numbers(3, 3)])


def test_what_it_cannot_run_says_why():
    assert OnchipBackend.supports_device("CPU")
    assert not OnchipBackend.supports_device("AUTO")
    assert not OnchipBackend.supports_device("TPU")
    assert OnchipBackend.is_compatible(model([op("Relu", "x")]))
    assert not OnchipBackend.is_compatible(model([op("Det", "x")]))
    with pytest.raises(DeviceError, match="CUDA:99"):
        OnchipBackend.prepare(model([op("Relu", "x")]), "CUDA:99")
    with pytest.raises(FormatError, match="Det"):
        OnchipBackend.run_model(model([op("Det", "x")]), [numbers(3, 4)])
