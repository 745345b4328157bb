# make demo   the shipped model through every stage, reports in out/demo
# make test   lint, type check, the tests
# make test-all    the long proofs too
# make docs   the documentation as a site, in out/docs
# make test-cpus   the tests of numbers as other CPUs would run them: fewer instructions, more threads; an hour on two cores
# make peers  environments for `seq2engine bench --peers`, in .peers; gigabytes, and needed for nothing else
# make measure     `base` against all peers, into benchmarks/results/base.json and docs/BENCHMARK.md; an hour on two cores
# make fuzz   mutated files and random command lines: 10 minutes, or FUZZ="--cases 10000 --seed 3"
# make kills  commands that write, killed at 200 random instants (KILLS=200)
# make exports   random models in every precision, exported and compared with their reference: 500, or EXPORTS="--exports 50 --seed 3"
# make measure-real     a real translation model on real sentences against CTranslate2, into benchmarks/results and README; 15 minutes
# make measure-loading  from load() to the first token and peak memory of that model against CTranslate2; 5 minutes
# make measure-families   the shapes of T5-small and FLAN-T5-base and Whisper tiny.en against CTranslate2 and Hugging Face; 15 minutes
# make measure-speech   Whisper tiny.en from audio to text against CTranslate2 and Hugging Face; 3 minutes
# make measure-g2p   the shipped small model against CTranslate2; a minute
# make gpu-check   on a machine with a GPU: build, parity, benchmark, tests -m gpu; one report in out/gpu-check
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-fast test-slow test-cpus lint style types bench peers measure measure-real measure-loading measure-families measure-speech measure-g2p fuzz kills exports readme docs pictures gpu-check gpu-present clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/seq2engine demo --out out/demo

# Tests start many processes, and each would compile our modules anew where byte code is not kept.
unexport PYTHONDONTWRITEBYTECODE

# A worker for each core. A file stays with one worker, so that what its tests share is made once. Benchmarks are `make bench`.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile -p no:benchmark

# Types are checked beside the tests: mypy has one thread, and would leave the other cores idle for a minute.
test: style
	@$(MAKE) --no-print-directory --jobs=2 types test-fast
	@$(BIN)/python tests/support/summary.py out/tests.xml

test-fast: $(VENV)/installed
	$(PYTEST) -m 'not gpu and not slow' --junitxml=out/tests.xml

test-slow: $(VENV)/installed .peers/triton/installed
	$(PYTEST) -m 'slow and not gpu' --junitxml=out/tests-slow.xml
	@$(BIN)/python tests/support/summary.py out/tests-slow.xml

test-all: test test-slow

FUZZ ?= --minutes 10
fuzz: $(VENV)/installed
	$(BIN)/python tests/fuzz/campaign.py $(FUZZ)

KILLS ?= 200
kills: $(VENV)/installed
	$(BIN)/python tests/fuzz/kills.py --kills $(KILLS)

EXPORTS ?= --exports 500
exports: $(VENV)/installed
	$(BIN)/python tests/fuzz/clean_exports.py $(EXPORTS)

# Each line is one CPU: settings of PyTorch (ATEN, oneDNN, MKL), or instructions hidden from it, from numpy and from ONNX Runtime,
# which asks the processor itself (tests/support/fewer_instructions.c; exit code 77: this processor cannot hide any, so that
# line is skipped). Threads of PyTorch sleep while they wait: they outnumber the cores, and would spin where another could
# compute. TESTS="tests/runtime/search/test_beam.py" runs less.
TESTS ?= tests/support tests/model tests/export tests/runtime tests/commands/test_score.py tests/flags/test_search.py
FEWER := LD_PRELOAD=$(CURDIR)/out/fewer_instructions.so
test-cpus: $(VENV)/installed
	@mkdir -p out && $(CC) -shared -fPIC -O1 -o out/fewer_instructions.so tests/support/fewer_instructions.c
	@failed=0; for cpu in \
	    "SEQ2ENGINE_TEST_THREADS=1" \
	    "SEQ2ENGINE_TEST_THREADS=2" \
	    "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2" \
	    "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 SEQ2ENGINE_TEST_THREADS=2" \
	    "MKL_CBWR=COMPATIBLE" \
	    "$(FEWER) SEQ2ENGINE_HIDE=avx512" \
	    "$(FEWER) SEQ2ENGINE_HIDE=avx2 SEQ2ENGINE_TEST_THREADS=2"; \
	do echo "== $$cpu"; env OMP_WAIT_POLICY=passive $$cpu $(PYTEST) -p no:faulthandler $(TESTS) || test $$? = 77 || failed=1; done; exit $$failed

