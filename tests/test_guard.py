"""The guard of changes that should change nothing: what it compares, and what it reports."""

import pytest

from guard import code_digest, compare, compare_code, renamed, sections, training_of, training_plans
from onchip.errors import DeviceError
from onchip.kernels.cuda.common.program import Program
from onchip.runtime.cuda.nvrtc import compile_program, nvrtc_version

KERNEL = "__global__ void {name}(float* x) {{ x[threadIdx.x] = {value} * x[threadIdx.x + 1]; }}\n"


def record(**sections):
    return {"code": {}, "results": {}, "trainings": {}, "plans": {}} | sections


@pytest.fixture
def compiled(tmp_path):
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)

    def compile(name, value, comment=""):
        source = tmp_path / f"{name}.cu"
        source.write_text(comment + KERNEL.format(name=name, value=value))
        return compile_program(Program(source, name), "sm_90a").cubin

    return compile


def test_code_is_the_same_under_another_name_and_differs_by_a_constant(compiled):
    cubin = compiled("scale", "2.5f")
    assert any(name.startswith(b".text.") and b"scale" in name and content for name, content in sections(cubin))
    assert code_digest(cubin) == code_digest(compiled("multiply", "2.5f", "// other words\n"))
    assert code_digest(cubin) != code_digest(compiled("scale", "3.5f"))


def test_instances_are_compared_by_their_code():
    assert compare_code({"a: x, sm_90a": "1", "b: y, sm_90a": "2"}, {"c: x, sm_90a": "2", "d: y, sm_90a": "1"}) == []
    (told,) = compare_code({"a: x, sm_90a": "1"}, {"a: x, sm_90a": "1", "b: y, sm_90a": "1"})
    assert "1 instances before (a: x, sm_90a), 2 now (a: x, sm_90a; b: y, sm_90a)" in told


def test_renames_are_of_whole_words():
    assert renamed('"mlp_pair", "mlp_pairs", "mlp_pair<3>"', {"mlp_pair": "two"}) == '"two", "mlp_pairs", "two<3>"'


def test_what_differs_is_named():
    old = record(results={"n": "1", "m": "2"}, plans={"p": [["mlp_pair", "mlp_pair<3>", ["a"], []]]})
    new = record(results={"n": "1", "m": "3"}, plans={"p": [["two", "two<3>", ["a"], []]]})
    assert compare(old, old, {}) == []
    assert [line.partition(" differs")[0] for line in compare(old, new, {})] == ["results: m", "plans: p"]
    assert [line.partition(" differs")[0] for line in compare(old, new, {"mlp_pair": "two"})] == ["results: m"]
    assert "trainings: t is new" in compare(old, record(**{**old, "trainings": {"t": "1"}}), {})


def test_a_training_has_the_same_digest_every_time():
    assert training_of(3) == training_of(3)
    assert training_of(3)[1] != training_of(4)[1]


def test_plans_of_trainings_have_launches():
    plans = training_plans()
    on_a_gpu = [shown for name, shown in plans.items() if ", cuda, " in name]
    assert len({shown[0] for shown in on_a_gpu}) >= 3
    assert all(launches for *_, launches in on_a_gpu)
