"""Faults in embedders, sparse models and late interaction: refused, and those in graphs named at modules."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export, verify
from planforge.exporter.checkpoints import pair_templates
from planforge.exporter.errors import VerificationError
from planforge.exporter.tracing.modules import find_module
from planforge.runtime.bundle.pair_templates import PairTemplate
from planforge.runtime.encode.pair_writer import PairWriter
from planforge.runtime.encode.requests import RequestReader
from planforge.runtime.text.long_text import Piece

from ...helpers.faults import Fault, change_weight, constant, no_mask, node_of, perturbed
from ...helpers.graphs import nodes
from ...helpers.retrieval_folders import write_folder
from ...helpers.verdicts import PlantedBundle

ENCODER = "encoder.ort.fp32"
QUERIES = "query_encoder.ort.fp32"


def without(module: str, op_type: str) -> Callable[[ir.Model], None]:
    """A node of a module gives what it reads."""

    def plant(model: ir.Model) -> None:
        node = node_of(model, module, op_type)
        source = node.inputs[0]
        assert source is not None
        ir.convenience.replace_all_uses_with(node.outputs[0], source)

    return plant


def pool_earlier(model: ir.Model) -> None:
    """The token before the last one is pooled."""
    node = next(node for node in nodes(model, "Sub") if find_module(node) == "sentence")
    node.replace_input_with(1, constant(model, "two", np.array(2)))


def roll_rows(model: ir.Model) -> None:
    """Each token has the weight of the one before it."""
    table = model.graph.initializers["query.words.weight"]
    change_weight(table, lambda array: np.roll(array, 1, axis=0))


FAULTS = [
    (
        "qwen3",
        ENCODER,
        Fault("the token before the last is pooled", pool_earlier, "sentence", ("Sub", "Equal")),
    ),
    ("qwen3", ENCODER, Fault("tokens see those behind them", no_mask(1), "", ("Where",))),
    (
        "splade",
        ENCODER,
        Fault("relu left out", without("sparse", "Relu"), "sparse", ("Add", "Log", "ReduceMax")),
    ),
    (
        "splade",
        ENCODER,
        Fault("padding has weights", without("sparse", "Mul"), "sparse", ("Mul", "ReduceMax")),
    ),
    ("router", QUERIES, Fault("weights of other tokens", roll_rows, "query.words", ("Gather",))),
    (
        "colbert",
        ENCODER,
        Fault(
            "the projection 1 % off", perturbed("token_vectors.dense.0"), "token_vectors.dense.0", ("MatMul",)
        ),
    ),
    (
        "bge-m3",
        ENCODER,
        Fault("relu left out", without("sparse", "Relu"), "sparse", ("Relu", "Squeeze", "Add")),
    ),
]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PlantedBundle]:
    root = tmp_path_factory.mktemp("retrieval")
    made: dict[str, PlantedBundle] = {}

    def make(kind: str) -> PlantedBundle:
        if kind not in made:
            folder = write_folder(kind, root / kind)
            export(folder, root / f"{kind}-bundle", target=["cpu"], precision=["fp32"])
            made[kind] = PlantedBundle(kind, root / f"{kind}-bundle", root / f"{kind}-damaged")
        return made[kind]

    return make


@pytest.mark.parametrize(
    ("kind", "artifact", "fault"), FAULTS, ids=[f"{kind}: {fault.name}" for kind, _, fault in FAULTS]
)
def test_a_fault_is_refused_and_named(
    bundles: Callable[[str], PlantedBundle], kind: str, artifact: str, fault: Fault
) -> None:
    verdict = bundles(kind).judge(artifact, fault)
    assert verdict.is_caught
    assert verdict.is_right, verdict.describe_name()


def test_a_swapped_router_is_refused_and_named(bundles: Callable[[str], PlantedBundle]) -> None:
    """The documents' encoder reads queries."""
    planted = bundles("two-encoders")
    documents = ir.load(planted.folder / planted.manifest.artifact(ENCODER).file).graph.initializers

    def swap(model: ir.Model) -> None:
        for name, value in model.graph.initializers.items():
            own = documents.get(name.removeprefix("query."))
            if name.startswith("query.") and own is not None:
                assert own.const_value is not None
                value.const_value = ir.tensor(own.const_value.numpy(), name=name)

    fault = Fault("Router swapped", swap, "query.embeddings.words", ("Gather",))
    verdict = planted.judge(QUERIES, fault)
    assert verdict.is_caught
    assert verdict.is_right, verdict.describe_name()


