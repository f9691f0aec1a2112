"""The tasks of an encoder: which outputs its results are made of, and how."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..backends.backend import Array
from ..errors import InputError
from ..option_checks import check_choice, check_switch, check_whole
from ..options import (
    AnswerOptions,
    ClassifyOptions,
    EncoderOptions,
    FeatureOptions,
    FillMaskOptions,
    Layers,
    ScoreOptions,
)
from ..text.long_text import place_tokens
from ..text.reading import Item, check_each, check_item, check_pair, check_text
from .embedding_tasks import EMBEDDING_TASKS, EmbeddingTasks
from .pooling import (
    LAYERS,
    combine_layers,
    share_classes,
    sigmoid,
    softmax,
)
from .requests import Outputs, Task, TextRequest
from .results import (
    Answers,
    Classification,
    Features,
    Fill,
    FilledMask,
    NextSentence,
    Ranked,
    Result,
    Tags,
)
from .spans import find_answers, find_entities, number_words
from .zero_shot import make_no_inference_error, read_hypotheses, stack_logits

log = logging.getLogger("planforge")

# The tasks that need a head, and which.
TASK_HEADS = {
    "classify": "sequence_classification",
    "rank": "sequence_classification",
    "next_sentence": "next_sentence",
    "fill_mask": "masked_lm",
    "tag": "token_classification",
    "answer": "question_answering",
}
TASKS = (*EMBEDDING_TASKS, "embed_hybrid", "features", *TASK_HEADS)


class Tasks(EmbeddingTasks):
    """The tasks. Each takes an iterable and a caller's options, and returns a `Task` that `run_task` runs.

    Options are checked at once, texts when they are read.
    """

    def make_task(self, task: str, texts: Iterable[Any], options: Any) -> Task[Result]:
        """Return the task of a name; refuse another name."""
        if task not in TASKS:
            raise InputError(f"task {task!r} is not one of {', '.join(TASKS)}")
        make: Callable[..., Task[Result]] = getattr(self, task)
        return make(texts, options)

    def features(self, texts: Iterable[str], options: FeatureOptions) -> Task[Features]:
        reading = self.read_options(options, FeatureOptions, "windows")
        layers = options.get("layers", "last")
        roles = self.find_layer_roles(layers)
        special_tokens = self.defaults.make_special_tokens()
        before = [self.tokenizer.spell(token) for token in special_tokens.prefix]
        behind = [self.tokenizer.spell(token) for token in special_tokens.suffix]

        def finish(request: TextRequest, outputs: Outputs) -> Features:
            states = [combine_layers(arrays, layers) for arrays in outputs]
            encoding = request.encoding
            pieces = request.fitted.pieces
            places = place_tokens(pieces, len(encoding))
            kept = [t for t, (piece, _) in enumerate(places) if piece >= 0]
            end = (len(pieces) - 1, len(pieces[-1]) - 1)
            spots = [*((0, 0) for _ in before), *(places[t] for t in kept), *(end for _ in behind)]
            offsets = encoding.offsets
            return Features(
                tokens=(*before, *(self.tokenizer.spell(encoding.ids[t]) for t in kept), *behind),
                offsets=(*((0, 0) for _ in before), *(offsets[t] for t in kept), *((0, 0) for _ in behind)),
                vectors=np.stack([states[piece][position] for piece, position in spots]),
                dropped=request.fitted.dropped,
            )

        return Task(check_each(texts, check_text), tuple(roles), finish, reading)

    def find_layer_roles(self, layers: Layers) -> list[str]:
        """Return the roles of the hidden states that a choice of layers needs."""
        check_choice("layers", layers, LAYERS)
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

    def classify(self, texts: Iterable[Item], options: ClassifyOptions) -> Task[Classification]:
        reading = self.read_options(options, ClassifyOptions, "head")
        if options.get("candidate_labels") is not None and TASK_HEADS["classify"] not in self.defaults.heads:
            raise make_no_inference_error(())
        head = self.need_head("classify")
        wants_logits = options.get("logits", False)
        check_switch("logits", wants_logits)
        hypotheses = read_hypotheses(options, self.defaults.labels, self.tokenizer)
        labels = self.defaults.labels if hypotheses is None else hypotheses.labels

        def name(values: Array) -> dict[str, float]:
            return dict(zip(labels, map(float, values), strict=True))

        def finish(request: TextRequest, outputs: Outputs) -> Classification:
            logits = stack_logits(outputs)
            if hypotheses is None:
                own = logits.mean(0)
                windows = share_classes(logits, self.defaults.problem_type)
                shares = None if windows is None else windows.mean(0)
            else:
                own = hypotheses.choose_logits(logits)
                shares = hypotheses.share(logits)
            best = 0 if shares is None else int(shares.argmax())
            named = name(own if shares is None else shares)
            return Classification(
                labels[best],
                named[labels[best]],
                {} if shares is None and len(labels) == 1 else named,
                request.fitted.dropped,
                name(own) if wants_logits else {},
            )

        if self.defaults.pairs is not None:
            if hypotheses is not None:
                raise InputError(
                    "candidate_labels cannot be used with this model, whose chat template writes pairs",
                    option="candidate_labels",
                )
            pairs = check_each(texts, check_pair, "classify(query, pair=text)")
            return self.make_pair_task(pairs, (head,), finish, reading, {})
        check = check_item if hypotheses is None else check_text
        items: Iterator[Item] = check_each(texts, check, "classify(text, pair=other)")
        return Task(
            items,
            (head,),
            finish,
            reading,
            needs_tokens=False,
            prompt=self.find_prompt(None, None),
            seconds=None if hypotheses is None else hypotheses.tokens,
        )

    def rank(self, pairs: Iterable[Item], options: ScoreOptions) -> Task[Ranked]:
        reading = self.read_options(options, ScoreOptions, "head")
        head = self.need_head("rank")
        if len(self.defaults.labels) != 1:
            raise InputError(
                "rank needs a cross-encoder with a single score; this model has the labels"
                f" {self.defaults.labels}"
            )
        activation = sigmoid if self.defaults.score_activation == "sigmoid" else np.asarray

        def finish(request: TextRequest, outputs: Outputs) -> Ranked:
            score = float(activation(np.max(outputs)))
            return Ranked(request.number, str(request.item[1]), score, request.fitted.dropped)

        items = check_each(pairs, check_pair, "rank(query, [text])")
        return self.make_pair_task(items, (head,), finish, reading, options)

    def next_sentence(self, pairs: Iterable[Item], options: EncoderOptions) -> Task[NextSentence]:
        reading = self.read_options(options, EncoderOptions, "head")
        head = self.need_head("next_sentence")

        def finish(request: TextRequest, outputs: Outputs) -> NextSentence:
            share = float(np.mean([softmax(array)[0] for (array,) in outputs]))  # class 0 is "it follows"
            return NextSentence(share > 0.5, share, request.fitted.dropped)

        items = check_each(pairs, check_pair, "next_sentence(text, other)")
        return Task(items, (head,), finish, reading, needs_tokens=False)

    def fill_mask(self, texts: Iterable[str], options: FillMaskOptions) -> Task[FilledMask]:
        reading = replace(self.read_options(options, FillMaskOptions, "windows"), parse_special=True)
        if not options.get("parse_special", True):
            raise InputError("fill_mask always reads mask tokens; leave parse_special=False out")
        top_k = options.get("top_k", 5)
        head = self.need_head("fill_mask")
        if "mask" not in self.defaults.tokens:
            raise InputError("fill_mask needs a mask token, and this bundle's tokenizer has none")
        mask = self.defaults.tokens["mask"]
        check_whole("top_k", top_k, 1, self.tokenizer.vocab_size)

        def find_masks(request: TextRequest) -> list[tuple[int, int]]:
            masked = [t for t, token in enumerate(request.encoding.ids) if token == mask]
            if not masked:
                spelled = self.tokenizer.spell(mask)
                raise InputError(f"the text {request.item[0]!r:.60} has no {spelled} to fill; put one in")
            places = place_tokens(request.fitted.pieces, len(request.encoding))
            return [places[t] for t in masked if places[t][0] >= 0]

        def find_rows(request: TextRequest) -> list[list[int]]:
            masked = find_masks(request)
            return [[at for p, at in masked if p == piece] for piece in range(len(request.fitted.pieces))]

        def finish(request: TextRequest, outputs: Outputs) -> FilledMask:
            taken = [iter(array) for (array,) in outputs]
            masks = tuple(self.find_words(next(taken[piece]), top_k) for piece, _ in find_masks(request))
            return FilledMask(masks, request.fitted.dropped)

        return Task(check_each(texts, check_text), (head,), finish, reading, find_rows)

    def find_words(self, logits: Array, top_k: int) -> tuple[Fill, ...]:
        """Return the likeliest words of one row of logits (V,)."""
        shares = softmax(logits)
        best = np.argsort(-shares[: self.tokenizer.vocab_size], kind="stable")[:top_k]
        return tuple(Fill(self.tokenizer.spell(int(t)), int(t), float(shares[t])) for t in best)

    def tag(self, texts: Iterable[str], options: EncoderOptions) -> Task[Tags]:
        reading = self.read_options(options, EncoderOptions, "windows")
        head = self.need_head("tag")
        labels = self.defaults.labels

        def finish(request: TextRequest, outputs: Outputs) -> Tags:
            encoding = request.encoding
            shares = np.full((len(encoding), len(labels)), np.nan, np.float32)
            for t, (piece, position) in enumerate(place_tokens(request.fitted.pieces, len(shares))):
                if piece >= 0:
                    shares[t] = softmax(outputs[piece][0][position])
            text = request.item[0]
            offsets = encoding.offsets
            words: Sequence[int | None] = encoding.words
            if not self.tokenizer.splits_words:
                words = number_words(text, encoding.ids, offsets, self.tokenizer.unknown)
            entities = find_entities(text, shares, offsets, words, labels)
            return Tags(entities, request.fitted.dropped)

        return Task(check_each(texts, check_text), (head,), finish, reading)

    def answer(self, pairs: Iterable[Item], options: AnswerOptions) -> Task[Answers]:
        reading = self.read_options(options, AnswerOptions, "windows")
        n_best = options.get("n_best", 1)
        max_answer_tokens = options.get("max_answer_tokens", 30)
        head = self.need_head("answer")
        check_whole("n_best", n_best, 1)
        check_whole("max_answer_tokens", max_answer_tokens, 1)

        def finish(request: TextRequest, outputs: Outputs) -> Answers:
            return find_answers(
                str(request.item[1]),
                request.encoding.offsets,
                request.fitted.pieces,
                outputs,
                n_best=n_best,
                max_tokens=max_answer_tokens,
                dropped=request.fitted.dropped,
            )

        items = check_each(pairs, check_pair, "answer(question, context)")
        return Task(items, (f"{head}.start", f"{head}.end"), finish, reading)

    def check_task(self, task: str) -> None:
        """Refuse a task that the model cannot do."""
        if task in TASK_HEADS:
            self.need_head(task)
        for part in EMBEDDING_TASKS if task == "embed_hybrid" else (task,):
            if part in ("embed_sparse", "embed_multi"):
                self.need_output(part)

    def need_head(self, task: str) -> str:
        """Return the head that a task needs; refuse a graph without it."""
        head = TASK_HEADS[task]
        if head not in self.defaults.heads:
            known = ", ".join(self.defaults.heads) or "none: it embeds texts (embed, features)"
            raise InputError(f"{task} needs the head {head}; this bundle's heads are {known}")
        return head
