"""Text in, text out: tokenize, prefill, decode token by token, and stop for a stated reason."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, overload

import numpy as np

from ..backends.backend import Backend
from ..backends.load_request import LoadRequest
from ..bundle.bundle import Bundle
from ..bundle.defaults import GenerationDefaults
from ..bundle.manifest import Artifact
from ..decoding.cache import capacity_for
from ..decoding.candidates import choose_tokens, results_for
from ..decoding.chunk import Cancellation, Chunk, TextStream, report_chunk
from ..decoding.decoder import Decoder, DecoderRun
from ..decoding.reuse import PromptReuse
from ..decoding.sampling import row_generators
from ..decoding.speculative import PromptLookup
from ..errors import ClosedError, InputError
from ..memory_budget import MemoryBudget
from ..model import Model
from ..opening import bytes_of, check_weights, length_of, open_programs, tokenizer_files
from ..options import BatchGenerationOptions, GenerationOptions, check_batch_size, check_not_pair
from ..progress import Progress
from ..text.chat import Chat, Message
from ..text.tokenizer import Tokenizer
from .beams import BeamGenerator, resolve_search
from .chat_prompt import ChatReader
from .checkpoint_options import CheckpointOptions
from .generation import Generation, make_generation
from .prompts import Prompt, PromptReader, is_one_prompt, vocabulary_of
from .request import GenerationRequest, resolve_request
from .row import Row
from .row_reader import RowReader
from .score import Score, check_scorable, score_tokens

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class TextGenerator(Model):
    """A language model of a bundle, ready to generate. Make one with `TextGenerator.load`.

    A prompt is a text, or a sequence of token ids, which are taken as they are: none is put before them.

    Safe to use from several threads: their steps take turns. Close it, or use it as a context manager.
    """

    _TASK = "text-generation"

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        *,
        max_length: int,
        chat: Chat | None = None,
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.max_length = max_length
        self.max_batch = decoder.artifact.axis("batch").max
        self._chats = ChatReader(chat=chat, tokenizer=tokenizer, max_length=max_length)
        self._checkpoint = CheckpointOptions(defaults)
        self._beams = BeamGenerator(decoder=decoder, tokenizer=tokenizer)
        self._vocabulary = vocabulary_of(decoder.artifact, tokenizer)
        self._prompts = PromptReader(
            tokenizer=tokenizer, defaults=defaults, max_length=max_length, vocabulary=self._vocabulary
        )
        self._rows = RowReader(prompts=self._prompts, chats=self._chats, defaults=defaults)
        self._reuse = PromptReuse()
        decoder.budget.before_waiting(self.forget_prompt)

    @classmethod
    def _open(cls, bundle: Bundle, engine: Backend, request: LoadRequest) -> Self:
        manifest = bundle.manifest
        assert manifest.generation is not None  # the manifest of what is no encoder has it
        artifact = engine.artifact(bundle, "decoder", request.precision)
        max_length = length_of(bundle, request.max_length, artifact)
        weight_bytes = bytes_of(manifest, artifact)
        check_weights(weight_bytes, request.memory_limit)
        with open_programs(engine, bundle, artifact) as programs:
            tokenizer = Tokenizer.from_file(bundle.path(tokenizer_files(manifest, 1)[0]))
            chat = Chat.of(bundle)
        decoder = Decoder(programs[0], artifact, MemoryBudget(request.memory_limit, weight_bytes))
        return cls(decoder, tokenizer, manifest.generation, max_length=max_length, chat=chat)

    @property
    def artifact(self) -> Artifact:
        """The graph that runs."""
        return self.decoder.artifact

    @overload  # a str is a sequence of str too; it counts as one prompt
    def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompt, **options: Unpack[BatchGenerationOptions]
    ) -> Generation: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], **options: Unpack[BatchGenerationOptions]
    ) -> list[Generation]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], **options: Unpack[BatchGenerationOptions]
    ) -> Generation | list[Generation]:
        """Continue one prompt, or each of several.

        Args:
            prompt: a prompt, or a sequence of prompts; a flat sequence of token ids is one. Several run
                `batch_size` at a time. Each one's answer is the one it has alone.
            **options: see `BatchGenerationOptions`.

        Returns:
            A `Generation`, or a list of them in the order of the prompts (none for none).

        Raises:
            InputError: an option or prompt that cannot be used; nothing has run.
            ContextLengthError: the prompt leaves no room in the context.
            MemoryLimitError: the cache does not fit `memory_limit`.
        """
        request = self._resolve(options, several=True)
        check_not_pair(prompt)
        answers: list[Generation] = []
        with Progress(request.progress, "prompts") as report:
            if is_one_prompt(prompt):
                rows = [self._rows.read(prompt, request)]
            else:
                rows = [self._rows.read_numbered(number, one, request) for number, one in enumerate(prompt)]
            for group in list(self._groups(rows, request)):
                answers += self._answer(group, request)
                report(len(answers))
        return answers[0] if is_one_prompt(prompt) else answers

    def iterate(
        self, prompts: Iterable[Prompt], **options: Unpack[BatchGenerationOptions]
    ) -> Iterator[Generation]:
        """Continue any number of prompts: answers come in order, and never all of them are held.

        Prompts are read `batch_size` at a time, when their answers are asked for. One that cannot be used
        raises after the answers of those before it.

        Args:
            prompts: anything that yields prompts.
            **options: see `BatchGenerationOptions`.

        Raises:
            InputError: as `generate`; that of a prompt names its number, and comes when it is read.
        """
        request = self._resolve(options, several=True)
        if isinstance(prompts, str | bytes) or not hasattr(prompts, "__iter__"):
            raise InputError(f"iterate takes several prompts, such as a list, not {type(prompts).__name__}")
        check_not_pair(prompts)
        return self._iterate(enumerate(prompts), request, Progress(request.progress, "prompts"))

    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> TextStream:
        """Continue one prompt, a chunk at each step.

        The chunks' texts joined are `generate`'s text. May be abandoned at any point.

        Args:
            prompt: one prompt.
            **options: see `GenerationOptions`.

        Raises:
            InputError: as `generate`, at the call, before the first chunk is asked for.
        """
        request = self._resolve(options, streams=True)
        return self._stream(self._rows.read(prompt, request), request)

    def chat(self, messages: Sequence[Message], **options: Unpack[GenerationOptions]) -> Generation:
        """Answer a conversation, worded by the checkpoint's chat template.

        Special tokens that a message spells are plain text unless parse_special=True. reuse_prompt=True
        spares a conversation that grows what was computed before. Unlike `generate`, what the checkpoint's
        generation_config says counts where an option is not given: see generation="checkpoint".

        Args:
            messages: mappings with the texts "role" ("system", "user", "assistant") and "content", which may
                be a list of parts {"type": "text", "text": ...}; the template gets what else they have.
            **options: see `GenerationOptions`. truncation="tail" drops the oldest turns of a conversation
                that is too long, a user's message with its answer, never what the system said.

        Raises:
            InputError: also where the bundle has no chat template, or it refuses the messages.
            ContextLengthError: the conversation leaves no room in the context; with truncation="tail" the
                last message, with what the system said, does not.
            BackendUnavailableError: jinja2 is missing.
            BundleError: the template is unusable.
        """
        request = self._resolve({"generation": "checkpoint", **options})
        return self._answer([self._rows.read_chat(messages, request)], request)[0]

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[GenerationOptions]) -> TextStream:
        """Answer a conversation as `chat` does, a chunk at each step as `stream` does."""
        request = self._resolve({"generation": "checkpoint", **options}, streams=True)
        return self._stream(self._rows.read_chat(messages, request), request)

    def score(self, text: Prompt, *, parse_special: bool = False) -> Score:
        """Return the log-probability of each of the text's tokens after the first, given those before it.

        Of a model whose prompts begin with a special token, that one is the first.

        Args:
            text: a text, or token ids, which are taken as they are.
            parse_special: read special tokens such as <|endoftext|> in the text as such.

        Raises:
            InputError: fewer than two tokens.
            ContextLengthError: more tokens than the context.
        """
        tokens = self._prompts.read_framed(text, parse_special)
        check_scorable(tokens, self.max_length)
        return score_tokens(self.decoder, tokens)

    def count_tokens(self, text: str | Sequence[Message], *, parse_special: bool = False) -> int:
        """Return how many tokens the model reads of a prompt, or of a conversation as `chat` words it.

        Those that begin every prompt are counted: it is `usage.prompt_tokens` of an answer to all of it.

        Raises:
            InputError: messages that cannot be used, or the bundle has no chat template.
        """
        if isinstance(text, str):
            return len(self._prompts.read_framed(text, parse_special))
        return len(self._chats.read(text, parse_special))

    def forget_prompt(self) -> None:
        """Free the cache that a call with reuse_prompt=True kept, if there is one."""
        self._reuse.drop()

    def close(self) -> None:
        """Free the engine. Later calls raise ClosedError; closing twice is fine."""
        self.decoder.close()
        self._reuse.drop()

    def _resolve(
        self, options: GenerationOptions, *, streams: bool = False, several: bool = False
    ) -> GenerationRequest:
        """Check a call's options before anything else."""
        if self.decoder.closed:
            raise ClosedError
        checkpoint = self._checkpoint.options
        request = resolve_request(options, checkpoint, streams=streams, several=several)
        request = replace(request, search=resolve_search(request, self.defaults.eos, streams=streams))
        request.sampling.check_vocabulary(self._vocabulary)
        check_batch_size(request.batch_size, self.max_batch)
        if options.get("generation") == "checkpoint":
            self._checkpoint.tell(request)
        return request

    def _batch_size(self, request: GenerationRequest) -> int:
        if request.search is not None:
            return min(self._beams.batch_size(request.search), request.batch_size or self.max_batch)
        return 1 if request.one_by_one else check_batch_size(request.batch_size, self.max_batch)

    def _groups(self, rows: Sequence[Row], request: GenerationRequest) -> Iterator[list[Row]]:
        """Yield rows that run together: in their order, as many as batch_size and memory_limit allow.

        Raises:
            MemoryLimitError: a row does not fit, even alone.
        """
        size = self._batch_size(request)
        group: list[Row] = []
        for row in rows:
            larger = [*group, row]
            if group and (len(larger) > size or not self._fit_together(larger, request)):
                yield group
                larger = [row]
            if len(larger) == 1:
                self.decoder.check_memory(request.num_beams, self._capacity(larger, request))
            group = larger
        if group:
            yield group

    def _fit_together(self, rows: Sequence[Row], request: GenerationRequest) -> bool:
        return self.decoder.fits(len(rows) * request.num_beams, self._capacity(rows, request))

    def _capacity(self, rows: Sequence[Row], request: GenerationRequest) -> int:
        """Return how many tokens each row of a cache has that these share."""
        if request.reuse_prompt:
            return self.max_length
        lengths = [len(row.prompt) for row in rows]
        return capacity_for(self.artifact, lengths, [row.most_left for row in rows])

    def _iterate(
        self, numbered: Iterator[tuple[int, Prompt]], request: GenerationRequest, progress: Progress
    ) -> Iterator[Generation]:
        size = self._batch_size(request)
        done = 0
        with progress:
            while True:
                rows, error = self._rows.read_some(islice(numbered, size), request)
                for group in self._groups(rows, request):
                    answers = self._answer(group, request)
                    done += len(answers)
                    progress(done)
                    yield from answers
                if error is not None:
                    raise error
                if len(rows) < size:
                    return

    def _answer(self, rows: list[Row], request: GenerationRequest) -> list[Generation]:
        """Answer prompts that run together."""
        if request.search is not None:
            return self._beams.answer(rows, request.search, logprobs=request.logprobs)
        generators = row_generators(request.sampling.seed, [row.number for row in rows])
        seconds = []
        for step_seconds in self._steps(rows, request, generators):
            seconds.append(step_seconds)
            if request.on_token is not None:
                for row in rows:
                    if row.has_news:
                        report_chunk(row.new_chunk, row.cancel, request.on_token)
        return [make_generation(row, seconds) for row in rows]

    def _stream(self, row: Row, request: GenerationRequest) -> TextStream:
        return TextStream(lambda cancellation: self._chunks(row, request, cancellation))

    def _chunks(
        self, row: Row, request: GenerationRequest, cancellation: Cancellation
    ) -> Generator[Chunk, None, None]:
        generators = row_generators(request.sampling.seed, [row.number])
        with closing(self._steps([row], request, generators)) as steps:
            while row.finish_reason is None:
                if cancellation.requested:
                    row.cancel()
                    yield row.new_chunk()
                    return
                next(steps)
                yield report_chunk(row.new_chunk, row.cancel, request.on_token)

    def _steps(
        self, rows: list[Row], request: GenerationRequest, generators: Sequence[np.random.Generator]
    ) -> Generator[float, None, None]:
        """Decode until every row has a finish reason; yield each step's seconds."""
        if request.one_by_one:
            return self._row_steps(rows[0], request, generators[0])
        return self._batch_steps(rows, request, generators)

    def _batch_steps(
        self, rows: list[Row], request: GenerationRequest, generators: Sequence[np.random.Generator]
    ) -> Generator[float, None, None]:
        """Add a new token to each row at each step; yield each step's seconds."""
        run = self.decoder.start(len(rows), self._capacity(rows, request))
        outputs = results_for(self.artifact, request.sampling, request.top_logprobs)
        start = time.perf_counter()
        scores = run.prefill([row.prompt for row in rows], outputs=outputs)
        active = [True] * len(rows)
        while True:
            places = [place for place, active_row in enumerate(active) if active_row]
            chosen = choose_tokens(
                scores if len(places) == len(rows) else scores[places],
                [rows[place].history for place in places],
                request.sampling,
                [generators[place] for place in places],
                logprobs=request.logprobs,
                top_logprobs=request.top_logprobs,
            )
            for number, place in enumerate(places):
                rows[place].take(chosen, number)
            yield time.perf_counter() - start
            active = [row.finish_reason is None for row in rows]
            if not any(active):
                return
            start = time.perf_counter()
            scores = run.decode([row.history[-1] for row in rows], active, outputs)

    def _row_steps(
        self, row: Row, request: GenerationRequest, generator: np.random.Generator
    ) -> Generator[float, None, None]:
        """Decode one row, which may reuse a cache and draft tokens; yield each step's seconds."""
        with self._run_of(row, request) as (run, row.reused):
            lookup = PromptLookup(row.history) if request.speculative else None
            drafts: list[int] = []
            outputs = results_for(self.artifact, request.sampling, request.top_logprobs)
            start = time.perf_counter()
            scores = run.prefill([row.prompt[row.reused :]], outputs=outputs)
            while True:
                accepted = row.accept(drafts, scores, generator)
                yield time.perf_counter() - start
                if row.finish_reason is not None:
                    return
                start = time.perf_counter()
                if lookup is not None:
                    if drafts:
                        lookup.learn(accepted)
                        run.truncate(len(row.history) - 1)
                    drafts = lookup.draft(row.most_left - 1)
                (scores,) = run.extend([row.history[-1], *drafts], 1 + len(drafts), outputs)

    def _run_of(self, row: Row, request: GenerationRequest) -> AbstractContextManager[tuple[DecoderRun, int]]:
        """Return a run of batch 1 for a row, and how many tokens of its prompt it holds."""
        if request.reuse_prompt:
            return self._reuse.run(row.history, lambda: self.decoder.start(1, self.max_length))
        return nullcontext((self.decoder.start(1, self._capacity([row], request)), 0))
