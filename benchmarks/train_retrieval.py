"""Trains small retrieval models on the King James Bible, from all-MiniLM-L6-v2: minutes each on two cores.

python -m benchmarks.train_retrieval WORK [--kinds splade,colbert,reranker,static] [--steps 150]

Writes a folder of sentence-transformers for each kind: WORK/splade, WORK/colbert, and so on. A query is a
third of a verse's longer words, and the verse is its document; in training a document has lost a fifth of its
words, so that a query's words may have to be guessed. Prints recall@10 of queries of held-out books before
and after; of the reranker recall@1, among the ten verses that MiniLM finds. "static" is not trained: it is
MiniLM's embedding matrix. Needs the program `bible`.
"""

from __future__ import annotations

import argparse
import string
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from planforge.exporter.checkpoints.source import find_demo
from planforge.models.training import schedule_rate

from .verses import Corpus, make_corpus, measure_recall, rank_documents, sample_words

SEED = 0
BATCH = 16
BODY_RATE = 1e-4  # of MiniLM's own weights
NEW_RATE = 2e-3  # of weights that begin at random
NEW = ("cls.", "classifier", "pooler", "1.linear")  # in the names of those
LOST = 0.2  # of a document's words, in training
LONGEST = 64  # tokens of a text, in training
WIDTH = 96  # of a token's vector, in late interaction
SHARPNESS = 2.0  # of the softmax over MaxSim, which is a sum of cosines
FIRST_BIAS = -5.0  # of all words in SPLADE: at first no text has any
SPARSITY = 0.02  # of the mean weights' squares in SPLADE's loss, at the end of the training
SAMPLED = 2_000  # words of a batch's loss beside its own
FIRST_WORD = 999  # of BERT's vocabulary, behind special and unused tokens
CANDIDATES = 4  # verses of a query that the reranker chooses from, in training
RERANKED = 10  # verses that MiniLM finds, for the reranker to order
DOCUMENTS = 1_000  # among which recall is measured
QUERIES = 200

Pairs = list[tuple[str, str]]  # of a query and a document
Loss = Callable[[Pairs, float], Tensor]  # of a batch, where a part of the training is over


class Recipe(NamedTuple):
    """Says how a kind is made, trained and judged; nothing is trained without a loss."""

    make: Callable[[Path], Any]
    make_loss: Callable[[Any, Corpus], Loss] | None
    measure: Callable[[Any, Corpus], float]


def make_splade(work: Path) -> Any:
    """Return a SPLADE: the head is new, and its decoder has MiniLM's embeddings."""
    folder = find_demo("bert-demo")
    body = work / "splade-body"
    model = transformers.BertForMaskedLM.from_pretrained(folder)
    nn.init.constant_(model.cls.predictions.bias, FIRST_BIAS)
    model.save_pretrained(body)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(body)
    transformer = Transformer(str(body), transformer_task="fill-mask")
    return SparseEncoder(modules=[transformer, SpladePooling("max")], device="cpu")


def make_colbert(work: Path) -> Any:
    """Return a ColBERT whose projection is new."""
    names: dict[str, Any] = {
        "module_input_name": "token_embeddings",
        "module_output_name": "token_embeddings",
    }
    modules = [
        Transformer(str(find_demo("bert-demo")), query_length=32, document_length=256),
        Dense(384, WIDTH, bias=False, activation_function=nn.Identity(), **names),
        Normalize(**names),
        MultiVectorMask(skiplist_words=list(string.punctuation)),
    ]
    return MultiVectorEncoder(modules=modules, device="cpu")


def make_reranker(work: Path) -> Any:
    """Return a cross-encoder whose score is new."""
    return CrossEncoder(str(find_demo("bert-demo")), num_labels=1, device="cpu")


def make_static(work: Path) -> Any:
    """Return a static model of MiniLM's embedding matrix."""
    folder = find_demo("bert-demo")
    table = transformers.AutoModel.from_pretrained(folder).embeddings.word_embeddings.weight.detach()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    module = StaticEmbedding(tokenizer, embedding_weights=table.numpy())
    return SentenceTransformer(modules=[module, Normalize()], device="cpu")


