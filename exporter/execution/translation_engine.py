"""An encoder or decoder, opened with the other one, which it runs with."""

from __future__ import annotations

from collections.abc import Callable

from ...runtime.backends.backend import Program
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.decoder import Decoder
from ...runtime.diagnostics.golden.translation_engine import Engine
from ...runtime.translate.source_encoder import SourceEncoder
from ...runtime.translate.tokenizers import translation_tokenizers


def open_engine(bundle: Bundle, artifact: Artifact, opened: Callable[[Artifact], Program]) -> Engine:
    """Return an engine of an artifact and the encoder or decoder that it runs with, opened.

    Args:
        bundle: the bundle that has both.
        artifact: an encoder or a decoder.
        opened: opens a graph.
    """
    defaults = bundle.manifest.generation
    assert defaults is not None and defaults.decoder_start is not None

    def fit(other: Artifact) -> tuple[bool, bool]:
        return other.precision == artifact.precision, other.dialect == artifact.dialect

    encoder, decoder = (
        artifact
        if artifact.graph == graph
        else max((a for a in bundle.manifest.artifacts if a.graph == graph), key=fit)
        for graph in ("encoder", "decoder")
    )
    return Engine(
        SourceEncoder(opened(encoder), encoder, decoder),
        Decoder(opened(decoder), decoder),
        defaults.decoder_start,
        translation_tokenizers(bundle),
    )
