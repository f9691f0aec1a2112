"""Folders that sentence-transformers writes: our vectors are those of its encode()."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    CNN,
    LSTM,
    Dense,
    Dropout,
    LayerNorm,
    Module,
    Normalize,
    Pooling,
    Transformer,
    WeightedLayerPooling,
)
from torch import Tensor, nn

from planforge.models import Encoder
from planforge.models.checkpoint import describe, load_model
from planforge.models.sentence_transformers import SentenceModules, read_modules

from ..helpers.encoders import save_tiny_encoder
from ..helpers.models import edit_json, edit_weights, tiny_bert, write_wordpiece

LIMIT = 1e-5
FAR = 1e-2  # vectors of different texts, or of other modules, differ by more
TEXTS = [
    "Hello world!",
    "the plan is not it",
    "a much longer one, about paris and the forge; is it not planned, 我在北京?",
    "x",
    "",
]
MODES = ["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"]
SUPPORTED = [*MODES, ("cls", "mean"), ("mean", "cls"), ("mean_sqrt_len_tokens", "max", "cls", "mean")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT as transformers writes it, with its tokenizer."""
    folder = tmp_path_factory.mktemp("plain")
    tiny_bert(folder)
    write_wordpiece(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sentences"


def saved(plain: Path, folder: Path, *modules: Module, **settings: Any) -> SentenceTransformer:
    """The library's model of `plain` and these modules, which it has written to `folder`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module in modules:
            if isinstance(module, Dense):
                module.linear.reset_parameters()
    model = SentenceTransformer(modules=[Transformer(str(plain)), *modules], device="cpu", **settings)
    model.save(str(folder), create_model_card=False)
    return model


def read_back(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu")


def vectors(model: SentenceTransformer, texts: list[str] = TEXTS) -> Tensor:
    """encode()'s, of which no two are near each other."""
    encoded = model.encode(texts, convert_to_tensor=True, show_progress_bar=False).clone()
    for b in range(1, len(texts)):
        assert (encoded[b:] - encoded[b - 1]).abs().amax(1).min() > FAR
    return encoded


def our_vectors(folder: Path, model: SentenceTransformer, texts: list[str] = TEXTS) -> Tensor:
    """Ours, of the texts as the library tokenizes them."""
    ours = load_model(folder)
    assert isinstance(ours, Encoder)
    batch = model.tokenizer(texts, padding=True, return_tensors="pt")
    assert len(texts) == 1 or not batch["attention_mask"].all()
    segments = batch["token_type_ids"] if ours.config.type_vocab_size else None
    vector: Tensor = ours(batch["input_ids"], batch["attention_mask"], segments)["sentence_embedding"]
    return vector


def assert_equal_vectors(folder: Path, model: SentenceTransformer) -> Tensor:
    wanted = vectors(model)
    torch.testing.assert_close(our_vectors(folder, model), wanted, rtol=0, atol=LIMIT)
    return wanted


def modules_of(folder: Path) -> SentenceModules:
    modules = read_modules(folder)
    assert modules is not None
    return modules


def edit_modules(folder: Path, *changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Rewrites modules.json; the n-th change is for the n-th module."""
    path = folder / "modules.json"
    modules = [m | change for m, change in zip(json.loads(path.read_text()), changes, strict=True)]
    path.write_text(json.dumps(modules))
    return modules


def as_old_versions_wrote_it(folder: Path, settings_name: str = "sentence_bert_config.json") -> None:
    """The transformer in a folder of its own, short names of classes, flags for the pooling."""
    (folder / "0_Transformer").mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(folder / "0_Transformer" / path.name)
    (folder / "0_Transformer" / "sentence_bert_config.json").unlink()
    settings = {"max_seq_length": 9, "do_lower_case": False}
    (folder / "0_Transformer" / settings_name).write_text(json.dumps(settings))
    modules = json.loads((folder / "modules.json").read_text())
    for module in modules:
        module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in folder.glob("*_Normalize/config.json"):
        shutil.rmtree(path.parent)  # was empty, and git keeps no empty folder


def flags(modes: Iterable[str]) -> dict[str, Any]:
    """A Pooling module's config.json of versions before 6."""
    names = {mode: mode if mode.endswith("_tokens") else f"{mode}_tokens" for mode in MODES}
    names |= {"cls": "cls_token", "weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken"}
    return {
        "word_embedding_dimension": 32,
        **{f"pooling_mode_{flag}": mode in modes for mode, flag in names.items()},
    }


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("mode", SUPPORTED, ids=str)
def test_pooling_equals_encode(plain: Path, folder: Path, mode: Any) -> None:
    wanted = assert_equal_vectors(folder, saved(plain, folder, Pooling(32, mode)))
    assert wanted.shape == (5, 32 if isinstance(mode, str) else 32 * len(mode))
    config = modules_of(folder).sentence
    assert config is not None
    assert config.pooling == ((mode,) if isinstance(mode, str) else mode)


def test_every_pooling_is_another(plain: Path, folder: Path) -> None:
    """So that none can stand for another in the test above."""
    parts = torch.chunk(vectors(saved(plain, folder, Pooling(32, tuple(MODES)))), len(MODES), dim=1)
    for i, part in enumerate(parts):
        for other in parts[i + 1 :]:
            assert (part - other).abs().amax(1).min() > FAR


def test_a_text_alone_has_the_same_vector(plain: Path, folder: Path) -> None:
    model = saved(plain, folder, Pooling(32, tuple(MODES)), Dense(32 * len(MODES), 20), Normalize())
    wanted = vectors(model)
    for text, vector in zip(TEXTS, wanted, strict=True):
        torch.testing.assert_close(our_vectors(folder, model, [text])[0], vector, rtol=0, atol=LIMIT)


@pytest.mark.parametrize("normalize", [False, True], ids=["as is", "normalized"])
@pytest.mark.parametrize(
    "activations",
    [[], [nn.Tanh()], [nn.Identity()], [nn.ReLU(), nn.Tanh()], [nn.GELU(), nn.SiLU(), nn.Identity()]],
    ids=lambda activations: "-".join(type(a).__name__ for a in activations) or "no dense",
)
def test_dense_and_normalize_equal_encode(
    plain: Path, folder: Path, activations: list[nn.Module], normalize: bool
) -> None:
    width = 64
    modules = list[Module]([Pooling(32, ("cls", "mean"))])
    for activation in activations:
        modules.append(Dense(width, width - 5, activation_function=activation))
        width -= 5
    if normalize:
        modules.append(Normalize())
    wanted = assert_equal_vectors(folder, saved(plain, folder, *modules))
    assert wanted.shape == (5, width)
    length = wanted.norm(dim=1)
    assert bool(((length - 1).abs() < LIMIT).all()) == normalize
    assert len(modules_of(folder).dense_folders) == len(activations)


def test_each_activation_is_another(plain: Path, folder: Path) -> None:
    found = []
    for activation in (nn.Tanh(), nn.Identity(), nn.ReLU(), nn.GELU(), nn.SiLU()):
        model = saved(plain, folder, Pooling(32), Dense(32, 32, activation_function=activation))
        found.append(assert_equal_vectors(folder, model))
        shutil.rmtree(folder)
    for i, one in enumerate(found):
        assert all((one - other).abs().max() > FAR for other in found[i + 1 :])


def test_dense_without_bias(plain: Path, folder: Path) -> None:
    assert_equal_vectors(folder, saved(plain, folder, Pooling(32), Dense(32, 16, bias=False)))
    config = modules_of(folder).sentence
    assert config is not None
    assert [getattr(layer, "bias", None) for layer in config.layers] == [False]


def test_distilbert(tmp_path: Path, folder: Path) -> None:
    tiny_bert(tmp_path / "distilbert", "DistilBertModel")
    write_wordpiece(tmp_path / "distilbert")
    modules = Pooling(32, ("max", "cls")), Dense(64, 24), Normalize()
    assert_equal_vectors(folder, saved(tmp_path / "distilbert", folder, *modules))


@pytest.mark.parametrize("mode", ["cls", "mean", "lasttoken"])
@pytest.mark.parametrize("kind", ["XLMRoberta", "ModernBert"])
def test_encoders_that_people_embed_with(tmp_path: Path, folder: Path, kind: str, mode: Any) -> None:
    plain = tmp_path / "plain"
    save_tiny_encoder(plain, kind)
    assert_equal_vectors(folder, saved(plain, folder, Pooling(32, mode), Normalize()))


def test_weights_of_other_heads_beside_the_transformers(tmp_path: Path, plain: Path, folder: Path) -> None:
    """As published by those who trained a sentence model on from a masked-word one."""
    model = saved(plain, folder, Pooling(32, "cls"), Normalize())
    weights = tiny_bert(tmp_path, "BertForPreTraining").state_dict()
    heads = [name for name in weights if name.startswith("cls.") and not name.endswith("decoder.weight")]
    edit_weights(folder, **{name: weights[name].clone() for name in heads})
    ours = load_model(folder)
    assert isinstance(ours, Encoder) and ours.config.heads == ("masked_lm", "next_sentence")
    assert_equal_vectors(folder, model)


@pytest.mark.parametrize("settings_name", ["sentence_bert_config.json", "sentence_distilbert_config.json"])
def test_a_folder_of_an_old_version(plain: Path, folder: Path, settings_name: str) -> None:
    saved(plain, folder, Pooling(32), Dense(32, 24), Normalize())
    as_old_versions_wrote_it(folder, settings_name)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags(["mean"])))
    model = read_back(folder)
    texts = [text for text in TEXTS if len(text) < 20]  # below the limit
    torch.testing.assert_close(our_vectors(folder, model, texts), vectors(model, texts), rtol=0, atol=LIMIT)
    modules = modules_of(folder)
    assert modules.transformer == folder / "0_Transformer"
    assert modules.max_seq_length == 9 == model.max_seq_length


