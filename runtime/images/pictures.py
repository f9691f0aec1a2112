"""Pictures in and out: arrays, files, and what the models read of them.

H height, W width
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import BackendUnavailableError, DataError, InputError, suggest_install

if TYPE_CHECKING:
    import PIL.Image

Pixels: TypeAlias = npt.NDArray[np.uint8]
Float32: TypeAlias = npt.NDArray[np.float32]
GivenPicture: TypeAlias = "str | Path | bytes | Pixels | PIL.Image.Image"
"""A picture: a file's path, a file's bytes, (H, W, 3) uint8, or an image of Pillow."""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")  # Pillow has readers of others that start programs
MAX_FILE_BYTES = 64 * 2**20
MAX_PIXELS = 64 * 2**20


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture that was made.

    Attributes:
        pixels: (H, W, 3) uint8, red, green and blue.
        prompt: what it was made for.
        seed: what its noise was drawn with.
        dropped: tokens of the prompt behind the model's longest, which were left out.
    """

    pixels: Pixels = field(repr=False)
    prompt: str = ""
    seed: int = 0
    dropped: int = 0

    def save(self, path: str | Path) -> None:
        """Write the picture in the format that the file's name ends with, such as .png; needs Pillow."""
        image = import_pillow().fromarray(self.pixels)
        try:
            image.save(path)
        except ValueError as error:  # of a name without a known ending
            raise InputError(f"path={str(path)!r}: {error}; end it with .png, .jpg or .webp") from error
        except FileNotFoundError as error:
            raise InputError(f"path={str(path)!r}: the folder {Path(path).parent} does not exist") from error

    def encode(self, format: str = "png") -> bytes:
        """Return the picture as a file's bytes; needs Pillow."""
        file = BytesIO()
        import_pillow().fromarray(self.pixels).save(file, format)
        return file.getvalue()


def can_write(path: Path) -> bool:
    """Tell whether a file's name ends as a format that pictures are written in; needs Pillow."""
    pillow = import_pillow()
    return pillow.registered_extensions().get(path.suffix.lower()) in pillow.SAVE


def import_pillow() -> Any:
    """Return Pillow's module of images, or say how to install it."""
    try:
        import PIL.Image
    except ImportError as error:
        raise BackendUnavailableError(f"pictures need Pillow: {suggest_install('images')}") from error
    return PIL.Image


def make_pixels(values: Float32) -> Pixels:
    """Return (..., H, W, 3) uint8 of (..., 3, H, W) from -1 to 1."""
    channels_last = np.moveaxis(values, -3, -1)
    pixels: Pixels = ((channels_last / 2 + 0.5).clip(0, 1) * 255).round().astype(np.uint8)
    return pixels


def read_picture(
    picture: GivenPicture, multiple: int, most: tuple[int, int], height: int | None, width: int | None
) -> Float32:
    """Return a picture (1, 3, H, W) from -1 to 1, as diffusers' pipelines read it.

    Args:
        picture: see `GivenPicture`.
        multiple: what H and W are multiples of; without a height or a width, the picture's is rounded down.
        most: the largest H and W.
        height: H; the picture is resized to it.
        width: W.
    """
    image = open_picture(picture)
    sizes = (width or image.width // multiple * multiple, height or image.height // multiple * multiple)
    if 0 in sizes:
        raise InputError(
            f"the picture has {image.width} x {image.height} pixels; at least {multiple} x {multiple} are"
            " needed",
            option="image",
        )
    if sizes[0] > most[1] or sizes[1] > most[0]:
        raise InputError(
            f"the picture has {image.width} x {image.height} pixels, and the model makes at most {most[1]} x"
            f" {most[0]}; give a height and a width, to which it is resized",
            option="image",
        )
    if sizes != image.size:
        image = image.resize(sizes, resample=import_pillow().Resampling.LANCZOS)
    values = np.asarray(image, np.float32) / np.float32(255)
    scaled: Float32 = 2 * values.transpose(2, 0, 1)[None] - 1
    return scaled


def open_picture(picture: GivenPicture) -> PIL.Image.Image:
    """Return a picture as an RGB image of Pillow; refuse what is none, and what is too large."""
    pillow = import_pillow()
    if isinstance(picture, pillow.Image):
        return check_size(picture).convert("RGB")
    if isinstance(picture, np.ndarray):
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            raise InputError(
                f"the picture is an array {picture.shape} of {picture.dtype}; it must be (H, W, 3) of uint8",
                option="image",
            )
        image: PIL.Image.Image = pillow.fromarray(picture)
        return check_size(image)
    if not isinstance(picture, str | Path | bytes):
        raise InputError(
            f"a picture must be a path, bytes, an array or an image of Pillow, not {type(picture).__name__}",
            option="image",
        )
    return read_file(picture)


def read_file(picture: str | Path | bytes) -> PIL.Image.Image:
    """Return the picture in a file; its header is checked before any pixel is read."""
    pillow = import_pillow()
    name = "the picture" if isinstance(picture, bytes) else str(picture)
    try:
        size = len(picture) if isinstance(picture, bytes) else Path(picture).stat().st_size
        if size > MAX_FILE_BYTES:
            raise DataError(f"{name} has {size} bytes; at most {MAX_FILE_BYTES} are read")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large pictures, which are refused below
            from PIL.ImageOps import exif_transpose

            opened = pillow.open(BytesIO(picture) if isinstance(picture, bytes) else picture, formats=FORMATS)
            with opened:
                return exif_transpose(check_size(opened)).convert("RGB")
    except DataError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"{name} does not exist", option="image") from error
    except pillow.DecompressionBombError as error:  # Pillow's own limit, which it may meet first
        raise DataError(
            f"{name} has too many pixels; at most {MAX_PIXELS} are read", option="image"
        ) from error
    except Exception as error:  # whatever a reader stumbles over in a damaged file
        why = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
        raise DataError(f"{name} is not a picture that can be read{why}", option="image") from error


def check_size(image: PIL.Image.Image) -> PIL.Image.Image:
    """Refuse a picture of too many pixels, before they are in memory."""
    if image.width * image.height > MAX_PIXELS:
        raise DataError(
            f"the picture has {image.width} x {image.height} pixels; at most {MAX_PIXELS} are read",
            option="image",
        )
    return image
