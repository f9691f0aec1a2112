"""TensorRT and TensorRT-RTX: two Python modules with one interface, in many versions."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..bundle.plan import RTX_SMS
from ..errors import BackendUnavailableError, suggest_install

log = logging.getLogger("planforge")

SEVERITIES = "FEWIV"  # as TensorRT's own tools write them: fatal, error, warning, information, verbose


@dataclass(frozen=True)
class Library:
    """One of the two libraries."""

    module: str
    package: str  # NVIDIA's
    sms: tuple[str, ...] = ()  # that it builds for without a GPU; empty where it builds for the present one
    cuda: str | None = None  # that a driver must have at least; None where the build machine's decides


# A library's name is also the name of the extra that installs it.
LIBRARIES = {
    "tensorrt-rtx": Library("tensorrt_rtx", "tensorrt-rtx-cu13", RTX_SMS, "13.0"),
    "tensorrt": Library("tensorrt", "tensorrt"),
}

# Said of every int64 input, and of every error on a machine without a driver.
NOISE = re.compile(r"has Int64 binding|cudaError 35\b")

LISTING = "Layers:\n"  # how a list of layers begins, in TensorRT-RTX 1.7.1

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "FLOAT": np.dtype(np.float32),
    "HALF": np.dtype(np.float16),
    "INT64": np.dtype(np.int64),
    "INT32": np.dtype(np.int32),
    "INT8": np.dtype(np.int8),
    "UINT8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


def is_installed(name: str) -> bool:
    """Tell whether a library's Python module is installed, without loading it."""
    return importlib.util.find_spec(LIBRARIES[name].module) is not None


def import_library(name: str) -> Any:
    """Return a library's Python module, or raise an error that says how to install it."""
    try:
        return importlib.import_module(LIBRARIES[name].module)
    except ImportError as error:  # the module, or a library below it
        raise make_library_error(name) from error


def make_library_error(name: str) -> BackendUnavailableError:
    """Return the error that names NVIDIA's package and the extra that installs it."""
    elsewhere = "; a Jetson has JetPack's, for the system's own Python" if name == "tensorrt" else ""
    return BackendUnavailableError(
        f"engine {name!r} needs NVIDIA's package {LIBRARIES[name].package}: {suggest_install(name)}"
        f"{elsewhere}"
    )


def make_logger(trt: Any) -> Any:
    """Return an `ILogger` of the module `trt` that collects messages in its `errors` and `warnings`.

    Its `listing` is the last message that lists the layers of a plan, which a builder writes at its end. With
    `--debug`, all that the library says goes to the log.
    """
    tells = log.isEnabledFor(logging.DEBUG)

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.warnings: list[str] = []
            self.listing = ""

        def log(self, severity: Any, message: str) -> None:
            if tells:
                log.debug("[%s] [%s] %s", trt.__name__, SEVERITIES[int(severity)], message)
            if message.startswith(LISTING):
                self.listing = message
            if NOISE.search(message) or severity > trt.ILogger.Severity.WARNING:
                return
            is_error = severity < trt.ILogger.Severity.WARNING
            (self.errors if is_error else self.warnings).append(message)

    return Logger()
