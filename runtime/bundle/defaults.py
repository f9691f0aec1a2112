"""The default settings of a bundle's tasks, as its manifest records them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ManifestError
from .json_reader import FILE_NAME, Reader
from .pair_templates import PairTemplates
from .role_defaults import RoleDefaults

FRAMED = ("all", "single", "none", "own")


@dataclass(frozen=True)
class SequenceBias:
    """What is added to the last of some tokens where the others stand before it."""

    tokens: tuple[int, ...]
    added: float


@dataclass(frozen=True)
class TokenRules:
    """Further rules of a checkpoint about its tokens, as transformers' processors have them."""

    min_length: int = 0  # no end token before a sequence, prompt included, has so many tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of several tokens that are never completed
    suppress_tokens: tuple[int, ...] = ()  # never generated, not even to end
    begin_suppress_tokens: tuple[int, ...] = ()  # never the first new token
    sequence_bias: tuple[SequenceBias, ...] = ()
    # Behind so many new tokens each further one makes the end likelier by the factor.
    decay_start: int = 0
    decay_factor: float = 1.0

    @staticmethod
    def from_json(value: Any) -> TokenRules:
        r = Reader(value, "generation.rules")
        words = r.get("bad_words", list, [])
        biases = [Reader(bias, "generation.rules.sequence_bias") for bias in r.get("sequence_bias", list, [])]
        return TokenRules(
            min_length=r.get("min_length", int, 0),
            bad_words=tuple(Reader({"bad_words": word}, r.what).list_of("bad_words", int) for word in words),
            suppress_tokens=r.list_of("suppress_tokens", int, ()),
            begin_suppress_tokens=r.list_of("begin_suppress_tokens", int, ()),
            sequence_bias=tuple(
                SequenceBias(bias.list_of("tokens", int), bias.number("added", 0.0)) for bias in biases
            ),
            decay_start=r.get("decay_start", int, 0),
            decay_factor=r.number("decay_factor", 1.0),
        )


NO_RULES = TokenRules()


@dataclass(frozen=True)
class GenerationDefaults:
    """The defaults of generation and translation; `decoding.beam.Search` explains those of beams."""

    eos: tuple[int, ...] = ()  # tokens that end a sequence
    prefix: tuple[int, ...] = ()  # that every prompt begins with, or of a translation every source
    bos: int | None = None
    pad: int | None = None
    decoder_start: int | None = None  # the token that every target begins with
    source_eos: int | None = None  # the token that every source ends with
    forced_bos: int | None = None  # the target's first token after `decoder_start`
    forced_eos: int | None = None  # its last token at full length
    suppressed: tuple[int, ...] = ()  # tokens that are never generated
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int = 0  # before so many tokens none of `eos` is generated
    renormalize: bool = False  # whether probabilities are normalized again after these rules
    max_new_tokens: int | None = None  # of a translation, or with the checkpoint's own settings
    # Of a prompt with its answer, where the checkpoint says that instead of max_new_tokens.
    max_total_tokens: int | None = None
    max_length: int = 1024  # tokens of one sequence, at most
    do_sample: bool = False  # if not, decoding is greedy, whatever the next four say
    temperature: float | None = None  # None turns one of the four off
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0  # for tokens that the prompt or the answer already has; 1.0 is none
    stop: tuple[str, ...] = ()  # texts that end an answer
    rules: TokenRules = NO_RULES
    adapters: tuple[str, ...] = ()  # that a request may name; the first has slot 1

    @staticmethod
    def from_json(value: Any) -> GenerationDefaults:
        r = Reader(value, "generation")
        never = r.value.get("early_stopping") == "never"
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
            early_stopping="never" if never else r.flag("early_stopping", False),
            no_repeat_ngram_size=r.get("no_repeat_ngram_size", int, None),
            min_new_tokens=r.get("min_new_tokens", int, 0),
            renormalize=r.flag("renormalize", False),
            max_new_tokens=r.get("max_new_tokens", int, None),
            max_length=r.get("max_length", int),
            do_sample=r.flag("do_sample", False),
            temperature=r.number("temperature", None),
            top_k=r.get("top_k", int, None),
            top_p=r.number("top_p", None),
            min_p=r.number("min_p", None),
            repetition_penalty=r.number("repetition_penalty", 1.0),
            max_total_tokens=r.get("max_total_tokens", int, None),
            stop=r.list_of("stop", str, ()),
            rules=TokenRules.from_json(r.get("rules", dict, {})),
            adapters=r.list_of("adapters", str, ()),
        )


