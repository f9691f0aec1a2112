"""The one table of task differences outside of graphs: tokenizers, caches and plans."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskTraits:
    """The traits that follow from a checkpoint's task.

    Attributes:
        name: as in the manifest.
        auto_model: the class of transformers that loads such a model without a head.
        min_length: the fewest tokens that an export may take at most.
        continues_texts: whether a prompt goes on: chats have templates, rows are padded on the left, a cache
            becomes long, and a plan may pick tokens on the GPU.
        has_sources: whether an encoder reads a source, with a tokenizer of its own.
        encodes: whether a text is read as a whole, and nothing is written.
        makes_images: whether a text becomes a picture.
        compares_images: whether texts and pictures become vectors that are alike.
        has_word_vectors: whether it has vectors of words, and reads no texts.
        reads_neighbours: whether it reads neighbours of its text, whose chunks end at the same places in all
            rows of a batch: none is padded.
    """

    name: str
    auto_model: str
    min_length: int
    continues_texts: bool = False
    has_sources: bool = False
    encodes: bool = False
    makes_images: bool = False
    compares_images: bool = False
    has_word_vectors: bool = False
    reads_neighbours: bool = False


GENERATION = TaskTraits("text-generation", "AutoModelForCausalLM", 2, continues_texts=True)
ENCODING = TaskTraits("text-encoding", "AutoModel", 8, encodes=True)
TRANSLATION = TaskTraits("translation", "AutoModelForSeq2SeqLM", 4, has_sources=True)
PICTURES = TaskTraits("image-generation", "", 2, makes_images=True)
LIKENESS = TaskTraits("image-text-encoding", "AutoModel", 2, compares_images=True)
WORDS = TaskTraits("word-vectors", "", 2, has_word_vectors=True)
RETRIEVAL = TaskTraits("retrieval-generation", "", 2, continues_texts=True, reads_neighbours=True)
# How the classes of transformers end that have a head, by the head.
CLASS_ENDS = {
    "masked_lm": "ForMaskedLM",
    "sequence_classification": "ForSequenceClassification",
    "token_classification": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
}
ALL = (GENERATION, ENCODING, TRANSLATION, PICTURES, LIKENESS, WORDS, RETRIEVAL)
TRAITS = {traits.name: traits for traits in ALL}
