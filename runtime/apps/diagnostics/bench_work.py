"""The process that `bench` times: one bundle in one precision.

The first line that it reads is a `Work` in JSON, answered with facts of what was loaded; every further line
is answered with one more round, an error as {"error": "...", "wrong_input": can the caller correct it}.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...bundle.bundle import Bundle
from ...bundle.manifest import Artifact, Manifest
from ...decoding.cache_shapes import count_cache_bytes
from ...errors import InputError
from ...images.options import MAX_PICTURES
from ...load import load
from .child import answer, serve_parent

if TYPE_CHECKING:
    from ...decoding.chunk import Chunk
    from ...encode.text_encoder import TextEncoder
    from ...generate.text_generator import TextGenerator
    from ...images.image_generator import ImageGenerator
    from ...images.options import ImageOptions
    from ...options import LoadOptions
    from ...translate.translator import Translator

DECODER_PROMPT = 32
ENCODER_PROMPT = 128
NEW_TOKENS = 64
STEPS = 4  # of a picture
# Jane Austen, Pride and Prejudice.
TEXT = """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be
in want of a wife. However little known the feelings or views of such a man may be on his first entering a
neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is considered as
the rightful property of some one or other of their daughters. "My dear Mr. Bennet," said his lady to him one
day, "have you heard that Netherfield Park is let at last?" Mr. Bennet replied that he had not. "But it is,"
returned she; "for Mrs. Long has just been here, and she told me all about it." Mr. Bennet made no answer."""
WORDS = TEXT.split()


@dataclass(frozen=True)
class Work:
    """What one process measures; `prompt_tokens` and `new_tokens` have defaults that fit the bundle."""

    bundle: str
    backend: str
    precision: str
    threads: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    batch: int = 1
    memory_limit: int | None = None
    steps: int | None = None
    height: int | None = None
    width: int | None = None
    index: str | None = None  # that a model reads neighbours from


class Subject(ABC):
    """A loaded model that can be timed, with so many tokens of each text and new ones for it.

    Attributes:
        steps: of each picture; 0 of models of text.
    """

    steps = 0

    def __init__(
        self, model: Any, artifacts: Sequence[Artifact], work: Work, lengths: tuple[int, int], most: int
    ) -> None:
        self.model = model
        self.artifacts = artifacts  # that run, the one that takes the time first
        self.batch = work.batch
        self.prompt, self.new_tokens = lengths
        if not 1 <= work.batch <= most:
            raise InputError(
                f"batch={work.batch} must be from 1 to {most}, the bundle's largest (planforge export"
                " --max-batch)"
            )
        self.prompt = self.count_prompt()

    def count_prompt(self) -> int:
        """Return how many tokens the model reads of a text."""
        count: int = self.model.count_tokens(self.text(0))
        return count

    def text(self, number: int) -> str:
        return make_passage(self.model.count_tokens, self.prompt, number)

    @abstractmethod
    def round(self, number: int) -> dict[str, Any]:
        """Time one call on another text than the rounds before, so that nothing cached of a text helps."""


def summarize_times(started: float, known: Sequence[float], ended: float) -> dict[str, Any]:
    """Return the times of a call, as a round reports them; `known` is when each token of every row was."""
    return {
        "seconds": ended - started,
        "ttft_ms": (known[0] - started) * 1e3,
        "inter_token_ms": [(later - earlier) * 1e3 for earlier, later in pairwise(known)],
    }


class TokenClock:
    """Notes when the next token of every row of a call is known."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.tokens = 0
        self.known: list[float] = []

    def note(self, chunk: Chunk) -> None:
        """Take a row's chunk; it is the `on_token` of the call."""
        self.tokens += len(chunk.token_ids)
        while len(self.known) < self.tokens // self.rows:
            self.known.append(time.perf_counter())


class Generating(Subject):
    """Greedy generation that no end token ends."""

    def __init__(self, model: TextGenerator, work: Work) -> None:
        lengths = choose_lengths(work, model.max_length, together=True)
        super().__init__(model, [model.artifact], work, lengths, model.max_batch)

    def round(self, number: int) -> dict[str, Any]:
        texts = [self.text(number)] * self.batch
        clock = TokenClock(self.batch)
        started = time.perf_counter()
        self.model.generate(texts, max_new_tokens=self.new_tokens, ignore_eos=True, on_token=clock.note)
        return summarize_times(started, clock.known, time.perf_counter())


class Translating(Subject):
    """Greedy translation that no end token ends."""

    def __init__(self, model: Translator, work: Work) -> None:
        artifacts = (model.artifact, model.encoder.artifact)
        lengths = choose_lengths(work, model.max_length, together=False)
        most = min(model.encoder.max_batch, model.artifact.axis("batch").max)
        super().__init__(model, artifacts, work, lengths, most)

    def text(self, number: int) -> str:
        language = "".join(f"{code} " for code in self.model.languages[:1])
        return language + make_passage(lambda t: self.model.count_tokens(language + t), self.prompt, number)

    def round(self, number: int) -> dict[str, Any]:
        texts = [self.text(number)] * self.batch
        new = self.new_tokens
        clock = TokenClock(self.batch)
        started = time.perf_counter()
        self.model.translate(texts, num_beams=1, min_new_tokens=new, max_new_tokens=new, on_token=clock.note)
        return summarize_times(started, clock.known, time.perf_counter())


