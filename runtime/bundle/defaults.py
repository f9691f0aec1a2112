"""The default settings of a bundle's tasks, as its manifest records them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ManifestError
from .json_reader import FILE_NAME, Reader


@dataclass(frozen=True)
class GenerationDefaults:
    """The defaults of generation and translation: how a sequence begins and ends, and how it is searched for.

    Attributes:
        eos: tokens that end it.
        prefix: special tokens that every prompt begins with, or of a translation every source.
        decoder_start: the token that every target begins with.
        source_eos: the token that every source ends with.
        forced_bos, forced_eos: the target's first token after that, and its last at full length.
        suppressed: tokens that are never generated.
        num_beams, length_penalty, early_stopping, no_repeat_ngram_size: see `decoding.beam.Search`.
        min_new_tokens: number of tokens before which none of `eos` is generated.
        renormalize: whether probabilities are normalized again after these rules.
        max_new_tokens: of a translation, or with the checkpoint's own settings.
        max_length: tokens of one sequence, at most.
        do_sample: whether a language model's checkpoint samples its tokens. If not, decoding is greedy,
            whatever the next four say.
        temperature, top_k, top_p, min_p: how they are sampled; None turns one off.
        repetition_penalty: for tokens that the prompt or the answer already has; 1.0 is none.
    """

    eos: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None
    decoder_start: int | None = None
    source_eos: int | None = None
    forced_bos: int | None = None
    forced_eos: int | None = None
    suppressed: tuple[int, ...] = ()
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int = 0
    renormalize: bool = False
    max_new_tokens: int | None = None
    max_length: int = 1024
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def to_json(self) -> dict[str, Any]:
        lists = {name: list(getattr(self, name)) for name in ("eos", "prefix", "suppressed")}
        return {**vars(self), **lists}

    @staticmethod
    def from_json(value: Any) -> GenerationDefaults:
        r = Reader(value, "generation")
        return GenerationDefaults(
            eos=r.list_of("eos", int, ()),
            prefix=r.list_of("prefix", int, ()),
            bos=r.get("bos", int, None),
            pad=r.get("pad", int, None),
            decoder_start=r.get("decoder_start", int, None),
            source_eos=r.get("source_eos", int, None),
            forced_bos=r.get("forced_bos", int, None),
            forced_eos=r.get("forced_eos", int, None),
            suppressed=r.list_of("suppressed", int, ()),
            num_beams=r.get("num_beams", int, 1),
            length_penalty=r.number("length_penalty", 1.0),
            early_stopping="never"
            if r.value.get("early_stopping") == "never"
            else r.flag("early_stopping", False),
            no_repeat_ngram_size=r.get("no_repeat_ngram_size", int, None),
            min_new_tokens=r.get("min_new_tokens", int, 0),
            renormalize=r.flag("renormalize", False),
            max_new_tokens=r.get("max_new_tokens", int, None),
            max_length=r.get("max_length", int),
            do_sample=r.flag("do_sample", False),
            temperature=r.optional_number("temperature"),
            top_k=r.get("top_k", int, None),
            top_p=r.optional_number("top_p"),
            min_p=r.optional_number("min_p"),
            repetition_penalty=r.number("repetition_penalty", 1.0),
        )


@dataclass(frozen=True)
class FittedHead:
    """A classifier that was fitted to a frozen encoder's features.

    Attributes:
        features: "embedding", or the name of a choice of hidden states, averaged over the tokens.
        file: file of the bundle with its weight (C, F) and bias (C,) as the fit gave them.
    """

    features: str
    file: str


@dataclass(frozen=True)
class EncoderDefaults:
    """What an encoder's results mean, and the default settings of its tasks.

    Attributes:
        max_length: tokens of one sequence, special ones included.
        tokens: the special tokens "cls", "sep", "pad" and, if there is one, "mask".
        separators: how many "sep" stand between the two texts of a pair.
        heads: names of the graph's heads.
        labels: of the classification head's classes, in order.
        problem_type: "regression", "single_label_classification" or "multi_label_classification".
        score_activation: "sigmoid" or "identity": how a cross-encoder's one logit becomes a score.
        pooling: how the vectors of a text's tokens become one.
        normalize: whether that vector gets length 1.
        prompts: texts to put before a text, by name.
        default_prompt: the name of the prompt that every text gets.
        fitted: where the classification head comes from, if not from the checkpoint.
    """

    max_length: int
    tokens: Mapping[str, int]
    separators: int = 1
    heads: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    problem_type: str | None = None
    score_activation: str = "sigmoid"
    pooling: str = "mean"
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    fitted: FittedHead | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "max_length": self.max_length,
            "tokens": dict(self.tokens),
            "separators": self.separators,
            "heads": list(self.heads),
            "labels": list(self.labels),
            "problem_type": self.problem_type,
            "score_activation": self.score_activation,
            "pooling": self.pooling,
            "normalize": self.normalize,
            "prompts": dict(self.prompts),
            "default_prompt": self.default_prompt,
            "fitted": None if self.fitted is None else vars(self.fitted),
        }

    @staticmethod
    def from_json(value: Any) -> EncoderDefaults:
        r = Reader(value, "encoder")
        tokens = Reader(r.object("tokens"), "encoder.tokens")
        if not {"cls", "sep", "pad"} <= set(tokens.value):
            raise ManifestError(f"{FILE_NAME}: encoder.tokens must have cls, sep and pad")
        return EncoderDefaults(
            max_length=r.get("max_length", int),
            tokens={role: tokens.get(role, int) for role in tokens.value},
            separators=r.get("separators", int, 1),
            heads=r.list_of("heads", str),
            labels=r.list_of("labels", str),
            problem_type=r.get("problem_type", str, None),
            score_activation=r.get("score_activation", str),
            pooling=r.get("pooling", str),
            normalize=r.flag("normalize"),
            prompts=r.texts("prompts"),
            default_prompt=r.get("default_prompt", str, None),
            fitted=None
            if r.value.get("fitted") is None
            else FittedHead(
                Reader(r.object("fitted"), "encoder.fitted").get("features", str),
                Reader(r.object("fitted"), "encoder.fitted").get("file", str),
            ),
        )