@pytest.mark.parametrize("modes", [*([mode] for mode in MODES), ["mean", "cls"], MODES[::-1], []], ids=str)
def test_pooling_by_flags(plain: Path, folder: Path, modes: list[str]) -> None:
    saved(plain, folder, Pooling(32))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags(modes)))
    wanted = assert_equal_vectors(folder, read_back(folder))
    assert wanted.shape == (5, 32 * max(1, len(modes)))
    config = modules_of(folder).sentence
    assert config is not None and (len(modes) != 1 or config.pooling == tuple(modes))


def test_prompts_and_length_are_read(plain: Path, folder: Path) -> None:
    prompts = {"query": "query: ", "passage": "the "}
    model = saved(plain, folder, Pooling(32), prompts=prompts, default_prompt_name="passage")
    assert prompts.items() <= modules_of(folder).prompts.items()
    assert modules_of(folder).default_prompt == "passage" == read_back(folder).default_prompt_name
    assert modules_of(folder).max_seq_length == 64 == read_back(folder).max_seq_length
    model.max_seq_length = 7  # version 6 writes it to tokenizer_config.json alone
    model.save(str(folder), create_model_card=False)
    assert modules_of(folder).max_seq_length == 7 == read_back(folder).max_seq_length
    edit_json(folder / "tokenizer_config.json", model_max_length=1e30)  # knows no limit
    assert modules_of(folder).max_seq_length is None


