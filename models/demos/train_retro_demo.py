#!/usr/bin/env python3
"""Train the RETRO demo: a language model that reads neighbours of its text in the King James Bible.

python models/demos/train_retro_demo.py --out models/demos/retro-demo [--minutes N | --steps N]

2 Kings and Mark are held out, which have much in common with other books. The neighbours of a chunk come from
other books, by the index that the runtime uses too. A model of this size takes hours, not minutes, to learn
to look for what it has just read. So the attention to neighbours begins as such a search, see
`begin_with_copying`, and in the first part of the training some neighbours are the text that follows, with
errors.

Needs torch, tokenizers, safetensors and numpy, and the program `bible`.

B windows, T tokens, L chunks of a window, M tokens of a chunk, K neighbours, R tokens of a neighbour
"""

from __future__ import annotations

import argparse
import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from planforge.models import Retro, RetroConfig, load_model, save_model, training
from planforge.models.demos.bible import (
    END,
    END_ID,
    VOCAB_SIZE,
    parse_books,
    read_bible,
    text_of,
    train_tokenizer,
)
from planforge.models.demos.language_model import SEED, Muon, log, write_json
from planforge.models.training import schedule_rate
from planforge.runtime.bundle.retrieval_defaults import RetrievalDefaults
from planforge.runtime.decoding.retrieval import pad_neighbours
from planforge.runtime.search.build import build_index
from planforge.runtime.search.neighbour_index import NeighbourIndex
from planforge.runtime.text.tokenizer import Tokenizer as OwnTokenizer

HELD_OUT = ("2Ki", "Mark")
CHUNK = 32
WINDOW = 256  # tokens
BATCH = 8
RATE = 4e-3
NO_NEIGHBOURS = 0.15  # of a batch's rows
FOLLOWING = 0.35  # of the rows: a neighbour is the text that follows; falls to 0
FOLLOWING_ENDS = 0.7  # of the training
ERRORS = (0.05, 0.35)  # of such a neighbour's tokens, from and to
CONFIG = RetroConfig(
    vocab_size=VOCAB_SIZE,
    max_positions=512,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    head_size=64,
    intermediate_size=768,
    cross_layers=(1, 3),
    chunk_length=CHUNK,
    neighbours=2,
    neighbour_length=2 * CHUNK,
    encoder_size=192,
    encoder_layers=1,
    encoder_heads=3,
    encoder_head_size=64,
    encoder_intermediate_size=384,
    encoder_cross_layers=(0,),
    encoder_words=True,
    cross_positions=False,
)
DEFAULTS = RetrievalDefaults(CHUNK, CONFIG.neighbours, CONFIG.neighbour_length)


@dataclass(frozen=True)
class Book:
    """A book's tokens (T,), and the neighbours (L, K, R) of its chunks with their mask."""

    ids: Tensor
    neighbours: Tensor
    mask: Tensor
    characters: int


def open_index(texts: Mapping[str, str], tokenizer: Path, folder: Path) -> NeighbourIndex:
    """Make an index of texts, and open it."""
    own = OwnTokenizer.from_file(tokenizer)
    sha256 = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    length = DEFAULTS.neighbour_length
    build_index(
        texts, folder, tokenizer=own, tokenizer_hash=sha256, chunk_length=CHUNK, neighbour_length=length
    )
    return NeighbourIndex.open(folder, own, sha256, CHUNK, length)


def read_book(name: str, text: str, tokenizer: Tokenizer, index: NeighbourIndex, own: bool = False) -> Book:
    """Return a book with its neighbours; those of the book itself only if `own`."""
    ids = tokenizer.encode(text).ids
    chunks = [ids[begin : begin + CHUNK] for begin in range(0, len(ids) - CHUNK + 1, CHUNK)]
    found = [
        neighbours
        for begin in range(0, len(chunks), 64)
        for neighbours in index.find(chunks[begin : begin + 64], CONFIG.neighbours, () if own else (name,))
    ]
    shape = (len(chunks), CONFIG.neighbours, CONFIG.neighbour_length)
    padded, mask = (torch.from_numpy(array).view(shape) for array in pad_neighbours(found, DEFAULTS))
    return Book(torch.tensor(ids), padded, mask, len(text))


