# Everything here sets itself up: `make demo` and `make test` work in a fresh checkout with nothing but
# Python 3.11 or newer, and a second run downloads and installs nothing.
#
#   make demo     answer prompts, train heads on the answers, measure them, answer side by side
#   make test     the tests, exactness on the real base model included
#   make test-changed  those that your change asks for: of its rooms, and of what imports them
#   make test-oldest  tests with the oldest transformers that is allowed; ROOMS="tests/base ..." names some
#   make test-newest  a few tests where `pip install .` alone chose the newest version of everything
#   make test-arm the kernels' tests as compiled for 64-bit ARM, emulated; it says which programs it needs
#   make check    lint, format, types, direction of imports
#   make format   rewrite files the way `make check` wants them
#   make docs     the documentation with the API reference, into site/; a broken link is an error
#   make dist     a release in dist/: the source, and a wheel with the kernels compiled; checked, and tried;
#                 HERE=1 compiles for this processor alone, a trial
#   make bench    heads against plain decoding and transformers' own modes, on the demo's heads; minutes
#   make measure  the experiments behind MEASUREMENTS.md whose code has changed; ONLY=NAME is one of them

PYTHON ?= python3
BIN    := .venv/bin
BASE   := models/smollm2-135m-instruct
DEMO   := runs/demo
TEST_PROCESSES ?= 2
ROOMS  ?= tests/base tests/decoding tests/drafters tests/engine tests/heads

# pip install --no-compile: half a minute less, since most modules of torch and transformers are never imported.
# The others are compiled when they are first imported, and must be kept: else each process compiles them anew,
# ten seconds of its time. Images of Python often forbid it.
unexport PYTHONDONTWRITEBYTECODE
export TOKENIZERS_PARALLELISM := false

.DELETE_ON_ERROR:
.PHONY: help demo test test-changed test-oldest test-newest test-arm lint types check format docs dist bench measure setup models FORCE

help:
	@sed -n 's/^#   //p' Makefile

# ---------------------------------------------------------------- set-up

setup: .venv/.installed
models: $(BASE)/config.json

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"medusa needs Python 3.11 or newer, $(PYTHON) is {v.major}.{v.minor}; name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable '.[train,dev]'
	@touch $@

$(BASE)/config.json: | .venv/.installed
	$(BIN)/medusa fetch smollm2-135m-instruct --output $(BASE)

# ---------------------------------------------------------------- the main job

# Each step leaves a file and is skipped once that file is there; `rm -r runs/demo` starts over.
HELD_OUT := --base $(BASE) --heads $(DEMO)/heads --prompts demo_heldout

demo: $(DEMO)/.tuned
	$(BIN)/medusa benchmark $(HELD_OUT) --limit 3 --max-new-tokens 80 --show --plot $(DEMO)/benchmark.png \
	    --json $(DEMO)/benchmark.json --systems heads default
	@echo "And with the heads that ship, which were trained for hours:"
	$(BIN)/medusa benchmark --base $(BASE) --prompts demo_heldout --limit 3 --max-new-tokens 80 \
	    --plot $(DEMO)/shipped.png --json $(DEMO)/shipped.json --systems default
	@echo
	@echo "Heads:      $(DEMO)/heads, trained just now; 'smollm2-135m-instruct' are the ones that ship"
	@echo "Evaluation: $(DEMO)/evaluation.json, $(DEMO)/evaluation.png, $(DEMO)/tree.png, $(DEMO)/benchmark.png"
	@echo "Chat:       $(BIN)/medusa chat"

# The base model answers prompts of our own writing.
$(DEMO)/.answered: | $(BASE)/config.json
	$(BIN)/medusa distill --base $(BASE) --prompts demo_prompts \
	    --output $(DEMO)/data.jsonl --max-new-tokens 192 --max-minutes 1.8
	@touch $@

# Heads learn to foresee those answers.
$(DEMO)/heads/config.json: | $(DEMO)/.answered
	$(BIN)/medusa train --config smollm2_demo --overwrite

