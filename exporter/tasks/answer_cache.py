"""Keeps PyTorch's answers in the user's cache folder, for the next run with the same checkpoint.

A file has the answers to one set of questions, or what a rounding does to them, behind a hash of its name
and its content. A file that is damaged, cut, or not what its name says counts as absent, and is deleted.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ...runtime.apps.check.files import Arrays
from ...runtime.backends.prepared import ABANDONED, check_room, describe_processor
from ...runtime.cache_folder import find_cache_folder
from ...runtime.errors import InputError, PlanForgeError

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel
    from .fitted_head import LinearHead
    from .rounding import Rounding

log = logging.getLogger("planforge")

KEPT = "kept from an earlier run"
SETTING = "PLANFORGE_ANSWERS_MB"
USUAL_MB = 4000.0
FILE_NAME = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}\.[0-9a-f]{12}")  # whole, or being written
DIGEST_BYTES = 32
PIECE_BYTES = 2**20  # that are hashed at once
# What computes an answer, or may: a model of transformers, or optimum's graphs.
PACKAGES = ("planforge", "numpy", "onnxruntime", "torch", "transformers")


def read_limit() -> int:
    """Return how many bytes of answers are kept at most; 0 switches it off."""
    text = os.environ.get(SETTING, "")
    try:
        megabytes = float(text) if text else USUAL_MB
    except ValueError:
        megabytes = math.nan
    if not 0 <= megabytes < math.inf:
        raise InputError(
            f"{SETTING}={text!r} must be a number of megabytes, 0 or more; 0 turns the cache of PyTorch's"
            " answers off"
        )
    return int(megabytes * 10**6)


def compute_key(
    checkpoint: str, model: ReferenceModel, questions: object, head: LinearHead | None = None
) -> str:
    """Return a hash of everything that a model's answers to some questions depend on.

    The number of threads is left out: it changes the order of sums, and so an answer's rounding alone.

    Args:
        checkpoint: the hash of the files that the model was loaded from, config.json among them.
        model: the model, whose weights are hashed as they are in memory.
        questions: a dataclass of plain values and arrays.
        head: what was fitted to the model, if anything.
    """
    asked = {
        "checkpoint": checkpoint,
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "weights": hash_weights(model),
        "questions": questions,
        "head": head,
        "code": hash_code(),
        "packages": {name: find_version(name) for name in PACKAGES},
        "processor": describe_processor(),
    }
    return hashlib.sha256(json.dumps(asked, default=describe).encode()).hexdigest()


def compute_gaps_key(answers: str, rounding: Rounding) -> str:
    """Return a hash of everything that a rounding's effect depends on; `answers` is the answers' key."""
    weights = {name: describe(array) for name, array in rounding.weights.items()}  # made one by one
    # An error tells how a product was chosen, which changes nothing that it computes.
    products = [
        [*names, replace(product, error=None)] for names, product in sorted(rounding.products.items())
    ]
    others = replace(rounding, dtype=None, weights={}, products={})
    asked = [answers, str(rounding.dtype), weights, products, others]
    return hashlib.sha256(json.dumps(asked, default=describe, sort_keys=True).encode()).hexdigest()


def describe(value: Any) -> Any:
    """Return a question's value in JSON's terms; questions may hold no other types than those here."""
    if is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return [type(value).__qualname__, named]
    if isinstance(value, np.ndarray):
        content = hashlib.sha256(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data).hexdigest()
        return [value.dtype.str, value.shape, content]
    if isinstance(value, range):
        return [value.start, value.stop, value.step]
    raise TypeError(f"{type(value).__name__} in what PyTorch is asked")


def hash_weights(model: ReferenceModel) -> str:
    """Return one hash over a model's parameters and buffers, by name."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@functools.cache
def hash_code() -> str:
    """Return one hash over PlanForge's own source files."""
    from ... import models, runtime

    digest = hashlib.sha256()
    own = Path(__file__).parents[1]
    for folder in (own, *map(Path, models.__path__), *map(Path, runtime.__path__)):
        for path in sorted(folder.rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def find_version(package: str) -> str:
    """Return the version of a package; "" where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def read_answers(key: str) -> Arrays | None:
    """Return the arrays that were kept under a key; None where there are none."""
    path = find_file(key)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            if file.read(DIGEST_BYTES) != compute_digest(key, file):
                raise ValueError("its hash is another")
            file.seek(DIGEST_BYTES)
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever zipfile, zlib and numpy raise
        log.debug("%s holds no answers of PyTorch: %s", path, error)
        with suppress(OSError):
            path.unlink()
        return None
    with suppress(OSError):
        os.utime(path)  # the files that were used longest ago are deleted first
    return arrays


def keep_answers(key: str, arrays: Arrays) -> None:
    """Keep arrays under a key; where that is not possible, do nothing."""
    path = find_file(key)
    needed = sum(array.nbytes for array in arrays.values())
    room = read_limit() - needed
    if path is None or room < 0:
        return
    partial = path.with_name(f".{key}.{secrets.token_hex(6)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_oldest(path.parent, room)
        check_room(path.parent, needed)
        with partial.open("x+b") as file:
            file.write(bytes(DIGEST_BYTES))
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.seek(DIGEST_BYTES)
            digest = compute_digest(key, file)
            file.seek(0)
            file.write(digest)
        partial.replace(path)
    except (OSError, PlanForgeError) as error:
        log.debug("PyTorch's answers are not kept: %s", error)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def find_file(key: str) -> Path | None:
    """Return the file of answers under a key; None if the user has no cache folder, or keeps no answers."""
    if not read_limit():
        return None
    try:
        return find_cache_folder() / "answers" / key
    except PlanForgeError:
        return None


def compute_digest(key: str, file: BinaryIO) -> bytes:
    """Return the hash of a key and the rest of a file."""
    digest = hashlib.sha256(key.encode())
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    return digest.digest()


def remove_oldest(folder: Path, max_bytes: int) -> None:
    """Delete the files that were not used for longest, until at most so many bytes are left.

    What a killed process has left half written goes too.
    """
    kept = []
    for path in folder.iterdir():
        if not FILE_NAME.fullmatch(path.name):
            continue
        with suppress(FileNotFoundError):  # another process deletes too
            state = path.stat()
            if path.name.startswith(".") and time.time() - state.st_mtime > ABANDONED:
                path.unlink()
            else:
                kept.append((state.st_mtime_ns, state.st_size, path))
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size
