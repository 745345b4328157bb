# make demo   the shipped model through every stage, reports in out/demo
# make test   lint, type check, all tests
# make gpu-check   on a machine with a GPU: build, parity, benchmark, tests -m gpu; one report in out/gpu-check
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench gpu-check gpu-present clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/seq2engine demo --out out/demo

test: lint
	$(BIN)/python -m pytest --junitxml=out/tests.xml
	@$(BIN)/python tests/summary.py out/tests.xml

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/linked && mkdir -p build/linked/seq2engine
	cd build/linked/seq2engine && ln -s ../../../seq2engine/* ../../../model ../../../export ../../../runtime ../../../benchmarks .
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-json=out/benchmark.json -o python_files='bench_*.py' -o testpaths=benchmarks

gpu-check: gpu-present $(VENV)/installed
	$(BIN)/python -m seq2engine.gpu_check out/gpu-check

gpu-present:
	@nvidia-smi -L >/dev/null 2>&1 || { echo "error: no NVIDIA GPU on this machine, which gpu-check needs; run it on one that has"; exit 1; }

clean:
	rm -rf $(VENV) out build

# Every version is pinned in constraints.txt; the editable install links the folders, so sources need no reinstall.
$(VENV)/installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; name another with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "making $(VENV) with the pinned packages; this happens once and takes a few minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --progress-bar on --constraint constraints.txt --editable '.[cpu,rtx,data,dev]'
	@touch $@
