# `make demo` and `make test` need only git, make and Python: they install everything else. The demo has a small environment
# of its own.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := .venv-demo
PEERS := .venv-peers
SLURM_PACKAGES := slurm-wlm munge iproute2 iptables slurmdbd slurm-wlm-mysql-plugin mariadb-server-core
# The tests wait more than they compute: two run at a time, those of one file in sequence.
PYTEST := $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --durations=15
BROWSER_PACKAGES := chromium fonts-dejavu-core

# Further versions of Python that `make test-long` tests, where they are installed.
PYTHONS := 3.10 3.13

# Further versions of TensorFlow with which `make test-long` trains Keras models, changes the workers, and forks processes.
TENSORFLOWS := 2.16 2.18

# The versions of TensorFlow whose jobs `make tensorflow-versions` runs, beside that of $(VENV): the Python of each, and further requirements.
JOB_TENSORFLOWS := 1.15 2.4 2.8 2.11 2.13 2.15 $(TENSORFLOWS)
PYTHON_OF_1.15 := 3.7
PYTHON_OF_2.4 := 3.8
PYTHON_OF_2.8 := 3.10
PYTHON_OF_2.11 := 3.10
PYTHON_OF_2.13 := 3.11
PYTHON_OF_2.15 := 3.11
NEEDS_OF_1.15 := protobuf<3.21 numpy<1.19
NEEDS_OF_2.4 := protobuf<3.21
NEEDS_OF_2.8 := protobuf<3.21 numpy<1.24
NEEDS_OF_2.11 := numpy<1.24

.PHONY: demo test test-long test-faults slurm-versions tensorflow-versions test-pythons test-tensorflows check slurm browser bench bench-quick peers faults notebooks docs docs-links dist simulate soak fuzz clean

demo: $(DEMO)/installed
	$(DEMO)/bin/tf4slurm run --ps 1 --workers 2 -- $(DEMO)/bin/python TUTORIALS/train_digits.py

# TensorFlow for CPUs, and the digits.
$(DEMO)/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/pip install --quiet --disable-pip-version-check --editable ".[cpu]" scikit-learn
	touch $@

test: $(VENV)/installed slurm browser check
	$(PYTEST) --cov --cov-report=

# The slow tests: most of the fault matrix, most notebooks, and all variants but the first. Hours.
test-long: $(VENV)/installed slurm browser test-pythons test-tensorflows tensorflow-versions slurm-versions
	$(PYTEST) -m long --ignore=tests/tensorflow/test_versions.py

# The fault matrix only: a third of an hour, or those cases that FAULTS names, as pytest's -k. One after the other: they are
# timed.
FAULTS ?=
test-faults: $(VENV)/installed slurm
	$(PYTEST) -m long tests/faults $(if $(FAULTS),-k "$(FAULTS)")

# The Slurm tests on each version of Slurm that Debian has, as a table in tf4slurm/doctor/slurm_tests.json. The other
# versions are in root directories below ~/.cache/tf4slurm-tests. Two hours.
slurm-versions: $(VENV)/installed slurm
	@if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then :; else apt-get update -qq && \
	  apt-get install -y -qq --no-install-recommends debootstrap e2fsprogs >/dev/null; fi
	$(BIN)/python -m tests.slurm.versions

# The unit tests and some local jobs on other versions of Python, without TensorFlow.
test-pythons: $(PYTHONS:%=$(VENV)-%/tested)

$(VENV)-%/tested: FORCE
	@for python in python$* $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$*.*/bin/python ""; do \
	  "$$python" -c "" 2>/dev/null && break; done; \
	if [ -z "$$python" ]; then echo "Python $* is not installed: its tests are skipped."; exit 0; fi; \
	set -ex; "$$python" -m venv $(VENV)-$*; \
	$(VENV)-$*/bin/pip install --quiet --disable-pip-version-check --editable ".[test]"; \
	$(VENV)-$*/bin/python -m pytest --numprocesses=2 --dist=loadfile tests/unit tests/local/test_fork_safety.py \
	    tests/test_architecture.py

# Training with Keras and forked processes on older versions of TensorFlow, each in its own virtual environment.
test-tensorflows: $(TENSORFLOWS:%=.tensorflow-%/tested)

