"""Pictures and texts in, vectors out that are alike where they belong together.

N pictures or texts, P pictures, T texts, F features of a vector
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends.backend import Backend, GraphRunner, LoadRequest
from ..backends.part import Part
from ..bundle.bundle import Bundle
from ..bundle.image_defaults import LikenessDefaults
from ..errors import InputError, ManifestError
from ..memory_budget import MemoryBudget
from ..model import Model
from ..opening import choose_artifacts, choose_length, list_tokenizer_files, open_programs, weigh
from ..text.tokenizer import Tokenizer
from .pictures import Float32, GivenPicture, import_pillow, open_picture
from .prompt import encode_prompt

if TYPE_CHECKING:
    from typing_extensions import Self, TypeIs

log = logging.getLogger("planforge")

GRAPHS = ("text_encoder", "image_encoder")
TEMPLATE = "a photo of a {}"


class ImageTextEncoder(Model):
    """A model that compares pictures with texts, such as CLIP. Make one with `ImageTextEncoder.load`.

    Safe to use from several threads: their batches take turns. Close it, or use it as a context manager.
    """

    task = "image-text-encoding"

    def __init__(self, parts: Sequence[Part], tokenizer: Tokenizer, defaults: LikenessDefaults) -> None:
        self.parts = {part.artifact.graph: part for part in parts}
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.max_length = defaults.max_length

    @classmethod
    def _open(cls, bundle: Bundle, engine: Backend, request: LoadRequest) -> Self:
        defaults = bundle.manifest.likeness
        if defaults is None:
            raise ManifestError(f"{bundle.folder}: the manifest of a model of this task has no 'likeness'")
        artifacts = choose_artifacts(engine, bundle, request, *GRAPHS)
        choose_length(bundle, request.max_length, artifacts[0])
        budget = MemoryBudget(request.memory_limit, weigh(engine, bundle, artifacts))
        with open_programs(engine, bundle, *artifacts) as programs:
            tokenizer = Tokenizer.from_file(bundle.path(list_tokenizer_files(bundle.manifest, 1)[0]))
        parts = [Part(program, own, budget) for program, own in zip(programs, artifacts, strict=True)]
        return cls(parts, tokenizer, defaults)

    @property
    def _runner(self) -> GraphRunner:
        return self.parts["text_encoder"]

    @property
    def input_tokenizer(self) -> Tokenizer:
        """The tokenizer that reads texts."""
        return self.tokenizer

    def warm_up(self) -> None:
        """Read a text and a picture; see `Model.warm_up`."""
        self.embed_texts(["a"])
        self._run(
            "image_encoder",
            "pixels",
            iter([np.zeros((3, self.defaults.size, self.defaults.size), np.float32)]),
        )

    def _close(self) -> None:
        for part in self.parts.values():
            part.close()

    def embed_texts(self, texts: str | Iterable[str]) -> Float32:
        """Return the vectors of texts.

        Args:
            texts: one, or several. What is behind the model's longest is left out, as a line of the log says.

        Returns:
            (F,) of one text, (N, F) of several, float32, of unit length.
        """
        if isinstance(texts, str):
            return self.embed_texts([texts])[0]  # type: ignore[no-any-return]
        return self._run("text_encoder", "ids", (self._read_text(text) for text in texts))

    def embed_images(self, images: GivenPicture | Iterable[GivenPicture]) -> Float32:
        """Return the vectors of pictures.

        Args:
            images: one, or several: paths, bytes of files, (H, W, 3) uint8, or images of Pillow.

        Returns:
            (F,) of one picture, (N, F) of several, float32, of unit length.

        Raises:
            DataError: a file is no picture.
        """
        if is_picture(images):
            return self.embed_images([images])[0]  # type: ignore[no-any-return]
        return self._run("image_encoder", "pixels", (read_pixels(one, self.defaults) for one in images))

    def compare(self, images: GivenPicture | Iterable[GivenPicture], texts: str | Iterable[str]) -> Float32:
        """Return how alike pictures and texts are: (P, T) float32, cosines times the model's own scale."""
        pictures = np.atleast_2d(self.embed_images(images))
        vectors = np.atleast_2d(self.embed_texts(texts))
        scaled: Float32 = np.float32(self.defaults.scale) * pictures @ vectors.T
        return scaled

    def classify(
        self,
        images: GivenPicture | Iterable[GivenPicture],
        labels: Sequence[str],
        *,
        template: str = TEMPLATE,
    ) -> list[dict[str, float]]:
        """Return for each picture how likely each label is, without training.

        Args:
            images: see `embed_images`.
            labels: what a picture may show, at least two; only they share the probability of 1.
            template: a text with "{}", in which each label is put.

        Returns:
            for each picture its labels with their probabilities, the likeliest first.
        """
        names = list(labels)
        if isinstance(labels, str) or len(names) < 2 or len(set(names)) < len(names):
            raise InputError(f"labels={labels!r:.60} must be two or more different texts", option="labels")
        if "{}" not in template:
            raise InputError(
                f"template={template!r:.60} needs a {{}} where the label goes", option="template"
            )
        logits = self.compare(images, [template.replace("{}", name) for name in names])
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares = powers / powers.sum(axis=1, keepdims=True)
        return [{names[i]: float(row[i]) for i in np.argsort(-row, kind="stable")} for row in shares]

    def _read_text(self, text: str) -> Any:
        """Return the tokens (T,) of a text; a line in the log tells of what is left out."""
        if not isinstance(text, str):
            raise InputError(f"a text must be a str, not {type(text).__name__}")
        tokens = encode_prompt(self.tokenizer, self.defaults, text)
        if tokens.dropped:
            log.warning(
                "a text has %d tokens more than the %d that the model reads, which are left out",
                tokens.dropped,
                self.defaults.max_length,
            )
        return np.array(tokens.ids, np.int64)

    def _run(self, graph: str, role: str, items: Iterator[Any]) -> Float32:
        """Return the vectors (N, F) of what is read, of unit length; a batch at a time is in memory."""
        part = self.parts[graph]
        (output,) = part.artifact.outputs
        features = output.axes[1]
        assert isinstance(features, int)
        vectors = [np.empty((0, features), np.float32)]
        while batch := list(islice(items, part.artifact.axis("batch").max)):
            vectors.append(part.run({role: np.stack(batch)})[output.role])
        joined = np.concatenate(vectors)
        unit: Float32 = joined / np.linalg.norm(joined, axis=1, keepdims=True)
        return unit


def is_picture(images: Any) -> TypeIs[GivenPicture]:
    """Tell whether it is a single picture."""
    return (
        isinstance(images, str | bytes | np.ndarray)
        or hasattr(images, "__fspath__")
        or hasattr(images, "resize")
    )


def read_pixels(picture: GivenPicture, defaults: LikenessDefaults) -> Float32:
    """Return a picture's middle (3, size, size), normalized, as transformers' CLIPImageProcessor does."""
    image = open_picture(picture)
    width, height = image.size
    shorter = min(width, height)
    sizes = int(defaults.shortest * width / shorter), int(defaults.shortest * height / shorter)
    image = image.resize(sizes, resample=import_pillow().Resampling(defaults.resample))
    left, top = ((side - defaults.size) // 2 for side in sizes)
    image = image.crop((left, top, left + defaults.size, top + defaults.size))
    values = np.asarray(image, np.float32) / np.float32(255)
    normalized = (values - np.array(defaults.mean, np.float32)) / np.array(defaults.std, np.float32)
    return np.ascontiguousarray(normalized.transpose(2, 0, 1))