def prepare(model: Any, texts: Any) -> dict[str, Any]:
    """Return a batch's tokens, cut as in training."""
    return {
        name: value[:, :LONGEST] if isinstance(value, Tensor) else value
        for name, value in model.preprocess(texts).items()
    }


class SpladeLoss:
    """A query's own verse has the largest product, a text's words have their idf as logits, others none.

    Only the batch's words and some others are computed, which count for all others.
    """

    def __init__(self, model: Any, corpus: Corpus) -> None:
        self.model = model
        counts = torch.ones(len(model.tokenizer))
        for ids in model.tokenizer(corpus.training, add_special_tokens=False)["input_ids"]:
            counts[list(set(ids))] += 1
        self.rarity = (len(corpus.training) / counts).log().clamp(min=0)

    def __call__(self, batch: Pairs, done: float) -> Tensor:
        """Return the loss of a batch."""
        sides = [prepare(self.model, list(texts)) for texts in zip(*batch, strict=True)]
        own = torch.unique(torch.cat([features["input_ids"].flatten() for features in sides]))
        sampled = torch.randint(len(self.rarity), (SAMPLED,))
        words = torch.unique(torch.cat([own, sampled]))
        counted = torch.where(torch.isin(words, own), 1.0, len(self.rarity) / SAMPLED)
        loss = torch.zeros(())
        weights: list[Tensor] = []
        for features in sides:
            ids = features["input_ids"]
            logits = self.compute_logits(features, words)
            is_word = ids >= FIRST_WORD
            of_own = logits.gather(1, torch.searchsorted(words, ids.contiguous()))
            weights.append(logits.relu().log1p())
            loss = loss + F.smooth_l1_loss(of_own[is_word], self.rarity[ids][is_word])
            loss = loss + SPARSITY * done**2 * (counted * weights[-1].mean(0) ** 2).sum()
        return loss + F.cross_entropy(weights[0] @ weights[1].T, torch.arange(len(batch)))

    def compute_logits(self, features: dict[str, Any], words: Tensor) -> Tensor:
        """Return the largest logit of each word in each text, (texts, words)."""
        masked = self.model.transformers_model
        mask = features["attention_mask"]
        states = masked.bert(input_ids=features["input_ids"], attention_mask=mask).last_hidden_state
        head = masked.cls.predictions
        rows = masked.bert.embeddings.word_embeddings.weight[words]
        logits = F.linear(head.transform(states), rows, head.bias[words])
        return logits.masked_fill(mask[..., None] == 0, -100.0).amax(1)


def compute_colbert_loss(model: Any, batch: Pairs, done: float) -> Tensor:
    """Return the loss of a ColBERT: a query's own verse has the largest MaxSim of the batch."""
    sides = []
    for texts, task in zip(zip(*batch, strict=True), ("query", "document"), strict=True):
        found = model(prepare(model, list(texts)), task=task)
        sides.append((found["token_embeddings"], found["attention_mask"].bool()))
    (queries, asked), (documents, known) = sides
    products = torch.einsum("qte,dse->qdts", queries, documents)
    best = products.masked_fill(~known[None, :, None], -1.0).amax(-1)
    scores = (best * asked[:, None]).sum(-1)
    return F.cross_entropy(SHARPNESS * scores, torch.arange(len(batch)))