# tf4slurm needs Python 3.10: with an older one, the environment has TensorFlow only.
.tensorflow-%/installed: setup.cfg pyproject.toml
	@for python in $(if $(PYTHON_OF_$*),python$(PYTHON_OF_$*) \
	    $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$(PYTHON_OF_$*).*/bin/python,$(PYTHON)) ""; do \
	  "$$python" -c "" 2>/dev/null && break; done; \
	if [ -z "$$python" ]; then echo "Python $(PYTHON_OF_$*) is not installed: TensorFlow $* is skipped."; exit 0; fi; \
	set -ex; "$$python" -m venv $(@D); \
	own=; ! $(@D)/bin/python -c "import sys; sys.exit(sys.version_info < (3, 10))" || own="--editable .$(if $(filter $*,$(TENSORFLOWS)),[test] scikit-learn)"; \
	$(@D)/bin/pip install --quiet --disable-pip-version-check $$own $(foreach need,$(NEEDS_OF_$*),"$(need)") \
	    "$(if $(filter 1.%,$*),tensorflow,tensorflow-cpu)==$*.*"; \
	touch $@

.tensorflow-%/tested: .tensorflow-%/installed FORCE
	$(@D)/bin/python -m pytest -m "" --numprocesses=2 --dist=loadfile tests/tensorflow/test_keras_fit.py \
	    tests/tensorflow/test_elastic.py tests/tensorflow/reference tests/tensorflow/test_preload.py

# Jobs with each version of TensorFlow, as a table in tf4slurm/doctor/tensorflow_tests.json: an hour.
tensorflow-versions: $(VENV)/installed $(JOB_TENSORFLOWS:%=.tensorflow-%/installed)
	$(BIN)/python -m tests.tensorflow.versions

.PRECIOUS: .tensorflow-%/installed

FORCE:

check: $(VENV)/installed
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy tf4slurm tests benchmarks

# All figures with bounds and peers, as a table and in benchmarks/results: 90 minutes; Ctrl-C keeps the results so far.
bench: $(VENV)/installed slurm peers
	@command -v fusermount3 >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	  apt-get install -y -qq --no-install-recommends fuse3 >/dev/null
	$(BIN)/python -m benchmarks

# Some of the figures, with few repetitions, not stored: under 5 minutes.
bench-quick: $(VENV)/installed slurm peers
	$(BIN)/python -m benchmarks quick

# JAX's and torch's coordinators, from PyPI, in a separate virtual environment.
peers: $(PEERS)/installed

$(PEERS)/installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --requirement benchmarks/peers/requirements.txt
	touch $@

# The whole fault matrix as a table, stored in benchmarks/results/faults.md: 20 minutes.
faults: $(VENV)/installed slurm
	$(BIN)/python -m benchmarks faults

# Execute the notebooks in place, and repeat the cluster sessions that they show on a real Slurm: a quarter of an hour.
notebooks: $(VENV)/installed slurm
	$(BIN)/python -m tests.tutorials

# The documentation site, docs/_build/html/index.html; each warning is an error. It needs no network.
docs: $(VENV)/installed
	$(BIN)/sphinx-build -E -W --keep-going --quiet docs docs/_build/html

# Follow the links of the site to other sites, with a network.
docs-links: $(VENV)/installed
	$(BIN)/sphinx-build -E --quiet -b linkcheck docs docs/_build/linkcheck

# The wheel and the source distribution, in dist/, checked as PyPI does. CONTRIBUTING.md has the steps of a release.
dist: $(VENV)/installed
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# Simulated jobs with faults, one per seed: `make simulate SEEDS=1000000`. The last line counts the violated invariants.
SEEDS ?= 20000
simulate: $(VENV)/installed
	$(BIN)/python -m tests.simulation $(SEEDS)

# 200 jobs in a row, each with a failure injected at a random time; a failed job prints how to repeat it alone.
soak: $(VENV)/installed
	$(BIN)/python -m tests.faults.soak

# 100,000 invalid environments and nodelists of each kind: some minutes.
fuzz: $(VENV)/installed
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest --timeout=0 tests/unit/test_slurm_fuzz.py

$(VENV)/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[cpu,tutorials,test,bench,docs,release]"
	@# In its own directory, for the tests that need it; --no-deps, because it requires tensorflow, not tensorflow-cpu.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/tf-keras "tf-keras>=2.16"
	touch $@

# Install Slurm for the tests, on a Debian machine as root. Elsewhere the Slurm tests are skipped, with a message.
slurm:
	@if command -v slurmctld >/dev/null && command -v munged >/dev/null && command -v ip >/dev/null && \
	  command -v slurmdbd >/dev/null && command -v iptables >/dev/null && command -v mariadbd >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES) >/dev/null; \
	fi

# Install a browser for the tests of the report and the live page, likewise.
browser:
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(BROWSER_PACKAGES) >/dev/null; \
	fi

clean:
	rm -rf $(VENV) $(DEMO) $(PYTHONS:%=$(VENV)-%) $(JOB_TENSORFLOWS:%=.tensorflow-%) $(PEERS) build dist docs/_build *.egg-info
