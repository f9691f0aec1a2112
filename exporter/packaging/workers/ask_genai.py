"""Answers questions with onnxruntime-genai.

B batch, T tokens, V vocabulary
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import numpy as np
import onnxruntime_genai as genai
from answers import Answer, Answers, answer_questions


class Decoder:
    """A package for onnxruntime-genai."""

    def __init__(self, folder: str, unused: int) -> None:
        self.folder = folder
        self.unused = unused
        self.open(own_end=False)

    def open(self, *, own_end: bool) -> None:
        """Open the model, with its own end tokens or without any.

        An end token would end a row whose logits are compared behind it. So it is one that is not chosen.
        """
        config = genai.Config(self.folder)
        if not genai.is_cuda_available():
            config.clear_providers()  # a package in fp16 asks for CUDA; a CPU computes the same, slowly
        if not own_end:
            config.overlay(json.dumps({"model": {"eos_token_id": [self.unused]}}))
        self.model = genai.Model(config)
        self.tokenizer = genai.Tokenizer(self.model)

    def start(self, rows: int, room: int) -> Any:
        """Return a generator without any of the package's own rules, as for PyTorch's tokens."""
        options = genai.GeneratorParams(self.model)
        options.set_search_options(
            max_length=room,
            batch_size=rows,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
        )
        return genai.Generator(self.model, options)

    def force(self, question: Answer, answers: Answers) -> Answer:
        """Feed tokens one by one behind a prompt; answer the logits before each."""
        prompt = question["prompt"]
        continuation = question["continuation"]
        generator = self.start(1, len(prompt) + len(continuation))
        logits = []
        for tokens in (prompt, *([token] for token in continuation[:-1])):
            generator.append_tokens(np.array([tokens], np.int32))
            logits.append(np.array(generator.get_logits(), np.float32).reshape(-1))  # (V,)
        return {"logits": answers.keep(np.stack(logits))}

    def greedy(self, question: Answer, answers: Answers) -> Answer:
        """Continue prompts as one padded batch; answer the logits and the likeliest token of each step."""
        prompts = question["prompts"]
        width = max(map(len, prompts))
        generator = self.start(len(prompts), width + question["steps"])
        ids = np.zeros((len(prompts), width), np.int32)  # padded on the right, with any token
        for row, prompt in zip(ids, prompts):  # noqa: B905
            row[: len(prompt)] = prompt
        generator.append_tokens(ids)
        logits = []
        for step in range(question["steps"]):
            if step:
                generator.generate_next_token()
            logits.append(np.array(generator.get_logits(), np.float32).reshape(len(prompts), -1))
        steps = np.stack(logits)  # (T, B, V)
        return {"logits": answers.keep(steps), "tokens": steps.argmax(-1).T.tolist()}

    def generate(self, question: Answer, answers: Answers) -> Answer:
        """Continue texts by the package's settings, greedily. It opens the model anew, so it comes last."""
        del answers
        self.open(own_end=True)
        return {
            "answers": [self.continue_text(text, question["max_new_tokens"]) for text in question["texts"]]
        }

    def continue_text(self, text: str, limit: int | None) -> Answer:
        """Continue a text up to its end, or the limit: genai has none of new tokens."""
        params = genai.GeneratorParams(self.model)
        params.set_search_options(do_sample=False, num_beams=1)
        generator = genai.Generator(self.model, params)
        self.tokenizer.update_options(add_special_tokens="true")  # as other runtimes do by themselves
        generator.append_tokens(self.tokenizer.encode(text))
        tokens: list[int] = []
        while not generator.is_done() and len(tokens) != limit:
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        return {"tokens": tokens, "text": self.tokenizer.decode(np.array(tokens, np.int32))}

    def read(self, question: Answer, answers: Answers) -> Answer:
        """Answer the ids of texts."""
        del answers
        return {"ids": [[int(token) for token in self.tokenizer.encode(text)] for text in question["texts"]]}

    def write(self, question: Answer, answers: Answers) -> Answer:
        """Answer the texts of ids."""
        del answers
        return {"texts": [self.tokenizer.decode(np.array(row, np.int32)) for row in question["ids"]]}

    def inputs(self, question: Answer, answers: Answers) -> Answer:
        """Answer all ids of texts."""
        del answers
        self.tokenizer.update_options(add_special_tokens="true")
        ids = [self.tokenizer.encode(one["text"]).tolist() for one in question["texts"]]
        self.tokenizer.update_options(add_special_tokens="false")
        return {"ids": ids}

    def chat(self, question: Answer, answers: Answers) -> Answer:
        """Answer a conversation as the chat template renders it."""
        del answers
        messages = json.dumps(question["messages"])
        return {"text": self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)}


def open_package(folder: str, options: Answer, questions: list[Answer]) -> tuple[str, Decoder]:
    del options
    used = {token for question in questions for token in question.get("continuation", ())}
    return version("onnxruntime-genai"), Decoder(folder, min(set(range(len(used) + 1)) - used))


if __name__ == "__main__":
    answer_questions(open_package)
