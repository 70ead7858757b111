# Two commands do everything on a fresh machine: `make compare` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Some images of containers set this. Hundreds of processes of the tests would each compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

# Ranks of a test wait for each other much of their time, so three tests share two cores. All tests of a module
# run in one process, whose fork server imports the libraries once. Long modules come first (tests/conftest.py).
WORKERS ?= 3
SIDE_BY_SIDE := --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder

# What a target runs of tests that have an exhaustive part: one representative of each kind, or the rest.
WHICH := "not exhaustive"

.PHONY: environment compare mutants sweep fuzz test test-ci labs test-exhaustive test-journeys test-docs test-browser test-cluster test-cluster-exhaustive gpu-stub-packages gpu-stub-environment test-gpu-stub test-gpu-stub-exhaustive traps gallery gallery-gpu-stub faults lint docs bench publish reports clean

compare: $(READY)
	$(BIN)/harness compare --config configs/default.yaml --runs runs --report runs/report.md

environment: $(READY)

test: $(READY)
	$(BIN)/pytest $(SIDE_BY_SIDE) --ignore tests/browser -m "not exhaustive and not costly and not documented"

# All that continuous integration runs in one session: `make test`, what is costly, and the documented commands.
test-ci: $(READY)
	$(BIN)/pytest $(SIDE_BY_SIDE) --ignore tests/browser -m "not exhaustive"

# The same checks over more ranks, precisions, pairs of strategies and published records.
test-exhaustive: $(READY)
	$(BIN)/pytest $(SIDE_BY_SIDE) -m exhaustive

# The journeys that `make test` leaves out: a minute of processor time each. Further observed scripts: `make test-exhaustive`.
test-journeys: $(READY)
	$(BIN)/pytest $(SIDE_BY_SIDE) -m exhaustive tests/journeys --ignore tests/journeys/test_observe.py

# Plants over a hundred small faults in a copy of this tree, one after the other; a test must notice each.
mutants: $(READY)
	$(BIN)/python -m tests.mutants

# Jobs of fifty shapes that people bring, sound and with a planted fault each: a quarter of an hour.
sweep: $(READY)
	$(BIN)/python -m tests.sweep

# Hostile input by every way in: 20,000 inputs from a seed that is printed. Several minutes.
FUZZED ?= 20000
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --inputs $(FUZZED)

# Every command and notebook of the documentation that can run here, at the smallest scale, and every figure of the
# page on strategies. A few minutes.
test-docs: $(READY)
	$(BIN)/pytest $(SIDE_BY_SIDE) -m documented tests/docs

# The HTML report in headless Chromium: Debian's packages chromium, chromium-driver and fonts-liberation.
test-browser: $(READY)
	REQUIRE_BROWSER=1 $(BIN)/pytest tests/browser

# A real Slurm of several nodes on this machine: Debian's packages, unpacked, and root are needed. Two modules
# at a time, each on a cluster of its own. What fails runs once more, and both results are printed: nodes that
# share a few cores may miss a deadline of Slurm's.
CLUSTERS ?= 2
test-cluster: $(READY)
	$(BIN)/python -m tests.cluster.packages .cluster/slurm
	REQUIRE_CLUSTER=1 $(BIN)/pytest --cluster --reruns 1 -rR -m $(WHICH) \
		--numprocesses $(CLUSTERS) --dist loadscope --no-loadscope-reorder tests/cluster

# Every strategy, launcher and way to end there; half an hour.
test-cluster-exhaustive:
	$(MAKE) test-cluster WHICH=exhaustive

# A CUDA machine without a GPU: torch's CUDA wheel over a stub of the driver and of NCCL (CONTRIBUTING.md). g++ is
# needed, and 4.7 GB for the environment, whose packages come from PyPI whatever build of torch pip prefers here. It
# has no bitsandbytes: importing that initialises CUDA in the server from which these tests fork their ranks.
STUB ?= .stub
STUB_VENV ?= $(STUB)/venv
STUB_PIP := env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null $(STUB_VENV)/bin/pip install --quiet
test-gpu-stub: $(STUB_VENV)/.ready
	mkdir -p $(STUB)
	$(STUB_VENV)/bin/python -m tests.gpu_stub.build $(STUB)/build >$(STUB)/environment
	. $(STUB)/environment && $(STUB_VENV)/bin/python -m pytest $(SIDE_BY_SIDE) -m $(WHICH) tests/gpu_stub

# Every backend, precision, trap and checkpoint there; a quarter of an hour.
test-gpu-stub-exhaustive:
	$(MAKE) test-gpu-stub WHICH=exhaustive

