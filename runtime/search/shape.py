"""What a bundle says of the neighbours that its model reads."""

from __future__ import annotations

from ..bundle.bundle import Bundle
from ..bundle.retrieval_defaults import RetrievalDefaults
from ..errors import InputError
from ..opening import list_tokenizer_files
from ..text.tokenizer import Tokenizer


def read_shape(bundle: Bundle) -> RetrievalDefaults:
    """Return the lengths that a bundle's model reads.

    Raises:
        InputError: the model reads no neighbours.
    """
    retrieval = bundle.manifest.retrieval
    if retrieval is None:
        raise InputError(
            f"{bundle.folder} is a bundle whose model reads no neighbours, so no index is of use to it; give"
            " the bundle of one that does",
            option="for_bundle",
        )
    return retrieval


def read_tokenizer(bundle: Bundle) -> tuple[Tokenizer, str]:
    """Return a bundle's tokenizer, and the sha256 of its file."""
    name = list_tokenizer_files(bundle.manifest, 1)[0]
    return Tokenizer.from_file(bundle.path(name)), bundle.manifest.files[name].sha256
