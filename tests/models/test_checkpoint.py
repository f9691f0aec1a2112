from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from planforge.models import GPT2, GPT2Config
from planforge.models import folder as folder_module
from planforge.models.checkpoint import load_model
from planforge.models.saving import save_model

from ..helpers.models import TINY, edit_json, edit_weights, random_gpt2, reference_logits, tiny_gpt2

IDS = torch.arange(40).reshape(2, 20)
Transformers = transformers.GPT2LMHeadModel


def assert_equal_logits(folder: Path, reference: Transformers) -> None:
    model = load_model(folder)
    assert isinstance(model, GPT2) and not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model(IDS)[0], reference_logits(reference, IDS), rtol=0, atol=1e-4)


def edit_config(folder: Path, **changes: Any) -> None:
    edit_json(folder / "config.json", **changes)


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load_model(folder)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Transformers]:
    folder = tmp_path_factory.mktemp("written") / "tiny"
    return folder, tiny_gpt2(folder)


@pytest.fixture
def tiny(folder: Path, written: tuple[Path, Transformers]) -> Transformers:
    """The reference of the checkpoint that lies in `folder`."""
    shutil.copytree(written[0], folder)
    return written[1]


def test_names_with_the_prefix(folder: Path, tiny: Transformers) -> None:
    names = load_file(folder / "model.safetensors")
    assert all(name.startswith("transformer.") for name in names)
    assert_equal_logits(folder, tiny)


def test_names_without_the_prefix(folder: Path) -> None:
    reference = random_gpt2(**TINY)
    reference.transformer.save_pretrained(folder)  # as openai-community/gpt2 is published
    assert "h.0.attn.c_attn.weight" in load_file(folder / "model.safetensors")
    assert_equal_logits(folder, reference)


def test_conv1d_weights_are_transposed_and_nothing_else_is(folder: Path, tiny: Transformers) -> None:
    published = load_file(folder / "model.safetensors")
    model = load_model(folder)
    turned = set()
    for name, parameter in model.named_parameters():
        weight = published["transformer." + name]
        if not torch.equal(parameter, weight):
            assert torch.equal(parameter, weight.T)
            turned.add(name.removeprefix("h.0.").removeprefix("h.1."))
    # attn.c_proj is square: its shape would not give a missing transposition away.
    assert turned == {f"{n}.weight" for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}


def test_mask_buffers_are_ignored(folder: Path, tiny: Transformers) -> None:
    causal = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
    masks = {}
    for layer in range(2):
        masks[f"transformer.h.{layer}.attn.bias"] = causal.clone()
        masks[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    edit_weights(folder, **masks)
    assert_equal_logits(folder, tiny)


def test_a_tied_head_may_be_there_twice_when_it_is_equal(folder: Path, tiny: Transformers) -> None:
    edit_weights(folder, **{"lm_head.weight": tiny.transformer.wte.weight.detach().clone()})
    assert_equal_logits(folder, tiny)
    model = load_model(folder)
    assert isinstance(model, GPT2) and model.lm_head.weight is model.wte.weight


def test_a_tied_head_that_differs_is_refused(folder: Path, tiny: Transformers) -> None:
    edit_weights(folder, **{"lm_head.weight": tiny.transformer.wte.weight.detach() + 1})
    message = refusal(folder)
    assert "lm_head.weight differs from wte.weight" in message
    assert "tie_word_embeddings" in message


def test_an_untied_head_is_its_own(folder: Path) -> None:
    reference = random_gpt2(**TINY, tie_word_embeddings=False)
    reference.save_pretrained(folder)
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    assert_equal_logits(folder, reference)
    edit_weights(folder, **{"lm_head.weight": None})
    assert "missing: lm_head.weight (96, 32)" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_weights_are_computed_in_fp32(folder: Path, dtype: torch.dtype) -> None:
    reference = random_gpt2(**TINY)
    torch.nn.Module.to(reference, dtype)
    reference.save_pretrained(folder)
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {dtype}
    torch.nn.Module.to(reference, torch.float32)
    assert_equal_logits(folder, reference)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_what_save_model_writes(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    model = GPT2(GPT2Config(**{**vars(config), "tie_word_embeddings": tied, "n_inner": 40}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    save_model(model, tmp_path / "new")
    loaded: Any = Transformers.from_pretrained(tmp_path / "new", output_loading_info=True)
    reference, report = loaded
    assert not any(report.values()), report
    assert_equal_logits(tmp_path / "new", reference)
    again = load_model(tmp_path / "new").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kept", [0, 5, 400, -1])
def test_truncated_weights_are_refused_by_name(folder: Path, tiny: Transformers, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path} is not a whole safetensors file" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, tiny: Transformers, name: str) -> None:
    (folder / name).unlink()
    message = refusal(folder)
    assert str(folder) in message and name in message


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "model.bin", 5, None],
)
def test_an_index_lists_files_of_its_own_folder_only(folder: Path, tiny: Transformers, name: object) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"transformer.wte.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"lists '{name}', which is not a safetensors file name" in refusal(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a.safetensors"]}])
def test_an_index_without_a_weight_map_is_refused(
    folder: Path, tiny: Transformers, index: dict[str, Any]
) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "has no weight_map" in refusal(folder)


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_a_pickle_is_never_opened_and_the_way_out_is_named(
    folder: Path, tiny: Transformers, tmp_path: Path
) -> None:
    mark = tmp_path / "opened"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(mark)))
    message = refusal(folder)
    assert "pytorch_model.bin" in message and "save_pretrained" in message
    assert not mark.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert mark.exists()  # so the trap works


