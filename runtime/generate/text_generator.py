"""Text in, text out: tokenize, prefill, decode token by token, and stop for a stated reason."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

from ..backends.backend import Backend, GraphRunner, LoadRequest
from ..bundle.bundle import Bundle
from ..bundle.defaults import GenerationDefaults
from ..decoding.chunk import TextStream
from ..decoding.decoder import Decoder
from ..errors import ClosedError
from ..memory_budget import MemoryBudget
from ..model import Model
from ..opening import choose_artifacts, choose_length, list_tokenizer_files, open_programs, weigh
from ..option_checks import check_batch_size
from ..options import BatchGenerationOptions, GenerationOptions
from ..progress import Progress
from ..scheduling.options import ScheduleOptions
from ..text.chat import Chat, Message
from ..text.tokenizer import Tokenizer
from .beams import resolve_search
from .generation import Generation
from .grammar import Grammars
from .loop import GenerationLoop
from .pending import PendingGeneration
from .prompt_groups import PromptGroups
from .request import (
    GenerationRequest,
    describe_request,
    find_adapter,
    read_checkpoint_options,
    resolve_request,
)
from .row_reader import Prompt, RowReader, check_several, count_vocabulary
from .score import Score, score_tokens
from .submissions import Submissions

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

log = logging.getLogger("planforge")


class TextGenerator(Model):
    """A language model of a bundle, ready to generate. Make one with `TextGenerator.load`.

    A prompt is a text, or a sequence of token ids, which are taken as they are: none is put before them.

    Safe to use from several threads: their steps take turns. Close it, or use it as a context manager.
    """

    task = "text-generation"

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
        self._checkpoint = read_checkpoint_options(defaults)
        self._told = False  # of the checkpoint's options
        vocabulary = count_vocabulary(decoder.artifact, tokenizer)
        self._rows = RowReader(
            tokenizer, defaults, max_length, vocabulary, chat, Grammars(tokenizer, defaults.eos, vocabulary)
        )
        self._loop = GenerationLoop(decoder, tokenizer, max_length)
        self._submissions = Submissions(decoder, self._rows)
        decoder.budget.make_room_by(self.forget_prompt)

    @classmethod
    def _open(cls, bundle: Bundle, engine: Backend, request: LoadRequest) -> Self:
        manifest = bundle.manifest
        assert manifest.generation is not None  # the manifest of what is no encoder has it
        (artifact,) = choose_artifacts(engine, bundle, request, "decoder")
        max_length = choose_length(bundle, request.max_length, artifact)
        weight_bytes = weigh(engine, bundle, (artifact,))
        with open_programs(engine, bundle, artifact) as programs:
            tokenizer = Tokenizer.from_file(bundle.path(list_tokenizer_files(manifest, 1)[0]))
            chat = Chat.of(bundle)
        budget = MemoryBudget(request.memory_limit, weight_bytes)
        decoder = Decoder(programs[0], artifact, budget, manifest.config)
        return cls(decoder, tokenizer, manifest.generation, max_length=max_length, chat=chat)

    @property
    def _runner(self) -> GraphRunner:
        return self.decoder

    @property
    def input_tokenizer(self) -> Tokenizer:
        """The tokenizer that reads texts."""
        return self.tokenizer

    def warm_up(self) -> None:
        """Compute one token; see `Model.warm_up`."""
        self.submit([0], max_new_tokens=1, ignore_eos=True).result()

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters beside the model, of which a call may choose one."""
        return self.defaults.adapters

    @property
    def has_chat(self) -> bool:
        """Whether the bundle has a chat template, which `chat` needs."""
        return self._rows.chat is not None

    @property
    def has_tools(self) -> bool:
        """Whether the bundle's chat template words tools."""
        return self._rows.chat is not None and self._rows.chat.supports_tools

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
        with Progress(request.progress, "prompts") as report:
            rows, is_one = self._rows.read_all(prompt, request)
            answers = self._group_prompts(request).answer(rows, report)
        return answers[0] if is_one else answers

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
        check_several(prompts)
        progress = Progress(request.progress, "prompts")
        return self._group_prompts(request).iterate(prompts, self._rows, progress)

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
        row = self._rows.read(prompt, request)
        return TextStream(lambda cancelled: self._loop.make_chunks(row, request, cancelled))

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
        return self._loop.answer([self._rows.read_chat(messages, request)], request)[0]

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[GenerationOptions]) -> TextStream:
        """Answer a conversation as `chat` does, a chunk at each step as `stream` does."""
        request = self._resolve({"generation": "checkpoint", **options}, streams=True)
        row = self._rows.read_chat(messages, request)
        return TextStream(lambda cancelled: self._loop.make_chunks(row, request, cancelled))

    def submit(
        self,
        prompt: Prompt,
        *,
        client: str = "",
        timeout: float | None = None,
        number: int = 0,
        **options: Unpack[GenerationOptions],
    ) -> PendingGeneration:
        """Let the engine continue a prompt beside those of other callers, and return at once.

        Requests that run share each step (continuous batching): they join and leave between two. What earlier
        ones computed of a prompt that begins alike is not computed again. Answers are those of `generate`.
        The engine runs in a thread of its own; see `schedule` for how many requests share it.

        Args:
            prompt: one prompt.
            client: whose request it is: where requests wait, clients take turns.
            timeout: seconds after which the request fails with a DeadlineError.
            number: of several answers to one prompt; each number has draws of its own, as the prompts of a
                list have in `generate`.
            **options: see `GenerationOptions`; without beams, speculative, reuse_prompt and on_token.

        Raises:
            InputError: as `generate`.
            QueueFullError: too many requests wait.
        """
        request = self._resolve(options)
        return self._submissions.submit(lambda rows: [rows.read(prompt, request, number)], client, timeout)[0]

    def submit_chat(
        self,
        messages: Sequence[Message],
        *,
        client: str = "",
        timeout: float | None = None,
        number: int = 0,
        **options: Unpack[GenerationOptions],
    ) -> PendingGeneration:
        """Let the engine answer a conversation, as `chat` does, beside other requests, as `submit` does."""
        request = self._resolve({"generation": "checkpoint", **options}, streams=True)
        return self._submissions.submit(
            lambda rows: [rows.read_chat(messages, request, number)], client, timeout
        )[0]

    def submit_answers(
        self,
        prompt: Prompt | Sequence[Message],
        count: int,
        *,
        client: str = "",
        timeout: float | None = None,
        chat: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> list[PendingGeneration]:
        """Submit a prompt, or with chat=True a conversation, for several answers; it is read once.

        They are those of `submit` and `submit_chat` with the numbers from 0. If one is refused, all are.
        """
        if chat:
            options = {"generation": "checkpoint", **options}
        request = self._resolve(options, streams=chat)
        numbers = range(count)
        return self._submissions.submit(
            lambda rows: rows.read_answers(prompt, request, numbers, chat=chat), client, timeout
        )

    def has_compiled(self, **options: Unpack[GenerationOptions]) -> bool:
        """Return whether `submit` has no grammar to compile for these options, which may take a second.

        Raises:
            InputError: as `generate`, but for what is wrong with the grammar.
        """
        structure = self._rows.find_structure(resolve_request(options, self._checkpoint))
        return structure is None or self._rows.grammars.has(structure)

    def schedule(self, **options: Unpack[ScheduleOptions]) -> None:
        """Say how submitted requests share the engine, before the first; see `ScheduleOptions`."""
        self._submissions.configure(options)

    def count_requests(self) -> tuple[int, int]:
        """Return how many submitted requests wait, and how many are being answered."""
        return self._submissions.count()

    def count_places(self) -> int:
        """Return how many requests a client may submit at once, where no others run or wait."""
        return self._submissions.count_places()

    def score(self, text: Prompt, *, parse_special: bool = False, adapter: str | None = None) -> Score:
        """Return the log-probability of each of the text's tokens after the first, given those before it.

        Of a model whose prompts begin with a special token, that one is the first.

        Args:
            text: a text, or token ids, which are taken as they are.
            parse_special: read special tokens such as <|endoftext|> in the text as such.
            adapter: the name of one that stays beside the model.

        Raises:
            InputError: fewer than two tokens.
            ContextLengthError: more tokens than the context.
        """
        tokens = self._rows.encode_prompt(text, parse_special, may_be_empty=True)
        slot = find_adapter(adapter, self.defaults.adapters)
        return score_tokens(self.decoder, tokens, self.max_length, slot)

    def encode_prompt(self, prompt: Prompt, *, parse_special: bool = False) -> list[int]:
        """Return the tokens that the model reads of a prompt, those that begin every prompt included.

        Raises:
            InputError: the prompt is empty, or has ids that the vocabulary does not have.
            ContextLengthError: it leaves no room in the context.
        """
        return self._rows.encode_prompt(prompt, parse_special)

    def count_tokens(self, text: str | Sequence[Message], *, parse_special: bool = False) -> int:
        """Return how many tokens the model reads of a prompt, or of a conversation as `chat` words it.

        Those that begin every prompt are counted: it is `usage.prompt_tokens` of an answer to all of it.

        Raises:
            InputError: messages that cannot be used, or the bundle has no chat template.
        """
        if isinstance(text, str):
            return len(self._rows.encode_prompt(text, parse_special, may_be_empty=True))
        return len(self._rows.encode_chat(text, parse_special))

    def forget_prompt(self) -> None:
        """Free what was kept of earlier prompts: by reuse_prompt=True, and of submitted requests."""
        self._loop.reuse.drop()
        self._submissions.free_memory()

    def _close(self) -> None:
        self._submissions.stop()
        self.decoder.close()  # before the scheduler's end is waited for: it may wait for memory itself
        self._submissions.close()
        self._loop.reuse.drop()

    def _resolve(
        self, options: GenerationOptions, *, streams: bool = False, several: bool = False
    ) -> GenerationRequest:
        """Check a call's options before anything else."""
        if self.decoder.closed:
            raise ClosedError
        request = resolve_request(options, self._checkpoint, streams=streams, several=several)
        request = request.bind(self.defaults.eos, self.defaults.adapters)
        request = replace(request, search=resolve_search(request, self.defaults.eos, streams=streams))
        request.sampling.check_vocabulary(self._rows.vocabulary)
        if request.structure is not None:
            self._rows.grammars.start(request.structure)  # one that cannot be used is refused before all else
        check_batch_size(request.batch_size, self.max_batch)
        self.decoder.check_beams(request.num_beams)
        if options.get("generation") == "checkpoint" and not self._told:
            self._told = True
            log.info(
                "options not given are taken from the checkpoint's generation_config.json; in use: %s",
                describe_request(request),
            )
        return request

    def _group_prompts(self, request: GenerationRequest) -> PromptGroups:
        return PromptGroups(request, self.decoder, self._loop, self.max_batch)
