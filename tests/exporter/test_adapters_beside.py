"""Adapters that stay beside their base model, of which each request chooses one: answers against peft."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from planforge.exporter import export, exporting, verify
from planforge.exporter.errors import CheckpointError, SourceError, VerificationError
from planforge.models import adapter_writing
from planforge.runtime import TextGenerator
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.export_again import suggest_export_again
from planforge.runtime.errors import InputError

from ..helpers.adapters import ATTENTION, GPT2, LLAMA, Lora, load_peft, write_adapter, write_base
from ..helpers.cli import planforge
from ..helpers.models import edit_json
from ..helpers.quantized_checkpoints import write_floats, write_quantized
from ..helpers.serving import running_server

# peft warns of much that is meant here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TEXT = "In the beginning God created the heaven and the earth"
PROMPTS = (TEXT, "And the evening", "Blessed are they that mourn: for they shall be comforted")
OPTIONS: dict[str, Any] = {"precision": ["fp32"], "verify": "quick"}
NAMES = ("red", "green", "blue")
# One of few layers and another rank, one of every linear layer, and one with a scale of its own.
ADAPTERS = (
    Lora(r=4, lora_alpha=16, target_modules=ATTENTION),
    Lora(r=2, target_modules="all-linear"),
    Lora(r=3, lora_alpha=5, use_rslora=True, target_modules=["k_proj", "up_proj"], layers_to_transform=[1]),
)
GPT2_ADAPTERS = (
    Lora(r=4, lora_alpha=16, target_modules=["c_attn"]),
    Lora(r=2, target_modules=["c_attn", "c_proj", "c_fc"]),
    Lora(r=3, use_rslora=True, target_modules=["c_proj"], layers_to_transform=[1]),
)
# Published weights that ours has joined, one below the other; those that ours has apart; transposed ones.
BASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama": (LLAMA, ADAPTERS),
    "gpt2": (transformers.GPT2Config(**GPT2), GPT2_ADAPTERS),
    "phi3": (
        transformers.Phi3Config(**{**LLAMA.to_dict(), "model_type": "phi3", "pad_token_id": 0}),
        (
            Lora(r=4, target_modules=["qkv_proj", "gate_up_proj"]),
            Lora(r=2, target_modules=["down_proj"]),
            Lora(r=3, target_modules=["o_proj"]),
        ),
    ),
}


class Trio:
    """A base model with three adapters, and the folders of them."""

    def __init__(self, folder: Path, kind: str) -> None:
        config, adapters = BASES[kind]
        self.base = write_base(config, folder / "base")
        self.adapters = {
            name: write_adapter(self.base, adapter, folder / name, seed=number)
            for number, (name, adapter) in enumerate(zip(NAMES, adapters, strict=True))
        }
        self.bundle = folder / "bundle"

    def compute_logits(self, name: str | None, ids: list[int]) -> Any:
        """Return peft's logits (T, V) with an adapter, or the base model's."""
        model = load_peft(self.base, self.adapters[name or NAMES[0]])
        with torch.no_grad():
            if name is not None:
                return model(torch.tensor([ids])).logits[0].numpy()
            with model.disable_adapter():
                return model(torch.tensor([ids])).logits[0].numpy()

    def generate(self, name: str | None, prompt: list[int], count: int) -> list[int]:
        """Return the tokens that transformers generates with peft's adapter, or the base model's."""
        model = load_peft(self.base, self.adapters[name or NAMES[0]])
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        ids = torch.tensor([prompt])

        def run() -> list[int]:
            found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            tokens: list[int] = found[0].tolist()
            return tokens

        if name is not None:
            return run()[len(prompt) :]
        with model.disable_adapter():
            return run()[len(prompt) :]


@pytest.fixture(scope="module", params=BASES)
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trio:
    made = Trio(tmp_path_factory.mktemp("trio"), request.param)
    for target in ("cpu", "portable"):
        export(made.base, made.bundle / target, adapter=made.adapters, target=[target], **OPTIONS)
    return made


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    made = Trio(tmp_path_factory.mktemp("llama"), "llama")
    export(made.base, made.bundle, adapter=made.adapters, **OPTIONS)
    export(made.base, made.bundle / "portable", adapter=made.adapters, target=["portable"], **OPTIONS)
    return made


@pytest.mark.parametrize("target", ["cpu", "portable"])
@pytest.mark.parametrize("name", [None, *NAMES])
def test_logits_are_those_of_peft(trio: Trio, name: str | None, target: str) -> None:
    with TextGenerator.load(trio.bundle / target) as model:
        ids = model.tokenizer.encode(TEXT)
        slot = 0 if name is None else 1 + NAMES.index(name)
        found = np.concatenate(list(model.decoder.start(1, len(ids), adapters=[slot]).extend(ids)))
    wanted = trio.compute_logits(name, ids)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())
    if name is not None:  # the adapter matters
        plain = trio.compute_logits(None, ids)
        assert np.abs(wanted - plain).max() > 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("target", ["cpu", "portable"])
def test_one_batch_has_rows_with_different_adapters(trio: Trio, target: str) -> None:
    choices = [None, *NAMES]
    with TextGenerator.load(trio.bundle / target) as model:
        prompts = [model.tokenizer.encode(PROMPTS[number % len(PROMPTS)]) for number in range(4)]
        run = model.decoder.start(4, 64, adapters=range(4))
        found = [run.prefill(prompts)]
        tokens = [[5, 6, 7, 8], [9, 10, 11, 12]]
        found += [run.decode(step) for step in tokens]
    for row, name in enumerate(choices):
        wanted = trio.compute_logits(name, [*prompts[row], *(step[row] for step in tokens)])[-3:]
        own = np.stack([step[row] for step in found])
        np.testing.assert_allclose(own, wanted, atol=2e-5 * np.abs(wanted).max(), err_msg=str(name))


@pytest.mark.parametrize("place", [".", "portable"])
def test_sixteen_concurrent_requests_keep_their_adapters(llama: Trio, place: str) -> None:
    most = 12
    with TextGenerator.load(llama.bundle / place) as model:
        jobs = [((None, *NAMES)[number % 4], PROMPTS[number % 3]) for number in range(16)]
        prompts = {text: model.encode_prompt(text) for text in PROMPTS}
        wanted = {job: llama.generate(job[0], prompts[job[1]], most) for job in set(jobs)}
        assert len({tuple(tokens) for tokens in wanted.values()}) > 8  # adapters matter
        counts = [most - number % 5 for number in range(16)]  # so that rows become free between others
        for _ in range(2):  # the second time prompts are found in the cache
            with ThreadPoolExecutor(16) as pool:
                pendings = list(
                    pool.map(
                        lambda job, count: model.submit(
                            job[1], adapter=job[0], max_new_tokens=count, ignore_eos=True
                        ),
                        jobs,
                        counts,
                    )
                )
            for job, count, pending in zip(jobs, counts, pendings, strict=True):
                assert list(pending.result().token_ids) == wanted[job][:count], job


@pytest.mark.parametrize(
    "options", [{}, {"reuse_prompt": True}, {"speculative": "prompt-lookup"}, {"num_beams": 2}]
)
@pytest.mark.parametrize("place", [".", "portable"])
def test_generate_uses_the_adapter_that_is_named(llama: Trio, place: str, options: Any) -> None:
    count = 8
    with TextGenerator.load(llama.bundle / place) as model:
        assert model.adapters == NAMES
        prompt = model.encode_prompt(TEXT)
        for name in (None, "red", "blue", "red"):
            found = model.generate(TEXT, adapter=name, max_new_tokens=count, ignore_eos=True, **options)
            wanted = llama.generate(name, prompt, count) if "num_beams" not in options else None
            if wanted is not None:
                assert list(found.token_ids) == wanted, name
            else:
                assert found.score == pytest.approx(
                    sum(model.score([*prompt, *found.token_ids], adapter=name).logprobs[len(prompt) - 1 :])
                    / count,
                    abs=1e-4,
                )


def test_a_score_is_that_of_the_adapter(llama: Trio) -> None:
    with TextGenerator.load(llama.bundle) as model:
        for name in (None, "green"):
            score = model.score(TEXT, adapter=name)
            logits = torch.tensor(llama.compute_logits(name, list(score.token_ids)))
            wanted = logits[:-1].log_softmax(-1)[range(len(score.logprobs)), score.token_ids[1:]]
            np.testing.assert_allclose(score.logprobs, wanted.numpy(), atol=2e-4)
        with pytest.raises(
            InputError, match=r"no adapter 'gren'; the bundle has red, green, blue; did you mean"
        ):
            model.score(TEXT, adapter="gren")
        with pytest.raises(InputError, match="no adapter 'x'"):
            model.generate(TEXT, adapter="x")


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_bases_have_adapters_in_fp32(llama: Trio, tmp_path: Path, precision: str) -> None:
    bundle = tmp_path / "bundle"
    result = export(
        llama.base,
        bundle,
        adapter=llama.adapters,
        precision=["fp32", precision],
        verify="quick",
        accept={name: 10.0 for name in ("mean_kl", "top1_changes", "perplexity_change")},
    )
    assert result.report is not None and result.report.passed
    with TextGenerator.load(bundle, precision=precision) as model:
        ids = model.tokenizer.encode(TEXT)
        for slot, name in enumerate((None, *NAMES)):
            found = np.concatenate(list(model.decoder.start(1, len(ids), adapters=[slot]).extend(ids)))
            wanted = llama.compute_logits(name, ids)
            others = [llama.compute_logits(other, ids) for other in (None, *NAMES) if other != name]
            gap = np.square(found - wanted).mean()
            assert all(gap < 0.5 * np.square(found - other).mean() for other in others), name


def test_the_bundle_is_as_large_as_base_and_adapters(llama: Trio, tmp_path: Path) -> None:
    alike = Lora(r=4, target_modules=["o_proj", "down_proj"])  # whose ranks are the tables' ranks
    adapters = {name: write_adapter(llama.base, alike, tmp_path / name) for name in NAMES}
    for name, adapter in (("alone", None), ("beside", adapters)):
        export(llama.base, tmp_path / f"bundle-{name}", adapter=adapter, target=["cpu"], **OPTIONS)
    alone, own = (
        sum(path.stat().st_size for path in tmp_path.glob(f"bundle-{name}/onnx/*.data"))
        for name in ("alone", "beside")
    )
    numbers = 4 * sum(
        tensor.numel()
        for folder in adapters.values()
        for tensor in load_file(folder / "adapter_model.safetensors").values()
    )
    # A fourth of zeros is that of rows without an adapter; weights begin at multiples of a page.
    assert 1.0 < (own - alone) / numbers < 4 / 3 + 0.2


def test_int8_beside_adapters_passes_the_usual_gate(llama: Trio, tmp_path: Path) -> None:
    found = export(
        llama.base, tmp_path / "bundle", adapter=llama.adapters, precision=["int8"], verify="quick"
    )
    assert found.report is not None and found.report.passed and not found.report.accepted


def test_an_adapter_merged_into_quantized_weights_makes_floats(llama: Trio, tmp_path: Path) -> None:
    codes = write_quantized("gptq 4", tmp_path / "base")
    (tmp_path / "floats").mkdir()
    write_floats(codes, tmp_path / "floats")
    adapter = write_adapter(tmp_path / "floats", ADAPTERS[0], tmp_path / "adapter")
    merged = export(tmp_path / "base", tmp_path / "merged", adapter=adapter, target=["cpu"], verify="quick")
    assert [artifact.precision for artifact in merged.manifest.artifacts] == ["fp32"]
    beside = export(tmp_path / "base", tmp_path / "beside", adapter={"red": adapter}, verify="quick")
    assert [artifact.precision for artifact in beside.manifest.artifacts] == ["int4"]  # whose codes are kept
    for bundle, name in ((merged.bundle, None), (beside.bundle, "red")):
        with TextGenerator.load(bundle) as model:
            score = model.score(TEXT, adapter=name)
        with torch.no_grad():
            logits = load_peft(tmp_path / "floats", adapter)(torch.tensor([score.token_ids])).logits[0]
        wanted = logits[:-1].log_softmax(-1)[range(len(score.logprobs)), score.token_ids[1:]].numpy()
        near = 2e-4 if bundle == merged.bundle else 0.5  # int4 rounds activations to 8 bits
        np.testing.assert_allclose(score.logprobs, wanted, atol=near)


def test_the_command_keeps_adapters_and_verify_finds_them_again(tmp_path: Path) -> None:
    made = Trio(tmp_path, "llama")
    named = [word for name, folder in made.adapters.items() for word in ("--adapter", f"{name}={folder}")]
    done = planforge("export", made.base, "-o", made.bundle, *named, "--verify", "quick")
    assert done.returncode == 0 and "keeping 3 adapters beside the model" in done.stderr
    source = json.loads((made.bundle / "manifest.json").read_text())["source"]
    assert source["adapters"] == {name: f"../{name}" for name in NAMES}
    shown = planforge("run", made.bundle, "--adapter", "green", "--max-new-tokens", "4", TEXT)
    assert shown.returncode == 0, shown.stderr
    again = suggest_export_again(Bundle.open(made.bundle))
    assert f" --adapter red={made.adapters['red']} " in again and "export " in again
    tested = planforge("selftest", made.bundle)
    assert tested.returncode == 0 and "texts to texts" in tested.stdout, tested.stdout
    found = planforge("inspect", made.adapters["red"]).stdout
    assert "4 modules by LoRA, of rank 4" in found and "--adapter NAME=FOLDER keeps it beside" in found
    assert "red, green, blue: a request names one, or none" in planforge("inspect", made.bundle).stdout
    assert verify(made.bundle, level="quick", source=made.base).passed
    edit_json(made.adapters["red"] / "adapter_config.json", lora_alpha=3)
    with pytest.raises(VerificationError, match="is not the checkpoint that the bundle was exported from"):
        verify(made.bundle, level="quick", source=made.base)
    shutil.rmtree(made.adapters["red"])
    with pytest.raises(SourceError, match=r"the adapter .*red does not exist; put it back there"):
        verify(made.bundle, level="quick", source=made.base)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            Lora(r=4, target_modules=ATTENTION, use_dora=True),
            "by DoRA, which no table holds; merge it instead",
        ),
        (Lora(r=4, target_modules=ATTENTION, modules_to_save=["lm_head"]), "its own lm_head.weight"),
        (Lora(r=4, target_modules=[*ATTENTION, "embed_tokens"]), "by LoRA of an embedding"),
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "by IA3"),
    ],
)
def test_what_no_table_holds_is_refused_by_name(
    llama: Trio, tmp_path: Path, adapter: Any, message: str
) -> None:
    folder = write_adapter(llama.base, adapter, tmp_path / "odd")
    with pytest.raises(CheckpointError, match=f"the adapter odd .*{re.escape(message)}"):
        export(llama.base, tmp_path / "bundle", adapter={"odd": folder}, **OPTIONS)
    assert not (tmp_path / "bundle").exists()


def test_the_head_has_no_table(llama: Trio, tmp_path: Path) -> None:
    folder = write_adapter(llama.base, Lora(r=4, target_modules=["lm_head"]), tmp_path / "odd")
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "lora" in name}, file)
    with pytest.raises(
        CheckpointError,
        match="adapter odd changes lm_head, which has no rows of its own for each text; merge it",
    ):
        export(llama.base, tmp_path / "bundle", adapter={"odd": folder}, **OPTIONS)


def test_wrong_choices_are_refused_before_anything_is_read(llama: Trio, tmp_path: Path) -> None:
    red = llama.adapters["red"]
    cases: list[tuple[Mapping[str, Any], type[Exception], str]] = [
        (
            {"adapter": {"red": red}, "target": ["rtx"], "precision": ["fp16"]},
            InputError,
            "target 'rtx': plans take no adapters",
        ),
        ({"adapter": {"a:b": red}}, SourceError, "name 'a:b' has other signs"),
        ({"adapter": {"red": tmp_path / "none"}}, SourceError, "none' is no folder"),
        ({"adapter": {}}, InputError, "names no adapter"),
        ({"adapter": {"red": red}, "outputs": ["explain"]}, InputError, "'explain' explains the model alone"),
        (
            {"adapter": {"red": red}, "exporter": "transformers"},
            InputError,
            "keeps no adapters beside a model",
        ),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            export(llama.base, tmp_path / "bundle", **{**OPTIONS, "precision": ["fp32"], **options})
    twice = planforge(
        "export", llama.base, "-o", tmp_path / "b", "--adapter", f"a={red}", "--adapter", f"a={red}"
    )
    assert twice.returncode == 2 and "a is given already" in twice.stderr
    plain = planforge("export", llama.base, "-o", tmp_path / "b", "--adapter", f"a={red}", "--adapter", red)
    assert plain.returncode == 2 and "each as NAME=FOLDER" in plain.stderr


def exchange(rows: Any) -> Any:
    """Exchange the first two adapters' rows of a table."""
    return rows.unflatten(0, (4, -1))[[0, 2, 1, 3]].flatten(0, 1)