def compute_reranker_loss(model: Any, batch: Pairs, done: float) -> Tensor:
    """Return the loss of a cross-encoder: of a few verses of the batch a query's own has the best score."""
    queries = batch[: BATCH // 2]
    pairs = [
        (query, batch[(place + step) % BATCH][1])
        for place, (query, _) in enumerate(queries)
        for step in range(CANDIDATES)
    ]
    scores = model(prepare(model, pairs))["scores"].view(len(queries), CANDIDATES)
    return F.cross_entropy(scores, torch.zeros(len(queries), dtype=torch.long))


def measure_search(model: Any, corpus: Corpus) -> float:
    """Return recall@10 of a model that embeds."""
    scores = model.similarity(model.encode_query(corpus.queries), model.encode_document(corpus.texts))
    return measure_recall(rank_documents(scores.numpy(), 10), corpus.wanted)


def measure_reranking(model: Any, corpus: Corpus) -> float:
    """Return recall@1 of the verses that MiniLM finds, in the reranker's order."""
    dense = SentenceTransformer(str(find_demo("bert-demo")), device="cpu")
    found = dense.similarity(dense.encode_query(corpus.queries), dense.encode_document(corpus.texts))
    best = rank_documents(found.numpy(), RERANKED)
    texts = corpus.texts
    pairs = [(query, texts[place]) for query, row in zip(corpus.queries, best, strict=True) for place in row]
    order = rank_documents(model.predict(pairs).reshape(best.shape), 1)
    return measure_recall(np.take_along_axis(best, order, axis=1), corpus.wanted)


RECIPES = {
    "splade": Recipe(make_splade, SpladeLoss, measure_search),
    "colbert": Recipe(make_colbert, lambda model, _: partial(compute_colbert_loss, model), measure_search),
    "reranker": Recipe(
        make_reranker, lambda model, _: partial(compute_reranker_loss, model), measure_reranking
    ),
    "static": Recipe(make_static, None, measure_search),
}


def draw_batches(verses: list[str], steps: int) -> Iterator[Pairs]:
    """Yield batches of queries with their documents."""
    random = np.random.default_rng(SEED)
    for _ in range(steps):
        chosen = [verses[place] for place in random.choice(len(verses), BATCH, replace=False)]
        yield [(sample_words(verse, random), drop_words(verse, random)) for verse in chosen]


def drop_words(text: str, random: np.random.Generator) -> str:
    """Return a text without some of its words."""
    return " ".join(word for word in text.split() if random.random() >= LOST)


def train(model: nn.Module, loss_of: Loss, verses: list[str], steps: int) -> None:
    """Train all weights but the embeddings of words."""
    groups: dict[float, list[nn.Parameter]] = {BODY_RATE: [], NEW_RATE: []}
    for name, parameter in model.named_parameters():
        if "word_embeddings" in name:
            parameter.requires_grad_(False)
        else:
            groups[NEW_RATE if any(part in name for part in NEW) else BODY_RATE].append(parameter)
    optimizer = torch.optim.AdamW([{"params": own, "lr": rate} for rate, own in groups.items()])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule_rate((step + 1) / (steps + 1), warm_up=0.05)
    )
    model.train()
    for step, batch in enumerate(draw_batches(verses, steps)):
        loss = loss_of(batch, step / steps)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            print(f"  step {step + 1}: loss {loss.item():.3f}", flush=True)
    model.eval()


def make(kind: str, work: Path, corpus: Corpus, steps: int) -> None:
    """Train a kind and write its folder; print its recall before and after."""
    torch.manual_seed(SEED)
    recipe = RECIPES[kind]
    model = recipe.make(work)
    print(f"{kind}: recall {recipe.measure(model, corpus):.3f}", flush=True)
    if recipe.make_loss is not None:
        began = time.perf_counter()
        train(model, recipe.make_loss(model, corpus), corpus.training, steps)
        seconds = time.perf_counter() - began
        print(f"{kind}: recall {recipe.measure(model, corpus):.3f} after {seconds:.0f} s", flush=True)
    model.save_pretrained(str(work / kind))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path, help="a folder for the models")
    parser.add_argument("--kinds", default=",".join(RECIPES))
    parser.add_argument("--steps", type=int, default=150, help=f"of {BATCH} queries each")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    corpus = make_corpus(DOCUMENTS, QUERIES)
    for kind in arguments.kinds.split(","):
        make(kind, arguments.work, corpus, arguments.steps)


if __name__ == "__main__":
    main()
