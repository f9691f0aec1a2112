"""What graphs compute at one time, in bytes, by the sizes of their model, before anything runs.

Of pictures these are feature maps of each level, and the scores of attention, which grow with the square of a
picture's points. ONNX Runtime has no scores where attention is one node, unless its environment variable
ORT_DISABLE_FLASH_ATTENTION is set. All of a graph's results count that live at one time, and an engine keeps
what each graph needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .bundle.artifact import SPARSE
from .bundle.image_defaults import ImageDefaults
from .bundle.manifest import Artifact, TensorSpec

# Names of a model's sizes in its family's configuration.
WIDTHS = ("hidden_size", "n_embd", "d_model")
INNER_WIDTHS = ("intermediate_size", "n_inner", "{}_ffn")  # an encoder-decoder has those of each graph
HEADS = ("num_attention_heads", "n_head", "{}_heads")
INNER_FACTOR = 4  # how many times the width the feed-forward part is where none is named
# Results of a layer that live at one time: of the feed-forward part, of the hidden size, and scores.
INNER_RESULTS = 3
HIDDEN_RESULTS = 9
SCORE_RESULTS = 2
# Of a mixture of experts, of the hidden size and for each expert of a token: what is sorted by expert, its
# parts, the experts' results, and all of these joined.
ROUTED_RESULTS = 4

# Of a recurrent layer, per token: what it reads, in the engine's order of time and reversed; its states, in
# both orders and reversed.
READ_RESULTS = 3
STATE_RESULTS = 3
GATES = {"gru": 3, "lstm": 4}
# Of a decoder's step, per row: the products of a cell's input and of its state, and what becomes of them.
CELL_RESULTS = 4

ITEM = 4  # bytes: ONNX Runtime computes in fp32 on a CPU, and what is kept in fp16 takes less elsewhere
# Results of a transformer block, in channels: its feed-forward part's product (8), the two halves of it (8),
# activation (4), and product of both (4); and its input, norm, sum, query, key and value before and after
# they are split into heads, context, and what is projected.
BLOCK_RESULTS = 24 + 12
# Of a residual block, of its input that has another level's channels too: joined, normalized, scaled,
# shifted, activated, reordered for the convolution; its result, the sum, and a copy for the next one.
RESIDUAL_RESULTS = 9
# Of a residual block of the autoencoder: its input, normalized, scaled, shifted and activated.
PICTURE_RESULTS = 5


def count_logit_bytes(artifact: Artifact, rows: int) -> int:
    """Return the size of the logits that a decoder gives for so many rows at one time."""
    spec = next((spec for spec in artifact.outputs if spec.role == "logits"), None)
    if spec is None or not isinstance(spec.axes[-1], int):
        return 0
    return rows * spec.axes[-1] * np.dtype(spec.dtype).itemsize


def count_output_bytes(specs: Sequence[TensorSpec], count: int, longest: int, rows: int) -> int:
    """Return the size of some outputs of `count` sequences; `rows` of their positions have word logits."""
    found = 0
    for spec in specs:
        names = spec.axis_names()
        numbers = math.prod(axis for axis in names if isinstance(axis, int))
        places = count
        if names[0] == "rows":
            places = rows
        elif "tokens" in names:
            places = count * longest
        found += places * numbers * np.dtype(spec.dtype).itemsize
    return found


def count_words(specs: Sequence[TensorSpec]) -> int:
    """Return how many logits of words a graph makes its weights of, for each token; 0 of other graphs."""
    return next((int(spec.axes[-1]) for spec in specs if spec.role == SPARSE), 0)  # type: ignore[arg-type]


def count_word_bytes(specs: Sequence[TensorSpec], tokens: int) -> int:
    """Return what the logits of so many tokens take that weights are made of, twice, as they are masked."""
    return 2 * count_words(specs) * tokens * ITEM


def count_batch_bytes(config: Mapping[str, Any], tokens: int, longest: int, graph: str = "encoder") -> int:
    """Return what a batch of so many tokens, padding included, needs while it runs.

    A layer's results that live at one time: its feed-forward part's product, activation and what that is
    computed in (a gated one's gate, product and activation); of the hidden size the layer's input, query, key
    and value before and after they are split into heads, context and sum; and every head's scores of every
    token for every token, twice, as the mask is added to them; of a mixture of experts a token's vector for
    each of its experts. All of them count, though scores are gone before the feed-forward part begins: an
    engine gives the place of one to the other in parts only. Of a recurrent model see `count_gated_bytes`. 0
    where the configuration does not name the sizes.
    """
    if config.get("cell") in GATES:
        return count_gated_bytes(config, tokens, graph)
    width, inner, heads = (
        find_size(config, [name.format(graph) for name in names]) for names in (WIDTHS, INNER_WIDTHS, HEADS)
    )
    if not width or not heads:
        return 0
    within = config.get("decoder")  # of a decoder that reads whole texts
    mixture = within if isinstance(within, Mapping) else config
    inner = max(inner or INNER_FACTOR * width, find_size(mixture, ["expert_size"]))
    scores = heads * longest
    hidden = (HIDDEN_RESULTS + ROUTED_RESULTS * find_size(mixture, ["experts_per_token"])) * width
    return int(4 * tokens * (INNER_RESULTS * inner + hidden + SCORE_RESULTS * scores))


def count_gated_bytes(config: Mapping[str, Any], tokens: int, graph: str) -> int:
    """Return what a recurrent model's encoder needs for some tokens, or its decoder's step for some rows.

    A layer of the encoder has the products of all tokens at one time. A step compares each row's state with a
    source of as many tokens as the model takes; additive scores have a vector for each of them, twice.
    """
    gates = GATES[config["cell"]]
    read = config["embedding_size"]
    memory = config["encoder_size"] * (2 if config["bidirectional"] else 1)
    size = config["decoder_size"]
    keys = {"additive": config["attention_size"], "general": size}.get(config["attention"], 0)
    if graph == "encoder":
        widest = max(read, memory) if config["encoder_layers"] > 1 else read
        return int(ITEM * tokens * (READ_RESULTS * widest + gates * memory + STATE_RESULTS * memory + keys))
    compared = SCORE_RESULTS + (2 * keys if config["attention"] == "additive" else 0)
    scores = 0 if config["attention"] == "none" else config["max_positions"] * compared
    joined = 3 * (read + memory + size)  # what the cell reads, and what the output reads, twice
    return int(ITEM * tokens * (joined + CELL_RESULTS * gates * size + scores))


def find_size(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the first of some sizes that a configuration names; 0 where it names none."""
    return next((config[name] for name in names if type(config.get(name)) is int), 0)


@dataclass(frozen=True)
class PictureBatch:
    """Describes what one call makes.

    Attributes:
        count: of pictures.
        guided: whether the UNet has a row for each negative prompt too.
        most: rows that a graph runs at one time.
        height: of latents.
        width: likewise.
        tokens: of each prompt.
        reads_picture: whether another picture is read, by the encoder's side.
        has_scores: whether the UNet has all scores of an attention at one time.
    """

    count: int
    guided: bool
    most: int
    height: int
    width: int
    tokens: int
    reads_picture: bool
    has_scores: bool

    @property
    def pictures(self) -> int:
        """Pictures that the autoencoder makes at one time."""
        return min(self.count, self.most)

    @property
    def rows(self) -> int:
        """Rows that text encoder and UNet run at one time."""
        return min(self.count * (2 if self.guided else 1), self.most)


def describe_usual_batch(defaults: ImageDefaults, count: int, has_scores: bool) -> PictureBatch:
    """Return a call for pictures of the size that a model was made for, with what leads away from them."""
    height, width = (side // defaults.multiple for side in (defaults.height, defaults.width))
    guided = defaults.guidance_features is None
    return PictureBatch(
        count=count,
        guided=guided,
        most=2 * count,
        height=height,
        width=width,
        tokens=defaults.max_length,
        reads_picture=False,
        has_scores=has_scores,
    )


def count_picture_bytes(config: Mapping[str, Any], batch: PictureBatch, multiple: int) -> int:
    """Return what all graphs need for a batch, each of which keeps its memory until the model is closed.

    Args:
        config: the bundle's, with the sizes of "text", "unet" and "vae".
        batch: what runs at one time.
        multiple: how many times as wide as its latents a picture is.
    """
    text = count_batch_bytes(config["text"], batch.rows * batch.tokens, batch.tokens)
    made = text + count_unet_bytes(config["unet"], batch) + count_vae_bytes(config["vae"], batch, multiple)
    if not batch.reads_picture:
        return made
    return made + count_vae_bytes(config["vae"], replace(batch, count=1), multiple)


def count_unet_bytes(config: Mapping[str, Any], batch: PictureBatch) -> int:
    """Return what the UNet needs: its largest scores, and each level's results, kept ones too.

    What is kept on the way down is joined on the way up. A softmax takes the place of its scores.
    """
    channels = config["block_out_channels"]
    scores = 0
    features = 0
    for level, own in enumerate(channels):
        points = halve(batch.height, level) * halve(batch.width, level)
        below = channels[min(level + 1, len(channels) - 1)]
        kept = (config["layers_per_block"] + 1) * own
        features += points * (RESIDUAL_RESULTS * (own + below) + kept)
        if config["has_attention"][level]:
            heads = config["heads"][level]
            features += points * (BLOCK_RESULTS * own + heads * batch.tokens)
            scores = max(scores, heads * points**2 if batch.has_scores else 0)
    return int(ITEM * batch.rows * (scores + features))


def count_vae_bytes(config: Mapping[str, Any], batch: PictureBatch, multiple: int) -> int:
    """Return what a side of the autoencoder needs: scores of one head over latents, and maps of full size.

    Those have the channels of the second level, as the decoder widens them before it has fewer.
    """
    points = batch.height * batch.width
    channels = max(config["block_out_channels"][:2])
    maps = PICTURE_RESULTS * channels * points * multiple**2
    return int(ITEM * batch.pictures * (points**2 + maps))


def halve(length: int, times: int) -> int:
    """Return a length after some convolutions that take every second point."""
    return -(-length // (1 << times))
