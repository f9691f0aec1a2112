"""Texts in, pictures out: tokenize, encode, denoise latents step by step, and decode them.

N pictures, T tokens, E text features, L channels of latents, H and W height and width of latents
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..activations import PictureBatch
from ..backends.backend import Backend, GraphRunner, LoadRequest
from ..backends.part import Part
from ..bundle.bundle import Bundle
from ..bundle.image_defaults import ImageDefaults
from ..errors import InputError, ManifestError, MemoryLimitError
from ..memory_budget import MemoryBudget
from ..opening import choose_artifacts, choose_length, list_tokenizer_files, open_programs, weigh
from ..option_checks import check_options, check_whole
from ..scheduling.batched_model import QUEUE_SIZE, BatchedModel
from ..scheduling.batcher import Batcher, BatchSettings, IsWanted, PendingResults
from ..scheduling.worker import find_deadline
from ..text.tokenizer import Tokenizer
from .denoise import denoise, predict
from .denoising import Scheduler
from .memory import PictureBudget
from .noise import Generator
from .options import MAX_PICTURES, ImageOptions
from .pictures import Float32, Picture, make_pixels, read_picture
from .prompt import PromptTokens, encode_prompt
from .scheduler_config import SchedulerConfig
from .schedulers import check_share, make_scheduler

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

log = logging.getLogger("planforge")

GRAPHS = ("unet", "text_encoder", "vae_decoder")  # that every picture needs
ENCODER = "vae_encoder"  # that another picture is read by


@dataclass(frozen=True)
class Step:
    """One step of the way from noise to pictures.

    Attributes:
        number: of the step, from 1.
        count: of all steps.
        seconds_left: as the steps so far say.
        latents: (N, L, H, W) float32, behind the step.
        preview: decodes the latents of now: the pictures as far as they are.
    """

    number: int
    count: int
    seconds_left: float
    latents: Float32
    preview: Callable[[], list[Picture]]


@dataclass(frozen=True, eq=False)
class Request:
    """The checked options of one call, with defaults filled in; no other call has an equal one."""

    prompts: list[str]
    negative_prompts: list[str]
    tokens: list[PromptTokens]  # of the negative prompts, then of the prompts
    seed: int
    generator: Generator
    height: int
    width: int
    guidance_scale: float
    scheduler: Scheduler
    begin: Float32 | None  # (1, 3, 8 H, 8 W) another picture, from -1 to 1
    on_step: Callable[[Step], object] | None


class ImageGenerator(BatchedModel):
    """A model of pictures of a bundle, ready to make them. Make one with `ImageGenerator.load`.

    The same seed gives the picture that diffusers makes on a CPU, but for rounding. Safe to use from several
    threads: their steps take turns. Close it, or use it as a context manager.
    """

    task = "image-generation"
    _TURN_TOKENS = MAX_PICTURES

    def __init__(
        self,
        parts: Sequence[Part],
        open_encoder: Callable[[], Part],
        tokenizer: Tokenizer,
        defaults: ImageDefaults,
        memory: PictureBudget,
    ) -> None:
        self._memory = memory
        self.parts = {part.artifact.graph: part for part in parts}
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.max_length = defaults.max_length
        self.scheduler = SchedulerConfig.from_json(defaults.scheduler)
        self._open_encoder = open_encoder
        self._opening = threading.Lock()  # of the parts: others read them meanwhile
        # The pictures of a request cost nothing: none waits for a turn of its own, as their noise is one.
        settings = BatchSettings(queue_size=QUEUE_SIZE, turn=MAX_PICTURES)
        self._batcher: Batcher[int, Picture, Picture] = Batcher(self._run_request, lambda _: 0, settings)

    @classmethod
    def _open(cls, bundle: Bundle, engine: Backend, request: LoadRequest) -> Self:
        manifest = bundle.manifest
        defaults = manifest.images
        if defaults is None:
            raise ManifestError(f"{bundle.folder}: the manifest of a model of pictures has no 'images'")
        *artifacts, encoder = choose_artifacts(engine, bundle, request, *GRAPHS, ENCODER)
        choose_length(bundle, request.max_length, *artifacts[:2])
        budget = MemoryBudget(request.memory_limit, weigh(engine, bundle, [*artifacts, encoder]))
        with open_programs(engine, bundle, *artifacts) as programs:
            tokenizer = Tokenizer.from_file(bundle.path(list_tokenizer_files(manifest, 1)[0]))

        def open_encoder() -> Part:
            return Part(engine.open(bundle, encoder), encoder, budget)

        parts = [
            Part(program, artifact, budget) for program, artifact in zip(programs, artifacts, strict=True)
        ]
        return cls(parts, open_encoder, tokenizer, defaults, PictureBudget(budget, manifest.config, defaults))

    @property
    def _runner(self) -> GraphRunner:
        return self.parts["unet"]

    @property
    def input_tokenizer(self) -> Tokenizer:
        """The tokenizer that reads prompts."""
        return self.tokenizer

    def warm_up(self) -> None:
        """Make one step of one picture; see `Model.warm_up`."""
        with suppress(MemoryLimitError):  # a smaller size may fit
            self.generate("a", steps=1, seed=0)

    def _close(self) -> None:
        with self._opening:
            for part in self.parts.values():
                part.close()  # what runs ends with the step that it is at
        self._batcher.close()

    def open_parts(self) -> Mapping[str, Part]:
        """Return all graphs by their names, and open the one that reads pictures, which few calls need."""
        with self._opening:
            self.parts["unet"].check_open()
            if ENCODER not in self.parts:
                self.parts = {**self.parts, ENCODER: self._open_encoder()}
            return self.parts

    def generate(self, prompt: str | Iterable[str], **options: Unpack[ImageOptions]) -> list[Picture]:
        """Return pictures of what a text says, or each of several texts.

        Args:
            prompt: a text, or several, whose pictures are made together.
            **options: see `ImageOptions`.

        Returns:
            `num_images` pictures of each text, in their order.

        Raises:
            InputError: an option or a text that cannot be used.
            DataError: the file of another picture is none.
            MemoryLimitError: the pictures do not fit `memory_limit`; nothing has run.
        """
        request = self._check(prompt, options)
        if not request.prompts:
            return []
        with self._memory.reserve(self._size(request)):
            return self._make(request, lambda: True)

    def submit(
        self,
        prompt: str | Iterable[str],
        *,
        client: str = "",
        timeout: float | None = None,
        **options: Unpack[ImageOptions],
    ) -> PendingResults[Picture]:
        """Let the engine make pictures when the requests of other callers had their turns; return at once.

        Options are checked, and another picture is read, in the caller's thread; the engine runs in one of
        its own, which calls `on_step` too. `Future.cancel` ends a request behind the step that runs.

        Args:
            prompt: as `generate`'s.
            client: whose request it is: where requests wait, clients take turns.
            timeout: seconds after which a request that is not complete fails with a DeadlineError.
            **options: as `generate`'s.

        Returns:
            What `generate` returns, when it is there.

        Raises:
            InputError: as `generate`.
            DataError: likewise.
            QueueFullError: too many requests wait.
        """
        request = self._check(prompt, options)
        parts = range(len(request.prompts))
        return self._batcher.submit(request, parts, client=client, deadline=find_deadline(timeout))

    def _run_request(
        self, request: Request, parts: Sequence[int], is_wanted: IsWanted
    ) -> Iterator[Mapping[int, Picture]]:
        """Yield the pictures of a request, all of them together; none where nobody waits any more."""
        del parts  # all of them, as they cost nothing
        with self._memory.reserve(self._size(request)):
            yield dict(enumerate(self._make(request, lambda: is_wanted(0))))

    def _size(self, request: Request) -> PictureBatch:
        """Return what a request makes."""
        return PictureBatch(
            count=len(request.prompts),
            guided=bool(request.negative_prompts),
            most=max(part.artifact.axis("batch").max for part in self.parts.values()),
            height=request.height // self.defaults.multiple,
            width=request.width // self.defaults.multiple,
            tokens=self.max_length,
            reads_picture=request.begin is not None,
            has_scores=not self.parts["unet"].artifact.fuses_scores,
        )

    def _make(self, request: Request, goes_on: Callable[[], bool]) -> list[Picture]:
        """Return the pictures of a request; none if it does not go on behind one of the steps."""
        tokens = request.tokens
        dropped = [one.dropped for one in tokens[len(request.negative_prompts) :]]
        text = self.encode_tokens(np.array([one.ids for one in tokens], np.int64))
        generator = request.generator
        latents = self._begin(request, generator)

        def finish(latents: Float32) -> list[Picture]:
            pixels = make_pixels(self.decode(latents))
            return [
                Picture(own, prompt, request.seed, count)
                for own, prompt, count in zip(pixels, request.prompts, dropped, strict=True)
            ]

        unet = self.parts["unet"]

        def ask(sample: Float32, timestep: float) -> Float32:
            return predict(unet, self.defaults, sample, timestep, text, request.guidance_scale)

        started = time.monotonic()
        count = len(request.scheduler.timesteps)
        steps = denoise(request.scheduler, latents, ask, generator.normal)
        for number, latents in enumerate(steps, 1):
            if request.on_step is not None:
                left = (time.monotonic() - started) / number * (count - number)
                request.on_step(Step(number, count, left, latents, partial(finish, latents)))
            if not goes_on():
                return []
        return finish(latents)

    def _encode_prompt(self, text: str) -> PromptTokens:
        """Return a prompt's tokens; a line in the log tells of what is left out."""
        tokens = encode_prompt(self.tokenizer, self.defaults, text)
        if tokens.dropped:
            log.warning(
                "the prompt has %d tokens more than the %d that the model reads, which are left out: it is"
                " read as %r",
                tokens.dropped,
                self.defaults.max_length,
                self.tokenizer.decode(tokens.ids),
            )
        return tokens

    def encode_tokens(self, tokens: Any) -> Float32:
        """Return the hidden states (N, T, E) of prompts' tokens (N, T)."""
        return self.parts["text_encoder"].run({"ids": tokens})["text"]

    def decode(self, latents: Float32) -> Float32:
        """Return the pictures (N, 3, 8 H, 8 W) from -1 to 1 of latents (N, L, H, W)."""
        return self.parts["vae_decoder"].run({"latents": latents})["pictures"]

    def _begin(self, request: Request, generator: Generator) -> Float32:
        """Return the latents (N, L, H, W) to begin with: noise, or another picture with noise."""
        defaults = self.defaults
        scheduler = request.scheduler
        count = len(request.prompts)
        channels = self.parts["unet"].artifact.input("sample").axes[1]
        assert isinstance(channels, int)
        shape = (count, channels, request.height // defaults.multiple, request.width // defaults.multiple)
        if request.begin is None:
            return scheduler.begin(generator.normal(shape))
        found = self.open_parts()[ENCODER].run({"pictures": request.begin})
        one = found["mean"] + found["deviation"] * generator.normal(found["mean"].shape)
        picture = np.float32(defaults.scaling_factor) * one
        return scheduler.add_noise(np.repeat(picture, count, axis=0), generator.normal(shape))

    def _check(self, prompt: str | Iterable[str], options: ImageOptions) -> Request:
        """Return a call's options, checked; refuse those out of range, before anything runs."""
        check_options(options, ImageOptions)
        defaults = self.defaults
        prompts = list_prompts(prompt)
        negative = options.get("negative_prompt") or ""
        negatives = [negative] * len(prompts) if isinstance(negative, str) else list(negative)
        if len(negatives) != len(prompts):
            raise InputError(
                f"there are {len(negatives)} negative prompts and {len(prompts)} prompts; give one for all,"
                " or one for each",
                option="negative_prompt",
            )
        if len(prompts) > MAX_PICTURES:
            raise InputError(
                f"there are {len(prompts)} prompts; give {MAX_PICTURES} at most in one call", option="prompt"
            )
        for name, texts in (("prompt", prompts), ("negative_prompt", negatives)):
            if wrong := [text for text in texts if not isinstance(text, str)]:
                raise InputError(f"{name} must be a text or texts, not {wrong[0]!r:.60}", option=name)
        on_step = options.get("on_step")
        if on_step is not None and not callable(on_step):
            raise InputError(f"on_step={on_step!r:.60} must be a function of a Step", option="on_step")
        copies = options.get("num_images", 1)
        check_whole("num_images", copies, 1, max(1, MAX_PICTURES // max(1, len(prompts))))
        seed = options.get("seed")
        seed = secrets.randbits(32) if seed is None else seed
        begin, height, width = self._read_sizes(options)
        scale = options.get("guidance_scale")
        scale = defaults.guidance_scale if scale is None else check_scale(scale)
        guided = scale > 1 and defaults.guidance_features is None
        read = {text: self._encode_prompt(text) for text in (*(negatives if guided else []), *prompts)}
        prompts = [text for text in prompts for _ in range(copies)]
        negatives = [text for text in negatives for _ in range(copies)] if guided else []
        return Request(
            prompts=prompts,
            negative_prompts=negatives,
            tokens=[read[text] for text in (*negatives, *prompts)],
            seed=seed,
            generator=Generator(seed),
            height=height,
            width=width,
            guidance_scale=scale,
            scheduler=make_scheduler(
                self.scheduler,
                defaults.steps if options.get("steps") is None else options["steps"],  # type: ignore[arg-type]
                options.get("scheduler"),
                1.0 if begin is None else check_share("strength", options.get("strength", 0.8)),
                keeps_steps=defaults.guidance_features is not None,
            ),
            begin=begin,
            on_step=on_step,
        )

    def _read_sizes(self, options: ImageOptions) -> tuple[Float32 | None, int, int]:
        """Return another picture to begin with, if one is given, and the height and width of the result."""
        defaults = self.defaults
        sizes: dict[str, int | None] = {"height": options.get("height"), "width": options.get("width")}
        most = []
        for name, size in sizes.items():
            axis = self.parts["unet"].artifact.axis(name)
            most.append(defaults.multiple * axis.max)
            check_whole(name, size, defaults.multiple * axis.min, most[-1], optional=True)
            if size is not None and size % defaults.multiple:
                raise InputError(f"{name}={size} is not a multiple of {defaults.multiple}", option=name)
        image = options.get("image")
        if image is None:
            if options.get("strength") is not None:
                raise InputError("strength is of an image to begin with; give one", option="strength")
            return None, sizes["height"] or defaults.height, sizes["width"] or defaults.width
        begin = read_picture(image, defaults.multiple, (most[0], most[1]), sizes["height"], sizes["width"])
        _, _, height, width = begin.shape
        return begin, height, width


def list_prompts(prompt: str | Iterable[str]) -> list[str]:
    """Return the prompts of a call: one text, or several."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, Iterable):
        raise InputError(f"prompt must be a text or texts, not {prompt!r:.60}", option="prompt")
    return list(prompt)


def check_scale(value: Any) -> float:
    """Return a guidance scale; refuse what is no number from 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1000:
        raise InputError(
            f"guidance_scale={value!r:.60} must be a number from 0 to 1000", option="guidance_scale"
        )
    return float(value)
