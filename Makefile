# Everything works from a fresh checkout: the targets make their own virtual environment in .venv first.
#   make demo        train a small network through the software switch and with gloo, and compare (about a minute and a half)
#   make test        the tests, under 10 minutes on 2 cores
#   make lint        formatting, lint, types, import rules
#   make cpp-test    the C++ tests under AddressSanitizer and UBSan, then under ThreadSanitizer
#   make check-all   all of these and the tests marked slow
#   make bench       throughput through the switch on loopback, as a ratio to gloo in the same run
#   make clean       remove what was built, .venv too

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
BUILD_TOOLS := scikit-build-core nanobind cmake ninja
NATIVE := CMakeLists.txt $(shell find native -name '*.cpp' -o -name '*.hpp' -o -name CMakeLists.txt)
CPP_SOURCES = $(shell find native -name '*.cpp' -o -name '*.hpp')
PYTEST := $(BIN)/python -m pytest

.PHONY: all demo test lint format cpp-test cpp-test-asan cpp-test-tsan check-all bench clean
all: $(VENV)/.built

demo: $(VENV)/.built
	$(BIN)/netsum demo $(DEMO_ARGS)

test: $(VENV)/.built
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

lint: $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.built
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)

cpp-test: cpp-test-asan cpp-test-tsan

cpp-test-asan cpp-test-tsan: $(VENV)/.installed
	@.ci/require doctest
	$(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -S . -B build/$@ -DNETSUM_PYTHON=OFF -DNETSUM_TESTS=ON \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DNETSUM_SANITIZE=$(if $(findstring tsan,$@),thread,"address,undefined") >/dev/null
	$(BIN)/cmake --build build/$@
	$(BIN)/ctest --test-dir build/$@ --output-on-failure --no-tests=error --timeout 300

check-all: lint cpp-test $(VENV)/.built
	$(PYTEST) $(PYTEST_ARGS)
	$(BIN)/netsum demo

bench: $(VENV)/.built
	$(BIN)/python -m netsum.experiments.loopback_ratio $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist demo-results .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Two stamps: a new dependency reinstalls, a changed C++ file only builds. Python files are used where they lie (editable install).
$(VENV)/.installed: pyproject.toml constraints.txt .ci/require
	@.ci/require python "$(PYTHON)"
	@.ci/require compiler
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(PIP) install -q -c constraints.txt $(BUILD_TOOLS)
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[torch,demo,test,lint]'
	@touch $@ $(VENV)/.built

$(VENV)/.built: $(VENV)/.installed $(NATIVE)
	$(PIP) install -q -c constraints.txt --no-build-isolation --no-deps -e .
	@touch $@