@dataclass(frozen=True)
class FittedHead:
    """A classifier that was fitted to a frozen encoder's features."""

    features: str  # "embedding", "cls", or the name of hidden states that are averaged over the tokens
    file: str  # of the bundle, with its weight (C, F) and bias (C,) as the fit gave them


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens before a text, between the two of a pair, and behind them."""

    prefix: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    second_segment: int = 1  # of the second text's tokens, where the model tells the two apart

    @staticmethod
    def from_json(value: Any, what: str) -> SpecialTokens:
        r = Reader(value, what)
        return SpecialTokens(
            prefix=r.list_of("prefix", int, ()),
            between=r.list_of("between", int, ()),
            suffix=r.list_of("suffix", int, ()),
            second_segment=r.get("second_segment", int, 1),
        )


@dataclass(frozen=True)
class EncoderDefaults:
    """What an encoder's results mean, and the default settings of its tasks."""

    max_length: int  # tokens of one sequence, special ones included
    tokens: Mapping[str, int]  # the special tokens that there are of "cls", "sep", "pad" and "mask"
    separators: int = 1  # how many "sep" stand between the two texts of a pair
    framed: str = "all"  # what "cls" and "sep" stand around: "all" texts, a "single" one, "none"; else "own"
    # Where `framed` is "own": what stands around a text, and around and between two.
    frames: tuple[SpecialTokens, SpecialTokens] | None = None
    segments: bool = True  # whether the model is told which tokens are of a pair's second text
    heads: tuple[str, ...] = ()  # of the graph
    labels: tuple[str, ...] = ()  # of the classification head's classes, in order
    # "regression", "single_label_classification" or "multi_label_classification"
    problem_type: str | None = None
    score_activation: str = "sigmoid"  # or "identity": how a cross-encoder's one logit becomes a score
    pooling: str = "mean"  # how the vectors of a text's tokens become one
    normalize: bool = True  # whether that vector gets length 1
    include_prompt: bool = True  # whether that vector is made of a prompt's tokens too
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts to put before a text, by name
    default_prompt: str | None = None  # the name of the prompt that every text gets
    fitted: FittedHead | None = None  # the classification head, where it is not the checkpoint's
    roles: RoleDefaults = field(default_factory=RoleDefaults)  # how queries and documents differ
    pairs: PairTemplates | None = None  # what writes a query with a document; None: `frames` and so on

    @property
    def padding(self) -> int:
        """The token that pads short texts of a batch; any does, as the mask leaves it out."""
        return self.tokens.get("pad", 0)

    def make_special_tokens(self, is_pair: bool = False) -> SpecialTokens:
        """Return what stands around a text, or around and between two."""
        if self.frames is not None:
            return replace(self.frames[is_pair], second_segment=int(self.segments))
        if self.framed == "none" or (is_pair and self.framed == "single"):
            return SpecialTokens(second_segment=int(self.segments))
        sep = self.tokens["sep"]
        between = (sep,) * self.separators if is_pair else ()
        return SpecialTokens((self.tokens["cls"],), between, (sep,), int(self.segments))

    @staticmethod
    def from_json(value: Any) -> EncoderDefaults:
        r = Reader(value, "encoder")
        tokens = Reader(r.get("tokens", dict), "encoder.tokens")
        fitted = None
        if r.value.get("fitted") is not None:
            head = Reader(r.value["fitted"], "encoder.fitted")
            fitted = FittedHead(head.get("features", str), head.get("file", str))
        framed = r.get("framed", str, "all")
        if framed not in FRAMED:
            raise ManifestError(f"{FILE_NAME}: encoder.framed must be one of {', '.join(FRAMED)}")
        frames = None
        if framed == "own":
            given = r.get("frames", list)
            if len(given) != 2:
                raise ManifestError(f"{FILE_NAME}: encoder.frames must be of a text and of a pair")
            single, pair = (SpecialTokens.from_json(frame, "encoder.frames") for frame in given)
            frames = (single, pair)
        elif framed != "none" and not {"cls", "sep"} <= set(tokens.value):
            raise ManifestError(f"{FILE_NAME}: encoder.tokens must have cls and sep, as texts are framed")
        return EncoderDefaults(
            max_length=r.get("max_length", int),
            tokens={role: tokens.get(role, int) for role in tokens.value},
            separators=r.get("separators", int, 1),
            framed=framed,
            frames=frames,
            segments=r.flag("segments", True),
            heads=r.list_of("heads", str),
            labels=r.list_of("labels", str),
            problem_type=r.get("problem_type", str, None),
            score_activation=r.get("score_activation", str),
            pooling=r.get("pooling", str),
            normalize=r.flag("normalize"),
            include_prompt=r.flag("include_prompt", True),
            prompts=r.texts("prompts"),
            default_prompt=r.get("default_prompt", str, None),
            fitted=fitted,
            roles=RoleDefaults.from_json(r.get("roles", dict, {})),
            pairs=PairTemplates.from_json(r.value.get("pairs")),
        )
