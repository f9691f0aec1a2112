"""Explanations that no model gave: their numbers are random, and consistent with each other."""

from __future__ import annotations

import base64
import re
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
METHODS = ("gradient_norm", "gradient_x_input", "integrated_gradients", "occlusion")
PROMPT = (
    "The lighthouse keeper climbed the narrow stairs every evening, because the lamp had to be lit before"
    " the first ships came round the point.\nOn stormy nights he"
)
ANSWER = " stayed beside it until dawn, and listened to the wind."
SOURCE = "The garden behind the old house is full of apple trees."
TRANSLATION = "Der Garten hinter dem alten Haus ist voller Apfelbäume."
REVIEW = "I expected a dull evening, but the film was warm, funny and wonderfully played."
WORDS = (" the", " a", " his", " and", " would", " of", " watched", " God", " in", " light", " sea", " not")
LABELS = ("positive", "neutral", "negative")


def split(text: str) -> list[str]:
    """Return a text in tokens: words with the space before them, long ones in two pieces."""
    pieces = []
    for word in re.findall(r" ?[\w']+|\n| ?[^\w\s]", text):
        cut = 6 if len(word) > 9 else len(word)
        pieces += [piece for piece in (word[:cut], word[cut:]) if piece]
    return pieces


def make_tokens(**parts: list[str]) -> list[dict[str, Any]]:
    """Return the tokens of parts, in order."""
    tokens = [(text, name) for name, texts in parts.items() for text in texts]
    return [{"text": text, "id": 100 + i, "part": part} for i, (text, part) in enumerate(tokens)]


def make_special(text: str) -> dict[str, Any]:
    return {"text": text, "id": 0, "part": "special"}


def make_generation(
    prompt: list[str] | None = None,
    answer: list[str] | None = None,
    *,
    layers: int = 6,
    heads: int = 4,
    seed: int = 0,
) -> dict[str, Any]:
    """Return what `planforge explain` would write of a text that was continued."""
    rng = np.random.default_rng(seed)
    prompt = split(PROMPT) if prompt is None else prompt
    answer = split(ANSWER) if answer is None else answer
    tokens = make_tokens(prompt=prompt, answer=answer)
    targets = [
        make_target(rng, token["text"], place) for place, token in enumerate(tokens) if place >= len(prompt)
    ]
    reads = [target["token"] for target in targets]
    read = len(tokens) - 1  # the last token of the answer is not read
    return {
        "kind": "generation",
        "model": "gpt2-demo",
        "tokens": tokens,
        "targets": targets,
        "saliency": make_saliency(rng, reads, len(tokens)),
        "missing": [0.013] * len(targets),
        "lens": make_lens(rng, [target["text"] for target in targets], layers, WORDS, (" God", " light")),
        "attention": [make_attention(rng, "self", layers, heads, (0, read), (0, read), is_causal=True)],
        "neurons": make_factors(rng, len(tokens), layers),
    }


