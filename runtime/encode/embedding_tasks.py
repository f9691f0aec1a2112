"""The tasks that embed texts: one dense vector, sparse weights, or a vector for each token.

T tokens, F width of a vector, V vocabulary
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from ..backends.backend import Array
from ..bundle.artifact import DENSE, SPARSE, VECTORS, WEIGHTS
from ..bundle.defaults import EncoderDefaults
from ..bundle.role_defaults import QUERY
from ..errors import InputError
from ..option_checks import check_choice, check_whole
from ..options import EmbedOptions, PromptOptions, SparseOptions
from ..text.long_text import Piece
from ..text.tokenizer import Tokenizer
from .encoder import Encoder
from .pooling import POOLINGS, merge_windows, normalize_vector, pool_tokens
from .request_runner import RequestRunner
from .requests import Outputs, Task, TextRequest, TokenizeOptions, read_input_type
from .results import Embedding, HybridEmbedding, MultiVector, SparseEmbedding
from .vector_types import TYPES, quantize_vectors

log = logging.getLogger("planforge")

# Outputs of a graph that are made for retrieval, by the task that gives them.
EMBEDDING_TASKS = {"embed": (DENSE,), "embed_sparse": (SPARSE, WEIGHTS), "embed_multi": (VECTORS,)}
KINDS = {
    "embed": "dense vectors",
    "embed_sparse": "sparse weights",
    "embed_multi": "late interaction",
}


def refuse_windows(task: str, reading: TokenizeOptions) -> None:
    """Refuse a task of tokens' vectors over several windows."""
    if reading.truncation == "windows":
        raise InputError(f"{task} reads a text at once: leave out windows", option="truncation")


