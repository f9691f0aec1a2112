"""Every error of PlanForge, in one tree.

PlanForgeError                       base of all; its message is one line that names the way out
├── BundleError                      a bundle, its manifest or one of its files is unusable
│   ├── BundleNotFoundError          no folder of that name, or no manifest in it
│   ├── ManifestError                manifest.json is malformed or of an unknown format
│   └── IntegrityError               a listed file is missing, changed, or leaves the folder
├── InputError                       what the caller passed in (also a ValueError)   .option
│   ├── ContextLengthError           more tokens than the model's context   .tokens .limit
│   ├── SchemaError                  a JSON schema that cannot be enforced   .path
│   └── DataError                    a line or a row that was read cannot be used
├── TokenizerError                   tokenizer files are missing or unusable
├── BackendUnavailableError          names the extra that installs it
├── BackendError                     an engine failed while loading or running
├── MemoryLimitError                 the byte budget does not fit           .needed .limit
├── ClosedError                      the model was closed
├── QueueFullError                   too many requests wait already
├── BatchError                       a job over a table cannot go on
├── DeadlineError                    a request's deadline passed (also a TimeoutError)
└── planforge.exporter.errors        CheckpointError, ExportError, BuildError, VerificationError, ...
"""

from __future__ import annotations

from typing import ClassVar


def suggest_install(extra: str) -> str:
    """Return the command that installs an extra of the distribution that is here: all of it, or the core."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution("planforge")
    except PackageNotFoundError:
        return f"pip install 'planforge-runtime[{extra}]'"
    return f"pip install 'planforge[{extra}]'"


def make_printable(text: str) -> str:
    r"""Return the text with what a terminal obeys or shows in another order written out, as \x1b.

    Names in a stranger's files get into messages. Line breaks and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in "\n\t" else escape(sign) for sign in text)


def escape(sign: str) -> str:
    return sign.encode("unicode_escape").decode("ascii")


class PlanForgeError(Exception):
    """Base of every error that PlanForge raises on purpose.

    Attributes:
        exit_code: of the command that it ends: 2 where what was typed is wrong, 1 where work failed.
    """

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        return make_printable(super().__str__())


class BundleError(PlanForgeError):
    """A bundle, its manifest or one of its files is unusable."""


class BundleNotFoundError(BundleError):
    """There is no folder of that name, or none with a manifest."""

    exit_code = 2


class ManifestError(BundleError):
    """manifest.json is malformed, or of a format that this version does not read."""


class IntegrityError(BundleError):
    """A file of the bundle is missing, has changed, or lies outside the folder."""


class InputError(PlanForgeError, ValueError):
    """An argument that cannot be used: names it, what it was, and what is allowed.

    Attributes:
        option: the argument, such as "top_k" or "texts[2]"; None where it is no single one.
    """

    exit_code = 2

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class ContextLengthError(InputError):
    """More tokens than the model's context holds."""

    def __init__(self, message: str, *, tokens: int, limit: int, option: str | None = None) -> None:
        super().__init__(message, option=option)
        self.tokens = tokens
        self.limit = limit


class SchemaError(InputError):
    """A JSON schema is malformed, or has a keyword that cannot be enforced.

    Attributes:
        path: where in the schema, such as "properties/name/pattern"; "" for the schema itself.
    """

    def __init__(self, message: str, *, path: str, option: str = "json_schema") -> None:
        super().__init__(message, option=option)
        self.path = path


class DataError(InputError):
    """What was read, such as a line of stdin or a row of a table, cannot be used."""

    exit_code = 1


class TokenizerError(PlanForgeError):
    """Tokenizer files are missing or cannot be read."""


class BackendUnavailableError(PlanForgeError):
    """The backend is not installed or cannot run here; names what to install."""


class BackendError(PlanForgeError):
    """An engine refused a graph, or failed while running it."""


class MemoryLimitError(PlanForgeError):
    """What is asked for does not fit in the byte budget."""

    def __init__(self, message: str, *, needed: int, limit: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.limit = limit


class ClosedError(PlanForgeError):
    """The model was used after close()."""

    def __init__(self, message: str = "the model was closed; load() it again") -> None:
        super().__init__(message)


class QueueFullError(PlanForgeError):
    """As many requests wait as may."""


class BatchError(PlanForgeError):
    """A job cannot go on: a worker cannot load, a part kills its workers, or its folder is in use."""


class DeadlineError(PlanForgeError, TimeoutError):
    """A request's deadline passed before its answer was there."""
