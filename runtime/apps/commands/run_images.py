"""The pictures that `planforge run` makes, and those that it compares with texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from ..stage_progress import CountedLine
from .console import emit, say

if TYPE_CHECKING:
    from ...images.image_generator import ImageGenerator, Step
    from ...images.image_text_encoder import ImageTextEncoder
    from .run_input import Item, TextSource
    from .stages import Stages


def draw(
    model: ImageGenerator,
    source: TextSource,
    options: dict[str, Any],
    output: Path | None,
    as_json: bool,
    stages: Stages,
) -> None:
    """Write the pictures of each text, and print their files.

    Args:
        model: makes them.
        source: the texts.
        options: of `ImageGenerator.generate`.
        output: the file of the only picture; of several NAME-1.png, NAME-2.png and so on.
        as_json: print JSON lines with file, prompt and seed; else the seed is a line on stderr, if none was
            given.
        stages: shows the steps.
    """
    from ...images.pictures import can_write

    if output is None:
        raise InputError("pictures are written to files: add -o FILE.png")
    if not output.parent.is_dir():
        raise InputError(f"-o {output}: the folder {output.parent} does not exist")
    if not can_write(output):
        raise InputError(f"-o {output}: the name of a picture's file ends with .png, .jpg or .webp")
    prompts = list(read_prompts(source))

    def show(step: Step) -> None:
        stages(CountedLine("making pictures: steps", step.number, step.count, "steps"))

    pictures = model.generate(prompts, on_step=show, **options)
    for number, picture in enumerate(pictures, 1):
        own = f"{output.stem}-{number}{output.suffix}" if len(pictures) > 1 else output.name
        path = output.with_name(own)
        picture.save(path)
        described = {"file": str(path), "prompt": picture.prompt, "seed": picture.seed}
        emit(json.dumps(described, ensure_ascii=False) if as_json else str(path))
    if pictures and not as_json and options.get("seed") is None:
        what = "this picture" if len(pictures) == 1 else "these pictures"
        say(f"--seed {pictures[0].seed} makes {what} again")


def match(model: ImageTextEncoder, source: TextSource, image: Path | None, as_json: bool) -> None:
    """Print how likely each text is of a picture, the likeliest first; together they have a probability of 1.

    Args:
        model: compares them.
        source: the texts.
        image: the picture's file.
        as_json: print JSON lines with text and probability.
    """
    if image is None:
        raise InputError("texts are compared with a picture: add --image FILE")
    texts = list(dict.fromkeys(read_prompts(source)))
    if len(texts) < 2:
        raise InputError("give two or more texts, of which those that fit the picture are told from others")
    (shares,) = model.classify(image, texts, template="{}")
    for text, probability in shares.items():
        described = {"text": text, "probability": probability}
        emit(json.dumps(described, ensure_ascii=False) if as_json else f"{probability:.4f}  {text}")


def read_prompts(source: TextSource) -> Iterator[str]:
    """Yield the texts that are not blank; refuse pairs."""
    item: Item | None
    for item in source.read_items():
        if item is None:
            continue
        if not isinstance(item, str):
            raise InputError("a picture goes with texts, not with pairs of texts")
        yield item