def test_a_plain_checkpoint_has_no_modules(plain: Path) -> None:
    assert read_modules(plain) is None
    ours = load_model(plain)
    assert isinstance(ours, Encoder) and ours.config.sentence is None


@pytest.mark.parametrize("mode", [None, 5, {"mean": True}, [["mean"]], "median"], ids=str)
def test_a_pooling_that_is_no_name_is_refused(plain: Path, folder: Path, mode: object) -> None:
    saved(plain, folder, Pooling(32))
    edit_json(folder / "1_Pooling" / "config.json", pooling_mode=mode)
    assert "is not one of" in refusal(folder)


@pytest.mark.parametrize(
    "modules",
    [
        [LayerNorm(32)],
        [LayerNorm(32), Normalize()],
        [Normalize(), Dense(32, 8)],
        [Normalize(), LayerNorm(32), Dropout(0.5), Dense(32, 8), LayerNorm(8), Dense(8, 5), Normalize()],
        [Dropout(0.5)],
    ],
    ids=lambda modules: "-".join(type(module).__name__ for module in modules),
)
def test_modules_in_any_order_equal_encode(plain: Path, folder: Path, modules: list[Module]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for module in modules:
            if isinstance(module, LayerNorm):
                nn.init.normal_(module.norm.weight)
                nn.init.normal_(module.norm.bias)
    assert_equal_vectors(folder, saved(plain, folder, Pooling(32), *modules))


def test_an_include_prompt_that_is_no_flag_is_refused(plain: Path, folder: Path) -> None:
    saved(plain, folder, Pooling(32))
    edit_json(folder / "1_Pooling" / "config.json", include_prompt="no")
    assert "include_prompt='no' is not true or false" in refusal(folder)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([LSTM(32, 16), Pooling(32)], ".lstm.LSTM' is not supported; known are"),
        ([CNN(32, 16, [1, 3]), Pooling(48)], ".cnn.CNN' is not supported; known are"),
        ([WeightedLayerPooling(32), Pooling(32)], ".WeightedLayerPooling' is not supported; known are"),
        ([Pooling(32), LayerNorm(31)], "a LayerNorm has dimension=31, but gets 32"),
        (
            [Dense(32, 32, module_input_name="token_embeddings"), Pooling(32)],
            "lists Transformer, Dense, Pool",
        ),
        ([Normalize("token_embeddings"), Pooling(32)], "lists Transformer, Normalize, Pooling"),
        ([Pooling(32), Dense(32, 8), Pooling(32)], "lists Transformer, Pooling, Dense, Pooling"),
        ([Pooling(32), Normalize("token_embeddings")], "sets module_input_name='token_embeddings'; only"),
        ([Pooling(32), Normalize(module_output_name="unit")], "sets module_output_name='unit'; only"),
        ([Pooling(32), Dense(32, 8, module_output_name="small")], "sets module_output_name='small'; only"),
        ([Pooling(32), Dense(32, 8, use_residual=True)], "sets ['use_residual'], which is not supported"),
        ([Pooling(32), Dense(32, 8, activation_function=nn.ELU())], "ELU' is not one of torch's ['GELU',"),
        ([Pooling(32), Dense(31, 8)], "dense layer 0 has in_features=31, but gets 32"),
        ([Pooling(32, ("cls", "max")), Dense(64, 8), Dense(9, 3)], "layer 1 has in_features=9, but gets 8"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(type(m).__name__ for m in value),
)
def test_modules_that_are_not_supported_are_named(
    plain: Path, folder: Path, modules: list[Module], message: str
) -> None:
    saved(plain, folder, *modules)
    assert message in refusal(folder)


@pytest.mark.parametrize("path", ["..", "../elsewhere", "1_Pooling/../..", "/etc", "C:\\x", "..\\elsewhere"])
def test_a_path_out_of_the_folder_is_refused_by_name(plain: Path, folder: Path, path: str) -> None:
    saved(plain, folder, Pooling(32))
    shutil.copytree(folder / "1_Pooling", folder.parent / "elsewhere")
    edit_modules(folder, {}, {"path": path})
    assert f"path {path!r} leaves the folder" in refusal(folder)


@pytest.mark.parametrize("kind", ["custom_st.Transformer", "Transformer", "mine.models.Pooling", 5, None])
def test_a_class_of_somebody_else_is_refused_by_name(plain: Path, folder: Path, kind: object) -> None:
    saved(plain, folder, Pooling(32))
    edit_modules(folder, {"type": kind}, {})
    assert repr(kind) in refusal(folder)


@pytest.mark.parametrize(
    "content", ["[]", '["Pooling"]', "{}", "[", '[{"type": "sentence_transformers.LSTM"}]']
)
def test_damaged_modules_json_is_refused(plain: Path, folder: Path, content: str) -> None:
    saved(plain, folder, Pooling(32))
    (folder / "modules.json").write_text(content)
    assert str(folder / "modules.json") in refusal(folder)


def test_a_length_of_vectors_is_refused_and_the_way_out_named(plain: Path, folder: Path) -> None:
    model = saved(plain, folder, Pooling(32), truncate_dim=8)
    assert vectors(model).shape == (5, 8)
    assert "truncate_dim=8, which is not supported; set it to null" in refusal(folder)
    edit_json(folder / "config_sentence_transformers.json", truncate_dim=None)
    assert_equal_vectors(folder, read_back(folder))


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("sentence_bert_config.json", "transformer_task", "fill-mask"),
        ("sentence_bert_config.json", "module_output_name", "sentence_embedding"),
        ("sentence_bert_config.json", "modality_config", {"text": {"method_output_name": "pooler_output"}}),
        ("sentence_bert_config.json", "max_seq_length", 2),
        ("sentence_bert_config.json", "max_seq_length", "64"),
        ("tokenizer_config.json", "model_max_length", 0),
        ("2_Dense/config.json", "activation_function", "mine.Tanh"),
        ("config_sentence_transformers.json", "default_prompt_name", "passage"),
    ],
)
def test_settings_that_are_not_supported_are_named(
    plain: Path, folder: Path, file: str, name: str, value: object
) -> None:
    saved(plain, folder, Pooling(32), Dense(32, 8))
    edit_json(folder / file, **{name: value})
    message = refusal(folder)
    assert str(folder / file) in message and f"{name}={value!r}" in message


