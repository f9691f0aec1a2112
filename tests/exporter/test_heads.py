"""Decoders with heads, choices and GPT-2's relatives: from a checkpoint to what its bundle answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

from planforge.exporter import export
from planforge.exporter.errors import CheckpointError
from planforge.exporter.tracing.modules import find_module
from planforge.runtime import TextEncoder, TextGenerator
from planforge.runtime.apps.check.case import Text
from planforge.runtime.apps.check.encoder import make_piece
from planforge.runtime.errors import InputError

from ..helpers.faults import Fault, constant, epsilon, no_mask, perturbed, scale_factor, transposed
from ..helpers.heads import write_decoder
from ..helpers.verdicts import PlantedBundle, keep_answers

LIMIT = 1e-5
IN_FP32: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": False}
TEXTS = [
    "In the beginning",
    "God created the heaven and the earth.",
    "And",
    "the evening and the morning " * 3,
]
CHOICES = ["God created the heaven", "the lamp eats a stone", "and"]
PRODUCT = ("MatMul",)


def encode(model: TextEncoder, first: str, second: str | None = None) -> list[int]:
    """The ids that a model reads of a text or a pair, by its manifest."""
    frame = model.defaults.make_special_tokens(is_pair=second is not None)
    ids = [*frame.prefix, *model.tokenizer.encode(first)]
    if second is not None:
        ids += [*frame.between, *model.tokenizer.encode(second)]
    return [*ids, *frame.suffix]


# By a name: a class of transformers, and what is written of it; each is exported and verified once.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "classifier": ("GPT2ForSequenceClassification", {"num_labels": 3, "pad_token_id": 0}),
    "neo": ("GPTNeoForCausalLM", {}),  # its second layer sees 4 tokens
    "gpt1": ("OpenAIGPTLMHeadModel", {"eos_token_id": None, "bos_token_id": None}),
    "double heads": ("GPT2DoubleHeadsModel", {"choice": "[CLS]"}),
    "double heads of gpt1": ("OpenAIGPTDoubleHeadsModel", {"choice": "[CLS]"}),
    "tagger": ("LlamaForTokenClassification", {}),
    "reader": ("LlamaForQuestionAnswering", {}),
}
IN_PORTABLE = ("classifier", "neo")  # for TensorRT too


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of one of `DECODERS`: its checkpoint, and its verified bundle."""

    @functools.cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        kind, settings = DECODERS[name]
        write_decoder(folder / "checkpoint", kind, **settings)
        target = ["cpu", "portable"] if name in IN_PORTABLE else ["cpu"]
        options: dict[str, Any] = {"precision": ["fp32"], "target": target, "verify": "quick"}
        report = export(folder / "checkpoint", folder / "bundle", **options).report
        assert report is not None and report.with_pytorch and report.passed
        return folder

    return make


def load_reference(folder: Path, name: str) -> Any:
    """Return transformers' own model of one of `DECODERS`."""
    return getattr(transformers, DECODERS[name][0]).from_pretrained(folder / "checkpoint").eval()


def test_a_classifier_answers_as_transformers_does(decoder: Callable[[str], Path]) -> None:
    """Texts of unequal length in one batch."""
    folder = decoder("classifier")
    reference = load_reference(folder, "classifier")
    with TextEncoder.load(folder / "bundle") as model:
        assert "classify" in model.tasks
        for text, found in zip(TEXTS, model.classify(TEXTS, logits=True), strict=True):
            with torch.no_grad():
                want = reference(torch.tensor([encode(model, text)])).logits[0]
            np.testing.assert_allclose(list(found.logits.values()), want.numpy(), atol=LIMIT)


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("tagger", ["token_classification"]),
        ("reader", ["question_answering.start", "question_answering.end"]),
    ],
)
def test_heads_on_each_token_of_a_llama(name: str, roles: list[str], decoder: Callable[[str], Path]) -> None:
    folder = decoder(name)
    reference = load_reference(folder, name)
    with TextEncoder.load(folder / "bundle") as model:
        assert model.tasks[-1] in ("tag", "answer")
        read = [encode(model, text) for text in TEXTS]
        results = model.encoder.run_batch([make_piece(Text(tuple(ids))) for ids in read], roles)
    for ids, arrays in zip(read, results, strict=True):
        with torch.no_grad():
            found = reference(torch.tensor([ids]))
        outputs = ["logits"] if len(roles) == 1 else ["start_logits", "end_logits"]
        for output, array in zip(outputs, arrays, strict=True):
            np.testing.assert_allclose(array, found[output][0].numpy(), atol=LIMIT)