lint: style types

style: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	rm -rf build/linked && mkdir -p build/linked/seq2engine
	cd build/linked/seq2engine && ln -s ../../../seq2engine/* ../../../model ../../../export ../../../runtime ../../../benchmarks .
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python -m pytest benchmarks/micro --benchmark-only --benchmark-json=out/benchmark.json -o python_files='bench_*.py' -o testpaths=benchmarks/micro

peers: .peers/transformers/installed .peers/optimum/installed .peers/openvino/installed

# Each peer wants other versions of the same libraries, so each has an environment of its own.
.peers/%/installed: benchmarks/peers/requirements-%.txt
	@echo "making .peers/$*; this happens once"
	@test -x .peers/$*/bin/python || $(PYTHON) -m venv .peers/$*
	@.peers/$*/bin/python -m pip install --quiet --requirement $<
	@# of pytriton only its tritonserver is used: what it asks for would put back numpy 1
	@if [ $* = triton ]; then .peers/$*/bin/python -m pip install --quiet --no-deps nvidia-pytriton==0.7.0; fi
	@# optimum-intel asks for torchvision, of which there is no build without CUDA, and which no text model needs
	@if [ $* = openvino ]; then .peers/$*/bin/python -m pip install --quiet --no-deps optimum-intel==2.2.0; fi
	@touch $@

MEASURED ?= 1x1x32x32 1x4x32x32 8x1x32x32 8x4x32x32 32x1x32x32 32x4x32x32
measure: $(VENV)/installed peers
	$(BIN)/seq2engine export random:base out/base --precision fp32 w8a8 --force
	$(BIN)/seq2engine bench out/base --backend onnxruntime --precision fp32 w8a8 --draft quantised --peers all --case $(MEASURED) --rounds 6 --out out/base/bench.json
	mkdir -p benchmarks/results && cp out/base/bench.json benchmarks/results/base.json
	$(MAKE) readme

# OPUS-MT zh-en and its sentences come from the package registry (benchmarks/real). SENTENCES=96 takes a quarter of the time,
# NEIGHBOURS=1 puts a busy process on one core, REAL_PEERS="all" takes every library of `make peers`.
SENTENCES ?= 384
NEIGHBOURS ?= 0
REAL_PEERS ?= "ctranslate2 float32" "ctranslate2 int8"
REAL_RESULT := $(if $(filter 0,$(NEIGHBOURS)),real,real_busy)
measure-real: $(VENV)/installed .peers/transformers/installed
	$(BIN)/python -m seq2engine.benchmarks.real.opus_zh_en out/opus
	$(BIN)/seq2engine export out/opus/hf out/opus/bundle --precision fp32 w8a8 --force
# A model in use: the table of its draft is narrowed by sentences that are not timed.
	tail -n 200 out/opus/pairs.tsv | cut -f 1 | $(BIN)/seq2engine run out/opus/bundle --precision fp32 --draft quantised --batch 1 > out/opus/others.txt
	$(BIN)/seq2engine bench out/opus/bundle --backend onnxruntime --precision fp32 w8a8 --draft quantised --peers $(REAL_PEERS) \
	    --references out/opus/pairs.tsv --count $(SENTENCES) --natural 1x1 1x4 8x1 8x4 32x1 32x4 --neighbour $(NEIGHBOURS) --out out/opus/$(REAL_RESULT).json
	cp out/opus/$(REAL_RESULT).json benchmarks/results/opus_zh_en_$(REAL_RESULT).json
	$(MAKE) readme

