"""Compares a bundle's answers with those of transformers, for a checkpoint that PlanForge has no model of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from planforge.runtime import TextEncoder, TextGenerator, Translator

from .models import greedy

TEXTS = ["In the beginning God created the heaven", "And", "the word of the LORD came " * 6]
PAIR = ("And God said", "Let there be light: and there was light")


def compare_tokens(bundle: Path, checkpoint: Path) -> None:
    """Compare greedy texts, of a padded batch and with drafts."""
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompts = [*TEXTS[:2], "Now therefore " * 12]
    with TextGenerator.load(bundle) as model:
        read = [[*model.defaults.prefix, *model.tokenizer.encode(prompt)] for prompt in prompts]
        wanted = [greedy(reference, prompt, 20) for prompt in read]
        assert len({token for tokens in wanted for token in tokens}) >= 8
        answers = model.generate(prompts, max_new_tokens=20)
        drafted = model.generate(prompts[0], max_new_tokens=20, speculative="prompt-lookup")
    assert [list(answer.token_ids) for answer in answers] == wanted
    assert list(drafted.token_ids) == wanted[0]


def compare_translations(bundle: Path, checkpoint: Path) -> None:
    """Compare translations of a padded batch by greedy and beam search."""
    reference: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    with Translator.load(bundle) as model:
        for beams in (1, 3):
            found = model.translate(TEXTS, num_beams=beams, max_new_tokens=16)
            for text, translation in zip(TEXTS, found, strict=True):
                ids = tokenizer(text, return_tensors="pt").input_ids
                read = [*model.defaults.prefix, *model.source_tokenizer.encode(text), model.source_eos]
                assert read == ids[0].tolist()
                options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": 16, "do_sample": False}
                wanted = reference.generate(ids, **options)[0].tolist()[1:]
                assert list(translation.token_ids) == wanted


def compute_states(checkpoint: Path, text: str) -> Any:
    """Return transformers' hidden states (T, E)."""
    model: Any = transformers.AutoModel.from_pretrained(checkpoint).eval()
    tokens = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)(text, return_tensors="pt")
    with torch.no_grad():
        return model(tokens.input_ids).last_hidden_state[0].numpy()


def compare_vectors(bundle: Path, checkpoint: Path) -> None:
    """Compare each token's vector, and a text's, of a padded batch."""
    wanted = [compute_states(checkpoint, text) for text in TEXTS]
    with TextEncoder.load(bundle) as model:
        found = model.embed(TEXTS, pooling="mean", normalize=False)
        np.testing.assert_allclose(found, [array.mean(0) for array in wanted], atol=1e-5)
        for features, array in zip(model.features(TEXTS), wanted, strict=True):
            np.testing.assert_allclose(features.vectors, array, atol=1e-5)


def compare_classes(model: TextEncoder, checkpoint: Path) -> None:
    """Compare the classes of a text and of a pair."""
    reference: Any = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    given: Sequence[str]
    for given in ((TEXTS[0],), PAIR):
        with torch.no_grad():
            logits = reference(**tokenizer(*given, return_tensors="pt")).logits[0]
        found = model.classify(*given)
        assert found.label == f"LABEL_{int(logits.argmax())}"
        np.testing.assert_allclose(found.score, logits.softmax(-1).max(), atol=1e-5)


def compare_masked_words(model: TextEncoder, checkpoint: Path) -> None:
    """Compare the likeliest words of two masks."""
    text = "In the <mask> God created the <mask> and the earth"
    reference: Any = transformers.AutoModelForMaskedLM.from_pretrained(checkpoint).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = reference(ids).logits[0][ids[0] == tokenizer.mask_token_id]
    found = model.fill_mask(text, top_k=3)
    assert [[word.token_id for word in words] for words in found.masks] == logits.topk(3).indices.tolist()
