# make demo   the whole way on the shipped detector and generated images, to an answer of the C++ service
# make test   style, types and tests, those of service/ included: minutes
# make test-all   that and 'make test-rest': sanitizers, whole data sets, every command of every page, long searches
# All three set up .venv first; nothing else has to be installed.
# make test-benchmarks   the tests of the scripts in benchmarks/ alone, which are a part of test-rest
# make service   the C++ runtime and service into build/service, for TensorRT with TENSORRT_INCLUDE_DIR=folder of NvInfer.h
# make test-sanitized   service/ with the address, undefined and thread sanitizers in it, a part of test-rest
# make test-matrix      Python 3.10 to 3.13 with the oldest and the newest dependencies, in .venv-matrix
# make lock             requirements.lock anew: the releases that make test installs
# make test-triton      packaged repositories in a real Triton server, in .venv-triton
# make docs      the pages as a site, into build/site
# make fuzz      what reads bytes from outside, with libFuzzer, each target for FUZZ_SECONDS; needs clang
# make attack    clients that want to cost the service much, on the loopback; IMAGES=folder of images, BUNDLE=folder
# make test-tensorrt86   what can be asked of TensorRT 8.6.0 without a GPU, in .venv86; needs Python 3.10, cc and 4 GB

PYTHON ?= python3
VENV   ?= .venv
# TensorRT 8.6.0 is made for Python 3.6 to 3.10, trtdet for 3.10 and later.
PYTHON310 ?= python3.10
VENV86    ?= .venv86
# Those of rooms that every installation has: without torch, a compiler or a browser.
MATRIX_PYTHONS ?= 3.10 3.11 3.12 3.13
MATRIX_TESTS ?= tests/audit tests/backends tests/building tests/bundle tests/calibration tests/data tests/detection \
  tests/evaluation tests/options tests/passes tests/quantization tests/runtime tests/test_config.py
# The CPU build is enough for the tests; any torch that is there already will do.
TORCH  ?= torch==2.13.0

BIN := $(VENV)/bin
BIN86 := $(VENV86)/bin

# Builds of service/ that the tests run on: as it is shipped, and with sanitizers.
SERVICE   := build/service
SANITIZED := address,undefined thread

# Files stay whole: what a file's tests share is made once. Long files come first, see tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# Commands that tests start read compiled modules, not sources, also where a machine's default is not to write them.
unexport PYTHONDONTWRITEBYTECODE

FUZZ_SECONDS ?= 600
FUZZ_TARGETS := manifest image recording multipart inference head encoding grpc

.PHONY: demo test test-all test-rest test-benchmarks test-matrix test-tensorrt86 test-triton test-sanitized chromium lint lock \
  service service-tests docs fuzz attack clean

demo: $(VENV)/.demo
	$(BIN)/trtdet demo -o demo
	@if service/build.sh build/demo -DBUILD_TESTING=OFF; \
	then service/demo.sh build/demo/serve/trtdet-serve $(BIN)/python demo/bundles/int8 demo/data/val/000001.png; \
	else echo "C++ service left out: it could not be built, see above; the demo itself is complete"; fi

# What is installed and what is compiled do not wait for each other.
test:
	$(MAKE) --no-print-directory -j2 lint service-tests
	$(PYTEST) -m "not slow and not benchmark and not tensorrt86"

test-all: test
	$(MAKE) --no-print-directory test-rest

# All that 'make test' leaves out and that needs no other environment, to its end also where some of it fails; like
# 'make test' it ends with pytest's summary.
test-rest: $(VENV)/.dev chromium
	failed=0; $(MAKE) --no-print-directory test-sanitized || failed=1; \
	$(PYTEST) -m "(slow or benchmark) and not tensorrt86" || failed=1; exit $$failed

# Reports are looked at in it; where it may not be installed those tests say that they skip.
chromium:
	@command -v chromium >/dev/null 2>&1 || { sudo=; test "$$(id -u)" -eq 0 || sudo="sudo -n"; \
	  $$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
	    --no-install-recommends chromium; } >/dev/null 2>&1 || echo "chromium is not here and was not installed" >&2

test-benchmarks: $(VENV)/.dev
	$(BIN)/python -m pytest -m benchmark

test-matrix:
	tests/matrix.sh $(VENV)-matrix "$(MATRIX_PYTHONS)" $(MATRIX_TESTS)

# torch is installed apart, as its CPU build.
lock: $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python -m uv pip compile --quiet --universal --python-version 3.10 --no-annotate --upgrade \
	  --custom-compile-command 'make lock' --extra rtx --extra sign --extra dev -o requirements.lock setup.cfg

# Its plugins want cuBLAS and cuDNN at import; stand-ins are enough for what is asked here. With TRTDET_TENSORRT_HEADERS
# and nvcc trtdet's own plugin library is compiled and asked too, and the library's ONNX parser reads what trtdet writes;
# NvOnnxParser.h is looked for with the other headers, or where TRTDET_ONNX_PARSER_HEADER names it.
test-tensorrt86: $(VENV86)/.dev
	LD_LIBRARY_PATH="$(abspath $(VENV86))/stand_ins$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}" \
	  $(BIN86)/python -m pytest -m tensorrt86 tests