def rank_by_index(model: TextEncoder, text: str, choices: Sequence[str]) -> list[float]:
    """The score of each choice, in their order."""
    return [hit.score for hit in sorted(model.rank(text, choices), key=lambda hit: hit.index)]


@pytest.mark.parametrize("name", ["double heads", "double heads of gpt1"])
def test_choices_of_a_double_heads_model_are_rated_at_their_choice_token(
    name: str, decoder: Callable[[str], Path]
) -> None:
    folder = decoder(name)
    reference = load_reference(folder, name)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder / "checkpoint")
    with TextEncoder.load(folder / "bundle") as model:
        got = rank_by_index(model, TEXTS[0], CHOICES)
        assert [hit.score for hit in model.rank(TEXTS[0], CHOICES)] == sorted(got, reverse=True)
    for choice, score in zip(CHOICES, got, strict=True):
        ids = tokenizer(TEXTS[0])["input_ids"] + tokenizer(f"{choice}[CLS]")["input_ids"]
        with torch.no_grad():
            found = reference(torch.tensor([[ids]]), mc_token_ids=torch.tensor([[len(ids) - 1]]))
        assert abs(found.mc_logits.item() - score) <= LIMIT


def test_a_double_heads_model_without_a_choice_token_is_refused(tmp_path: Path) -> None:
    write_decoder(tmp_path / "checkpoint", "GPT2DoubleHeadsModel")
    said = "the tokenizer has no choice token, which a double-heads model reads: .*'cls_token'"
    with pytest.raises(CheckpointError, match=said) as refused:
        export(tmp_path / "checkpoint", tmp_path / "bundle", **IN_FP32)
    assert "\n" not in str(refused.value) and not (tmp_path / "bundle").exists()


def test_choices_of_a_bert_are_rated_as_transformers_does(head_bundle: Callable[[str], Path]) -> None:
    bundle = head_bundle("chooser")
    reference: Any = transformers.BertForMultipleChoice.from_pretrained(bundle.parent / "chooser").eval()
    tokenizer: Any = transformers.BertTokenizer.from_pretrained(bundle.parent / "chooser")
    text = "hello world"
    choices = ["the plan is it", "paris", "it is not the forge"]
    inputs = tokenizer([text] * len(choices), choices, padding=True, return_tensors="pt")
    with torch.no_grad():
        want = reference(**{name: tensor[None] for name, tensor in inputs.items()}).logits[0]
    with TextEncoder.load(bundle, precision="fp32") as model:
        np.testing.assert_allclose(rank_by_index(model, text, choices), want.numpy(), atol=LIMIT)
        assert model.labels == ("choice",)


