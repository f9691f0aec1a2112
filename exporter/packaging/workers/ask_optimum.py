"""Answers questions with optimum's ORTModelFor... classes.

B batch, T tokens, V vocabulary, E width
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import optimum.onnxruntime as optimum
import torch
from answers import Answer, Answers, answer_questions
from transformers import AutoTokenizer, GenerationConfig, LogitsProcessor, LogitsProcessorList, pipeline

# Of each head the pipeline, and options by which it says all.
PIPELINES: dict[str, tuple[Any, Answer]] = {
    "sequence_classification": ("text-classification", {"top_k": None}),
    "token_classification": ("token-classification", {"ignore_labels": []}),
    "masked_lm": ("fill-mask", {}),
}


class Forced(LogitsProcessor):
    """A logits processor that forces given tokens; the logits before each step are returned."""

    def __init__(self, tokens: list[int], begin: int) -> None:
        self.tokens = tokens
        self.begin = begin  # the prompt's length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = torch.full_like(scores, -torch.inf)
        scores[:, self.tokens[input_ids.shape[1] - self.begin]] = 0
        return scores


class Package:
    """A package for optimum, in the class that its task has."""

    def __init__(self, folder: str, class_name: str) -> None:
        self.model = getattr(optimum, class_name).from_pretrained(folder, local_files_only=True)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.own_config = getattr(self.model, "generation_config", None)

    def continue_ids(self, prompts: list[list[int]], steps: int, forced: list[int] | None) -> tuple[Any, Any]:
        """Continue prompts, padded on the left; return tokens (B, T) and logits (T, B, V)."""
        width = max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        # Golden tokens are the model's likeliest, without a checkpoint's rules, and go on behind an end.
        self.model.generation_config = GenerationConfig(pad_token_id=0)
        processors = LogitsProcessorList([] if forced is None else [Forced(forced, width)])
        found = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=steps,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_logits=True,
            logits_processor=processors,
        )
        return found.sequences[:, width:], torch.stack(found.logits)

    def force(self, question: Answer, answers: Answers) -> Answer:
        """Feed tokens one by one behind a prompt; answer the logits before each."""
        continuation = question["continuation"]
        _, logits = self.continue_ids([question["prompt"]], len(continuation), continuation)
        return {"logits": answers.keep(logits[:, 0])}

    def at_once(self, question: Answer, answers: Answers) -> Answer:
        """Feed a prompt and its continuation as one left-padded row; answer the logits of all next tokens."""
        prompt = question["prompt"]
        continuation = question["continuation"]
        padding = question["padding"]
        ids = torch.tensor([[0] * padding + prompt + continuation[:-1]])
        mask = torch.ones_like(ids)
        mask[:, :padding] = 0
        found = self.model(input_ids=ids, attention_mask=mask)
        return {"logits": answers.keep(found.logits[0, padding + len(prompt) - 1 :])}

    def greedy(self, question: Answer, answers: Answers) -> Answer:
        """Continue prompts as one padded batch; answer the logits and the likeliest token of each step."""
        tokens, logits = self.continue_ids(question["prompts"], question["steps"], None)
        return {"logits": answers.keep(logits), "tokens": tokens.tolist()}

    def generate(self, question: Answer, answers: Answers) -> Answer:
        """Continue texts as one batch by the package's settings, greedily."""
        del answers
        self.model.generation_config = self.own_config
        limit = question["max_new_tokens"]
        options = {} if limit is None else {"max_new_tokens": limit}
        batch = self.tokenizer(question["texts"], padding=True, return_tensors="pt")
        found = self.model.generate(
            **batch, do_sample=False, num_beams=1, tokenizer=self.tokenizer, **options
        )
        rows = found[:, batch["input_ids"].shape[1] :].tolist()
        pad = self.tokenizer.pad_token_id
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return {"answers": [{"tokens": row, "text": text, "pad": pad} for row, text in zip(rows, texts)]}  # noqa: B905

    def label(self, question: Answer, answers: Answers) -> Answer:
        """Answer the labels and scores that a head's pipeline gives texts."""
        del answers
        task, options = PIPELINES[question["head"]]
        ask = pipeline(task, model=self.model, tokenizer=self.tokenizer, **options)
        return {"labels": [[describe_label(one) for one in given] for given in ask(question["texts"])]}

    def encode(self, question: Answer, answers: Answers) -> Answer:
        """Answer the outputs of sequences as one batch, padded on the right."""
        rows, segments = question["rows"], question["segments"]
        width = max(map(len, rows))
        ids = np.zeros((len(rows), width), np.int64)
        mask = np.zeros_like(ids)
        kinds = np.zeros_like(ids)
        for row, (tokens, own) in enumerate(zip(rows, segments)):  # noqa: B905
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
            kinds[row, : len(own)] = own
        feeds = {"input_ids": ids, "attention_mask": mask}
        if "token_type_ids" in self.model.input_names:
            feeds["token_type_ids"] = kinds
        found = self.model(**{name: torch.from_numpy(array) for name, array in feeds.items()})
        return {"outputs": {name: answers.keep(found[name].numpy()) for name in question["outputs"]}}

    def read(self, question: Answer, answers: Answers) -> Answer:
        """Answer the ids of texts, without the special tokens around them."""
        del answers
        return {"ids": self.tokenizer(question["texts"], add_special_tokens=False)["input_ids"]}

    def write(self, question: Answer, answers: Answers) -> Answer:
        """Answer the texts of ids, without special tokens."""
        del answers
        return {"texts": [self.tokenizer.decode(row, skip_special_tokens=True) for row in question["ids"]]}

    def inputs(self, question: Answer, answers: Answers) -> Answer:
        """Answer all ids of texts and pairs."""
        del answers
        texts = question["texts"]
        return {"ids": [self.tokenizer(one["text"], one["pair"])["input_ids"] for one in texts]}

    def chat(self, question: Answer, answers: Answers) -> Answer:
        """Answer a conversation as the chat template renders it."""
        del answers
        messages = question["messages"]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return {"text": text}


def describe_label(one: Answer) -> Answer:
    """Return a label of a pipeline with its place: 0 for a text or a mask, its index for a token."""
    label = one["token"] if "token" in one else one.get("label", one.get("entity"))
    return {"place": one.get("index", 0), "label": label, "score": float(one["score"])}


def open_package(folder: str, options: Answer, questions: list[Answer]) -> tuple[str, Package]:
    del questions
    names = f"{version('optimum-onnx')}, transformers {version('transformers')}"
    return names, Package(folder, options["class"])


if __name__ == "__main__":
    answer_questions(open_package)
