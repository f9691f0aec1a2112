"""The graphs that explain a model: `layers`, `lens` and `gradient`, in fp32, of whole texts without padding.

They share the weights of the fp32 graphs, and are added to them: `load` runs them only for `explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....runtime.apps.explain.objectives import LENS_TOKENS
from ....runtime.bundle.manifest import Axis, TensorSpec
from ....runtime.errors import InputError
from ...task_traits import ENCODING, GENERATION, TRANSLATION
from .recipe import Recipe, TraceOptions, index_recipes

if TYPE_CHECKING:
    from torch import nn

EXPLAIN = "explain"  # the name among an export's outputs
OPSET = 20
BATCH = Axis("batch", 1, 8, 64)  # texts of one length
STATES = Axis("states", 1, 64, 2**20)  # that a lens reads at a time
ASKED = Axis("asked", 1, 1, 64)  # tokens that a lens ranks
CLASSES = Axis("classes", 1, 2, 2**16)  # of a head on top of a text's vector
EXAMPLE = {
    "batch": 2,
    "tokens": 3,
    "source_tokens": 5,
    "states": 4,
    "asked": 6,
    "classes": 7,
}


@dataclass(frozen=True)
class StackSizes:
    """The sizes of a stack of layers, and the prefix of its results' names."""

    layers: int
    heads: int
    width: int
    neurons: int
    prefix: str = ""
    embeds: bool = True  # whether the first layer reads something else than the embeddings as they are

    def list_specs(self, tokens: Axis) -> list[TensorSpec]:
        """Return the specs of its embeddings, hidden states, attention weights and neurons, in this order."""
        wide = (BATCH, tokens, self.width)
        seen = (BATCH, self.heads, tokens, tokens)
        inner = (BATCH, tokens, self.neurons)
        each = range(self.layers)
        return [
            *([make_spec(f"{self.prefix}embeddings", *wide)] if self.embeds else []),
            *(make_spec(f"{self.prefix}hidden.{layer}", *wide) for layer in (*each, self.layers)),
            *(make_spec(f"{self.prefix}attentions.{layer}", *seen) for layer in each),
            *(make_spec(f"{self.prefix}activations.{layer}", *inner) for layer in each),
        ]


def make_spec(name: str, *axes: Axis | int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, name, dtype, axes)


TARGET = make_spec("target", BATCH, dtype="int64")
ROW = make_spec("row", BATCH, dtype="int64")
OBJECTIVE = make_spec("objective", 1, dtype="int64")  # see `planforge.runtime.apps.explain.objectives`


def make_explanations(task: str, config: Any, choices: TraceOptions) -> dict[str, Recipe]:
    """Return the recipes of the graphs that explain a model, by their ids."""
    tokens = Axis("tokens", 1, min(128, choices.max_length), choices.max_length)
    explain = {
        GENERATION.name: explain_decoder,
        ENCODING.name: explain_encoder,
        TRANSLATION.name: explain_transformer,
    }
    return index_recipes(explain[task](config, tokens))


def explain_decoder(config: Any, tokens: Axis) -> Iterable[Recipe]:
    if getattr(config, "num_experts", 0):  # each token has neurons of experts of its own
        raise InputError(
            f"output {EXPLAIN!r} is not for mixtures of experts; leave it out: occlusion explains them"
            " without graphs of its own"
        )
    sizes = StackSizes(
        config.cache_sizes[0],
        config.num_attention_heads,
        config.hidden_size,
        config.intermediate_size,
        embeds=getattr(config, "embedding_scale", None) != 1,  # GPT-2 adds positions
    )
    ids = make_spec("input_ids", BATCH, tokens, dtype="int64")
    embeddings = make_spec("embeddings", BATCH, tokens, sizes.width)
    yield make_recipe("layers", [ids], sizes.list_specs(tokens), wrap("LayersOfDecoder"))
    yield make_lens(sizes.width, config.vocab_size)
    yield make_gradient("ScoreOfDecoder", [embeddings], [ROW, TARGET, OBJECTIVE])


def explain_transformer(config: Any, tokens: Axis) -> Iterable[Recipe]:
    if config.is_recurrent:
        raise InputError(
            f"output {EXPLAIN!r} is for Transformers; cross_attentions shows what recurrent models attend to"
        )
    source_tokens = Axis("source_tokens", tokens.min, tokens.opt, tokens.max)
    width = config.d_model
    source = StackSizes(
        config.encoder_layers, config.encoder_heads, width, config.encoder_ffn, prefix="source_"
    )
    target = StackSizes(config.decoder_layers, config.decoder_heads, width, config.decoder_ffn)
    outputs = source.list_specs(source_tokens) + target.list_specs(tokens)
    outputs += [
        make_spec(f"cross_attentions.{layer}", BATCH, target.heads, tokens, source_tokens)
        for layer in range(target.layers)
    ]
    ids = [
        make_spec("source_ids", BATCH, source_tokens, dtype="int64"),
        make_spec("input_ids", BATCH, tokens, dtype="int64"),
    ]
    embeddings = [
        make_spec("source_embeddings", BATCH, source_tokens, width),
        make_spec("embeddings", BATCH, tokens, width),
    ]
    yield make_recipe("layers", ids, outputs, wrap("LayersOfTransformer"))
    yield make_lens(width, config.vocab_size)
    yield make_gradient("ScoreOfTransformer", embeddings, [ROW, TARGET, OBJECTIVE])


