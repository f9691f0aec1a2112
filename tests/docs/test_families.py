"""The pages' tables of what runs natively and what goes through optimum are those of the code."""

from __future__ import annotations

import re

import pytest

from planforge.exporter.imported.optimum import MODEL_TYPES
from planforge.models.families import FAMILIES

from ..helpers.paths import ROOT

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
    "granite": "Granite",
    "llama": "Llama",
    "marian": "MarianMT",
    "ministral": "Ministral",
    "mistral": "Mistral",
    "modernbert": "ModernBERT",
    "olmo2": "OLMo",
    "olmo3": "OLMo",
    "phi3": "Phi-3",
    "qwen2": "Qwen",
    "qwen3": "Qwen",
    "roberta": "RoBERTa",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM",
    "transformer": "Transformer",
    "xlm-roberta": "XLM-R",
}
# What they call those that optimum exports.
THROUGH_OPTIMUM = {
    "ALBERT": "albert",
    "BART": "bart",
    "BLOOM": "bloom",
    "DeBERTa": "deberta-v2",
    "ELECTRA": "electra",
    "GPT-NeoX": "gpt_neox",
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
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![a-z])", text) is not None


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_family_of_ours_is_in_the_tables(model_type: str) -> None:
    name = NATIVE[model_type]
    assert has_name(read_rows("natively"), name)
    assert not has_name(read_rows("optimum"), name)
    assert has_name(read("docs/index.md"), name) or model_type == "transformer"
    assert has_name(read("CHANGELOG.md"), name)


def test_each_model_of_the_tables_is_exported_so() -> None:
    rows = read_rows("optimum")
    named = {re.sub(r"\(.*\)", "", name).strip() for name in rows.split(",")}
    assert named == set(THROUGH_OPTIMUM)
    for name, model_type in THROUGH_OPTIMUM.items():
        assert model_type in MODEL_TYPES and model_type not in FAMILIES, name
        assert has_name(read("docs/import.md"), name), name


def test_the_versions_of_the_readme_are_those_of_the_families() -> None:
    """Numbers behind a name, such as those of Qwen2 and Qwen3, are model_types of their own."""
    row = read_rows("natively")
    for text in ("Llama 2 and 3", "Qwen2, Qwen3", "Gemma 1 to 3 (text)", "OLMo 2 and 3", "Phi-3 and 4-mini"):
        assert text in row
    assert {name for name in FAMILIES if name.startswith("qwen")} == {"qwen2", "qwen3"}
    assert {name for name in FAMILIES if name.startswith("gemma")} == {"gemma", "gemma2", "gemma3_text"}
    assert {name for name in FAMILIES if name.startswith("olmo")} == {"olmo2", "olmo3"}