def make_model() -> Retro:
    """Return an untrained model."""
    torch.manual_seed(SEED)
    model = Retro(CONFIG)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            is_table = "words" in name or name == "output.weight"
            torch.nn.init.normal_(parameter, std=0.02 if is_table else 0.5 * parameter.shape[1] ** -0.5)
        if name.endswith(("attention.output.weight", "feed_forward.output.weight")):
            parameter.data *= 0.3
    begin_with_copying(model)
    return model


@torch.no_grad()
def begin_with_copying(model: Retro) -> None:
    """Let the attention to neighbours begin as a search for the current token, which gives the one behind it.

    A word of the encoder is 63 numbers to be found by, a constant, 64 numbers that say what it is, and room
    for those of the next word. A head of the encoder, whose queries and keys are constant but for rotation,
    fetches them. In the first layer of the decoder that attends to neighbours, the queries and keys of two
    heads are the numbers to be found by, and their values those of the next word. In the last such layer they
    look for words that are likely anyway.
    """
    width = CONFIG.hidden_size
    random = torch.Generator().manual_seed(SEED)
    find = torch.linalg.qr(torch.randn(width, 63, generator=random))[0]  # orthonormal columns
    tell = torch.linalg.qr(torch.randn(width, 64, generator=random))[0]
    words = F.normalize(model.words.weight, dim=1)
    table = model.encoder.words.weight
    table.zero_()
    table[:, :63] = words @ find * (2 * (width / 63) ** 0.5)
    table[:, 63] = 2.0
    table[:, 64:128] = words @ tell * (2 * (width / 64) ** 0.5)

    layer: Any = model.encoder.layers[0]
    fetch = layer.attention
    frequencies = 10000.0 ** (-torch.arange(32) / 32)
    sharp = (torch.arange(32) < 12) * 3.0
    for weight in (fetch.query.weight, fetch.key.weight, fetch.value.weight):
        weight[:64] = 0
    # A query that is turned by one place more sees the token behind its own.
    fetch.query.weight[:64, 63] = torch.cat([sharp * frequencies.cos(), sharp * frequencies.sin()])
    fetch.key.weight[:32, 63] = sharp
    fetch.value.weight[:64, 64:128] = torch.eye(64)
    fetch.output.weight[:, :64] = 0
    fetch.output.weight[:, 64:] *= 0.1
    fetch.output.weight[128:] = 0
    fetch.output.weight[128:, :64] = torch.eye(64)
    for part in (layer.cross, layer.feed_forward):
        part.output.weight *= 0.1

    for number, place, sharpness in ((CONFIG.cross_layers[0], 128, 1.0), (CONFIG.cross_layers[-1], 64, 0.5)):
        cross: Any = model.layers[number].cross
        for weight, factor in (
            (cross.query.weight, 0.3),
            (cross.key.weight, 0.3),
            (cross.output.weight, 0.2),
        ):
            weight *= factor
        for head in range(2):
            own = slice(64 * head, 64 * head + 64)
            half = slice(32 * head, 32 * head + 32)
            for weight in (cross.query.weight, cross.key.weight, cross.value.weight):
                weight[own] = 0
            cross.output.weight[:, own] = 0
            cross.query.weight[64 * head : 64 * head + 63] = find.T * sharpness
            cross.key.weight[64 * head : 64 * head + 63, :63] = torch.eye(63)
            cross.value.weight[64 * head : 64 * head + 32, place + 32 * head : place + 32 * head + 32] = (
                torch.eye(32)
            )
            cross.output.weight[:, 64 * head : 64 * head + 32] = tell[:, half] * 0.5