@pytest.mark.parametrize("prompts", [["query: "], {"query": 5}, "query: "], ids=str)
def test_prompts_that_are_no_texts_are_refused(plain: Path, folder: Path, prompts: object) -> None:
    saved(plain, folder, Pooling(32))
    edit_json(folder / "config_sentence_transformers.json", prompts=prompts)
    assert "prompts must be an object of strings" in refusal(folder)


def test_weights_of_a_dense_layer_are_checked(plain: Path, folder: Path) -> None:
    saved(plain, folder, Pooling(32), Dense(32, 8))
    edit_weights(folder / "2_Dense", **{"linear.bias": None, "linear.weight": torch.ones(8, 31)})
    message = refusal(folder)
    assert "missing: sentence.dense.0.bias (8,)" in message
    assert "shape: sentence.dense.0.weight is (8, 31), config.json means (8, 32)" in message
    (folder / "2_Dense" / "model.safetensors").unlink()
    assert f"{folder / '2_Dense'} has neither model.safetensors" in refusal(folder)


def test_a_model_that_reads_no_texts_is_refused_by_name(plain: Path, folder: Path) -> None:
    saved(plain, folder, Pooling(32))
    edit_json(folder / "config.json", model_type="recurrent")
    assert "must have an encoder or a decoder, not recurrent" in refusal(folder)


