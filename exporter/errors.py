"""The exporter's branch of the error tree drawn in runtime/errors.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..runtime.errors import InputError, PlanForgeError


class ExporterError(PlanForgeError):
    """The base of all errors between checkpoint and bundle."""


class SourceError(ExporterError):
    """MODEL names nothing that can be exported."""

    exit_code = 2


class HubError(SourceError):
    """The hub cannot be reached, or refuses; MODEL may be right."""

    exit_code = 1


class CheckpointError(ExporterError):
    """A checkpoint's files are missing, damaged, or contradict its config."""


class OutputError(ExporterError):
    """The output folder exists, or cannot be written."""


class ExportError(ExporterError):
    """The exported graph is not the one that was expected."""


class BuildError(ExporterError):
    """TensorRT refused a graph; names the ONNX node."""


class BuildOptionError(BuildError, InputError):
    """A build option is not one of the engine's."""


class VerificationError(ExporterError):
    """An exported graph does not compute the model."""

    def __init__(self, message: str, failed: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.failed = failed  # the ids of the graphs, where they are known


class PromptsError(VerificationError, InputError):
    """The file of prompts to verify with is missing, or holds no prompts."""


@contextmanager
def raise_checkpoint_errors(kind: type[Exception] = ValueError) -> Iterator[None]:
    """Raise a CheckpointError for any fault of a checkpoint's files."""
    try:
        yield
    except kind as error:
        raise CheckpointError(str(error)) from error


def shorten_error(error: Exception) -> str:
    """Return the first line of another library's error, for a message of one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def make_named_error(name: str, message: str) -> PlanForgeError:
    """Return the error that a child process raised, by its class's name; else an ExportError."""
    kinds: list[type[PlanForgeError]] = [PlanForgeError]
    for kind in kinds:  # grows: the whole tree
        kinds += kind.__subclasses__()
    kind = next((kind for kind in kinds if kind.__name__ == name), ExportError)
    try:
        return kind(message)
    except TypeError:  # it takes fields too
        return ExportError(message)
