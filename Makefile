# Every target first makes .venv and installs what it needs; an interrupted install is repaired
# by running again. PYTHON chooses the interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# All that is installed comes from LOCK, in the versions there, and so does what pip builds with.
# LOCK= takes the newest versions that pyproject.toml allows, as users get them.
LOCK := constraints.txt
PIP := $(if $(LOCK),PIP_CONSTRAINT=$(LOCK) PIP_BUILD_CONSTRAINT=$(LOCK)) $(BIN)/python -m pip
# The CPU build of torch comes first (1.3 GB for everything together); make TORCH_INDEX= takes
# PyPI's, which brings CUDA (5.7 GB).
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(if $(TORCH_INDEX),$(BIN)/python -m pip show --quiet torch 2>/dev/null || $(PIP) install \
  --quiet --no-deps --timeout 15 --retries 1 --index-url $(TORCH_INDEX) torch || \
  echo "no torch from $(TORCH_INDEX): taking the build that PyPI has",true)

# Without it each interpreter that tests start compiles the library, and each of pytest's
# processes rewrites the assertions of all tests: the latter alone takes 30 seconds of one core.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint types fuzz chaos soak many large mutants mutants-coverage browser-test \
  cluster-test bench docs docs-serve dist lock clean

# All-reduce and gossip side by side while machines misbehave, in less than two minutes;
# ARGS="--workers 6" for another demo.
demo: $(VENV)/lab.installed
	$(BIN)/gossipdp demo $(or $(ARGS),--compare)

# In three processes, as many tests mostly wait for workers, a file whole in one of them, in the
# order of tests/conftest.py, without those of tests/long.txt; ARGS="-k pairing" for some tests,
# ARGS="-n 0" for one process. The slowest tests are named at the end.
test: $(VENV)/dev.installed
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 15 -m "not long" \
	  $(ARGS)

lint: $(VENV)/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.installed
	$(BIN)/mypy

# Faults put into copies of the library, one at a time: none may pass the tests that are named for
# it. ARGS="--only WORDS", ARGS="--list". RANDOM=400 SEED=7: instead, how many of 400 faults that the
# seed draws all tests notice; make mutants-coverage records before that which tests reach which lines.
mutants: $(VENV)/dev.installed
	$(BIN)/python tests/mutants/$(if $(RANDOM),random_faults.py $(RANDOM) $(if $(SEED),--seed $(SEED)),run.py) $(ARGS)

mutants-coverage: $(VENV)/dev.installed
	$(BIN)/python tests/mutants/random_faults.py 0 $(ARGS)

# Coverage-guided, SECONDS for each parser; findings stay under runs/fuzz.
SECONDS ?= 60
fuzz: $(VENV)/fuzz.installed
	$(BIN)/python tests/fuzz/run.py --seconds $(SECONDS) $(ARGS)

# The tests of tests/long.txt, then faults: fresh examples of the properties, 1,000 schedules of the
# simulated network (tests/simulation/test_faults.py), two hosts that lose each other (root only),
# and joins by gossipdp run.
chaos: $(VENV)/dev.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m long tests --ignore tests/property \
	  --ignore tests/simulation
	GOSSIPDP_EXPLORE=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/property tests/simulation
	$(BIN)/python -m pytest -s $(addprefix tests/chaos/,partition.py rejoining.py)

# Half an hour of everything at once: is all flat, and is the end right; ARGS="--minutes 60".
soak: $(VENV)/dev.installed
	$(BIN)/python tests/chaos/soak.py $(ARGS)

# 64 processes, once.
many: $(VENV)/dev.installed
	$(BIN)/python tests/chaos/many.py $(ARGS)

# Three workers of 500 million values: 20 GB of memory; ARGS="--values 50000000" for 4.
large: $(VENV)/dev.installed
	$(BIN)/python tests/chaos/many.py --workers 3 --values 500000000 --method gossip --exchanges 4 \
	  --timeout-s 2 --results runs/large.json $(ARGS)

# The examples of docs/clusters.md on a Ray of this machine, and, as root where Debian's slurm-wlm
# and munge are installed, on a Slurm of one node.
cluster-test: $(VENV)/cluster.installed
	$(BIN)/python -m pytest $(addprefix tests/clusters/,ray_local.py slurm.py) $(ARGS)

