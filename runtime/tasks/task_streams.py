"""Every task of an encoder as a stream: texts in, results out, in order, never all of them held."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ..backends.backend import Array
from ..bundle.defaults import EncoderDefaults
from ..encoding.encoder import Encoder
from ..errors import InputError
from ..text.long_text import FittedText, best_window, fit
from ..text.tokenizer import Encoding, Tokenizer
from .answering import answers_of
from .encoder_results import (
    Answers,
    Classification,
    Embedding,
    Features,
    Fill,
    FilledMask,
    NextSentence,
    Ranked,
    Result,
    Tags,
)
from .pooling import LAYERS, POOLINGS, combined, merged, normalized, pooled
from .probabilities import sigmoid, softmax
from .reading import Item, Reading, check_item, check_pair, check_text, checked, chunks
from .tagging import entities_of

log = logging.getLogger("planforge")

R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Request:
    """One text, or a pair, as the encoder gets it."""

    item: tuple[str, str | None]
    first: Encoding
    second: Encoding | None
    fitted: FittedText

    @property
    def body(self) -> tuple[str, Encoding]:
        """The text that windows slide over: the second if there is one."""
        text, pair = self.item
        return (text, self.first) if pair is None or self.second is None else (pair, self.second)


Outputs: TypeAlias = list[list[Array]]  # of each piece of a request, an array per role
Rows: TypeAlias = Callable[[Request], list[list[int]]]


class TaskStreams:
    """The tasks. Each takes an iterable and the options of `Reading`, and returns an iterator."""

    def __init__(self, encoder: Encoder, tokenizer: Tokenizer, defaults: EncoderDefaults) -> None:
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.roles = {spec.role for spec in encoder.artifact.outputs}
        layers = [int(role.removeprefix("hidden.")) for role in self.roles if role.startswith("hidden.")]
        self.last_layer = max(layers, default=None)  # an imported graph with a head may have none

    def embed(
        self,
        texts: Iterable[str],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        truncation: str = "head",
        **options: Any,
    ) -> Iterator[Embedding]:
        if pooling is not None and pooling not in POOLINGS:
            raise InputError(f"pooling={pooling!r} is not one of {', '.join(POOLINGS)}")
        last = self.need_states("embed")
        defaults = self.defaults
        unit = defaults.normalize if normalize is None else normalize
        own = pooling is None and "sentence_embedding" in self.roles and (unit or not defaults.normalize)
        role = "sentence_embedding" if own else f"hidden.{last}"
        if not own and pooling is None and defaults.pooling not in POOLINGS:
            raise InputError(f"normalize={normalize!r} needs a pooling: one of {', '.join(POOLINGS)}")
        how = pooling or defaults.pooling
        before = self.prompt_text(prompt)

        def finish(request: Request, outputs: Outputs) -> Embedding:
            vectors = [array if own else pooled(array, how) for (array,) in outputs]
            vector = merged(vectors, [len(piece) for piece in request.fitted.pieces], how)
            return Embedding(normalized(vector) if unit else vector, request.fitted.dropped)

        reading = Reading(truncation, **options)
        return self.results((before + text for text in checked(texts, check_text)), [role], finish, reading)

    def prompt_text(self, name: str | None) -> str:
        """The text of a prompt of the checkpoint; of its default one without a name, none for ""."""
        name = self.defaults.default_prompt if name is None else name
        if name and name not in self.defaults.prompts:
            known = ", ".join(map(repr, self.defaults.prompts)) or "none"
            raise InputError(f"prompt={name!r} is not one of this model's prompts: {known}")
        return self.defaults.prompts[name] if name else ""

    def features(
        self, texts: Iterable[str], *, layers: str = "last", truncation: str = "windows", **options: Any
    ) -> Iterator[Features]:
        roles = self.layer_roles(layers)
        cls, sep = (self.tokenizer.spelling(self.defaults.tokens[role]) for role in ("cls", "sep"))

        def finish(request: Request, outputs: Outputs) -> Features:
            states = [combined(arrays, layers) for arrays in outputs]
            encoding, pieces = request.first, request.fitted.pieces
            places = best_window(pieces, len(encoding))
            kept = [t for t, (piece, _) in enumerate(places) if piece >= 0]
            spots = [(0, 0), *(places[t] for t in kept), (len(pieces) - 1, len(pieces[-1]) - 1)]
            offsets = encoding.offsets
            return Features(
                tokens=(cls, *(self.tokenizer.spelling(encoding.ids[t]) for t in kept), sep),
                offsets=((0, 0), *(offsets[t] for t in kept), (0, 0)),
                vectors=np.stack([states[piece][position] for piece, position in spots]),
                dropped=request.fitted.dropped,
            )

        return self.results(checked(texts, check_text), roles, finish, Reading(truncation, **options))

    def layer_roles(self, layers: str) -> list[str]:
        """The roles of the hidden states that a choice of features needs."""
        if layers not in LAYERS:
            raise InputError(f"layers={layers!r} is not one of {', '.join(LAYERS)}")
        needed = LAYERS[layers](self.need_states("features"))
        if min(needed) < 0:
            raise InputError(f"layers={layers!r} needs four layers, this model has {self.last_layer}")
        roles = [f"hidden.{layer}" for layer in needed]
        if missing := [layer for layer, role in zip(needed, roles, strict=True) if role not in self.roles]:
            raise InputError(
                f"layers={layers!r} needs the hidden states of layers {missing}, which this bundle does not"
                " have; export it again with --outputs hidden_states"
            )
        return roles

    def classify(
        self, texts: Iterable[Item], *, truncation: str = "head", **options: Any
    ) -> Iterator[Classification]:
        self.need_head("classify", "sequence_classification")
        labels, kind = self.defaults.labels, self.defaults.problem_type

        def finish(request: Request, outputs: Outputs) -> Classification:
            logits = np.stack([array for (array,) in outputs])  # (windows, C)
            dropped = request.fitted.dropped
            if kind == "regression":
                numbers = [float(number) for number in logits.mean(0)]
                named = dict(zip(labels, numbers, strict=True)) if len(labels) > 1 else {}
                return Classification(labels[0], numbers[0], named, dropped)
            multi = kind == "multi_label_classification"
            shares = (sigmoid if multi else softmax)(logits).mean(0)
            best = int(shares.argmax())
            probabilities = dict(zip(labels, map(float, shares), strict=True))
            return Classification(labels[best], float(shares[best]), probabilities, dropped)

        reading = Reading(truncation, **options)
        return self.results(checked(texts, check_item), ["sequence_classification"], finish, reading)

    def rank(self, pairs: Iterable[Item], *, truncation: str = "head", **options: Any) -> Iterator[Ranked]:
        self.need_head("rank", "sequence_classification")
        if len(self.defaults.labels) != 1:
            raise InputError(
                f"rank needs a cross-encoder with one score, this one has the labels {self.defaults.labels}"
            )
        numbers = itertools.count()
        activation = sigmoid if self.defaults.score_activation == "sigmoid" else np.asarray

        def finish(request: Request, outputs: Outputs) -> Ranked:
            score = float(activation(np.max(outputs)))
            return Ranked(next(numbers), str(request.item[1]), score, request.fitted.dropped)

        reading = Reading(truncation, **options)
        return self.results(checked(pairs, check_pair), ["sequence_classification"], finish, reading)

    def next_sentence(
        self, pairs: Iterable[Item], *, truncation: str = "head", **options: Any
    ) -> Iterator[NextSentence]:
        self.need_head("next_sentence", "next_sentence")

        def finish(request: Request, outputs: Outputs) -> NextSentence:
            share = float(np.mean([softmax(array)[0] for (array,) in outputs]))  # class 0 is "it follows"
            return NextSentence(share > 0.5, share, request.fitted.dropped)

        reading = Reading(truncation, **options)
        return self.results(checked(pairs, check_pair), ["next_sentence"], finish, reading)

    def fill_mask(
        self, texts: Iterable[str], *, top_k: int = 5, truncation: str = "windows", **options: Any
    ) -> Iterator[FilledMask]:
        self.need_head("fill_mask", "masked_lm")
        if "mask" not in self.defaults.tokens:
            raise InputError("fill_mask needs a mask token, and this bundle's tokenizer has none")
        mask = self.defaults.tokens["mask"]
        vocabulary = self.tokenizer.vocab_size
        if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= vocabulary:
            raise InputError(f"top_k={top_k!r} must be a whole number from 1 to {vocabulary}")

        def places(request: Request) -> list[tuple[int, int]]:
            masked = [t for t, token in enumerate(request.first.ids) if token == mask]
            if not masked:
                spelled = self.tokenizer.spelling(mask)
                raise InputError(f"the text {request.item[0]!r:.60} has no {spelled} to fill")
            windows = best_window(request.fitted.pieces, len(request.first))
            return [windows[t] for t in masked if windows[t][0] >= 0]

        def rows(request: Request) -> list[list[int]]:
            found = places(request)
            return [[at for p, at in found if p == piece] for piece in range(len(request.fitted.pieces))]

        def finish(request: Request, outputs: Outputs) -> FilledMask:
            taken = [iter(array) for (array,) in outputs]
            masks = tuple(self.best_words(next(taken[piece]), top_k) for piece, _ in places(request))
            return FilledMask(masks, request.fitted.dropped)

        reading = Reading(truncation, **{**options, "parse_special": True})
        return self.results(checked(texts, check_text), ["masked_lm"], finish, reading, rows)

    def best_words(self, logits: Array, top_k: int) -> tuple[Fill, ...]:
        """The likeliest words of one row of logits (V,)."""
        shares = softmax(logits)
        best = np.argsort(-shares[: self.tokenizer.vocab_size], kind="stable")[:top_k]
        return tuple(Fill(self.tokenizer.spelling(int(t)), int(t), float(shares[t])) for t in best)

    def tag(self, texts: Iterable[str], *, truncation: str = "windows", **options: Any) -> Iterator[Tags]:
        self.need_head("tag", "token_classification")
        labels = self.defaults.labels

        def finish(request: Request, outputs: Outputs) -> Tags:
            shares = np.full((len(request.first), len(labels)), np.nan, np.float32)
            for t, (piece, position) in enumerate(best_window(request.fitted.pieces, len(shares))):
                if piece >= 0:
                    shares[t] = softmax(outputs[piece][0][position])
            text, encoding = request.item[0], request.first
            entities = entities_of(text, shares, encoding.offsets, encoding.words, labels)
            return Tags(entities, request.fitted.dropped)

        reading = Reading(truncation, **options)
        return self.results(checked(texts, check_text), ["token_classification"], finish, reading)

    def answer(
        self,
        pairs: Iterable[Item],
        *,
        n_best: int = 1,
        max_answer_tokens: int = 30,
        truncation: str = "windows",
        **options: Any,
    ) -> Iterator[Answers]:
        self.need_head("answer", "question_answering")
        for name, value in (("n_best", n_best), ("max_answer_tokens", max_answer_tokens)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name}={value!r} must be a whole number of at least 1")

        def finish(request: Request, outputs: Outputs) -> Answers:
            context, encoding = request.body
            return answers_of(
                context,
                encoding.offsets,
                request.fitted.pieces,
                outputs,
                n_best=n_best,
                max_tokens=max_answer_tokens,
                dropped=request.fitted.dropped,
            )

        roles = ["question_answering.start", "question_answering.end"]
        return self.results(checked(pairs, check_pair), roles, finish, Reading(truncation, **options))

    def need_states(self, task: str) -> int:
        """The last layer's number; refuses a graph that gives only its head's logits."""
        if self.last_layer is None:
            raise InputError(
                f"{task} needs hidden states, which this bundle's graph does not give; its heads are"
                f" {', '.join(self.defaults.heads)}"
            )
        return self.last_layer

    def need_head(self, task: str, head: str) -> None:
        """Refuses a task that this bundle's graph has no head for."""
        if head not in self.defaults.heads:
            known = ", ".join(self.defaults.heads) or "none: it embeds texts (embed, features)"
            raise InputError(f"{task} needs the head {head}; this bundle's heads are {known}")

    def results(
        self,
        items: Iterable[Item],
        roles: Sequence[str],
        finish: Callable[[Request, Outputs], R],
        reading: Reading,
        rows: Rows | None = None,
    ) -> Iterator[R]:
        """Runs a task over items, some ahead at a time; says at the end what was dropped."""
        done, shortened, dropped = 0, 0, 0
        for chunk in chunks(items):
            requests = self.requests(chunk, reading, done)
            pieces = [piece for request in requests for piece in request.fitted.pieces]
            wanted = None if rows is None else [row for request in requests for row in rows(request)]
            outputs = iter(self.encoder.run(pieces, roles, wanted))
            for request in requests:
                yield finish(request, list(itertools.islice(outputs, len(request.fitted.pieces))))
                done += 1
                shortened += request.fitted.dropped > 0
                dropped += request.fitted.dropped
                if reading.progress is not None:
                    reading.progress(done)
        if dropped:
            log.warning(
                "%d of %d texts were longer than the %d tokens that this model takes, and %d tokens were"
                " dropped (truncation=%r); truncation='windows' keeps all",
                *(shortened, done, self.defaults.max_length, dropped, reading.truncation),
            )

    def requests(self, items: Sequence[Item], reading: Reading, done: int) -> list[Request]:
        """Tokenizes texts and pairs, of which `done` came before, and fits them to the model."""
        pairs = [(item, None) if isinstance(item, str) else item for item in items]
        special = reading.parse_special
        firsts = self.tokenizer.encode_batch([first for first, _ in pairs], special, done)
        given = [second for _, second in pairs if second is not None]
        seconds = iter(self.tokenizer.encode_batch(given, special, done))
        requests = []
        for pair, first in zip(pairs, firsts, strict=True):
            second = None if pair[1] is None else next(seconds)
            fitted = fit(
                first.ids,
                None if second is None else second.ids,
                max_length=self.defaults.max_length,
                tokens=self.defaults.tokens,
                truncation=reading.truncation,
                stride=reading.stride,
                separators=self.defaults.separators,
            )
            requests.append(Request(pair, first, second, fitted))
        return requests