gpu-stub-packages: $(STUB_VENV)/.packages

gpu-stub-environment: $(STUB_VENV)/.ready

# The complete clean matrix on it, as the folder that is published.
gallery-gpu-stub: $(STUB_VENV)/.ready
	mkdir -p $(STUB)
	$(STUB_VENV)/bin/python -m tests.gpu_stub.build $(STUB)/build >$(STUB)/environment
	. $(STUB)/environment && $(STUB_VENV)/bin/python -m tests.gpu_stub.gallery reports/gpu-stub

# All that it depends on, and nothing of this tree, which two environments cannot install at a time.
$(STUB_VENV)/.packages: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(STUB_VENV)
	$(STUB_PIP) --no-compile --constraint constraints.txt "torch>=2.13" nvidia-cuda-crt==13.0.88
	$(PYTHON) -m tests.gpu_stub.requirements train dev nvml >$(STUB)/requirements.txt
	$(STUB_PIP) --no-compile --constraint constraints.txt --requirement $(STUB)/requirements.txt
	touch $@

$(STUB_VENV)/.ready: $(STUB_VENV)/.packages
	$(STUB_PIP) --no-compile --constraint constraints.txt --editable ".[train,dev,nvml]"
	touch $@

# Every known trap is planted and must be named; a clean matrix must raise nothing. A few minutes.
traps: $(READY)
	$(BIN)/pytest tests/traps

# The same traps, as the folder of records and reports that is published.
gallery: $(READY)
	$(BIN)/python -m tests.traps.gallery reports/traps

# Every kind of fault in real ranks, 120 injections: each must leave a truthful record, and nothing else. A call
# goes on where the last one ended. Linux and root are needed, and about 20 minutes of two free cores.
FAULTS ?= .faults
faults: $(READY)
	$(BIN)/python -m tests.faults $(FAULTS) --page docs/faults.md

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation as a site that needs no network: site/index.html. A broken link or a warning is an error;
# --quiet would hide warnings from --strict, too.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Every lab at the scale of two CPU ranks, as intended and as written. Several minutes; publish them with
# python -m benchmarks.labs_page docs/labs/tiny runs/labs.
labs: $(READY)
	$(BIN)/harness labs run all --scale tiny
	$(BIN)/harness labs run all --scale tiny --variant as-written

bench: $(READY)
	$(BIN)/python benchmarks/run.py

# make publish NAME=my-job CONFIG=my-job.yaml REPEATS=5
# It runs in a folder that git ignores: a record says whether its checkout had local changes.
NAME ?= default
CONFIG ?= configs/default.yaml
REPEATS ?= 7
PUBLISHED := reports/$(NAME)

publish: $(READY)
	$(BIN)/harness compare --config $(CONFIG) --repeats $(REPEATS) --runs runs/$(NAME) --report runs/$(NAME).md
	rm -f $(PUBLISHED)/runs.tar.xz
	$(BIN)/harness report runs/$(NAME) -o $(PUBLISHED)/report.md --archive
	$(BIN)/python -m benchmarks.publishing reports $(PUBLISHED)
	$(BIN)/python -m benchmarks.reports_page reports

# Renders and verifies all published reports again, and their pages; the same records and code give the same bytes.
reports: $(READY)
	$(BIN)/python -m benchmarks.publishing reports
	$(BIN)/python -m tests.traps.gallery reports/traps --page
	$(BIN)/python -m tests.gpu_stub.gallery reports/gpu-stub --page
	$(BIN)/python -m benchmarks.routes_table docs/your-configuration.md
	$(BIN)/python -m benchmarks.errors_table docs/planning.md
	$(BIN)/python -m benchmarks.defaults_table
	$(BIN)/python -m benchmarks.equivalences
	$(BIN)/python -m benchmarks.offload_table
	$(BIN)/python -m benchmarks.node_scaling reports/same-job-on-nodes
	$(BIN)/python -m benchmarks.shaped_links reports/shaped-links
	$(BIN)/python -m benchmarks.reports_page reports
	$(BIN)/python -m benchmarks.labs_page docs/labs/tiny

# pip would compile 18,000 files, of which a run imports a sixth.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt "torch>=2.13"
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable ".[train,dev,docs,qlora]"
	-DS_ACCELERATOR=cpu $(BIN)/python -W ignore -c "import accelerate, datasets, deepspeed, harness.rank.rank, transformers"
	touch $(READY)

clean:
	rm -rf $(VENV) .kept-by-tests runs site build dist *.egg-info
