"""docs/graphs.md: its script decodes as transformers does, and it names all that graphs take and give."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from planforge.runtime.bundle.bundle import Bundle

from ..helpers.paths import ROOT

PAGE = (ROOT / "docs" / "graphs.md").read_text(encoding="utf-8")
PROMPT = [10, 20, 30]
OTHERS = ("planforge", "torch", "transformers", "tokenizers", "onnx")  # that the script does without


def greedy(checkpoint: Path) -> list[int]:
    """transformers' greedy answer to the page's prompt, with it; no token ends it."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=10, min_new_tokens=10, do_sample=False
    )
    (ids,) = model.generate(torch.tensor([PROMPT]))
    tokens: list[int] = ids.tolist()
    return tokens


@pytest.mark.parametrize("demo", ["gpt2-demo", "llama-demo"])
def test_the_script_decodes_as_transformers(
    demo: str, demo_bundle: Path, llama_demo_bundle: Path, tmp_path: Path
) -> None:
    """In every dialect that ONNX Runtime runs, and with nothing else of ours or of PyTorch's imported."""
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    bundle = {"gpt2-demo": demo_bundle, "llama-demo": llama_demo_bundle}[demo]
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "gpt2-demo").symlink_to(bundle)
    artifacts = [one.id for one in Bundle.open(bundle).manifest.artifacts if one.precision == "fp32"]
    expected = greedy(ROOT / "models" / "demos" / demo)
    ends = f"\nimport sys\nprint([name for name in {OTHERS} if name in sys.modules])"
    for artifact in artifacts:
        code = script.replace("decoder.ort.fp32", artifact) + ends
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        tokens, imported = map(json.loads, ran.stdout.splitlines())
        assert (tokens, imported) == (expected, []), artifact


def test_the_page_names_all_inputs_and_outputs(
    demo_bundle: Path,
    llama_demo_bundle: Path,
    dates_bundle: Path,
    minilm_bundle: Path,
    recurrent_bundle: Path,
    head_bundle: Callable[[str], Path],
) -> None:
    heads = [head_bundle(name) for name in ("classifier", "tagger", "reader", "pretrained")]
    for folder in (demo_bundle, llama_demo_bundle, dates_bundle, recurrent_bundle, minilm_bundle, *heads):
        for artifact in Bundle.open(folder).manifest.artifacts:
            for spec in (*artifact.inputs, *artifact.outputs):
                name = re.sub(r"\.\d+", ".N", spec.name).removesuffix(".key").removesuffix(".value")
                assert f"`{name}" in PAGE, (artifact.id, spec.name)
