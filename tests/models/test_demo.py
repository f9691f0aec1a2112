"""gpt2-demo and llama-demo: their sizes, their recorded figures, and that they do not loop when sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from planforge.exporter.checkpoints.source import DEMOS
from planforge.models.demos.language_model import new_optimizers
from planforge.models.demos.samples import LOOP, NEW_TOKENS, PROMPTS, TEMPERATURE, TOP_K, longest_repeat
from planforge.models.demos.train_gpt2_demo import RECIPE
from planforge.runtime import TextGenerator

each_demo = pytest.mark.parametrize("name", ["gpt2-demo", "llama-demo"])


@each_demo
def test_the_demo_fits_into_8_mb(name: str) -> None:
    assert sum(path.stat().st_size for path in (DEMOS / name).iterdir()) <= 8_000_000


@each_demo
def test_held_out_text_costs_15_percent_less_than_a_5_gram(name: str) -> None:
    held_out = json.loads((DEMOS / name / "training.json").read_text())["held_out"]
    baselines = held_out["baselines_bits_per_character"]
    assert held_out["bits_per_character"] <= 0.85 * baselines["character_5gram_modified_kneser_ney"]
    assert held_out["bits_per_character"] <= baselines["bpe_token_5gram_modified_kneser_ney"]
    assert held_out["sampling"]["with_a_loop_of_20_tokens"] == 0


def test_repeats_are_counted() -> None:
    assert longest_repeat([1, 2, 3, 4]) == 0
    assert longest_repeat([1, 2, 3, 1, 2, 4]) == 2
    assert longest_repeat([7] * 5) == 4


@pytest.mark.parametrize("bundle", ["demo_bundle", "llama_demo_bundle"])
def test_ten_samples_of_200_tokens_have_no_loop(bundle: str, request: pytest.FixtureRequest) -> None:
    with TextGenerator.load(request.getfixturevalue(bundle)) as model:
        answers = [
            model.generate(
                prompt,
                max_new_tokens=NEW_TOKENS,
                temperature=TEMPERATURE,
                top_k=TOP_K,
                seed=seed,
                parse_special=True,
            )
            for seed, prompt in enumerate(PROMPTS)
        ]
    assert len(answers) == 10
    assert max(longest_repeat(answer.token_ids) for answer in answers) < LOOP


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_an_answer_ends_with_its_turn(llama_demo_bundle: Path, precision: str) -> None:
    """In every precision that its gates have passed: a verse, and the end token of the chat template."""
    messages = [{"role": "user", "content": "And God said, Let there be light: and there was light."}]
    with TextGenerator.load(llama_demo_bundle, precision=precision) as model:
        answer = model.chat(messages, max_new_tokens=120)
    assert answer.finish_reason == "eos"
    assert answer.text[0].isupper() and "<|im_end|>" not in answer.text
    assert answer.usage.completion_tokens > 5


def test_embeddings_are_trained_by_adamw_and_matrices_by_muon() -> None:
    """GPT-2's table of positions is no matrix that multiplies."""
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    muon, adamw = new_optimizers(model, RECIPE, rate=1e-3)
    names = {id(weight): name for name, weight in model.named_parameters()}
    by_muon = {
        names[id(weight)]: group["pieces"] for group in muon.param_groups for weight in group["params"]
    }
    assert by_muon == {
        "transformer.h.0.attn.c_attn.weight": 3,
        "transformer.h.0.attn.c_proj.weight": 1,
        "transformer.h.0.mlp.c_fc.weight": 1,
        "transformer.h.0.mlp.c_proj.weight": 1,
    }
    by_adamw = {names[id(weight)] for group in adamw.param_groups for weight in group["params"]}
    assert by_adamw == set(names.values()) - set(by_muon)
