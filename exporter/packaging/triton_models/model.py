"""Answers the requests of a Triton server with PlanForge's runtime; its python backend imports this file.

Texts come in and texts, vectors or labels go out. A generator's requests share the engine's steps, whenever
they come (continuous batching), and each answer is streamed. An encoder's and a translator's come in Triton's
dynamic batches.
"""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as triton

from planforge.runtime import PlanForgeError, TextGenerator, Translator, load

REFUSALS = (PlanForgeError, TypeError, ValueError)  # TypeError: an option that there is not


class TritonPythonModel:
    """A model of Triton's python backend; Triton creates one object for each instance."""

    def initialize(self, args):
        """Open the bundle in this file's folder."""
        parameters = json.loads(args["model_config"])["parameters"]
        folder = Path(args["model_repository"]) / args["model_version"] / "bundle"
        precision = parameters["precision"]["string_value"]
        self.task = parameters["task"]["string_value"]
        self.model = load(folder, backend=parameters["backend"]["string_value"], precision=precision)

    def execute(self, requests):
        """Answer requests: a generator's piece by piece, all others before this returns."""
        if isinstance(self.model, TextGenerator):
            for request in requests:
                self.stream(request)
            return None
        return self.answer_batch(requests)

    def finalize(self):
        """Close the bundle; answers that are not ready end with an error."""
        self.model.close()

    def stream(self, request):
        """Send each chunk of an answer as soon as it is there."""
        sender = request.get_response_sender()

        def send(chunk):
            sender.send(triton.InferenceResponse(make_chunk_tensors(chunk)))

        def finish(future):
            error = future.exception()
            if error is not None:
                sender.send(triton.InferenceResponse(error=triton.TritonError(str(error))))
            sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

        try:
            (text,) = read_texts(request, "TEXT")
            pending = self.model.submit(text, **read_options(request))
        except REFUSALS as error:
            sender.send(
                triton.InferenceResponse(error=triton.TritonError(str(error))),
                flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
            return
        pending.subscribe(send)
        pending.future.add_done_callback(finish)

    def answer_batch(self, requests):
        """Answer requests whose task and options are alike as one batch; return a response for each."""
        responses = [None] * len(requests)
        alike = {}
        for place, request in enumerate(requests):
            try:
                items = read_items(request)
                key = json.dumps([self.choose_task(items), read_options(request)], sort_keys=True)
                alike.setdefault(key, []).append((place, items))
            except REFUSALS as error:
                responses[place] = refuse(error)
        for key, members in alike.items():
            task, options = json.loads(key)
            try:
                results = self.answer_items(task, [item for _, items in members for item in items], options)
            except REFUSALS as error:
                results = None
                failed = refuse(error)
            for place, items in members:
                if results is None:
                    responses[place] = failed
                    continue
                own, results = results[: len(items)], results[len(items) :]
                responses[place] = triton.InferenceResponse(self.make_tensors(own))
        return responses

    def choose_task(self, items):
        """Return the task of a request: a ranker scores pairs, or single texts where it has no pairs."""
        is_text = bool(items) and isinstance(items[0], str)
        return "classify" if self.task == "rank" and is_text else self.task

    def answer_items(self, task, items, options):
        """Return a result for each text or pair: a vector, a translation, or a head's answer."""
        if isinstance(self.model, Translator):
            return self.model.translate(items, **options)
        return list(self.model.iterate(task, items, **options))

    def make_tensors(self, results):
        """Return the outputs (B, 1) or (B, E) of a request's results."""
        if isinstance(self.model, Translator):
            return [make_texts("TEXT", [[result.text] for result in results])]
        if self.task == "embed":
            return [triton.Tensor("EMBEDDING", np.stack([result.vector for result in results]))]
        return [make_texts("RESULT", [[describe(result)] for result in results])]


def describe(result):
    """Return a head's answer as JSON, without its index in the batch, which may join several requests."""
    fields = result.to_json()
    fields.pop("index", None)
    return json.dumps(fields)


def make_chunk_tensors(chunk):
    """Return the outputs of a chunk; its reason is "" except at the end."""
    return [
        make_texts("TEXT", [chunk.text]),
        triton.Tensor("TOKEN_IDS", np.array(chunk.token_ids, np.int64)),
        make_texts("FINISH_REASON", [chunk.finish_reason or ""]),
    ]


def make_texts(name, texts):
    """Return an output of texts; Triton wants them as bytes."""
    encoded = np.vectorize(lambda text: text.encode(), otypes=[object])(np.array(texts, dtype=object))
    return triton.Tensor(name, encoded)


def read_texts(request, name):
    """Return the texts of an input, whatever its shape is; none where it is not given."""
    tensor = triton.get_input_tensor_by_name(request, name)
    values = [] if tensor is None else tensor.as_numpy().reshape(-1)
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values]


def read_items(request):
    """Return the texts of a request, or the pairs where it has the input CONTEXT."""
    texts = read_texts(request, "TEXT")
    contexts = read_texts(request, "CONTEXT")
    if not contexts:
        return texts
    if len(contexts) != len(texts):
        raise ValueError(f"CONTEXT has {len(contexts)} texts, TEXT has {len(texts)}; give one for each")
    return list(zip(texts, contexts, strict=True))


def read_options(request):
    """Return the options of the runtime's method: JSON in the input OPTIONS, which may be left out."""
    texts = read_texts(request, "OPTIONS")
    options = json.loads(texts[0]) if texts and texts[0] else {}
    if not isinstance(options, dict):
        raise ValueError(f"OPTIONS must be a JSON object, not {texts[0]:.60}")
    return options


def refuse(error):
    """Return a response that consists of an error."""
    return triton.InferenceResponse(output_tensors=[], error=triton.TritonError(str(error)))
