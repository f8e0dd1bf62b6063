# Nothing but Python 3.10+ and make is assumed: demo, test, lint, types, format and bench make .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
XLA := .venv-xla
XLA_STAMP := $(XLA)/.installed
SUITE := .venv-lightning
DOWNSTREAM := .venv-downstream
LIBRARIES := .venv-libraries
LIBRARIES_STAMP := $(LIBRARIES)/.installed
LAUNCHERS := .venv-launchers
RIVALS := .venv-rivals
RIVALS_STAMP := $(RIVALS)/.installed
LAUNCHERS_STAMP := $(LAUNCHERS)/.installed
SUITE_STAMP := $(SUITE)/.installed
SOURCES := lightning_accel callbacks tests examples benchmarks
WORKERS ?= 2
RESULTS ?= $(or $(OUT),docs/results)

.DEFAULT_GOAL := help
.PHONY: help demo test test-medium test-slow test-strangers test-cpus test-simulated-gpu test-simulated-gpu-first test-browser test-xla test-lightning test-launchers test-libraries test-newest test-versions lint types docs format stub bench column results downstream rivals gpu gpu-smoke gpu-tests gpu-bench release clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

demo: $(STAMP)  ## Train two real models, plain and accelerated, and compare them (3 to 4 minutes on 2 cores)
	$(BIN)/python examples/demo.py

# A file is one worker's, in the order of the folders: what a file's tests share is made once. Bytecode is kept whatever
# the shell says: without it both workers rewrite every file of tests again, and every process that a test starts compiles
# the package.
TEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(STAMP)  ## The tests of less than a second that need no GPU, two at a time (5 to 7 minutes on 2 slow cores; WORKERS=n: n at a time)
	$(TEST)

test-medium: $(STAMP)  ## The tests of one to ten seconds, and those that wait for several processes (7 minutes on 2 slow cores)
	$(TEST) -m "medium and not gpu and not slow"

test-slow: $(STAMP)  ## The tests over ten seconds each, and second and third variants of others
	$(BIN)/python -m pytest -m "slow and not gpu"

# Neighbouring tests go to one worker, which keeps the plain run that they are compared with.
test-strangers: $(STAMP)  ## Trainings as other people write them, plain and accelerated (8 minutes on 2 slow cores)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not gpu" tests/strangers

test-cpus: $(STAMP)  ## The tests that compare numbers, with torch's libraries told to be on other processors
	$(BIN)/python tests/as_other_cpus.py $(WORKERS)

# Without g++, or with torch built for CUDA, there is no such device: what needs it is skipped, and says so.
SIMULATED = PYTHONDONTWRITEBYTECODE= PYTHONPATH=tests $(BIN)/python -m pytest -p simulated_cuda.plugin -n $(WORKERS) --dist loadfile
SIMULATED_FIRST := tests/simulated_cuda tests/data/test_pipeline_on_gpu.py tests/memory/test_offload_on_gpu.py \
	tests/ops tests/plugin/test_out_of_memory_on_gpu.py tests/techniques/test_graphs.py \
	tests/techniques/test_no_synchronisation.py

test-simulated-gpu: $(STAMP)  ## The tests that need a GPU but none of its kernels, on a simulated one (needs g++)
	$(SIMULATED) -m "(gpu and not needs_kernels and not slow) or simulated_gpu"

test-simulated-gpu-first: $(STAMP)  ## Of these the simulated device's own, a newcomer's path, and some of each kind (two minutes)
	$(SIMULATED) -m "((gpu and not needs_kernels) or simulated_gpu) and not slow" $(SIMULATED_FIRST)

# Chromium is the system's: there is none on PyPI. Without one the tests in it are skipped, and say so.
test-browser: $(STAMP)  ## Other people's loggers, reports and TensorBoard in a real browser (installs them; Chromium is yours to)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[boards]'
	$(BIN)/python -m pytest -m "browser or slow" tests/callbacks/test_boards_elsewhere.py tests/callbacks/test_boards_in_browser.py tests/evidence/test_page_in_browser.py \
		tests/test_site_in_browser.py