class EmbeddingTasks(RequestRunner):
    """The tasks whose results are vectors. Options are checked at once, texts when they are read."""

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        defaults: EncoderDefaults,
        queries: Encoder | None = None,
    ) -> None:
        super().__init__(encoder, tokenizer, defaults, queries)
        self.roles = {spec.role for spec in encoder.artifact.outputs}
        self.query_roles = {spec.role for spec in (queries or encoder).artifact.outputs}
        layers = [int(role.removeprefix("hidden.")) for role in self.roles if role.startswith("hidden.")]
        self.last_layer = max(layers, default=None)  # an imported graph with a head may have none

    def embed(self, texts: Iterable[str], options: EmbedOptions) -> Task[Embedding]:
        reading = self.read_options(options, EmbedOptions, "head")
        pooling = options.get("pooling")
        normalize = options.get("normalize")
        if pooling is not None:
            check_choice("pooling", pooling, POOLINGS)
        last = self.need_states("embed")
        if pooling is None and "embed" not in (made := self.list_embedding_tasks()):
            raise InputError(f"embed needs pooling here: this bundle's model is made for {made[0]}")
        defaults = self.defaults
        unit = defaults.normalize if normalize is None else normalize
        in_graph = pooling is None and DENSE in self.roles and (unit or not defaults.normalize)
        role = DENSE if in_graph else f"hidden.{last}"
        if not in_graph and pooling is None and defaults.pooling not in POOLINGS:
            raise InputError(
                f"normalize={normalize!r} needs pooling too: one of {', '.join(POOLINGS)}", option="normalize"
            )
        how = pooling or defaults.pooling
        width = self.encoder.artifact.output(role).axes[-1]
        keep = options.get("truncate_dim")
        check_whole("truncate_dim", keep, 1, width if isinstance(width, int) else sys.maxsize, optional=True)

        precision = options.get("precision", "float32")
        is_own = in_graph and keep is None and unit == defaults.normalize
        ranges = self.find_ranges(precision, width if is_own else None)

        def finish(request: TextRequest, outputs: Outputs) -> Embedding:
            pieces = request.fitted.pieces
            vectors = [
                array if in_graph else pool_tokens(array[piece.unpooled :], how)
                for piece, (array,) in zip(pieces, outputs, strict=True)
            ]
            vector = merge_windows(vectors, [len(piece) for piece in pieces], how)[:keep]
            vector = normalize_vector(vector) if unit else vector
            return Embedding(quantize_vectors(vector, precision, ranges), request.fitted.dropped)

        return self.make_text_task(texts, (role,), finish, reading, options)

    def find_ranges(self, precision: str, width: object) -> Array | None:
        """Return the ranges (2, E) of a vector's numbers, where a type of vectors needs them.

        `width` is that of the checkpoint's own vectors; None of others, whose ranges are not known.
        """
        check_choice("precision", precision, TYPES)
        if precision not in ("int8", "uint8"):
            return None
        ranges = self.defaults.roles.ranges
        if not ranges or len(ranges[0]) != width:
            why = (
                "this bundle has none: export it again with verification"
                if not ranges
                else ("they are those of whole vectors: leave out truncate_dim, pooling and normalize")
            )
            raise InputError(f"precision={precision!r} needs ranges, and {why}", option="precision")
        return np.asarray(ranges, np.float32)

    def embed_sparse(self, texts: Iterable[str], options: SparseOptions) -> Task[SparseEmbedding]:
        reading = self.read_options(options, SparseOptions, "head")
        most = options.get("max_active_dims", self.defaults.roles.max_active_dims)
        least = options.get("min_weight", 0.0)
        check_whole("max_active_dims", most, 1, optional=True)
        if isinstance(least, bool) or not isinstance(least, int | float) or not least >= 0:
            raise InputError(f"min_weight={least!r:.40} must be a number of 0 or more", option="min_weight")
        role = self.need_output("embed_sparse", read_input_type(options))

        def finish(request: TextRequest, outputs: Outputs) -> SparseEmbedding:
            arrays = [array for (array,) in outputs]
            return self.make_sparse(role, request, arrays, least, most)

        return self.make_text_task(texts, (role,), finish, reading, options)

    def make_sparse(
        self,
        role: str,
        request: TextRequest,
        arrays: Sequence[Array],
        least: float = 0.0,
        most: int | None = None,
    ) -> SparseEmbedding:
        """Return a text's weights of more than `least`, whatever their sign, and at most so many."""
        if role == SPARSE:
            weights = arrays[0] if len(arrays) == 1 else np.max(arrays, axis=0)
            ids = np.flatnonzero(np.abs(weights) > least)
            values = weights[ids]
        else:
            ids, values = self.merge_weights(request.fitted.pieces, arrays, least)
        if most is not None and len(ids) > most:
            kept = np.sort(np.argsort(-np.abs(values), kind="stable")[:most])
            ids, values = ids[kept], values[kept]
        tokens = tuple(self.tokenizer.spell_all(ids.tolist()))
        return SparseEmbedding(ids, values, tokens, request.fitted.dropped)

    def merge_weights(
        self, pieces: Sequence[Piece], weights: Sequence[Array], least: float
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Array]:
        """Return the tokens of a text, each once with its largest weight; those around it have none."""
        found: dict[int, float] = {}
        for piece, own in zip(pieces, weights, strict=True):
            for place in self.find_weighted(piece):
                token, weight = piece.ids[place], float(own[place])
                if abs(weight) > max(least, abs(found.get(token, 0.0))):
                    found[token] = weight
        ids = np.array(sorted(found), np.int64)
        return ids, np.array([found[token] for token in ids.tolist()], np.float32)

    def embed_multi(self, texts: Iterable[str], options: PromptOptions) -> Task[MultiVector]:
        reading = self.read_options(options, PromptOptions, "head")
        refuse_windows("embed_multi", reading)
        input_type = read_input_type(options)
        role = self.need_output("embed_multi", input_type)

        def finish(request: TextRequest, outputs: Outputs) -> MultiVector:
            ((vectors,),) = outputs
            return self.make_multi(request, vectors, input_type)

        return self.make_text_task(texts, (role,), finish, reading, options)

    def make_multi(self, request: TextRequest, vectors: Array, input_type: str | None) -> MultiVector:
        """Return the vectors of those of a text's tokens (T, F) that count."""
        (piece,) = request.fitted.pieces
        counted = self.find_counted(piece.ids, input_type)
        tokens = tuple(self.tokenizer.spell_all([piece.ids[place] for place in counted]))
        return MultiVector(vectors[counted], tokens, request.fitted.dropped)

    def embed_hybrid(self, texts: Iterable[str], options: PromptOptions) -> Task[HybridEmbedding]:
        reading = self.read_options(options, PromptOptions, "head")
        refuse_windows("embed_hybrid", reading)
        input_type = read_input_type(options)
        roles = tuple(self.need_output(task, input_type) for task in EMBEDDING_TASKS)

        def finish(request: TextRequest, outputs: Outputs) -> HybridEmbedding:
            ((vector, weights, vectors),) = outputs
            sparse = self.make_sparse(roles[1], request, [weights])
            multi = self.make_multi(request, vectors, input_type)
            return HybridEmbedding(vector, sparse, multi, request.fitted.dropped)

        return self.make_text_task(texts, roles, finish, reading, options)

    def list_embedding_tasks(self) -> tuple[str, ...]:
        """Return the tasks that embed texts, those that the model is made for first."""
        made = tuple(task for task, roles in EMBEDDING_TASKS.items() if self.roles & set(roles))
        if len(made) == len(EMBEDDING_TASKS):
            made = (*made, "embed_hybrid")
        if self.last_layer is None:
            return made
        return (*(made or ("embed",)), "features")

    def need_output(self, task: str, input_type: str | None = None) -> str:
        """Return the output that a task needs of texts of a type; refuse a graph without it."""
        is_queries = input_type == QUERY and self.queries is not None
        roles = self.query_roles if is_queries else self.roles
        found = next((role for role in EMBEDDING_TASKS[task] if role in roles), None)
        if found is None:
            others = [other for other, roles in EMBEDDING_TASKS.items() if self.roles & set(roles)]
            raise InputError(
                f"{task} needs a model of {KINDS[task]}; this bundle's gives {' and '.join(others) or 'none'}"
            )
        return found

    def need_states(self, task: str) -> int:
        """Return the last layer's number; refuse a graph that gives only its head's logits."""
        if self.last_layer is None:
            raise InputError(
                f"{task} needs hidden states, which this bundle's graph does not give; its heads are"
                f" {', '.join(self.defaults.heads)}"
            )
        return self.last_layer
