"""The one table of runtimes that a bundle can be packaged for: what each takes, and how it is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ...runtime.errors import InputError
from ...runtime.suggest import did_you_mean
from .. import task_traits
from ..precisions import PRECISIONS
from . import genai, optimum, transformers_js, triton
from .answer_checks import list_answer_checks
from .check import Check
from .checks import list_decoder_checks, list_encoder_checks, list_translator_checks, make_graph_check
from .default_checks import list_default_checks
from .encoders import name_class, name_outputs
from .links import FilePlacer
from .worker import Worker, find_node, find_python

CAUSAL = task_traits.GENERATION.name
ENCODING = task_traits.ENCODING.name
TRANSLATION = task_traits.TRANSLATION.name


@dataclass(frozen=True)
class Engine:
    """One of the ways in which a runtime runs a package."""

    name: str = ""  # the suffix of the runtime's name in reports
    options: Mapping[str, Any] = field(default_factory=dict)  # that the worker is told
    max_bytes: float = math.inf  # of a precision's weights; larger ones are not run by it


@dataclass(frozen=True)
class Recipe:
    """A runtime, and the form of a package for it."""

    name: str  # as on the command line
    title: str
    tasks: tuple[str, ...]
    precisions: tuple[str, ...]
    many: bool  # whether one package has graphs in several precisions
    write: Callable[[Bundle, Sequence[Artifact], Path, FilePlacer], None]
    find: Callable[[Path | None], Worker | None]  # the worker of a runtime that is installed
    install: str  # what installs it
    oldest: str  # the oldest version that packages were run with
    choose_class: Callable[[Bundle], str]  # that its users load the package with
    dtypes: Mapping[str, str]  # what its users call precisions
    embedding: bool = False  # whether its users read an encoder's sentence_embedding
    every_place: bool = False  # whether its users read the logits of all tokens
    takes_texts: bool = False  # whether its models take texts, not tokens
    engines: tuple[Engine, ...] = (Engine(),)  # each runs the package once

    def choose_options(self, bundle: Bundle, precision: str) -> dict[str, Any]:
        """Return the options of a package for its worker."""
        return {
            "class": self.choose_class(bundle),
            "dtype": self.dtypes.get(precision, precision),
            "name": triton.name_model(bundle),
        }

    def find_precision(self, name: str) -> str:
        """Return our name of a runtime's precision, such as int4 for q4; else the name itself."""
        return next((own for own, other in self.dtypes.items() if other == name), name)

    def list_checks(self, bundle: Bundle, artifact: Artifact) -> list[Check]:
        """Return the checks of a graph's package in its runtime."""
        manifest = bundle.manifest
        if self.takes_texts:
            checks = list_answer_checks(bundle, artifact)
            return checks + ([make_graph_check(bundle, artifact)] if manifest.encoder is not None else [])
        own = list_default_checks(bundle, artifact)
        if manifest.task == CAUSAL:
            return list_decoder_checks(bundle, artifact, every_place=self.every_place) + own
        if manifest.task == TRANSLATION:
            return list_translator_checks(bundle, artifact) + own
        names = name_outputs(manifest, artifact, embedding=self.embedding)
        return list_encoder_checks(bundle, artifact, names) + own


def choose_auto_class(bundle: Bundle) -> str:
    """Return the class of transformers.js, which are named as those of transformers."""
    task = bundle.manifest.task
    if task == CAUSAL:
        return "AutoModelForCausalLM"
    if task == TRANSLATION:
        return "AutoModelForSeq2SeqLM"
    return f"AutoModel{name_class(bundle.manifest)}"


def choose_ort_class(bundle: Bundle) -> str:
    """Return the class of optimum."""
    if bundle.manifest.task == CAUSAL:
        return "ORTModelForCausalLM"
    return f"ORTModel{name_class(bundle.manifest) or 'ForFeatureExtraction'}"


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="genai",
            title="onnxruntime-genai",
            tasks=(CAUSAL,),
            precisions=("fp32", "fp16", "int8", "int4", "w8a16", "w4a16"),
            many=False,
            write=genai.write,
            find=partial(find_python, "ask_genai.py", "onnxruntime_genai", "onnxruntime-genai"),
            install="pip install onnxruntime-genai",
            oldest="0.12.2",
            choose_class=lambda bundle: "",
            dtypes={},
        ),
        Recipe(
            name="transformers.js",
            title="transformers.js",
            tasks=(CAUSAL, ENCODING, TRANSLATION),
            precisions=("fp32", "fp16", "int8", "int4"),
            many=True,
            write=transformers_js.write,
            find=partial(find_node, "ask_transformers_js.mjs"),
            install="npm install @huggingface/transformers",
            oldest="4.0.0",
            choose_class=choose_auto_class,
            dtypes=transformers_js.DTYPES,
            embedding=True,
            engines=(Engine(), Engine("in WebAssembly", {"wasm": True}, max_bytes=2**30)),
        ),
        Recipe(
            name="optimum",
            title="optimum-onnx",
            tasks=(CAUSAL, ENCODING),
            precisions=("fp32", "fp16", "int8", "int4"),
            many=False,
            write=optimum.write,
            find=partial(find_python, "ask_optimum.py", "optimum.onnxruntime", "optimum-onnx"),
            install="pip install optimum-onnx 'transformers<4.58'",
            oldest="0.1.0",
            choose_class=choose_ort_class,
            every_place=True,
            dtypes={},
        ),
        Recipe(
            name="triton",
            title="Triton",
            tasks=(CAUSAL, ENCODING, TRANSLATION),
            precisions=tuple(PRECISIONS),
            many=False,
            write=triton.write,
            find=partial(find_python, "ask_triton.py", "planforge.runtime", "planforge"),
            install="pip install planforge",
            oldest="0.1.0",
            choose_class=lambda bundle: "",
            dtypes={},
            takes_texts=True,
        ),
    )
}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a runtime's name; refuse an unknown one."""
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES)
        raise InputError(f"--for {name!r} is not one of {', '.join(RECIPES)}{hint}")
    return RECIPES[name]