# Not in $(VENV): torch_xla is built for one release of torch, and the newest is for an older one than the package asks for.
test-xla: $(XLA_STAMP)  ## AccelXLAPlugin on XLA's CPU device (makes .venv-xla: 8 GB with the torch that torch_xla is built for)
	PJRT_DEVICE=CPU $(XLA)/bin/python -m pytest tests/xla

# Not in $(VENV): Lightning's tests want packages of their own. Those tests are not on PyPI: LIGHTNING is a clone of its repository.
test-lightning: $(SUITE_STAMP)  ## Lightning's own 2,607 tests with AccelPlugin in every Trainer, in three ways (LIGHTNING=a clone of it; 20 minutes on 2 slow cores)
	$(SUITE)/bin/python tests/lightning_suite/run.py "$(LIGHTNING)"

# Not in $(VENV): Ray brings packages of its own. SLURM is the system's: without its sbatch that test is skipped, and says so.
test-launchers: $(LAUNCHERS_STAMP)  ## Two processes started by torchrun, Ray Train, submitit, and SLURM where it is (makes .venv-launchers)
	$(LAUNCHERS)/bin/python -m pytest -m slow tests/test_launchers.py

# Not in $(VENV), and without constraints.txt: what they ask for is theirs to say.
test-libraries: $(LIBRARIES_STAMP)  ## neuralforecast, darts and lightly, given the plugin through their own arguments (makes .venv-libraries: 6 GB)
	$(LIBRARIES)/bin/python -m pytest -m slow tests/test_libraries.py

test-newest: $(STAMP)  ## The suite with what pip chooses today, without constraints.txt (torch built for CUDA, 4 GB; 10 minutes on 2 slow cores)
	$(BIN)/python tests/versions.py $(WORKERS) --only newest

# Each is removed when it has been tested. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes torch without CUDA.
test-versions: $(STAMP)  ## The suite on torch 2.11 to the newest, Python 3.10 to 3.14, Lightning 2.6.0 and the newest (an hour; writes docs/versions.md)
	$(BIN)/python tests/versions.py $(WORKERS) --write

lint: $(STAMP)  ## ruff: rules and formatting
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

# An installed copy: type checkers do not follow the import hook of an editable install, so in the checkout
# lightning_accel.callbacks would not be found. setuptools reuses build/, hence the rm.
types: $(STAMP)  ## mypy, strict, on an installed copy of the package
	@rm -rf build
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target build/typed .
	cd build/typed && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

# Not --quiet, by which warnings would not count. On the path: mkdocstrings has ruff write signatures. The variable silences
# what the theme says of its successor.
docs: $(STAMP)  ## The pages of docs/ as a site, in site/; a link or an anchor that leads nowhere is an error (seconds)
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(STAMP)  ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

stub: $(STAMP)  ## Write the schema of reports, after it was changed
	$(BIN)/python tests/report_schema.py