class Embedding(Subject):
    """Vectors of texts, whatever the encoder's heads."""

    def __init__(self, model: TextEncoder, work: Work) -> None:
        if work.new_tokens is not None:
            raise InputError("this bundle is an encoder, which generates no tokens; leave new_tokens out")
        longest = model.defaults.max_length
        prompt = choose_length("prompt_tokens", work.prompt_tokens, ENCODER_PROMPT, longest)
        super().__init__(model, [model.artifact], work, (prompt, 0), model.encoder.max_batch)

    def round(self, number: int) -> dict[str, Any]:
        texts = [self.text(number)] * self.batch
        started = time.perf_counter()
        self.model.embed(texts, prompt="")
        return {"seconds": time.perf_counter() - started, "ttft_ms": None, "inter_token_ms": []}


class Drawing(Subject):
    """Pictures of a text; what a first step takes beyond the others is reading it."""

    def __init__(self, model: ImageGenerator, work: Work) -> None:
        if work.new_tokens is not None or work.prompt_tokens is not None:
            raise InputError("this bundle makes pictures; leave prompt_tokens and new_tokens out")
        self.steps = STEPS if work.steps is None else work.steps
        self.options: ImageOptions = {"steps": self.steps, "height": work.height, "width": work.width}
        graphs = ("unet", "text_encoder", "vae_decoder")
        artifacts = [model.parts[graph].artifact for graph in graphs]
        super().__init__(model, artifacts, work, (model.max_length, 0), MAX_PICTURES)

    def count_prompt(self) -> int:
        return self.prompt

    def text(self, number: int) -> str:
        inside = self.prompt - 2  # between the start and the end token
        return make_passage(lambda text: len(self.model.tokenizer.encode(text)), inside, number)

    def round(self, number: int) -> dict[str, Any]:
        known: list[float] = []
        text = self.text(number)
        started = time.perf_counter()
        self.model.generate(
            text,
            num_images=self.batch,
            seed=number,
            on_step=lambda _: known.append(time.perf_counter()),
            **self.options,
        )
        return summarize_times(started, known, time.perf_counter())


SUBJECTS: dict[str, Callable[[Any, Work], Subject]] = {
    "text-generation": Generating,
    "retrieval-generation": Generating,
    "text-encoding": Embedding,
    "translation": Translating,
    "image-generation": Drawing,
}


def make_passage(count: Callable[[str], int], tokens: int, start: int) -> str:
    """Return running text from some word on that has at most, and usually exactly, so many tokens."""
    start = start * 7 % len(WORDS)
    words = islice(cycle([*WORDS[start:], *WORDS[:start]]), tokens)  # each is a token at least
    text = " ".join(words)
    low = 1
    high = len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(text[:middle]) <= tokens else (low, middle - 1)
    return text[:low]


def choose_lengths(work: Work, longest: int, *, together: bool) -> tuple[int, int]:
    """Return how many prompt tokens and new tokens there are, which share the context or have one each."""
    prompt = choose_length("prompt_tokens", work.prompt_tokens, min(DECODER_PROMPT, longest // 2), longest)
    room = longest - prompt if together else longest
    return prompt, choose_length("new_tokens", work.new_tokens, NEW_TOKENS, room)


def choose_length(name: str, given: int | None, default: int, longest: int) -> int:
    if given is None:
        return max(1, min(default, longest))
    if not 1 <= given <= longest:
        raise InputError(f"{name}={given} must be from 1 to {longest}: the model's context holds no more")
    return given


def count_step_bytes(manifest: Manifest, subject: Subject, batch: int) -> int | None:
    """Return the bytes that one decoding step moves at least: every weight once, and the cache half-way.

    None where the weights file holds more than one step reads: of an encoder-decoder, or no decoder.
    """
    if len(subject.artifacts) > 1 or not subject.new_tokens:
        return None
    (artifact,) = subject.artifacts
    length = subject.prompt + subject.new_tokens // 2
    return manifest.count_weight_bytes(artifact) + count_cache_bytes(artifact, batch, length)


def measure_peak_rss() -> float | None:
    """Return the most memory that this process has had, in MB; None where the system doesn't say."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage's number also has what the parent held when it made this process
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return None


def serve(work: Work) -> None:
    """Load the model, run a warm-up round, answer with what was loaded, then run a round for each line."""
    opened = Bundle.open(work.bundle)
    started = time.perf_counter()
    options: LoadOptions = {"backend": work.backend, "precision": work.precision, "threads": work.threads}
    options |= {"memory_limit": work.memory_limit, "index": work.index}
    with load(work.bundle, **options) as model:
        load_ms = (time.perf_counter() - started) * 1e3
        subject = SUBJECTS[opened.manifest.task](model, work)
        subject.round(0)
        placement = model.placements.get(subject.artifacts[0].id)
        answer(
            {
                "backend": model.backend,
                "artifacts": [artifact.id for artifact in subject.artifacts],
                "prompt": subject.prompt,
                "new_tokens": subject.new_tokens,
                "steps": subject.steps,
                "load_ms": load_ms,
                "step_bytes": count_step_bytes(opened.manifest, subject, work.batch),
                "nodes": placement.to_json() if placement else None,
            }
        )
        for number, _ in enumerate(sys.stdin, 1):
            answer({**subject.round(number), "peak_rss_mb": measure_peak_rss()})


def main() -> None:
    """Serve the work that stdin describes."""
    serve_parent(lambda work: serve(Work(**work)))
