"""A checkpoint's generation_config.json: kept in the bundle, and sampled by as transformers does."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import Source
from planforge.exporter.errors import CheckpointError
from planforge.exporter.imported.decoder import ImportedDecoder
from planforge.exporter.imported.folder import read_folder
from planforge.runtime.bundle.defaults import GenerationDefaults
from planforge.runtime.decoding.sampling import process
from planforge.runtime.generate.request import read_checkpoint_options, resolve_request

from ...helpers.models import edit_json, random_gpt2
from ...helpers.paths import DEMOS

DEMO = DEMOS / "gpt2-demo"
TINY: dict[str, Any] = {"vocab_size": 2048, "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 2}
LLAMA3: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
SETTINGS: list[dict[str, Any]] = [
    LLAMA3,
    {"do_sample": True},
    {"do_sample": True, "top_k": 20, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.05},
    {"do_sample": True, "top_k": 0, "min_p": 0.05, "temperature": 1.5},
    {"do_sample": True, "top_k": None, "top_p": 1.0, "min_p": 0.0},
    {"do_sample": True, "top_p": 0.0},
    {"do_sample": True, "temperature": 2.0, "top_k": 5},
    {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.0, "top_k": 7, "no_repeat_ngram_size": 2},
    {},
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    random_gpt2(**TINY).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint whose files may be changed."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def read(folder: Path) -> GenerationDefaults:
    """What the export keeps, after the way through the manifest's JSON."""
    found = Checkpoint(Source("folder", str(folder), folder)).generation
    assert found is not None
    return GenerationDefaults.from_json(json.loads(json.dumps(asdict(found))))


def transformers_scores(folder: Path, logits: Any, prompt: list[int]) -> Any:
    """What transformers' own `generate` would draw from."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config, _ = model._prepare_generation_config(None)
    model._prepare_special_tokens(config, False, device=torch.device("cpu"))
    processors = model._get_logits_processor(config, input_ids_seq_length=len(prompt), device="cpu")
    scores = processors(torch.tensor([prompt]), torch.from_numpy(logits.copy()))
    return bool(config.do_sample), scores.numpy()


@pytest.mark.parametrize("config", SETTINGS, ids=str)
@pytest.mark.parametrize("old", [False, True])
def test_the_distribution_is_that_of_transformers(folder: Path, config: dict[str, Any], old: bool) -> None:
    if old:  # as before there was a generation_config.json
        (folder / "generation_config.json").unlink()
        edit_json(folder / "config.json", **config)
    else:
        edit_json(folder / "generation_config.json", **config)
    logits = np.random.default_rng(0).normal(0, 3, (1, TINY["vocab_size"])).astype(np.float32)
    prompt = np.random.default_rng(1).integers(0, TINY["vocab_size"], 12).tolist()
    prompt += prompt[:3]
    draws, wanted = transformers_scores(folder, logits, prompt)
    sampling = resolve_request({"generation": "checkpoint"}, read_checkpoint_options(read(folder))).sampling
    assert sampling.greedy == (not draws)
    found = process(logits, [prompt], sampling)
    if draws:
        found, wanted = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (found, wanted))
    np.testing.assert_array_equal(found > -np.inf, wanted > -np.inf)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"do_sample": True, "temperature": 0.0}, r"temperature is 0\.0, expected a finite number over 0"),
        ({"do_sample": True, "temperature": -1.0}, r"temperature is -1\.0"),
        ({"do_sample": True, "temperature": float("nan")}, "temperature is nan"),
        ({"do_sample": True, "temperature": float("inf")}, "temperature is inf"),
        ({"do_sample": True, "temperature": 10**400}, r"temperature is 10*\.\.\., which is too large"),
        ({"do_sample": True, "temperature": "warm"}, "temperature is 'warm', not a number"),
        ({"do_sample": True, "top_k": -3}, "top_k is -3, expected an integer of at least 0"),
        ({"do_sample": True, "top_k": 2.5}, r"top_k is 2\.5, not an integer"),
        ({"do_sample": True, "top_p": -0.1}, r"top_p is -0\.1, expected a number from 0 to 1"),
        ({"do_sample": True, "min_p": 1.5}, r"min_p is 1\.5, expected a number from 0 to 1"),
        ({"do_sample": "yes"}, "do_sample is 'yes', not true or false"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0\.0, expected a finite number over 0"),
        ({"repetition_penalty": True}, "repetition_penalty is True, not a number"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"no_repeat_ngram_size": "two"}, "no_repeat_ngram_size is 'two', not an integer"),
    ],
)
def test_what_transformers_would_refuse_is_named(folder: Path, config: dict[str, Any], message: str) -> None:
    edit_json(folder / "generation_config.json", **config)
    with pytest.raises(CheckpointError, match=message):
        read(folder)


def test_what_is_left_out_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_json(folder / "generation_config.json", do_sample=True, typical_p=0.9, num_beams=4, eta_cutoff=0.0)
    with caplog.at_level(logging.WARNING, "planforge"):
        read(folder)
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(" sets ")[1] for text in told] == [
        "typical_p=0.9, which is ignored",
        "num_beams=4, which is ignored",
    ]


def test_the_beams_are_kept_where_no_tokens_are_drawn(folder: Path) -> None:
    edit_json(folder / "generation_config.json", num_beams=4, length_penalty=0.6, early_stopping="never")
    assert read_checkpoint_options(read(folder)) == {
        "num_beams": 4,
        "length_penalty": 0.6,
        "early_stopping": "never",
    }
    edit_json(folder / "generation_config.json", num_beams=0)
    with pytest.raises(CheckpointError, match="num_beams"):
        read(folder)


def test_a_bundle_from_before_is_greedy() -> None:
    defaults = GenerationDefaults.from_json({"eos": [0], "max_length": 64})
    assert read_checkpoint_options(defaults) == {}


def test_an_import_keeps_the_sampling(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported / "llama.onnx", tmp_path / "folder"))
    edit_json(folder / "generation_config.json", **LLAMA3)
    found = ImportedDecoder(
        Source("folder", str(folder), folder), read_folder(folder), shared=False
    ).generation
    assert found is not None
    assert read_checkpoint_options(found) == {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": None}