bench: $(STAMP)  ## Every benchmark that runs on a CPU, downstream and rivals apart (80 minutes on 2 slow cores, and an hour for tuning.py)
	@for script in $$(ls benchmarks/*.py | grep -v -e '/gpu[._]' -e /render.py -e /downstream.py -e /rivals -e '/_'); do \
		echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

column: $(STAMP)  ## Measure this machine's column of README.md and docs/claims.md (10 minutes, nothing else running)
	$(BIN)/python examples/demo.py --json docs/results/demo
	$(BIN)/lightning-accel claims
	$(BIN)/python benchmarks/render.py

results: $(STAMP)  ## Measure everything again, and write the tables of README.md and docs (95 minutes on 2 slow cores, and an hour for tuning.py)
	@for script in $$(ls benchmarks/*.py | grep -v -e '/gpu[._]' -e /render.py -e /downstream.py -e /rivals -e '/_'); do \
		echo "== $$script"; $(BIN)/python "$$script" --json docs/results || exit 1; done
	@$(MAKE) column

# Not among the others: it installs those libraries, with the script's own hands.
downstream: $(STAMP)  ## Fits of six libraries built on Lightning, plain and with the plugin (makes .venv-downstream: 3 GB; half an hour)
	$(BIN)/python benchmarks/downstream.py --json docs/results
	$(BIN)/python benchmarks/render.py

# Not in $(VENV): the other tools bring packages of their own.
rivals: $(RIVALS_STAMP)  ## AccelPlugin() beside other tools on six models (makes .venv-rivals: 3 GB; an hour on 2 slow cores, and 10 GB of memory)
	$(RIVALS)/bin/python benchmarks/rivals.py --json docs/results
	$(RIVALS)/bin/python benchmarks/render.py

# No network, no venv, no install: PYTHON is the machine's own, with torch and Lightning in it.
gpu:  ## The three below, each whatever came of the others, with the machine's own PYTHON=python3 as it is
	@status=0; for part in gpu-smoke gpu-tests gpu-bench; do $(MAKE) $$part || status=$$?; done; exit $$status

gpu-smoke:  ## The demo's models on a GPU with each technique once, beside the processor's losses (3 minutes)
	$(PYTHON) tests/on_gpu.py smoke --out "$(abspath $(RESULTS))"

gpu-tests:  ## The tests marked gpu, for 8 minutes (PART=memory: those of tests/memory; PART=graphs: those that capture)
	$(PYTHON) tests/on_gpu.py tests --part "$(PART)" --out "$(abspath $(RESULTS))"

gpu-bench:  ## The benchmarks of GPUs, as many as go into 8 minutes, and the command for the rest (ONLY=gpu_ladder,gpu_memory: those)
	$(PYTHON) tests/on_gpu.py bench --only "$(ONLY)" --out "$(abspath $(RESULTS))"

# Nothing is uploaded. What writes the SBOM is needed for nothing else.
release: $(STAMP)  ## Build wheel and sdist twice, install them on the oldest and the newest Python, write sums and an SBOM into dist/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0
	$(BIN)/python tests/release.py $(RELEASE_FLAGS)

clean:  ## Remove everything that make and the tests have made, .venv too
	rm -rf $(VENV) $(XLA) $(SUITE) $(DOWNSTREAM) $(LAUNCHERS) $(LIBRARIES) $(RIVALS) .venv-versions build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo_logs
	find lightning_accel callbacks tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: '$(PYTHON)' is not here. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "make: $$($(PYTHON) --version) is too old, 3.10 is needed. Name a newer one: make PYTHON=python3.12" >&2; \
		exit 1; }
	@test -x $(BIN)/python -a -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "make: no virtual environment could be made. On Debian and Ubuntu: apt install python3-venv" >&2; \
		exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes torch without CUDA, a twentieth of the size.
$(XLA_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(XLA)
	grep -v '^torch==' constraints.txt > $(XLA)/constraints.txt
	$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(XLA)/constraints.txt \
		torch==2.9.0 torch_xla==2.9.0 lightning torchmetrics numpy psutil pyyaml cloudpickle rich jinja2 \
		typing-extensions pytest setuptools
	$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(SUITE_STAMP): pyproject.toml constraints.txt tests/lightning_suite/requirements.txt
	$(PYTHON) -m venv --clear $(SUITE)
	$(SUITE)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--requirement tests/lightning_suite/requirements.txt --editable .
	@touch $@

$(LAUNCHERS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(LAUNCHERS)
	$(LAUNCHERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[examples,launchers]' pytest
	@touch $@

$(RIVALS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(RIVALS)
	$(RIVALS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[transformers]' accelerate==1.15.0 pytorch-autotune==2.0.0
	@touch $@

$(LIBRARIES_STAMP): pyproject.toml
	$(PYTHON) -m venv --clear $(LIBRARIES)
	$(LIBRARIES)/bin/python -m pip install --quiet --disable-pip-version-check --editable . neuralforecast darts lightly pytest
	@touch $@
