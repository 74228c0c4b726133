# Everything a fresh machine with git, make and Python needs: `make demo` and `make test` do all their own set-up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
SLURM_PACKAGES := slurm-wlm munge iproute2 iptables slurmdbd slurm-wlm-mysql-plugin mariadb-server-core
# The tests wait more than they compute: two at a time, each file's after one another.
PYTEST := $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --durations=40
BROWSER_PACKAGES := chromium fonts-dejavu-core

# Versions of Python beside that of $(VENV) that `make test-long` tries, where they are installed.
PYTHONS := 3.10 3.13

.PHONY: demo test test-long test-pythons check slurm browser bench bench-quick peers faults notebooks soak fuzz clean

demo: $(VENV)/installed
	$(BIN)/tf4slurm run --ps 1 --workers 2 -- $(BIN)/python TUTORIALS/train_digits.py

test: $(VENV)/installed slurm browser check
	$(PYTEST) --cov

# What takes long: most of the fault matrix, most notebooks, and of what there is in several kinds all but the first.
# Half an hour.
test-long: $(VENV)/installed slurm browser test-pythons
	$(PYTEST) -m long

# The unit tests on other versions of Python, without TensorFlow.
test-pythons: $(PYTHONS:%=$(VENV)-%/tested)

$(VENV)-%/tested: FORCE
	@for python in python$* $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$*.*/bin/python ""; do \
	  "$$python" -c "" 2>/dev/null && break; done; \
	if [ -z "$$python" ]; then echo "Python $* is not installed: its tests are left out."; exit 0; fi; \
	set -ex; "$$python" -m venv $(VENV)-$*; \
	$(VENV)-$*/bin/pip install --quiet --disable-pip-version-check --editable ".[test]"; \
	$(VENV)-$*/bin/python -m pytest --numprocesses=2 --dist=loadfile tests/unit tests/test_architecture.py

FORCE:

check: $(VENV)/installed
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy tf4slurm tests benchmarks

# Every figure beside its bound and its peers, as a table, and in benchmarks/results: 70 minutes; Ctrl-C keeps what there is.
bench: $(VENV)/installed slurm peers
	$(BIN)/python -m benchmarks

# A choice of them, a few times each, kept nowhere: under 5 minutes.
bench-quick: $(VENV)/installed slurm peers
	$(BIN)/python -m benchmarks quick

# JAX's and torch's coordinators, from PyPI, in an environment of their own.
peers: $(PEERS)/installed

$(PEERS)/installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --requirement benchmarks/peers/requirements.txt
	touch $@

# The whole fault matrix as a table, kept in benchmarks/results/faults.md: 20 minutes.
faults: $(VENV)/installed slurm
	$(BIN)/python -m benchmarks faults

# Execute the notebooks in place, and type what they show of a cluster again on a real Slurm: a quarter of an hour.
notebooks: $(VENV)/installed slurm
	$(BIN)/python -m tests.tutorials

# 200 jobs in a row, each disturbed at a random moment; a failure prints how to run it again alone.
soak: $(VENV)/installed
	$(BIN)/python -m tests.faults.soak

# 100,000 broken environments and nodelists of each kind: some minutes.
fuzz: $(VENV)/installed
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest --timeout=0 tests/unit/test_slurm_fuzz.py

$(VENV)/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[cpu,tutorials,test,bench]"
	@# Beside the rest, for those tests that ask for it; it asks for the package tensorflow, which tensorflow-cpu is not.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/tf-keras "tf-keras>=2.16"
	touch $@

# A real Slurm for the tests, where it can be had: a Debian machine, as root. Elsewhere its tests skip and say so.
slurm:
	@if command -v slurmctld >/dev/null && command -v munged >/dev/null && command -v ip >/dev/null && \
	  command -v slurmdbd >/dev/null && command -v iptables >/dev/null && command -v mariadbd >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES) >/dev/null; \
	fi

# A real browser for the tests of the report and the live page; the same.
browser:
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(BROWSER_PACKAGES) >/dev/null; \
	fi

clean:
	rm -rf $(VENV) $(PYTHONS:%=$(VENV)-%) $(PEERS) build dist *.egg-info
