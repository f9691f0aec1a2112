"""gpt2-demo: its size, its recorded figures, and that it does not loop when sampled."""

from __future__ import annotations

import json
from pathlib import Path

from planforge.exporter.checkpoints.source import DEMOS
from planforge.models.demos.samples import LOOP, NEW_TOKENS, PROMPTS, TEMPERATURE, TOP_K, longest_repeat
from planforge.runtime import TextGenerator

DEMO = DEMOS / "gpt2-demo"


def test_the_demo_fits_into_8_mb() -> None:
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 8_000_000


def test_held_out_text_costs_15_percent_less_than_a_5_gram() -> None:
    held_out = json.loads((DEMO / "training.json").read_text())["held_out"]
    baselines = held_out["baselines_bits_per_character"]
    assert held_out["bits_per_character"] <= 0.85 * baselines["character_5gram_modified_kneser_ney"]
    assert held_out["bits_per_character"] <= baselines["bpe_token_5gram_modified_kneser_ney"]
    assert held_out["sampling"]["with_a_loop_of_20_tokens"] == 0


def test_repeats_are_counted() -> None:
    assert longest_repeat([1, 2, 3, 4]) == 0
    assert longest_repeat([1, 2, 3, 1, 2, 4]) == 2
    assert longest_repeat([7] * 5) == 4


def test_ten_samples_of_200_tokens_have_no_loop(demo_bundle: Path) -> None:
    with TextGenerator.load(demo_bundle) as model:
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
