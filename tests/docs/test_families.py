"""The pages' tables of what runs natively and what is traced from transformers are those of the code."""

from __future__ import annotations

import re

import pytest

from planforge.models.families import FAMILIES

from ..helpers.paths import ROOT
from ..helpers.random_checkpoints import CONFIGS

# What the pages call each model_type that is ours.
NATIVE = {
    "bert": "BERT",
    "camembert": "CamemBERT",
    "clip": "CLIP",
    "distilbert": "DistilBERT",
    "exaone4": "EXAONE 4",
    "gemma": "Gemma",
    "gemma2": "Gemma",
    "gemma3_text": "Gemma",
    "gpt2": "GPT-2",
    "gpt_neo": "GPT-Neo",
    "granite": "Granite",
    "llama": "Llama",
    "marian": "MarianMT",
    "ministral": "Ministral",
    "mixtral": "Mixtral",
    "mistral": "Mistral",
    "modernbert": "ModernBERT",
    "olmo2": "OLMo",
    "olmo3": "OLMo",
    "olmoe": "OLMoE",
    "openai-gpt": "GPT-1",
    "phi3": "Phi-3",
    "qwen2": "Qwen",
    "qwen3": "Qwen",
    "qwen3_moe": "Qwen3-MoE",
    "recurrent": "GRU and LSTM",
    "retro": "RETRO",
    "roberta": "RoBERTa",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM",
    "static": "model2vec",
    "transformer": "Transformer",
    "word-vectors": "GloVe",
    "xlm-roberta": "XLM-R",
}
# What they call those that are traced from transformers, each of which has a test.
TRACED = {
    "ALBERT": "albert",
    "BART": "bart",
    "BLOOM": "bloom",
    "DeBERTa": "deberta",
    "ELECTRA": "electra",
    "Falcon": "falcon",
    "GPT-J": "gptj",
    "GPT-NeoX": "gpt_neox",
    "MPNet": "mpnet",
    "OPT": "opt",
    "Phi-2": "phi",
    "T5": "t5",
}


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def read_rows(how: str) -> str:
    """Return the models in the README's rows of one way to be exported."""
    rows = re.findall(r"^\| (.+) \| .+ \| (.+) \|$", read("README.md"), re.MULTILINE)
    return ", ".join(models for models, way in rows if how in way)


def has_name(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![A-Za-z])", text) is not None


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_family_of_ours_is_in_the_tables(model_type: str) -> None:
    name = NATIVE[model_type]
    assert has_name(read_rows("natively"), name)
    assert not has_name(read_rows("traced"), name)
    assert has_name(read("docs/index.md"), name) or model_type == "transformer"
    assert has_name(read("CHANGELOG.md"), name)


def test_each_model_of_the_tables_is_exported_so() -> None:
    rows = read_rows("traced")
    named = {re.sub(r"\(.*\)", "", name).strip() for name in rows.split(",")}
    assert named == set(TRACED)
    for name, checkpoint in TRACED.items():
        assert CONFIGS[checkpoint].model_type not in FAMILIES, name
        assert has_name(read("docs/import.md"), name), name


def test_the_versions_of_the_readme_are_those_of_the_families() -> None:
    """Numbers behind a name, such as those of Qwen2 and Qwen3, are model_types of their own."""
    row = read_rows("natively")
    for text in ("Llama 2 and 3", "Qwen2, Qwen3", "Gemma 1 to 3 (text)", "OLMo 2 and 3", "Phi-3 and 4-mini"):
        assert text in row
    assert {name for name in FAMILIES if name.startswith("qwen")} == {"qwen2", "qwen3", "qwen3_moe"}
    assert {name for name in FAMILIES if name.startswith("gemma")} == {"gemma", "gemma2", "gemma3_text"}
    assert {name for name in FAMILIES if name.startswith("olmo")} == {"olmo2", "olmo3", "olmoe"}
