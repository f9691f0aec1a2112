"""Text in, text out, by an encoder-decoder: tokenize, encode and search; and its cross-attention.

B sources of a batch, L layers, H heads, S source tokens, T target tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

from ..backends.backend import Backend, GraphRunner, LoadRequest
from ..bundle.bundle import Bundle
from ..bundle.defaults import GenerationDefaults
from ..decoding.beam import Search, make_search
from ..decoding.chunk import TextStream
from ..decoding.decoder import Decoder
from ..errors import ClosedError, InputError, ManifestError
from ..memory_budget import MemoryBudget
from ..opening import choose_artifacts, choose_length, open_programs, weigh
from ..option_checks import check_batch_size, check_options, check_switch
from ..options import BatchTranslationOptions, TranslationOptions
from ..progress import Progress
from ..scheduling.batched_model import QUEUE_SIZE, BatchedModel, refuse_options
from ..scheduling.batcher import Batcher, BatchSettings, IsWanted, PendingResults
from ..scheduling.steps import Steps, run_all
from ..scheduling.worker import find_deadline
from ..text.reading import (
    READ_AHEAD,
    STEP_CHARACTERS,
    check_each,
    check_text,
    count_read_ahead,
    run_in_chunks,
    run_one_or_all,
    split_into_chunks,
)
from ..text.tokenizer import Tokenizer
from .loop import BatchKind, TranslationLoop
from .results import Alignment, Translation
from .source_encoder import SourceEncoder, check_same_export
from .sources import Source, SourceReader, open_tokenizers

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

NOT_OF_THE_SEARCH = ("truncation", "parse_special", "on_token", "alignment", "batch_size", "progress")
TURN_TOKENS = 512  # of sources that are translated to their ends before others have their turn
HINTS = {  # of options that do not go with requests that share an engine
    "on_token": "use translate or stream",
    "progress": "add a callback to the future that it returns",
}


class Translator(BatchedModel):
    """An encoder-decoder of a bundle, ready to translate. Make one with `Translator.load`.

    Safe to use from several threads: their steps take turns. Close it, or use it as a context manager.
    """

    task = "translation"
    _TURN_TOKENS = TURN_TOKENS

    def __init__(
        self,
        encoder: SourceEncoder,
        decoder: Decoder,
        tokenizers: tuple[Tokenizer, Tokenizer],
        defaults: GenerationDefaults,
        *,
        max_length: int,
    ) -> None:
        assert defaults.decoder_start is not None and defaults.source_eos is not None  # load() sees to it
        self.encoder = encoder
        self.decoder = decoder
        self.source_tokenizer, self.target_tokenizer = tokenizers
        self.defaults = defaults
        self.start = defaults.decoder_start
        self.source_eos = defaults.source_eos
        self.max_length = max_length
        self._loop = TranslationLoop(encoder, decoder, tokenizers, self.start)
        settings = BatchSettings(queue_size=QUEUE_SIZE, turn=TURN_TOKENS)
        self._batcher: Batcher[Source, Translation, Translation] = Batcher(self._run_turn, len, settings)

    @classmethod
    def _open(cls, bundle: Bundle, engine: Backend, request: LoadRequest) -> Self:
        manifest = bundle.manifest
        defaults = manifest.generation
        if defaults is None or None in (defaults.decoder_start, defaults.source_eos):
            raise ManifestError(
                f"{bundle.folder}: a translation's generation needs decoder_start and source_eos"
            )
        decoder, encoder = choose_artifacts(engine, bundle, request, "decoder", "encoder")
        max_length = choose_length(bundle, request.max_length, decoder, encoder)
        check_same_export(bundle, encoder, decoder)
        weight_bytes = weigh(engine, bundle, (encoder, decoder))
        with open_programs(engine, bundle, encoder, decoder) as programs:
            tokenizers = open_tokenizers(bundle)
        budget = MemoryBudget(request.memory_limit, weight_bytes)
        return cls(
            SourceEncoder(programs[0], encoder, decoder, budget, manifest.config),
            Decoder(programs[1], decoder, budget, manifest.config),
            tokenizers,
            defaults,
            max_length=max_length,
        )

    @property
    def _runner(self) -> GraphRunner:
        return self.decoder

    @property
    def input_tokenizer(self) -> Tokenizer:
        """The tokenizer that reads texts."""
        return self.source_tokenizer

    def warm_up(self) -> None:
        """Translate one text by one token; see `Model.warm_up`."""
        self.submit(["a"], max_new_tokens=1).result()

    @property
    def languages(self) -> tuple[str, ...]:
        """The target languages of a model that has several, such as ">>fra<<": a text begins with one."""
        return self.source_tokenizer.language_codes

    @overload
    def translate(  # type: ignore[overload-overlap]  # a str is no iterable of texts here
        self, texts: str, **options: Unpack[BatchTranslationOptions]
    ) -> Translation: ...
    @overload
    def translate(
        self, texts: Iterable[str], **options: Unpack[BatchTranslationOptions]
    ) -> list[Translation]: ...
    def translate(
        self, texts: str | Iterable[str], **options: Unpack[BatchTranslationOptions]
    ) -> Translation | list[Translation]:
        """Translate one text, or each of several.

        Args:
            texts: one text, or several; those of similar length run together.
            **options: see `BatchTranslationOptions`: what they mean in transformers, and as the checkpoint
                says unless given.

        Raises:
            InputError: an option or a text that cannot be used; nothing has run yet of its thousand texts.
            ContextLengthError: a text is longer than the model's source, and truncation=None.
            MemoryLimitError: the cache does not fit `memory_limit`.

        Example:
            >>> model.translate("the 3rd of May, 1998").text
            '1998-05-03'
        """
        return run_one_or_all(texts, lambda many: self.iterate(many, **options))

    def iterate(
        self, texts: Iterable[str], **options: Unpack[BatchTranslationOptions]
    ) -> Iterator[Translation]:
        """Translate any number of texts: results come in order, and never all of them are held.

        Each result is there as soon as its batch, and those of the texts before it, are computed. At most
        1,024 texts are read ahead, or 8 batches of a `batch_size`, and none with batch_size=1. The arguments
        are `translate`'s.
        """
        search = self._make_search(options)
        on_token = options.get("on_token")
        reader = self._make_reader(options)
        batch_size = options.get("batch_size")
        kind = self._make_kind(search, options)
        checked = check_each(texts, check_text)
        report = Progress(options.get("progress", False))

        def run_chunk(done: int, chunk: Sequence[str]) -> Iterator[dict[int, Translation]]:
            yield from self._loop.translate_all(reader.read_all(chunk, done), kind, done, on_token)

        def run() -> Iterator[Translation]:
            yield from run_in_chunks(checked, count_read_ahead(batch_size), report, run_chunk)
            reader.report()

        return run()

    def submit(
        self,
        texts: Iterable[str],
        *,
        client: str = "",
        timeout: float | None = None,
        **options: Unpack[BatchTranslationOptions],
    ) -> PendingResults[Translation]:
        """Let the engine translate texts beside those of other callers, and return at once.

        Texts are read and tokenized in the caller's thread; the engine runs in one of its own. Texts with the
        same options and of similar length are translated together, and to their ends before others have
        their turn. Results are those of `translate`. `Future.cancel` ends a request within a step.

        Args:
            texts: several texts.
            client: whose request it is: where requests wait, clients take turns.
            timeout: seconds after which the request fails with a DeadlineError.
            **options: see `BatchTranslationOptions`; without on_token and progress.

        Raises:
            InputError: as `translate`.
            QueueFullError: too many requests wait.
        """
        return run_all(self.submit_in_steps(texts, client=client, deadline=find_deadline(timeout), **options))

    def submit_in_steps(
        self,
        texts: Iterable[str],
        *,
        client: str = "",
        deadline: float | None = None,
        **options: Unpack[BatchTranslationOptions],
    ) -> Steps[PendingResults[Translation]]:
        """Do what `submit` does, by a deadline of time.monotonic(), in steps that each read some texts."""
        refuse_options(options, HINTS)
        search = self._make_search(options)
        kind = self._make_kind(search, options)
        reader = self._make_reader(options)
        sources: list[Source] = []
        for chunk in split_into_chunks(check_each(texts, check_text), READ_AHEAD, STEP_CHARACTERS):
            if sources:
                yield
            sources += reader.read_all(chunk, len(sources))
        reader.report()
        self._loop.limit_batch(search, max(map(len, sources), default=1), 1)
        return self._batcher.submit(kind, sources, client=client, deadline=deadline)

    def stream(self, text: str, **options: Unpack[TranslationOptions]) -> TextStream:
        """Translate one text greedily, a chunk as soon as it is there; `translate`'s options, but for beams.

        A chunk's text never ends inside a character; all of them joined are the text of
        `translate(num_beams=1)`. Chunks have no log-probabilities. May be abandoned at any point.

        Example:
            >>> for chunk in model.stream("the 3rd of May, 1998"):
            ...     print(chunk, end="", flush=True)
        """
        search = self._make_search(options, greedy=True)
        if search.num_beams != 1:
            raise InputError(
                f"stream needs num_beams=1, not {search.num_beams}; use translate for beam search"
            )
        on_token = options.get("on_token")
        reader = self._make_reader(options)
        source = reader.read(check_text(text))
        reader.report()
        self._loop.limit_batch(search, len(source.tokens), 1)
        return TextStream(lambda cancelled: self._loop.make_chunks(source, search, on_token, cancelled))

    def align(self, text: str, **options: Unpack[TranslationOptions]) -> Alignment:
        """Return what each token of a text's translation looked at.

        Args:
            text: one text.
            **options: see `TranslationOptions`.

        Raises:
            InputError: the bundle's graph does not give its attention, which needs an export with
                `--outputs cross_attentions`.
        """
        check_options(options, TranslationOptions)
        alignment = self.translate(text, alignment=True, **options).alignment
        assert alignment is not None
        return alignment

    def encode_source(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the tokens that the encoder reads of a text, those that begin and end it included.

        Raises:
            ContextLengthError: there are more than the encoder takes.
        """
        return list(self._make_reader({"parse_special": parse_special}).read(check_text(text)).tokens)

    def count_tokens(self, text: str, *, parse_special: bool = False) -> int:
        """Return how many tokens the model reads of a text, those that begin and end it included."""
        tokens = self.source_tokenizer.encode(text, parse_special=parse_special)
        return len(self.defaults.prefix) + len(tokens) + 1

    def _close(self) -> None:
        self.encoder.close()
        self.decoder.close()  # what runs ends with the step that it is at
        self._batcher.close()

    def _make_reader(self, options: TranslationOptions) -> SourceReader:
        return SourceReader(
            self.source_tokenizer,
            self.defaults,
            limit=min(self.max_length, self.encoder.artifact.axis("tokens").max),
            truncation=options.get("truncation"),
            parse_special=options.get("parse_special", False),
        )

    def _make_search(self, options: TranslationOptions, *, greedy: bool = False) -> Search:
        """Check the options; `greedy` is of one text, without beams unless the caller asks for them."""
        if self.decoder.closed:
            raise ClosedError
        check_options(options, TranslationOptions if greedy else BatchTranslationOptions)
        room = self.max_length  # which no graph takes fewer tokens than
        usual = self.defaults.max_new_tokens or room
        given = {name: value for name, value in options.items() if name not in NOT_OF_THE_SEARCH}
        if greedy and given.get("num_beams") is None:
            given["num_beams"] = 1
        search = make_search(replace(self.defaults, max_new_tokens=min(usual, room)), **given)
        self.decoder.check_beams(search.num_beams)
        if search.max_new_tokens > room:
            raise InputError(
                f"max_new_tokens={search.max_new_tokens} must be at most {room}, what the model can generate",
                option="max_new_tokens",
            )
        on_token = options.get("on_token")
        if on_token is not None and not callable(on_token):
            raise InputError(f"on_token={on_token!r:.80} must be a function that takes a chunk, or None")
        if on_token is not None and search.num_beams > 1:
            raise InputError(
                f"on_token cannot be used with num_beams={search.num_beams}: the best beam is only known at"
                " the end; give num_beams=1, or leave on_token out"
            )
        return search

    def _make_kind(self, search: Search, options: BatchTranslationOptions) -> BatchKind:
        """Check how many texts may run together: each takes num_beams rows of the decoder."""
        rows = check_batch_size(options.get("batch_size"), self.encoder.max_batch)
        most = min(rows, self.decoder.artifact.axis("batch").max // search.num_beams)
        alignment = options.get("alignment", False)
        check_switch("alignment", alignment)
        if alignment and not self._loop.attentions:
            raise InputError(
                "this bundle has no attention output; export it again with --outputs cross_attentions",
                option="alignment",
            )
        return BatchKind(search, most, alignment)

    def _run_turn(
        self, kind: BatchKind, sources: Sequence[Source], is_wanted: IsWanted
    ) -> Iterator[Mapping[int, Translation]]:
        return self._loop.translate_all(sources, kind, is_wanted=is_wanted)