def make_translation(seed: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    tokens = make_tokens(source=split(SOURCE), translation=split(TRANSLATION))
    source = len(split(SOURCE)) + 1
    tokens[source - 1 : source - 1] = [make_special("</s>"), make_special("<pad>")]
    tokens.append(make_special("</s>"))
    places = range(source + 1, len(tokens))
    targets = [make_target(rng, tokens[place]["text"], place) for place in places]
    end = len(tokens) - 1
    return {
        "kind": "translation",
        "model": "transformer-demo",
        "tokens": tokens,
        "targets": targets,
        "saliency": make_saliency(rng, list(places), len(tokens)),
        "missing": None,
        "lens": None,
        "attention": [
            make_attention(rng, "cross", 3, 4, (source, end), (0, source)),
            make_attention(rng, "source", 3, 4, (0, source), (0, source)),
            make_attention(rng, "self", 3, 4, (source, end), (source, end), is_causal=True),
        ],
        "neurons": None,
    }


def make_classification(labels: tuple[str, ...] = LABELS, seed: int = 2) -> dict[str, Any]:
    """Return the explanation of a text's labels; of one label alone it is the score of a ranker."""
    rng = np.random.default_rng(seed)
    is_ranking = len(labels) == 1
    text = (
        {"query": split("Who plays well?"), "text": split(REVIEW)} if is_ranking else {"text": split(REVIEW)}
    )
    tokens = [make_special("[CLS]"), *make_tokens(**text), make_special("[SEP]")]
    shares = np.sort(rng.dirichlet(np.ones(len(labels))))[::-1].round(4).tolist()
    likeliest = [{"text": name, "probability": p} for name, p in zip(labels, shares, strict=True)]
    targets = [
        {
            "token": None,
            "text": name,
            "logit": round(3.21 - 2 * place, 2),
            "probability": None if is_ranking else shares[place],
            "likeliest": [] if is_ranking else likeliest,
        }
        for place, name in enumerate(labels)
    ]
    whole = (0, len(tokens))
    return {
        "kind": "ranking" if is_ranking else "classification",
        "model": "bert-demo",
        "tokens": tokens,
        "targets": targets,
        "saliency": make_saliency(rng, [len(tokens)] * len(targets), len(tokens)),
        "missing": None,
        "lens": None if is_ranking else make_lens_of_labels(rng, labels, 4),
        "attention": [make_attention(rng, "self", 4, 4, whole, whole)],
        "neurons": None,
    }


def make_target(rng: np.random.Generator, text: str, place: int) -> dict[str, Any]:
    """Return a token of an answer; it is among the likeliest, and most often the likeliest."""
    shares = np.sort(rng.dirichlet(np.full(10, 0.4)))[::-1] * rng.uniform(0.7, 0.98)
    words = [word for word in WORDS if word != text][:9]
    words.insert(0 if rng.random() < 0.7 else 2, text)
    likeliest = [{"text": word, "probability": float(p)} for word, p in zip(words, shares, strict=True)]
    probability = likeliest[words.index(text)]["probability"]
    logit = round(float(rng.normal(8, 2)), 3)
    return {"token": place, "text": text, "logit": logit, "probability": probability, "likeliest": likeliest}


def make_saliency(rng: np.random.Generator, reads: list[int], count: int) -> dict[str, Any]:
    """Return numbers by method for targets, each of which reads so many tokens."""
    saliency: dict[str, list[list[float | None]]] = {}
    for method in METHODS:
        saliency[method] = []
        for read in reads:
            row = rng.normal(0, 1, read) ** 3 * np.linspace(0.4, 1, read)
            if method == "gradient_norm":
                row = np.abs(row) / np.abs(row).sum()
            saliency[method].append([*map(float, row), *[None] * (count - read)])
    return saliency


def make_lens(
    rng: np.random.Generator,
    texts: list[str],
    layers: int,
    words: tuple[str, ...],
    watched: tuple[str, ...],
) -> dict[str, Any]:
    """Return ranks that get better from layer to layer; a token of rank 1 is the likeliest."""
    steps = np.linspace(3.5, -0.7, layers + 1)[:, None]
    ranks = np.maximum(1, 10 ** (steps + rng.normal(0, 0.5, (layers + 1, len(texts))))).astype(int)
    likeliest = [
        [
            text if rank == 1 else words[rng.integers(len(words))]
            for text, rank in zip(texts, row, strict=True)
        ]
        for row in ranks
    ]
    other = rng.integers(2, 3000, (len(watched), layers + 1, len(texts)))
    return {
        "layers": ["embeddings", *[f"layer {number + 1}" for number in range(layers)]],
        "ranks": ranks.tolist(),
        "likeliest": likeliest,
        "watched": [
            {"text": text, "ranks": rows.tolist()} for text, rows in zip(watched, other, strict=True)
        ],
    }


def make_lens_of_labels(rng: np.random.Generator, labels: tuple[str, ...], layers: int) -> dict[str, Any]:
    """Return the ranks of labels among each other; at the last layer the first is the likeliest."""
    count = len(labels)
    orders = [rng.permutation(count) for _ in range(layers)] + [np.arange(count)]
    return {
        "layers": ["embeddings", *[f"layer {number + 1}" for number in range(layers)]],
        "ranks": [(order + 1).tolist() for order in orders],
        "likeliest": [[labels[int(order.argmin())]] * count for order in orders],
        "watched": [],
    }


def make_attention(
    rng: np.random.Generator,
    name: str,
    layers: int,
    heads: int,
    queries: tuple[int, int],
    keys: tuple[int, int],
    *,
    is_causal: bool = False,
) -> dict[str, Any]:
    """Return weights as a page reads them; those of a query sum to 1, but for rounding."""
    shape = (layers, heads, queries[1] - queries[0], keys[1] - keys[0])
    weights: Floats = rng.gamma(0.15, 1, shape) + 1e-6
    weights[..., 0] += 0.5
    if is_causal:
        weights *= np.tri(shape[2], shape[3])
    weights /= weights.sum(-1, keepdims=True)
    packed = zlib.compress(np.rint(weights * 255).astype(np.uint8).tobytes())
    return {
        "name": name,
        "layers": layers,
        "heads": heads,
        "queries": list(queries),
        "keys": list(keys),
        "weights": base64.b64encode(packed).decode(),
    }


def read_attention(entry: dict[str, Any]) -> NDArray[np.uint8]:
    """Return the weights (layers, heads, queries, keys) of an entry, 255 of them to 1."""
    shape = [
        entry["layers"],
        entry["heads"],
        *(end - first for first, end in (entry["queries"], entry["keys"])),
    ]
    return np.frombuffer(zlib.decompress(base64.b64decode(entry["weights"])), np.uint8).reshape(shape)


def make_factors(rng: np.random.Generator, count: int, layers: int, factors: int = 5) -> dict[str, Any]:
    """Return groups of neurons, each strong around a few tokens."""
    centers = rng.integers(0, count, (factors, 3, 1))
    bumps: Floats = np.exp(-(((np.arange(count) - centers) / 1.5) ** 2)).max(1)
    activations = np.clip(bumps * 0.9 + rng.uniform(0, 0.1, (factors, count)), 0, 1)
    strongest = np.argsort(-activations, axis=1)[:, :6]
    shares = rng.dirichlet(np.full(layers, 0.5), factors)
    return {
        "activations": activations.round(4).tolist(),
        "tokens": strongest.tolist(),
        "layers": shares.round(4).tolist(),
    }
