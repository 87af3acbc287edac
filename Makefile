# Needs Python >= 3.11 and make, nothing else. Everything is installed into .venv from requirements.lock.

# The first Python that is new enough and can make virtual environments.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
	then echo $$python; break; fi; done)
UV ?= uv

VENV := .venv
RUN := $(VENV)/bin/python -m
STAMP := $(VENV)/installed

# A virtual environment knows absolute paths, so one that came along with a copied or moved checkout is installed again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): anew
endif

.PHONY: serve test lint format types lock clean anew
.DEFAULT_GOAL := test

serve: $(STAMP)  ## run the main job on an embedded PostgreSQL, with a stand-in for the outside world
	$(VENV)/bin/webhooks serve --dev

test: $(STAMP)  ## run the whole suite, four at a time since most of it waits; ARGS are passed to pytest
	$(RUN) pytest -n 4 --dist worksteal $(ARGS)

lint: $(STAMP)
	$(RUN) ruff check .
	$(RUN) ruff format --check .

format: $(STAMP)
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

types: $(STAMP)
	$(RUN) mypy --strict
	$(RUN) basedpyright

$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with venv and ensurepip found; name one: make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --disable-pip-version-check --quiet --require-hashes -r requirements.lock
	$(RUN) pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@echo "$(CURDIR)" > $@

# Pins every dependency, the build backend included, with the hashes of its files. Needs uv (`pip install uv`).
lock:
	$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')" \
	| $(UV) pip compile --quiet --no-config --universal --generate-hashes --custom-compile-command "make lock" \
		--extra embedded --extra dev $(ARGS) --output-file requirements.lock pyproject.toml -

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