# Loading, in processes of their own: needs what measure-real fetches and exports.
measure-loading: $(VENV)/installed
	$(BIN)/python -m seq2engine.benchmarks.real.opus_zh_en out/opus
	test -d out/opus/bundle || $(BIN)/seq2engine export out/opus/hf out/opus/bundle --precision fp32 w8a8
	$(BIN)/python -m seq2engine.benchmarks.real.loading out/opus
	cp out/opus/loading.json benchmarks/results/opus_zh_en_loading.json

# T5 with random weights, Whisper with OpenAI's on random features; output lengths are forced.
FAMILY_PEERS ?= "ctranslate2 float32" "ctranslate2 int8" transformers
T5_CASES ?= 1x1x32x32 8x4x32x32
SPEECH_CASES ?= 1x1x1500x32 8x4x1500x32
measure-families: $(VENV)/installed .peers/transformers/installed
	$(BIN)/python -m seq2engine.benchmarks.real.tiny_en out/tiny_en  # first: it says what is not installed
	$(BIN)/seq2engine export random:t5-small out/families/t5_small --precision fp32 w8a8 --force
	$(BIN)/seq2engine export random:flan-t5-base out/families/flan_t5_base --precision fp32 w8a8 --force
	$(BIN)/seq2engine export out/tiny_en/tiny.en.pt out/families/tiny_en --precision fp32 w8a8 --force
	for model in t5_small flan_t5_base tiny_en; do \
	    $(BIN)/seq2engine bench out/families/$$model --backend onnxruntime --precision fp32 w8a8 --draft quantised --peers $(FAMILY_PEERS) --rounds 6 \
	        --case $$(if [ $$model = tiny_en ]; then echo $(SPEECH_CASES); else echo $(T5_CASES); fi) --out out/families/$$model.json || exit 1; \
	    cp out/families/$$model.json benchmarks/results/$$model.json; done
	$(MAKE) readme

# From audio to text: Whisper tiny.en on 28 s of speech by espeak-ng, against CTranslate2 and Hugging Face.
measure-speech: $(VENV)/installed
	$(BIN)/python -m seq2engine.benchmarks.real.tiny_en out/tiny_en
	$(BIN)/seq2engine export out/tiny_en/tiny.en.pt out/tiny_en/bundle --precision fp32 w8a8 --force
	$(BIN)/python -m seq2engine.benchmarks.real.tiny_en out/tiny_en 10
	cp out/tiny_en/speech.json benchmarks/results/tiny_en_speech.json

# A model so small that what surrounds its products decides.
G2P_CASES ?= 1x1x9x9 1x4x9x9 8x1x9x9 8x4x9x9 32x1x9x9 32x4x9x9
measure-g2p: $(VENV)/installed .peers/transformers/installed
	$(BIN)/seq2engine export shipped:g2p out/families/g2p --precision fp32 w8a8 --force
	$(BIN)/seq2engine bench out/families/g2p --backend onnxruntime --precision fp32 w8a8 --peers "ctranslate2 float32" "ctranslate2 int8" \
	    --case $(G2P_CASES) --rounds 15 --out out/families/g2p.json
	cp out/families/g2p.json benchmarks/results/g2p.json
	$(MAKE) readme

readme: $(VENV)/installed
	$(BIN)/python docs/site/generated.py

docs: $(VENV)/installed
	cd docs/site && NO_MKDOCS_2_WARNING=1 $(CURDIR)/$(BIN)/mkdocs build --quiet --strict
	@echo "open out/docs/index.html"

pictures: $(VENV)/installed
	$(BIN)/python docs/site/pictures.py out/pictures

gpu-check: gpu-present $(VENV)/installed
	$(BIN)/python -m seq2engine.commands.pipeline.gpu_check out/gpu-check

gpu-present:
	@nvidia-smi -L >/dev/null 2>&1 || { echo "error: no NVIDIA GPU on this machine, which gpu-check needs; run it on one that has"; exit 1; }

clean:
	rm -rf $(VENV) .peers out build

# Every version is pinned in constraints.txt; the editable install links the folders, so sources need no reinstall.
$(VENV)/installed: pyproject.toml constraints.txt $(wildcard runtime/kernels/*.[ch])
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; name another with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "making $(VENV) with the pinned packages; this happens once and takes a few minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --progress-bar on --constraint constraints.txt --editable '.[rtx,data,dev]'
	@touch $@