def test_orders_and_routes_that_are_not_supported(tmp_path: Path) -> None:
    from ..helpers.retrieval_folders import write_folder

    folder = write_folder("router", tmp_path / "router")
    path = folder / "router_config.json"
    written = json.loads(path.read_text())
    for changes, words in (
        ({"structure": {"query": written["structure"]["query"]}}, r"has the routes \['query'\] and"),
        ({"parameters": {"default_route": "query"}}, "default_route='query'; only 'document' is supported"),
        ({"parameters": {"route_mappings": {"a": "query"}}}, "route_mappings={'a': 'query'}; supported are"),
    ):
        path.write_text(json.dumps({**written, **changes}))
        with pytest.raises(ValueError, match=words):
            describe(folder)
    path.write_text(json.dumps(written))
    other = written["structure"]["document"]
    path.write_text(json.dumps({**written, "structure": {"query": other[:1], "document": other}}))
    with pytest.raises(ValueError, match="only 'sequence-classification' is supported"):
        describe(folder)


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("1_SpladePooling", {"pooling_strategy": "mean"}, "pooling_strategy='mean'; supported are relu"),
        ("1_SpladePooling", {"activation_function": "gelu"}, "sets activation_function='gelu' and"),
    ],
)
def test_settings_of_splade(tmp_path: Path, file: str, changes: dict[str, Any], words: str) -> None:
    from ..helpers.retrieval_folders import write_folder

    folder = write_folder("splade", tmp_path / "splade")
    edit_json(folder / file / "config.json", **changes)
    with pytest.raises(ValueError, match=words):
        describe(folder)


def test_pickled_heads_are_told_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from planforge.exporter.checkpoints.checkpoint import Checkpoint
    from planforge.exporter.checkpoints.source import Source

    from ..helpers.retrieval_folders import write_folder

    folder = write_folder("bge-m3", tmp_path / "bge-m3")
    for name in ("sparse_linear", "colbert_linear"):
        (folder / f"{name}.safetensors").rename(folder / f"{name}.pt")
    with caplog.at_level("WARNING", logger="planforge"):
        checkpoint = Checkpoint(Source("folder", str(folder), folder))
    assert list(checkpoint.config.list_vectors()) == ["sentence_embedding"]
    told = [record.message for record in caplog.records if "is a pickle" in record.message]
    assert len(told) == 2 and "weights_only=True" in told[0]
