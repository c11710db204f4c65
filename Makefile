# Two commands for users: `make demo` and `make test`. Both create .venv and install their packages from wheels.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
QUICK  := tests/test_architecture.py tests/network tests/formats/test_csv_rows.py tests/plan/test_plan_shown.py \
          tests/plan/test_planner.py tests/kernels/cpu/mlp/test_fused.py tests/runtime/test_engine.py \
          tests/train/test_options.py tests/train/test_fit_inputs.py tests/cli/test_cli_plan.py tests/cli/test_cli_cache.py

KERNELS := onchip.kernels.cuda onchip.ladders
BOUNDS := tests/cli/test_cli_main.py tests/cli/test_values.py tests/cli/test_cli_demo.py tests/formats/onnx/test_layers.py \
          tests/kernels/cpu/mlp/test_fused.py tests/runtime/test_engine.py tests/train/test_fit_many.py \
          tests/ladders/test_linear_cuda.py tests/ladders/test_sentiment_cuda.py tests/runtime/test_nvrtc.py

.PHONY: demo test test-all test-bounds quick check check-kernels sanitize bench bench-h200 docs clean

# The first run creates .venv (a minute or two of downloads) and takes some 20 seconds; later runs take less.
demo: $(VENV)/.demo
	$(BIN)/onchip demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Every case of every test, where `make test` runs a sample.
test-all: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile --all-cases

# With the oldest and with the newest packages that pyproject.toml allows, each in its own environment.
test-bounds:
	$(PYTHON) tests/bounds.py $(BOUNDS)

# A few tests of every package, in under a minute on two cores: run it before a commit.
quick: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(QUICK)

# Linters, types, architecture, and a sample of the CUDA kernels compiled: a minute or two on two cores.
check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py
	$(BIN)/python -m onchip.runtime.cuda.kernel_check $(KERNELS) --sample 4

# Every instance of every CUDA kernel for Hopper, one of each for other chips, held against budgets. Needs no GPU.
check-kernels: $(VENV)/.test
	$(BIN)/python -m onchip.runtime.cuda.kernel_check $(KERNELS)

# The CUDA kernels under compute-sanitizer, with a planted bug for each of its tools. Needs a GPU.
sanitize: $(VENV)/.sanitize
	$(BIN)/python tests/sanitizer/run.py

# The committed figures, each file by one whole run: of a CPU with two cores, and of an H200. They need a quiet machine,
# and ONCHIP_DATA for MNIST; a copy of the tree without .git also COMMIT="--commit SHA".
RESULTS := --out benchmarks/results

bench: $(VENV)/.peers
	$(BIN)/onchip bench decode digits backprop --device cpu --peers --accuracy $(COMMIT)
	$(BIN)/onchip bench sentiment faces imported --device cpu --peers $(COMMIT)
	$(BIN)/onchip bench scan --device cpu --peers $(COMMIT)
	$(BIN)/onchip ladder decode --device cpu $(RESULTS) $(COMMIT)
	$(BIN)/onchip ladder backprop --device cpu $(RESULTS) $(COMMIT)
	$(BIN)/onchip ladder scan --device cpu $(RESULTS) $(COMMIT)

bench-h200: $(VENV)/.peers
	$(BIN)/onchip bench decode mlp scan --device cuda --peers $(COMMIT)
	$(BIN)/onchip bench digits backprop --device cuda --peers $(COMMIT)
	$(BIN)/onchip bench sentiment --device cuda --peers $(COMMIT)
	$(BIN)/onchip bench faces product --device cuda --peers $(COMMIT)
	$(BIN)/onchip bench imported --device cuda --peers $(COMMIT)
	$(BIN)/onchip ladder decode --device cuda --counters $(RESULTS) $(COMMIT)
	$(BIN)/onchip ladder decode --device cuda --rows 12800 --counters $(RESULTS) $(COMMIT)
	$(BIN)/onchip ladder scan --device cuda $(RESULTS) $(COMMIT)
	$(BIN)/onchip ladder digits --device cuda $(RESULTS) $(COMMIT)
	$(BIN)/onchip ladder backprop --device cuda $(RESULTS) $(COMMIT)
	$(BIN)/onchip ladder sentiment --device cuda $(RESULTS) $(COMMIT)
	$(BIN)/onchip ladder linear --device cuda $(RESULTS) $(COMMIT)
	$(BIN)/onchip ladder faces --device cuda $(RESULTS) $(COMMIT)
	for rows in 10 100 880 1000 2224 2512 4856; do \
	  $(BIN)/onchip ladder faces --device cuda --rows $$rows $(RESULTS) $(COMMIT) || exit 1; \
	done
	$(BIN)/onchip ladder decode --device cuda --ranks 2 $(RESULTS) $(COMMIT)
	$(BIN)/onchip ladder faces --device cuda --rows 1000 --ranks 2 $(RESULTS) $(COMMIT)
	$(BIN)/onchip ladder sentiment --device cuda --ranks 2 $(RESULTS) $(COMMIT)

# The generated parts of the documents, from result files and docstrings; a test fails if one is out of date.
docs: $(VENV)/.test
	$(BIN)/python -m onchip.bench.report.table README.md benchmarks/results --front
	$(BIN)/python -m onchip.bench.report.table docs/results.md benchmarks/results
	$(BIN)/python -m onchip.bench.report.chart docs/speedup.svg benchmarks/results
	for page in docs/ladders/*.md; do \
	  files=$$(ls benchmarks/results/*/ladder-$$(basename $$page .md)*.json 2>/dev/null); \
	  test -z "$$files" || $(BIN)/python -m onchip.bench.report.table $$page $$files || exit 1; \
	  for file in $$(ls benchmarks/results/*/ladder-$$(basename $$page .md).json); do \
	    picture=docs/ladders/$$(basename $$page .md)-$$(basename $$(dirname $$file)).svg; \
	    $(BIN)/python -m onchip.bench.report.chart $$picture $$file || exit 1; \
	  done; \
	done
	$(BIN)/onchip plan faces --device h200 --precision fp16 --svg docs/plan.svg > /dev/null
	$(BIN)/python docs/make_pages.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.demo: $(BIN)/python pyproject.toml
	@echo "installing what the demo needs into $(VENV), once: a minute or two"
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

$(VENV)/.sanitize: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[sanitize]'
	touch $@

$(VENV)/.peers: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[peers,plot,sklearn]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