def draw_batches(
    books: list[Book], measure_done: Callable[[], float]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield windows (B, T + 1) with the neighbours of their chunks and a mask, until the training is over."""
    chunks = WINDOW // CHUNK
    starts = [(book, begin) for book in books for begin in range(len(book.neighbours) - chunks - 1)]
    generator = torch.Generator().manual_seed(SEED)
    while (done := measure_done()) < 1.0:
        rows = []
        for number in torch.randint(len(starts), (BATCH,), generator=generator).tolist():
            book, begin = starts[number]
            ids = book.ids[begin * CHUNK : begin * CHUNK + WINDOW + CHUNK + 1]
            neighbours = book.neighbours[begin : begin + chunks].clone()
            mask = book.mask[begin : begin + chunks].clone()
            draw = torch.rand(1, generator=generator).item()
            following = FOLLOWING * max(0.0, 1.0 - done / FOLLOWING_ENDS)
            if draw < NO_NEIGHBOURS:
                mask.zero_()
            elif draw < NO_NEIGHBOURS + following:
                place = int(torch.randint(CONFIG.neighbours, (1,), generator=generator))
                neighbours[:, place] = follow(ids, generator)
                mask[:, place] = 1
            rows.append((ids[: WINDOW + 1], neighbours, mask))
        ids, neighbours, mask = (torch.stack(parts) for parts in zip(*rows, strict=True))
        yield ids, neighbours, mask


def follow(ids: Tensor, generator: torch.Generator) -> Tensor:
    """Return for each chunk the text about it (L, R), moved by some tokens, and with errors."""
    chunks = WINDOW // CHUNK
    moved = torch.randint(-24, 25, (chunks, 1), generator=generator)
    at = torch.arange(chunks)[:, None] * CHUNK + torch.arange(CONFIG.neighbour_length) + moved
    text = ids[at.clamp(0, len(ids) - 1)]
    least, most = ERRORS
    share = least + (most - least) * torch.rand(1, generator=generator)
    wrong = torch.rand(text.shape, generator=generator) < share
    return torch.where(wrong, torch.randint(VOCAB_SIZE, text.shape, generator=generator), text)


def compute_loss(model: Retro, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    ids, neighbours, mask = batch
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :WINDOW], neighbours, mask)
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def train(model: Retro, books: list[Book], args: argparse.Namespace) -> dict[str, Any]:
    """Train until the time, or the number of steps, is used up; return facts."""
    start = time.monotonic()
    step = 0
    smooth = math.log(VOCAB_SIZE)

    def measure_done() -> float:
        return float(step / args.steps if args.steps else (time.monotonic() - start) / (60.0 * args.minutes))

    tables = {id(weight) for weight in (model.words.weight, model.encoder.words.weight)}
    matrices = [p for p in model.parameters() if p.dim() == 2 and id(p) not in tables]
    others = [p for p in model.parameters() if p.dim() < 2 or id(p) in tables]
    for step, loss in training.train(
        model,
        draw_batches(books, measure_done),
        lambda batch: compute_loss(model, batch),
        lambda _: RATE * schedule_rate(measure_done(), 0.02, floor=0.02, cosine=True),
        [Muon([{"params": matrices}], RATE), torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95))],
    ):
        smooth += (loss - smooth) * max(0.01, 1.0 / step)
        if step % 25 == 0:
            log(f"step {step}  {measure_done():6.1%}  loss {smooth:.3f}")
    minutes = round((time.monotonic() - start) / 60.0, 1)
    return {"steps": step, "tokens_seen": step * BATCH * WINDOW, "minutes": minutes, "threads": args.threads}


@torch.no_grad()
def measure_bits(model: Retro, book: Book, kind: str) -> float:
    """Return bits per character of a book, each token behind a complete chunk, by windows that overlap.

    `kind`: "right" neighbours, those of "random" other chunks of the book, or "none".
    """
    chunks = WINDOW // CHUNK
    order = torch.randperm(len(book.neighbours), generator=torch.Generator().manual_seed(SEED))
    neighbours = book.neighbours[order] if kind == "random" else book.neighbours
    mask = book.mask[order] if kind == "random" else book.mask
    nats = 0.0
    count = 0
    step = chunks // 2  # the second half of a window counts
    for begin in range(0, len(book.neighbours) - chunks, step):
        ids = book.ids[begin * CHUNK : begin * CHUNK + WINDOW + 1][None]
        own = slice(begin, begin + chunks)
        given = (None, None) if kind == "none" else (neighbours[own][None], mask[own][None])
        logits = model(ids[:, :-1], *given)[0, -step * CHUNK :]
        nats += F.cross_entropy(logits.double(), ids[0, 1:][-step * CHUNK :], reduction="sum").item()
        count += step * CHUNK
    return nats / math.log(2.0) / count * len(book.ids) / book.characters


def evaluate(
    out: Path, texts: Mapping[str, str], index: NeighbourIndex, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return figures of the saved model on the held-out books, and what their own text in the index does."""
    model = load_model(out)
    assert isinstance(model, Retro)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        every = open_index(texts, out / "tokenizer.json", Path(folder) / "index")
        for name in HELD_OUT:
            book = read_book(name, texts[name], tokenizer, index)
            bits = {kind: round(measure_bits(model, book, kind), 4) for kind in ("right", "random", "none")}
            own = read_book(name, texts[name], tokenizer, every, own=True)
            without = read_book(name, texts[name], tokenizer, every)
            found[name] = {
                **bits,
                "own_book_in_index": round(measure_bits(model, own, "right"), 4),
                "own_book_left_out": round(measure_bits(model, without, "right"), 4),
                "below_none": round(1.0 - bits["right"] / bits["none"], 4),
                "random_below_none": round(1.0 - bits["random"] / bits["none"], 4),
                "chunks_that_the_index_has": round(index.measure_overlap(book.ids.tolist()), 4),
            }
            log(f"{name}: {found[name]}")
        every.close()
    return found


def save(out: Path, model: Retro, tokenizer: Tokenizer) -> None:
    """Write the model in half precision, and what export reads beside it."""
    save_model(model.half(), out, settings={"bos_token_id": END_ID, "eos_token_id": END_ID})
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "model_max_length": CONFIG.max_positions,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    write_json(out / "tokenizer_config.json", settings)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the RETRO demo model.")
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--minutes", type=float, default=30.0, help="training time")
    parser.add_argument("--steps", type=int, help="train this many steps instead")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--evaluate-only", action="store_true", help="only redo the figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = {name: text_of(book) for name, book in parse_books(read_bible()).items()}
    known = {name: text for name, text in texts.items() if name not in HELD_OUT}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "tokenizer.json"
    if not args.evaluate_only:
        train_tokenizer(list(known.values()), [END]).save(str(path))
        for name, text in texts.items():
            file = args.out / ("held-out" if name in HELD_OUT else "texts") / f"{name}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(path))
    with tempfile.TemporaryDirectory() as folder:
        index = open_index(known, path, Path(folder) / "index")
        facts: dict[str, Any] = {
            "corpus": "King James Bible as printed by the program of Debian's bible-kjv",
            "held_out_books": HELD_OUT,
            "seed": SEED,
        }
        if not args.evaluate_only:
            log("looking for the neighbours of every chunk")
            books = [read_book(name, text, tokenizer, index) for name, text in known.items()]
            model = make_model()
            facts["parameters"] = sum(weight.numel() for weight in model.parameters())
            log(f"{facts['parameters']} parameters, {sum(len(book.ids) for book in books)} tokens")
            facts |= train(model, books, args)
            save(args.out, model, tokenizer)
        facts["bits_per_character"] = evaluate(args.out, texts, index, tokenizer)
        index.close()
    write_json(args.out / "training.json", facts)


if __name__ == "__main__":
    main()