# The pages of `gossipdp report` and of a status port in Chromium (apt-get install chromium);
# screenshots in runs/browser.
browser-test: $(VENV)/dev.installed
	$(BIN)/python -m pytest tests/browser/pages.py $(ARGS)

# Short forms of the benchmarks, one after the other, over half an hour; ARGS=--quick to see
# that all works. Figures to be quoted want a script's own defaults, and a machine that rests.
BENCHMARKS = exchange.py "memory.py --rounds 1" "shards.py --rounds 1" \
	"overlap.py --rounds 2 --only resnet18 --only launch-bound --only resnet18-shared-core" \
	"startup.py --rounds 2" "independence.py --real --rounds 1 --events stop" \
	"time_to_loss.py slow_link --steps 128 --rows ddp_bf16,local_sgd@16,gossipdp" \
	"time_to_loss.py slow --steps 128" "time_to_loss.py equal --steps 128" \
	"race.py --conditions calm,kills10 --rows gossipdp,ddp --rounds 1 --seconds 35" \
	"quality.py --size small --minutes 10"
bench: $(VENV)/dev.installed
	export BENCHMARK_RESULTS=runs/benchmarks; \
	  for each in $(BENCHMARKS); do $(BIN)/python benchmarks/$$each $(ARGS) || exit 1; done

# An sdist and the wheel built from it, in dist/; tests/integration/test_wheel.py says what is in them.
dist: $(VENV)/dev.installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

# The documentation as a site, in build/site; a link that leads nowhere is an error.
docs: $(VENV)/docs.installed
	$(BIN)/python tools/build_site.py

# The same on http://localhost:8000, built again at each edit.
docs-serve: $(VENV)/docs.installed
	$(BIN)/zensical serve

# Writes constraints.txt for Linux, CPU or GPU, and each Python that pyproject.toml allows. A version
# that still fits stays; ARGS=--upgrade takes the newest of each, ARGS="--upgrade-package ruff" of one.
lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet uv
	cp constraints.txt build/lock/resolved.txt
	build/lock/bin/uv pip compile --quiet --universal --fork-strategy fewest --all-extras \
	  --no-annotate --no-header --no-emit-index-url --output-file build/lock/resolved.txt $(ARGS) \
	  pyproject.toml
	{ sed -n '/^#/p' constraints.txt; \
	  sed -e "/_platform == '\(darwin\|emscripten\|win32\)'/d" -e 's/ ;.*//' build/lock/resolved.txt; \
	} >build/lock/constraints.txt
	mv build/lock/constraints.txt constraints.txt

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written only after pip has succeeded, so whatever was interrupted is done again.
$(VENV)/lab.installed: pyproject.toml constraints.txt | venv
	@$(TORCH)
	$(PIP) install --quiet --editable ".[lab]"
	@touch $@

$(VENV)/dev.installed: pyproject.toml constraints.txt | venv
	@$(TORCH)
	$(PIP) install --quiet --editable ".[dev]"
	@touch $@ $(VENV)/lab.installed

$(VENV)/cluster.installed: pyproject.toml constraints.txt | venv
	@$(TORCH)
	$(PIP) install --quiet --editable ".[dev,ray]"
	@touch $@ $(VENV)/dev.installed $(VENV)/lab.installed

$(VENV)/docs.installed: pyproject.toml constraints.txt | venv
	@$(TORCH)
	$(PIP) install --quiet --editable ".[docs]"
	@touch $@ $(VENV)/lab.installed

$(VENV)/fuzz.installed: pyproject.toml constraints.txt | venv
	@$(TORCH)
	$(PIP) install --quiet --editable ".[dev,fuzz]"
	@touch $@ $(VENV)/dev.installed $(VENV)/lab.installed

.PHONY: venv
venv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
	  { echo "gossipdp needs Python 3.11 to 3.14; $(PYTHON) is `$(PYTHON) -V 2>&1`. Choose another: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module. Install it (Debian, Ubuntu: apt install python3-venv) and run make again." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || \
	  { echo "making $(VENV) (the first installation takes a few minutes)"; rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
ifneq ($(origin PYTHON),file)
	@[ "`$(BIN)/python -V`" = "`$(PYTHON) -V`" ] || \
	  { echo "$(VENV) is `$(BIN)/python -V`, not `$(PYTHON) -V`: run make clean first" >&2; exit 1; }
endif