# Triton wants NumPy 1, and nvidia-pytriton brings the server: 200 MB.
test-triton: $(VENV)-triton/.dev
	$(VENV)-triton/bin/python -m pytest -m triton tests

$(VENV)-triton/.dev: setup.cfg
	$(PYTHON) -m venv $(VENV)-triton
	$(VENV)-triton/bin/python -m pip install --quiet --disable-pip-version-check -e . nvidia-pytriton 'numpy<2' \
	  'opencv-python-headless<4.12' pytest pytest-timeout hypothesis
	touch $@

# build.sh ends with 3 where packages are missing that it may not install: it has said which.
service:
	service/build.sh $(SERVICE) -DTENSORRT_INCLUDE_DIR=$(TENSORRT_INCLUDE_DIR) || test $$? -eq 3

service-tests: service
	set -e; test -f $(SERVICE)/CTestTestfile.cmake || exit 0; \
	ctest --test-dir $(SERVICE) --output-on-failure

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

fuzz: $(VENV)/.dev
	service/build.sh build/fuzz -DCMAKE_CXX_COMPILER=clang++ -DTRTDET_FUZZ=ON -DTRTDET_SANITIZE=address,undefined \
	  -DTRTDET_PROGRAMS=OFF -DBUILD_TESTING=OFF
	$(BIN)/python service/fuzz/seeds.py build/fuzz/seeds
	set -e; for target in $(FUZZ_TARGETS); do \
	  mkdir -p build/fuzz/corpus/$$target; \
	  build/fuzz/fuzz/fuzz_$$target -max_total_time=$(FUZZ_SECONDS) -timeout=20 -artifact_prefix=build/fuzz/ -print_final_stats=1 \
	    build/fuzz/corpus/$$target build/fuzz/seeds/$$target; \
	done

attack: $(VENV)/.dev service
	$(BIN)/python benchmarks/attack.py $(BUNDLE) --images $(IMAGES) --service $(SERVICE)/serve/trtdet-serve -- \
	  --library-folder $$($(BIN)/python -c "import onnxruntime, os; print(os.path.dirname(onnxruntime.__file__))")/capi

# The library's own tests, then the whole process as its clients see it.
test-sanitized: $(VENV)/.dev service
	set -e; test -f $(SERVICE)/CTestTestfile.cmake || exit 0; \
	tests="tests/service/test_serve.py tests/service/test_serve_load.py"; \
	for sanitizers in $(SANITIZED); do \
	  folder=$(SERVICE)-$${sanitizers%%,*}; \
	  service/build.sh $$folder -DTRTDET_SANITIZE=$$sanitizers -DCMAKE_UNITY_BUILD=ON; \
	  ctest --test-dir $$folder --output-on-failure; \
	done; \
	TRTDET_SERVICE_BUILD=$(SERVICE)-thread $(PYTEST) $$tests; \
	TRTDET_SERVICE_BUILD=$(SERVICE)-address $(PYTEST) $$tests tests/service/test_grpc.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find service -name '*.[ch]pp' | xargs $(BIN)/clang-format --dry-run --Werror

# Debian's python3 comes without ensurepip; virtualenv then does the same.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); $(PYTHON) -m virtualenv $(VENV); } || { rm -rf $(VENV); \
	  $(PYTHON) -m pip install --user virtualenv && $(PYTHON) -m virtualenv $(VENV); } || { \
	  echo "no virtual environment could be made: install python3-venv or virtualenv" >&2; exit 1; }

$(VENV)/.demo: $(BIN)/python setup.cfg requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[rtx]'
	touch $@

# Much of what the tests want is never imported: what is, is compiled then.
$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c requirements.lock -e '.[rtx,dev]'
	touch $@

# A python3.10 that is on the path but does not start is pyenv's, which wants to be told of a version.
$(BIN86)/python:
	@found=$$(pyenv versions --bare 2>/dev/null | grep '^3\.10\.' | tail -1); \
	for python in "$(PYTHON310)" $${found:+"$$(pyenv prefix $$found)/bin/python3.10"}; do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null || continue; \
	  "$$python" -m venv $(VENV86) || { rm -rf $(VENV86); $(PYTHON) -m virtualenv --python "$$python" $(VENV86); }; \
	  exit; \
	done; \
	echo "no Python 3.10 here, which TensorRT 8.6.0 needs: install it (python3.10 and python3.10-venv, or" \
	  "'pyenv install 3.10') or name it with PYTHON310=/path/to/python3.10" >&2; exit 1

# Without what it asks for: the newest cuDNN, which it would get, is one that it cannot be loaded with.
$(VENV86)/.dev: $(BIN86)/python setup.cfg tests/tensorrt86/stand_ins.py
	$(BIN86)/python -m pip install --quiet --disable-pip-version-check --no-deps tensorrt==8.6.0
	$(BIN86)/python -m pip install --quiet --disable-pip-version-check -e . pytest hypothesis polygraphy pycocotools pytest-timeout
	$(BIN86)/python tests/tensorrt86/stand_ins.py $(VENV86)/lib/python3.10/site-packages/tensorrt $(VENV86)/stand_ins
	touch $@

clean:
	rm -rf $(VENV) $(VENV86) $(VENV)-triton $(VENV)-matrix demo build *.egg-info