FIND_PROMPT = RequestReader.find_prompt
FIT_TEXT = RequestReader.fit_text
EXPAND = Piece.expand
FILL = PairTemplate.fill


def forget_prompt(self: RequestReader, name: Any, prompt: Any, input_type: Any = None) -> str:
    del input_type
    return FIND_PROMPT(self, name, prompt)


def see_expansion(self: Piece, length: int, token: int, attend: bool) -> Piece:
    return replace(EXPAND(self, length, token, attend), unseen=0)


def expand_less(self: Piece, length: int, token: int, attend: bool) -> Piece:
    return EXPAND(self, length - 1, token, attend)


def count_all(self: RequestReader, ids: Any, input_type: Any) -> list[int]:
    del input_type
    return list(range(len(ids)))


def weigh_all(self: RequestReader, piece: Piece) -> list[int]:
    return list(range(len(piece)))


def add_frame(self: RequestReader, first: Any, second: Any, reading: Any, is_queries: bool = False) -> Any:
    del is_queries
    return FIT_TEXT(self, first, second, reading)


def forget_end(self: PairTemplate, values: Any) -> str:
    return FILL(replace(self, texts=(*self.texts[:-1], "")), values)


def forget_prompted(self: PairTemplate, values: Any) -> str:
    return FILL(replace(self, texts=tuple(text.replace("any", "") for text in self.texts)), values)


@pytest.mark.parametrize(
    ("kind", "owner", "name", "broken", "words"),
    [
        (
            "chat-reranker",
            PairTemplate,
            "fill",
            forget_end,
            r"as a pair, 'Who sells food.' has \d+ tokens; transformers .* gives \d+, with '<.im_end.>' ",
        ),
        ("chat-reranker", PairTemplate, "fill", forget_prompted, r"as a pair, token \d+ of 'Who sells food"),
        ("chat-reranker", PairWriter, "ending", [], r"as a pair, token \d+ of .* gives 2 \('<.im_end.>'\)"),
        (
            "qwen3",
            RequestReader,
            "find_prompt",
            forget_prompt,
            r"token 1 of .* gives 7 \('the'\)",
        ),
        ("pylate", RequestReader, "find_prompt", forget_prompt, r"as a query, token 1 of .*\[unused0\]"),
        ("stanford", Piece, "expand", see_expansion, r"of the query .* 12 tokens are seen, not \d"),
        ("pylate", Piece, "expand", expand_less, r"as a query, .* has 11 tokens; transformers .* gives 12"),
        ("pylate", RequestReader, "find_counted", count_all, r"of the document .* the vectors at .* count"),
        (
            "bge-m3",
            RequestReader,
            "find_counted",
            count_all,
            r"the vectors at \[0, .*, not those at \[1",
        ),
        ("bge-m3", RequestReader, "find_weighted", weigh_all, r"the weights at \[0, .*, not those at \[1"),
        ("router", RequestReader, "fit_text", add_frame, r"as a query, token 0 of .* is 2 \('\[CLS\]'\)"),
    ],
)
def test_texts_that_are_read_otherwise_are_refused(
    bundles: Callable[[str], PlantedBundle],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    owner: type,
    name: str,
    broken: Any,
    words: str,
) -> None:
    """A prefix left out, an expansion that is seen, a token not left out, a template's end, and so on."""
    planted = bundles(kind)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        report = verify(planted.folder, source=planted.source, only=[ENCODER], level="quick")
    (failed,) = [c for c in report.comparisons if c.case == "queries and documents"]
    assert not failed.passed
    text = " | ".join(map(str, failed.failures))
    assert re.search(words, text), text


def test_an_export_compares_pairs_with_the_template_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was learned wrongly is refused, as the template is rendered once more by transformers."""
    learn = pair_templates.learn_template

    def learn_less(*given: Any) -> PairTemplate:
        template = learn(*given)
        return replace(template, texts=(*template.texts[:-1], ""))

    monkeypatch.setattr(pair_templates, "learn_template", learn_less)
    folder = write_folder("chat-reranker", tmp_path / "F")
    with pytest.raises(VerificationError, match=r"queries and documents: as a pair, .* '<.im_end.>' "):
        export(folder, tmp_path / "B", target=["cpu"], precision=["fp32"])
    assert not (tmp_path / "B").exists()


def test_sound_bundles_pass(bundles: Callable[[str], PlantedBundle], tmp_path: Path) -> None:
    for kind in ("qwen3", "splade", "router", "colbert", "bge-m3", "pylate", "stanford", "chat-reranker"):
        report = bundles(kind).verify()
        assert report.list_failures() == []
        assert report.list_locations() == []