def explain_encoder(config: Any, tokens: Axis) -> Iterable[Recipe]:
    """Yield the recipes for a classifier or ranker, or for an encoder that gives a text's vector."""
    from ....models.causal_encoder import CausalEncoderConfig  # loads torch

    if isinstance(config, CausalEncoderConfig):  # by its states alone no token is told to be padding
        raise InputError(
            f"output {EXPLAIN!r} is not for decoders that classify texts; leave it out: occlusion explains"
            " them without graphs of its own"
        )
    others = set(config.heads) - {"sequence_classification"}
    if others:
        raise InputError(
            f"output {EXPLAIN!r} is for models that classify or rank texts, or give their vectors; this one"
            f" has the head {sorted(others)[0]}"
        )
    sizes = StackSizes(
        config.num_hidden_layers, config.num_attention_heads, config.hidden_size, config.intermediate_size
    )
    segments = [make_spec("token_type_ids", BATCH, tokens, dtype="int64")] if config.type_vocab_size else []
    ids = make_spec("input_ids", BATCH, tokens, dtype="int64")
    embeddings = make_spec("embeddings", BATCH, tokens, sizes.width)
    hidden = make_spec("hidden", STATES, tokens, sizes.width)
    yield make_recipe("layers", [ids, *segments], sizes.list_specs(tokens), wrap("LayersOfEncoder"))
    if config.heads:
        answer = make_spec("logits", STATES, config.num_labels)
        yield make_recipe("lens", [hidden], [answer], wrap("LensOfEncoder"))
        yield make_gradient("ScoreOfEncoder", [embeddings], [*segments, TARGET, OBJECTIVE])
        return
    width = measure_vector(config)
    head = [make_spec("weight", CLASSES, width), make_spec("bias", CLASSES)]
    yield make_recipe("lens", [hidden], [make_spec("vector", STATES, width)], wrap("LensOfEncoder"))
    yield make_gradient("ScoreOfVector", [embeddings], [*segments, *head, TARGET, OBJECTIVE])


def measure_vector(config: Any) -> int:
    """Return how many values the vector of a text has."""
    if config.sentence is None:
        return int(config.hidden_size)
    return int(config.sentence.measure_vector(config.hidden_size))


def make_lens(width: int, vocab_size: int) -> Recipe:
    """Return the recipe of a decoder's lens, which ranks tokens of its vocabulary."""
    named = min(LENS_TOKENS, vocab_size)
    return make_recipe(
        "lens",
        [make_spec("hidden", STATES, width), make_spec("tokens", STATES, ASKED, dtype="int64")],
        [
            make_spec("ranks", STATES, ASKED, dtype="int64"),
            make_spec("logprobs", STATES, ASKED),
            make_spec("likeliest", STATES, named, dtype="int64"),
            make_spec("likeliest_logprobs", STATES, named),
        ],
        wrap("Lens"),
    )


def make_gradient(score: str, embeddings: Sequence[TensorSpec], rest: Sequence[TensorSpec]) -> Recipe:
    """Return the recipe of the gradients of a score by its first inputs, and the score itself."""
    inputs = [*embeddings, *rest]
    outputs = [make_spec(f"gradient.{spec.name}", *spec.axes) for spec in embeddings]
    count = len(embeddings)
    outputs.append(make_spec("score", BATCH))
    module = wrap_gradient(score, inputs, count)
    return make_recipe("gradient", inputs, outputs, module, wrap_autograd(score, count))


def make_recipe(
    graph: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    module: Callable[[Any], nn.Module],
    reference: Callable[[Any], Callable[..., Any]] | None = None,
) -> Recipe:
    """Return a recipe; a module that is traced unchanged is its own reference."""
    return Recipe(
        graph=graph,
        dialect="portable",
        opset=OPSET,
        padding_side="right",
        module=module,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        example=EXAMPLE,
        reference=module if reference is None else reference,
    )


def wrap(name: str) -> Callable[[Any], nn.Module]:
    """Return a function that wraps a model in a class of `explanations`, imported late as it loads torch."""

    def wrap_model(model: Any) -> nn.Module:
        from .. import explanations

        module: nn.Module = getattr(explanations, name)(model)
        return module

    return wrap_model


def wrap_gradient(score: str, inputs: Sequence[TensorSpec], count: int) -> Callable[[Any], nn.Module]:
    """Return a function that traces the gradient of a model's score by the first `count` inputs."""

    def trace_gradient(model: Any) -> nn.Module:
        import torch

        from .. import explanations, gradients

        names = dict.fromkeys(axis.name for spec in inputs for axis in spec.axes if isinstance(axis, Axis))
        sizes = gradients.choose_sizes(model, list(names))
        examples = [
            torch.zeros(
                [sizes[a.name] if isinstance(a, Axis) else a for a in spec.axes],
                dtype=getattr(torch, spec.dtype),
            )
            for spec in inputs
        ]
        return gradients.Gradient(getattr(explanations, score)(model), examples, count)

    return trace_gradient


def wrap_autograd(score: str, count: int) -> Callable[[Any], Callable[..., Any]]:
    """Return a function that computes a score's gradient by the first `count` inputs with torch.autograd."""

    def make_reference(model: Any) -> Callable[..., Any]:
        from .. import explanations, gradients

        return gradients.Autograd(getattr(explanations, score)(model), count)

    return make_reference
