"""The architecture: imports point one way, `import onchip` is quick, public names are the listed ones."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import onchip

ROOT = Path(onchip.__file__).parent

# A package may import itself and the packages before it.
ORDER = [
    "errors", "files", "cache", "svg", "network", "formats", "plan", "kernels", "text", "runtime", "train",
    "workloads", "measure", "ladders", "bench", "cli",
]  # fmt: skip


def package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; say where it is"
            found.append((node.lineno, node.module or ""))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


SOURCES = [p for p in sorted(ROOT.rglob("*.py")) if package(p) not in ("__init__", "__main__")]


def test_the_sources_are_found():
    assert {package(p) for p in SOURCES} <= set(ORDER)
    assert len(SOURCES) > 30


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    here = ORDER.index(package(path))
    for line, module in imported_modules(path):
        if module.startswith("onchip."):
            there = module.split(".")[1]
            if there in ORDER:
                assert ORDER.index(there) <= here, f"{path}:{line}: {package(path)} must not import {there}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_cycle_of_modules():
    """Depth first over all imports, also those inside functions and for type checks."""
    names = {module_name(path): path for path in ROOT.rglob("*.py")}
    edges: dict[str, set[str]] = {}
    for name, path in names.items():
        edges[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            targets = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                targets = [f"{node.module}.{target}" for target in targets] + [node.module or ""]
            edges[name] |= {t for t in targets if t in names and t != name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(edges[name]):
                # A package's __init__ that imports its own modules does not make them import each other.
                if not (name.startswith(target + ".") and names[target].name == "__init__.py"):
                    visit(target, (*trail, name))
            done.add(name)

    for name in sorted(names):
        visit(name, ())


# A family of kernels imports itself and these; recipes and __init__ put families together.
SHARED = {
    "cpu": {"compiler", "cost", "kernel", "memory", "microkernels", "threading"},
    "cuda": {"common", "mma"},
}


@pytest.mark.parametrize("device", SHARED)
def test_no_family_of_kernels_imports_another(device):
    folder, prefix = ROOT / "kernels" / device, f"onchip.kernels.{device}."
    for path in sorted(folder.glob("*/**/*.py")):
        family = path.relative_to(folder).parts[0]
        for line, module in imported_modules(path) if family != "recipes" else ():
            other = module.removeprefix(prefix).split(".")[0]
            if module.startswith(prefix) and other != family:
                assert other in SHARED[device], f"{path}:{line}: {family} must not import {other}"


def test_the_runtime_imports_no_training_kernel():
    """It knows kernels that run whole steps by kernels/cuda/common/training.py and kernels/cpu/__init__.py alone."""
    training = re.compile(r"onchip\.kernels\.\w+\.train(\.|$)")
    for path in sorted((ROOT / "runtime").rglob("*.py")):
        for line, module in imported_modules(path):
            assert not training.match(module), f"{path}:{line}: the runtime must not import {module}"


def test_import_loads_no_package():
    heavy = ("numpy", "numba", "cuda", "torch", "onnx", "scipy", "sklearn", "typer")
    code = (
        "import sys; import onchip;"
        "print(*sorted(m for m in sys.modules if m.startswith('onchip')));"
        f"print(*sorted(m for m in {heavy} if m in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out == ["onchip onchip.errors", ""]


TIMED_ON_A_GPU = ("test_auto.py", "test_cuda_engine.py", "test_cuda_torch.py")  # what they time is marked gpu
CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "time", "time_ns"}
LIMITS = {"timeout", "deadline"}


def reads_a_clock(call: ast.Call) -> bool:
    """A clock, or a limit of time: pytest's timeout is the one guard against a hang."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    numbers = [given.value for given in call.args if isinstance(getattr(given, "value", None), int | float)]
    waits = name in ("join", "wait") and any(value >= 1 for value in numbers)  # less is a nap of a loop
    limits = any(given.arg in LIMITS and getattr(given.value, "value", 1) is not None for given in call.keywords)
    return name in CLOCKS or name in LIMITS or waits or limits


def test_no_test_depends_on_the_clock():
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and reads_a_clock(node) and path.name not in TIMED_ON_A_GPU:
                pytest.fail(f"{path}:{node.lineno}: {ast.unparse(node)}")


@pytest.mark.parametrize("text", ["time.monotonic()", "process.communicate(timeout=30)", "thread.join(30)",
                                  "event.wait(10)", "settings(deadline=200)", "pytest.mark.timeout(60)"])  # fmt: skip
def test_a_clock_is_found(text):
    assert reads_a_clock(ast.parse(text, mode="eval").body)


def test_public_names():
    assert onchip.__all__ == sorted(onchip.__all__)
    assert dir(onchip) == sorted([*onchip.__all__, "__version__"])
    for name in onchip.__all__:
        assert getattr(onchip, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        onchip.nothing  # noqa: B018


def test_there_is_one_version():
    project = tomllib.loads((ROOT.parent.parent / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "onchip.__version__"}


def test_what_the_wheel_leaves_out_is_loaded_by_name_alone():
    """Without bench/peers/frameworks every other module can be imported: a wheel has none of it."""
    left_out = "onchip.bench.peers.frameworks"
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body if "frameworks" not in path.parts else ():
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith(left_out), f"{path}:{node.lineno}"


def test_without_scikit_learn_networks_run_and_what_needs_it_says_so():
    code = (
        "import sys; sys.modules['sklearn'] = sys.modules['scipy'] = None\n"
        "import numpy as np, onchip\n"
        "print(onchip.compile(onchip.mlp(2, 3, activation='GELU'), 'cpu')(np.zeros((1, 2), np.float32)).shape)\n"
        "from onchip.cli.main import main\n"
        "assert main(['train', 'digits', '--data', 'sklearn', '--epochs', '1']) == 0\n"
        "try: onchip.Classifier\n"
        "except ImportError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shape, *lines = ran.stdout.splitlines()
    assert shape == "(1, 3)"
    assert "onchip.Classifier needs scikit-learn" in lines
    assert "pip install 'onchip[sklearn]'" in lines[-1]


GENERIC_LAMBDA = re.compile(r"\[[^\]\n]*\]\s*\([^)\n]*\bauto\b[^)\n]*\)\s*(mutable\s*)?\{")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.cu*")), ids=lambda p: p.name)
def test_no_kernel_has_a_generic_lambda(path):
    """NVRTC 13.0 refuses them; newer ones, which `make check` may use, do not."""
    assert not GENERIC_LAMBDA.search(path.read_text())