def test_an_unknown_model_type_lists_the_known_ones(folder: Path, tiny: Transformers) -> None:
    for model_type in ("rwkv", None, ["gpt2"]):
        edit_config(folder, model_type=model_type)
        message = refusal(folder)
        assert repr(model_type) in message and "'gpt2'" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
        ("activation_function", "mish"),
        ("n_head", 5),
        ("n_layer", "2"),
        ("n_embd", None),
    ],
)
def test_settings_that_are_not_supported_are_named(
    folder: Path, tiny: Transformers, name: str, value: object
) -> None:
    edit_config(folder, **{name: value})
    assert f"{name}={value!r}" in refusal(folder)


def test_a_mismatch_lists_every_name_and_both_shapes_at_once(folder: Path, tiny: Transformers) -> None:
    edit_weights(
        folder,
        **{
            "transformer.ln_f.bias": None,
            "transformer.h.1.mlp.c_fc.weight": None,
            "transformer.h.0.attn.rotary": torch.ones(3),
            "score.weight": torch.ones(2, 32),
            "transformer.wpe.weight": torch.ones(60, 32),
            "transformer.h.0.mlp.c_proj.weight": torch.ones(100, 32),
        },
    )
    lines = refusal(folder).splitlines()
    assert lines[0] == f"{folder}: config.json and the weights disagree"
    assert sorted(line.strip() for line in lines[1:]) == [
        "missing: h.1.mlp.c_fc.weight (128, 32)",
        "missing: ln_f.bias (32,)",
        "shape: h.0.mlp.c_proj.weight is (32, 100), config.json means (32, 128)",
        "shape: wpe.weight is (60, 32), config.json means (64, 32)",
        "unexpected: h.0.attn.rotary (3,)",
        "unexpected: score.weight (2, 32)",
    ]


def test_a_config_that_contradicts_the_weights_is_refused(folder: Path, tiny: Transformers) -> None:
    edit_config(folder, n_layer=3)
    message = refusal(folder)
    assert message.count("missing: h.2.") == 12 and "unexpected" not in message
    edit_config(folder, n_layer=1)
    assert refusal(folder).count("unexpected: h.1.") == 12


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"n_layer": 2**31}, "n_layer=2147483648 in config.json is more than the supported 2000 layers"),
        ({"n_embd": 2**31}, "has a size too large to load"),
        ({"n_embd": 2**64}, "has a size too large to load"),
    ],
)
def test_sizes_that_no_model_has_are_refused_at_once(
    folder: Path, tiny: Transformers, setting: dict[str, int], why: str
) -> None:
    """Layers are made one by one, so that a number of ten digits would take hours."""
    edit_config(folder, **setting)
    assert why in refusal(folder)


def test_a_weight_under_both_names_is_refused(folder: Path, tiny: Transformers) -> None:
    edit_weights(folder, **{"ln_f.bias": torch.zeros(32)})
    assert "holds ln_f.bias twice" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"model_type": "gpt2"} x', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "must hold a JSON object, not a list"),
        (b"null", "must hold a JSON object, not a NoneType"),
    ],
    ids=["empty", "open", "more", "not UTF-8", "deep", "list", "null"],
)
def test_a_config_that_is_no_json_object_is_refused(
    folder: Path, tiny: Transformers, content: bytes, message: str
) -> None:
    (folder / "config.json").write_bytes(content)
    got = refusal(folder)
    assert str(folder / "config.json") in got and message in got


def test_a_config_that_is_too_large_is_not_read(
    folder: Path, tiny: Transformers, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (folder / "config.json").stat().st_size
    monkeypatch.setattr(folder_module, "MAX_JSON_BYTES", size)
    load_model(folder)
    monkeypatch.setattr(folder_module, "MAX_JSON_BYTES", size - 1)
    assert f"has {size} bytes; at most {size - 1} are read" in refusal(folder)
