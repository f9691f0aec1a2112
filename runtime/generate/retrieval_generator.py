"""A generator that reads neighbours of its text, which an index finds."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..backends.backend import Backend, LoadRequest
from ..bundle.bundle import Bundle
from ..decoding.retrieval import NeighbourEncoder, RetrievalDecoder
from ..errors import InputError, ManifestError
from ..memory_budget import MemoryBudget
from ..opening import choose_artifacts, choose_length, list_tokenizer_files, open_programs, weigh
from ..search.neighbour_index import NeighbourIndex
from ..text.chat import Chat
from ..text.tokenizer import Tokenizer
from .request import GenerationRequest
from .row_reader import Prompt
from .score import Score
from .text_generator import TextGenerator

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..options import GenerationOptions

log = logging.getLogger("planforge")


class RetrievalGenerator(TextGenerator):
    """A language model that reads neighbours of its text; `TextGenerator.load` with an index makes one.

    At the end of each chunk of the text, prompt and answer alike, the index gives the chunks that are most
    like it, with what follows them, and the model reads them. `answer.neighbours` tells which.
    """

    task = "retrieval-generation"
    index: NeighbourIndex | None = None
    _warned = False

    @classmethod
    def _open(cls, bundle: Bundle, engine: Backend, request: LoadRequest) -> Self:
        manifest = bundle.manifest
        if manifest.generation is None or manifest.retrieval is None:
            raise ManifestError(f"{bundle.folder}: manifest.json lacks generation or retrieval")
        decoder, encoder = choose_artifacts(engine, bundle, request, "decoder", "encoder")
        max_length = choose_length(bundle, request.max_length, decoder)
        weight_bytes = weigh(engine, bundle, (decoder, encoder))
        name = list_tokenizer_files(manifest, 1)[0]
        budget = MemoryBudget(request.memory_limit, weight_bytes)
        with ExitStack() as opened:  # closes all of it where something fails
            with open_programs(engine, bundle, decoder, encoder) as programs:
                tokenizer = Tokenizer.from_file(bundle.path(name))
                index = open_index(bundle, tokenizer, manifest.files[name].sha256, request)
                if index is not None:
                    opened.enter_context(index)
            for program in programs:
                opened.callback(program.close)
            reading = NeighbourEncoder(
                programs[1], encoder, decoder, manifest.retrieval, budget, manifest.config
            )
            running = RetrievalDecoder(programs[0], decoder, reading)
            model = cls(running, tokenizer, manifest.generation, max_length=max_length, chat=Chat.of(bundle))
            opened.pop_all()
        if index is not None:
            model.index = index
            count = manifest.retrieval.neighbours
            running.find = lambda chunks: index.find(chunks, count)
        return model

    def score(self, text: Prompt, *, parse_special: bool = False, adapter: str | None = None) -> Score:
        """Return the log-probability of each token, as `TextGenerator.score` does.

        A warning says how much of the text the index has almost word by word: the model may have copied it.
        """
        self._warn_without_index()
        found = super().score(text, parse_special=parse_special, adapter=adapter)
        share = 0.0 if self.index is None else self.index.measure_overlap(found.token_ids)
        if share:
            log.warning(
                "the index has %.*f %% of the text's chunks almost word by word: the model may have copied"
                " them",
                0 if share >= 0.01 else 1,
                100 * share,
            )
        return found

    def _resolve(
        self, options: GenerationOptions, *, streams: bool = False, several: bool = False
    ) -> GenerationRequest:
        request = super()._resolve(options, streams=streams, several=several)
        self._warn_without_index()
        if request.speculative:
            raise InputError(
                f"speculative={request.speculative!r} is not for models that read neighbours: a guess that"
                " is wrong would have been read beside them; leave it out"
            )
        return request

    def _warn_without_index(self) -> None:
        """Say once that no neighbours are read."""
        if self.index is None and not self._warned:
            self._warned = True
            log.warning(
                "without an index the model reads no neighbours: give index=INDEX (--index), which `planforge"
                " index` makes of texts"
            )

    def _close(self) -> None:
        super()._close()
        if self.index is not None:
            self.index.close()


def open_index(
    bundle: Bundle, tokenizer: Tokenizer, tokenizer_hash: str, request: LoadRequest
) -> NeighbourIndex | None:
    """Open the index that was asked for; refuse one that is not for this bundle."""
    if request.index is None:
        return None
    retrieval = bundle.manifest.retrieval
    assert retrieval is not None
    return NeighbourIndex.open(
        request.index,
        tokenizer,
        tokenizer_hash,
        retrieval.chunk_length,
        retrieval.neighbour_length,
        keys=request.index_keys,
        backend=request.backend,
        device=request.device,
        threads=request.threads,
    )