# How often are they right, by depth?
$(DEMO)/evaluation.json: | $(DEMO)/heads/config.json
	$(BIN)/medusa evaluate $(HELD_OUT) --limit 12 --max-new-tokens 32 \
	    --plot $(DEMO)/evaluation.png --json $@

# How many guesses are worth verifying at once on this machine?
$(DEMO)/.tuned: | $(DEMO)/evaluation.json
	$(BIN)/medusa tune --base $(BASE) --heads $(DEMO)/heads --prompts $(DEMO)/data.jsonl \
	    --limit 16 --sizes 2,3,4,6,8,12 --plot $(DEMO)/tree.png --json $(DEMO)/tuned.json
	@touch $@

bench: | $(DEMO)/.tuned
	$(BIN)/medusa benchmark $(HELD_OUT) --limit 12 --max-minutes 6 --plot $(DEMO)/benchmark.png \
	    --json $(DEMO)/benchmark.json

measure: .venv/.installed | $(BASE)/config.json
	$(BIN)/python scripts/measure.py $(if $(ONLY),--only $(ONLY))

# ---------------------------------------------------------------- checks

lint: .venv/.installed
	$(BIN)/ruff check --quiet .

test: lint | $(BASE)/config.json
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal

# Those that a change asks for: of its rooms, and of what imports it. SINCE names a commit to compare with.
test-changed: lint | $(BASE)/config.json
	tests=$$($(BIN)/python scripts/changed_tests.py $(if $(SINCE),--since $(SINCE))) && { test -z "$$tests" || \
	    OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal $$tests; }

# The oldest transformers that pyproject.toml allows, and the hub that it wants, before the packages of .venv.
OLDEST := $(shell sed -n 's/^ *"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml).0
.venv-oldest/.$(OLDEST): | .venv/.installed
	rm -rf .venv-oldest
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target .venv-oldest transformers==$(OLDEST) 'huggingface_hub<2'
	@touch $@

test-oldest: .venv-oldest/.$(OLDEST) .venv/.installed
	PYTHONPATH=.venv-oldest OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal $(ROOMS)

# What a user has whom no constraints hold back.
NEWEST := \
    tests/base/test_causal_lm.py \
    tests/heads/test_mtp.py::test_the_text_is_that_of_plain_decoding \
    tests/engine/weights/test_quantised_directories.py::test_compiled_steps_write_the_text_of_general_ones_with_any_draft \
    tests/training/test_trainer.py::test_training_lowers_the_held_out_loss_and_leaves_the_base_alone \
    tests/serving/test_server.py::test_an_answer_is_that_of_generate_streamed_or_not \
    tests/serving/test_server.py::test_many_clients_at_once_get_what_each_gets_alone \
    tests/cli/test_next_steps.py::test_a_command_ends_with_its_next_step

# FROM names a wheel of `make dist` to install in place of the checkout.
FROM ?= .
test-newest: .venv-newest/.installed
	.venv-newest/bin/python -m pip install --quiet --no-compile --force-reinstall --no-deps $(FROM)
	.venv-newest/bin/python -m pip check
	OMP_NUM_THREADS=1 .venv-newest/bin/pytest -n $(TEST_PROCESSES) --dist worksteal -W error::FutureWarning $(NEWEST)

# What is newest was chosen within the hour.
.venv-newest/.installed: pyproject.toml $(if $(shell find .venv-newest/.installed -mmin -60 2>/dev/null),,FORCE)
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
	    > .venv-newest/requirements.txt
	.venv-newest/bin/python -m pip install --quiet --no-compile --requirement .venv-newest/requirements.txt \
	    pytest pytest-xdist hypothesis openai
	@touch $@
FORCE:

test-arm: .venv/.installed
	$(BIN)/python scripts/test_arm.py

types: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint types
	$(BIN)/python -m pytest tests/test_architecture.py tests/test_shape.py tests/test_style.py

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

# ---------------------------------------------------------------- release

.venv-dist/.installed:
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --no-compile 'twine>=6.1'
	@touch $@

dist: .venv/.installed .venv-dist/.installed | $(BASE)/config.json
	$(BIN)/python scripts/make_dist.py $(if $(HERE),--here)