@pytest.mark.parametrize("name", ["neo", "gpt1"])
def test_relatives_of_gpt2_continue_texts_as_transformers_does(
    name: str, decoder: Callable[[str], Path]
) -> None:
    """Longer than GPT-Neo's window; GPT-1 has no end token, and transformers no cache for it."""
    folder = decoder(name)
    reference = load_reference(folder, name)
    with TextGenerator.load(folder / "bundle") as model:
        prompts = [model.tokenizer.encode(text) for text in TEXTS[:3]]
        answers = model.generate(TEXTS[:3], max_new_tokens=12)
    for ids, answer in zip(prompts, answers, strict=True):
        tokens = list(answer.token_ids)
        assert len(tokens) == 12 or answer.finish_reason == "eos"
        with torch.no_grad():
            logits = reference(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        np.testing.assert_allclose(
            answer.logprobs, logits.log_softmax(-1)[range(len(tokens)), tokens], atol=1e-4
        )


def test_a_classifier_has_no_graphs_that_explain_it(decoder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="output 'explain' is not for decoders that classify texts; leave"):
        export(decoder("classifier") / "checkpoint", tmp_path / "bundle", outputs=["explain"], **IN_FP32)


def other_pad(other: int) -> Callable[[Any], None]:
    """Another token is taken for padding."""

    def plant(model: Any) -> None:
        node = next(n for n in model.graph if n.op_type == "Equal" and find_module(n) == "last_token")
        node.replace_input_with(1, constant(model, "other_pad", np.array(other)))

    return plant


def wider_mask(model: Any) -> None:
    """Widen the window outside of which a mask hides tokens."""
    node = next(n for n in model.graph if n.op_type == "Less")
    node.replace_input_with(1, constant(model, "wider", np.array(5)))


def wider_window(model: Any) -> None:
    """Every layer with a window sees one token more."""
    for node in model.graph:
        if node.op_type == "GroupQueryAttention" and "local_window_size" in node.attributes:
            window = node.attributes["local_window_size"].as_int()
            node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", window + 1)


BLOCK = "decoder.h.1"
OF_CLASSIFIER = [
    Fault("another token pads", other_pad(7), "last_token", ("Equal",)),
    Fault(
        "the head's weights 1 % off",
        perturbed("heads.sequence_classification"),
        "heads.sequence_classification",
        ("Gemm",),
    ),
    Fault("a transposed weight", transposed(f"{BLOCK}.attn.c_proj"), f"{BLOCK}.attn.c_proj", PRODUCT),
    Fault("epsilon 1e-2", epsilon(f"{BLOCK}.ln_2", 1e-2), f"{BLOCK}.ln_2", ("LayerNormalization",)),
]
OF_PORTABLE = [
    Fault("later tokens are seen", no_mask(1), "", ("Where",)),
    Fault("scores 10 % larger", scale_factor(f"{BLOCK}.attn"), f"{BLOCK}.attn", ("Mul",)),
]
OF_NEO = [
    Fault("a window of one token more", wider_window, "h.1.attn", ("GroupQueryAttention",)),
    Fault("a transposed weight", transposed("h.0.attn.c_proj"), "h.0.attn.c_proj", PRODUCT),
]
GEMM = ("Gemm",)
CHOICE_HEAD = "heads.sequence_classification"
OF_GPT1 = [
    Fault("epsilon 1e-2", epsilon("h.0.ln_1", 1e-2), "h.0.ln_1", ("LayerNormalization",)),
    Fault("a transposed weight", transposed("h.1.attn.c_proj"), "h.1.attn.c_proj", PRODUCT),
]
TOKEN_HEADS = {"tagger": "heads.token_classification", "reader": "heads.question_answering"}
PLANTED = [
    *(("classifier", "encoder.ort.fp32", fault) for fault in OF_CLASSIFIER),
    *(("classifier", "encoder.portable.fp32", fault) for fault in OF_PORTABLE),
    *(("neo", "decoder.ort.fp32", fault) for fault in OF_NEO),
    (
        "neo",
        "decoder.portable.fp32",
        Fault("a window of one token more", wider_mask, "", ("Less",)),
    ),
    *(("gpt1", "decoder.ort.fp32", fault) for fault in OF_GPT1),
    (
        "double heads",
        "encoder.ort.fp32",
        Fault("the head 1 % off", perturbed(CHOICE_HEAD), CHOICE_HEAD, GEMM),
    ),
    ("chooser", "encoder.ort.fp32", Fault("the head 1 % off", perturbed(CHOICE_HEAD), CHOICE_HEAD, GEMM)),
    *(
        (name, "encoder.ort.fp32", Fault("the head 1 % off", perturbed(head), head, PRODUCT))
        for name, head in TOKEN_HEADS.items()
    ),
]


@pytest.fixture(scope="module")
def planted(
    decoder: Callable[[str], Path],
    head_bundle: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], PlantedBundle]]:
    copies = tmp_path_factory.mktemp("damaged")

    @functools.cache
    def copy(name: str) -> PlantedBundle:
        sound = decoder(name) / "bundle" if name in DECODERS else head_bundle(name)
        return PlantedBundle(name, sound, copies / name)

    with keep_answers(tmp_path_factory.mktemp("answers")):
        yield copy


@pytest.mark.parametrize(
    ("name", "artifact", "fault"), PLANTED, ids=lambda value: getattr(value, "name", value)
)
def test_planted_faults_are_refused_and_named(
    planted: Callable[[str], PlantedBundle], name: str, artifact: str, fault: Fault
) -> None:
    verdict = planted(name).judge(artifact, fault)
    assert verdict.is_caught and verdict.is_right, verdict