def leave_out(rows: Any) -> Any:
    """Leave the second adapter out of a table."""
    kept = torch.tensor([1.0, 1, 0, 1])
    return (rows.unflatten(0, (4, -1)) * kept[:, None, None]).flatten(0, 1)


FAULTS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "alpha over r": lambda a, b: (a, b * 2),
    "left out": lambda a, b: (a, leave_out(b)),
    "a and b of other adapters": lambda a, b: (a, exchange(b)),
    "exchanged": lambda a, b: (exchange(a), exchange(b)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_tables_are_refused_and_named(
    llama: Trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    make = adapter_writing.make_table
    monkeypatch.setattr(adapter_writing, "make_table", lambda *given: FAULTS[fault](*make(*given)))
    with pytest.raises(
        VerificationError, match=r"\.(qkv|k|q|v|o|up|gate|down)_proj.* with the adapter \w+ beside it"
    ):
        export(llama.base, tmp_path / "bundle", adapter=llama.adapters, **OPTIONS)


@pytest.mark.parametrize("part", ["a", "b"])
def test_a_fault_of_the_graph_is_refused_and_named(
    llama: Trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    collect = exporting.collect_graphs
    table = f"layers.1.mlp.down_proj.adapters.{part}"

    def collect_wrong(*given: Any) -> Any:
        graphs = collect(*given)
        graph = graphs["decoder.ort"].graph
        value = graph.initializers[table]
        assert value.const_value is not None
        value.const_value = ir.tensor(np.roll(value.const_value.numpy(), 1, 0), name=table)
        return graphs

    monkeypatch.setattr(exporting, "collect_graphs", collect_wrong)
    with pytest.raises(VerificationError, match=r"layers\.1\.mlp\.down_proj"):
        export(llama.base, tmp_path / "bundle", adapter=llama.adapters, **OPTIONS)


def test_the_server_answers_by_adapters(llama: Trio) -> None:
    names = ["m", *(f"m:{name}" for name in NAMES)]
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with TextGenerator.load(llama.bundle) as model, running_server({"m": model}) as address:
        prompt = model.encode_prompt(TEXT)
        assert [entry["id"] for entry in address.client.get("/v1/models").json()["data"]] == names
        assert address.client.get("/v1/models/m:red").json()["id"] == "m:red"
        with ThreadPoolExecutor(16) as pool:
            answers = pool.map(lambda name: address.ask("/v1/completions", model=name, **body), names * 4)
        for name, answer in zip(names * 4, answers, strict=True):
            adapter = name.partition(":")[2] or None
            wanted = model.tokenizer.decode(llama.generate(adapter, prompt, 8))
            assert (answer["choices"][0]["text"], answer["model"]) == (wanted, name)
        unknown = address.post("/v1/completions", model="m:none", **body)
        assert unknown.status_code == 404 and "'m:red'" in unknown.json()["error"]["message"]
