"""`planforge run`: texts from arguments, stdin or a file through a bundle, by its task. Loads no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ...bundle.json_reader import parse_json
from ...errors import InputError
from ...load import load
from ...suggest import did_you_mean
from ...tasks import RETRIEVAL
from . import run_options
from .console import emit, say, show_stages
from .run_chat import converse
from .run_images import draw, match
from .run_input import Item, TextSource, blame_data, keep_blanks
from .run_options import FLAGS, TASKS
from .run_output import Printer
from .run_words import find_neighbours
from .stages import Stages

if TYPE_CHECKING:
    from ... import TextEncoder, TextGenerator, Translator
    from ...options import LoadOptions

    Model: TypeAlias = TextGenerator | TextEncoder | Translator

# The default task of a bundle with this head; the first head that it has counts.
HEAD_TASKS = {
    "sequence_classification": "classify",
    "token_classification": "tag",
    "question_answering": "answer",
    "masked_lm": "fill_mask",
    "next_sentence": "next_sentence",
}
# Tasks of models that have no other, and what such models do.
ONLY_TASKS = {
    "generate": "generates text",
    "translate": "translates",
    "draw": "makes pictures",
    "match": "compares a picture with texts",
    "neighbours": "finds words that mean alike",
}
ONLY_TASK_OF = {
    "text-generation": "generate",
    RETRIEVAL: "generate",
    "translation": "translate",
    "image-generation": "draw",
    "image-text-encoding": "match",
    "word-vectors": "neighbours",
}
# Options that are words on the command line, and the values that they stand for.
WORDS: dict[str, dict[str, Any]] = {
    "early_stopping": {"true": True, "false": False, "never": "never"},
    "generation": {"checkpoint": "checkpoint", "none": None},
}


def run(
    bundle: run_options.BundleArgument,
    texts: run_options.TextsArgument = None,
    task: run_options.TaskOption = None,
    input_file: run_options.InputFileOption = None,
    as_json: run_options.JsonLinesOption = False,
    parse_special: run_options.ParseSpecialOption = False,
    max_new_tokens: run_options.MaxNewTokensOption = None,
    temperature: run_options.TemperatureOption = None,
    top_k: run_options.TopKOption = None,
    top_p: run_options.TopPOption = None,
    min_p: run_options.MinPOption = None,
    repetition_penalty: run_options.RepetitionPenaltyOption = None,
    frequency_penalty: run_options.FrequencyPenaltyOption = None,
    presence_penalty: run_options.PresencePenaltyOption = None,
    no_repeat_ngram_size: run_options.NoRepeatOption = None,
    seed: run_options.SeedOption = None,
    stop: run_options.StopOption = None,
    ignore_eos: run_options.IgnoreEosOption = None,
    generation: run_options.GenerationOption = None,
    speculative: run_options.SpeculativeOption = None,
    top_logprobs: run_options.TopLogprobsOption = None,
    chat: run_options.ChatOption = None,
    system: run_options.SystemOption = None,
    template_options: run_options.TemplateOption = None,
    continue_from: run_options.ContinueOption = None,
    adapter: run_options.AdapterOption = None,
    num_beams: run_options.NumBeamsOption = None,
    n_best: run_options.NBestOption = None,
    length_penalty: run_options.LengthPenaltyOption = None,
    early_stopping: run_options.EarlyStoppingOption = None,
    min_new_tokens: run_options.MinNewTokensOption = None,
    attention: run_options.AttentionOption = None,
    attention_layer: run_options.AttentionLayerOption = None,
    attention_head: run_options.AttentionHeadOption = None,
    pair: run_options.PairOption = None,
    question: run_options.QuestionOption = None,
    query: run_options.QueryOption = None,
    candidate_labels: run_options.CandidateLabelsOption = None,
    hypothesis_template: run_options.HypothesisOption = None,
    multi_label: run_options.MultiLabelOption = None,
    logits: run_options.LogitsOption = None,
    pooling: run_options.PoolingOption = None,
    truncate_dim: run_options.TruncateDimOption = None,
    max_active_dims: run_options.MaxActiveDimsOption = None,
    min_weight: run_options.MinWeightOption = None,
    input_type: run_options.InputTypeOption = None,
    prompt_name: run_options.PromptNameOption = None,
    prompt: run_options.PromptOption = None,
    layers: run_options.LayersOption = None,
    negative: run_options.NegativeOption = None,
    together: run_options.TogetherOption = None,
    output: run_options.OutputOption = None,
    negative_prompt: run_options.NegativePromptOption = None,
    steps: run_options.StepsOption = None,
    guidance_scale: run_options.GuidanceOption = None,
    height: run_options.HeightOption = None,
    width: run_options.WidthOption = None,
    image: run_options.ImageOption = None,
    strength: run_options.StrengthOption = None,
    num_images: run_options.NumImagesOption = None,
    scheduler: run_options.SchedulerOption = None,
    truncation: run_options.TruncationOption = None,
    stride: run_options.StrideOption = None,
    batch_size: run_options.BatchSizeOption = None,
    backend: run_options.BackendOption = "auto",
    device: run_options.DeviceOption = 0,
    precision: run_options.PrecisionOption = None,
    threads: run_options.ThreadsOption = None,
    max_memory: run_options.MaxMemoryOption = None,
    index: run_options.IndexOption = None,
    index_keys: run_options.IndexKeysOption = None,
    show_neighbours: run_options.ShowNeighboursOption = False,
) -> None:
    """Generate, translate, embed, classify, tag, answer, draw or compare, by the bundle's model."""
    given = {name: value for name, value in locals().items() if value is not None}
    beside: dict[str, str] = {name: given[name] for name in ("pair", "question", "query") if name in given}
    source = TextSource(tuple(texts or ()), input_file, beside)
    picture = Picture(attention, attention_layer, attention_head)
    with show_stages() as stages:
        source.check()
        options = read_options(given)
        engine: LoadOptions = {"backend": backend, "precision": precision, "threads": threads}
        engine |= {"device": device, "memory_limit": run_options.read_max_memory(max_memory)}
        engine |= {"index": index, "index_keys": index_keys}
        with load(bundle, **engine) as model:
            task = task or find_default_task(model, beside, options)
            run_job(Job(model, task, source, options, picture, output, as_json, stages, show_neighbours))


@dataclass(frozen=True)
class Picture:
    """Where to draw the attention of a translation, and of which layer and head."""

    path: Path | None
    layer: int | None
    head: int | None

    def check(self, task: str) -> None:
        """Refuse a picture for other tasks than translation, and a layer or head without a picture."""
        if self.path is not None and task != "translate":
            raise InputError(f"--attention cannot be used with the task {task}")
        if self.path is None and (self.layer is not None or self.head is not None):
            raise InputError("--attention-layer and --attention-head need --attention FILE")

    def draw_only(
        self, model: Translator, items: Iterator[Item | None], options: dict[str, Any]
    ) -> Iterator[Item | None]:
        """Draw the attention of the only text, and return an iterator over it; refuse several."""
        from ..diagnostics.plots import draw_attention

        assert self.path is not None
        texts = [item for item in items if item is not None]
        if len(texts) != 1:
            count = len(texts) or "only blank lines"
            raise InputError(f"--attention draws the translation of exactly one text, but {count} were given")
        text = texts[0]
        if not isinstance(text, str):
            raise InputError("translation takes texts, not pairs of texts")
        settings = {name: value for name, value in options.items() if name not in ("batch_size", "progress")}
        draw_attention(model.align(text, **settings), self.path, layer=self.layer, head=self.head)
        return iter([text])


@dataclass(frozen=True)
class Job:
    """One call of `planforge run`, whose model is loaded."""

    model: Model
    task: str
    source: TextSource
    options: dict[str, Any]  # of the task, by the names of the runtime's parameters
    picture: Picture
    output: Path | None  # of a model's own pictures
    as_json: bool
    stages: Stages
    show_neighbours: bool

    def iterate(self, texts: Iterable[Any]) -> Iterator[Any]:
        """Compute the texts' results one after the other, reading ahead."""
        model: Any = self.model
        if self.task in ONLY_TASKS:
            return model.iterate(map(self.check_text, texts), **self.options)  # type: ignore[no-any-return]
        return model.iterate(self.task, texts, **self.options)  # type: ignore[no-any-return]

    def check_text(self, item: Item) -> str:
        """Refuse a pair where the task takes texts."""
        if not isinstance(item, str):
            what = "text generation takes prompts" if self.task == "generate" else "translation takes texts"
            raise InputError(f"{what}, not pairs of texts")
        return item


def run_job(job: Job) -> None:
    """Run a task over its texts and print every result."""
    check_task(job)
    check_second_texts(job)
    check_neighbours(job)
    job.picture.check(job.task)
    options = job.options
    if job.task == "draw":
        del options["parse_special"]  # prompts always are
        with blame_data(job.source):
            draw(job.model, job.source, options, job.output, job.as_json, job.stages)  # type: ignore[arg-type]
        return
    if job.task == "match":
        with blame_data(job.source):
            match(job.model, job.source, options.get("image"), job.as_json)  # type: ignore[arg-type]
        return
    if job.task == "neighbours":
        with blame_data(job.source):
            find_neighbours(job.model, job.source, options, job.as_json)  # type: ignore[arg-type]
        return
    if job.output is not None:
        raise InputError(f"--output cannot be used with the task {job.task}")
    if job.task == "fill_mask":  # it always reads special tokens as such
        del options["parse_special"]
    is_chat = options.pop("chat", False)
    system = options.pop("system", None)
    begin = options.pop("continue_from", None)
    best = options.pop("top_k", None) if job.task == "rank" else None
    if best is not None and "query" not in job.source.beside:
        raise InputError("--top-k with rank needs --query; pairs from --input keep their order")
    if job.task == "generate":
        if "top_logprobs" in options and not job.as_json:
            raise InputError("--top-logprobs needs --json, which shows them")
        options["logprobs"] = job.as_json
    list(job.iterate([]))  # refuses wrong values of options before a text is read
    with blame_data(job.source):
        if is_chat:
            converse(job.model, job.source, options, system, begin, job.as_json)  # type: ignore[arg-type]
        elif "query" in job.source.beside:
            print_ranking(job, best)
        else:
            print_results(job)


def print_results(job: Job) -> None:
    """Print the result of every text: as it comes, as soon as it was typed, or in batches."""
    source = job.source
    options = job.options
    items = source.read_items()
    if job.picture.path is not None:
        items = job.picture.draw_only(job.model, items, options)  # type: ignore[arg-type]
    several = job.task in ONLY_TASKS and options.get("n_best", 1) > 1
    is_search = several or options.get("num_beams", 1) > 1
    printer = Printer(job.task, job.as_json, several or "candidate_labels" in options, job.show_neighbours)
    is_single = source.is_typed or len(source.texts) == 1
    streams = job.task == "generate" and is_single and not (job.as_json or is_search or job.show_neighbours)
    if not (streams or source.is_typed):
        if not sys.stdout.isatty():
            options["progress"] = job.stages.count
        for result in keep_blanks(items, job.iterate):
            printer.show(result)
        return
    for item in items:
        try:
            if streams:
                stream(job, item)
            else:
                for result in keep_blanks(iter([item]), job.iterate):
                    printer.show(result)
        except InputError as error:
            if not source.is_typed:
                raise
            say(f"error: {error}")  # of a text that was typed, instead of ending the command


def stream(job: Job, item: Item | None) -> None:
    """Continue a prompt, printing each chunk as it comes."""
    if item is None:
        emit("")
        return
    prompt = job.check_text(item)
    chunks = job.model.stream(prompt, **job.options)  # type: ignore[union-attr]  # checks everything first
    emit(prompt, end="")
    for chunk in chunks:
        emit(str(chunk), end="")
    emit("")


def print_ranking(job: Job, best: int | None) -> None:
    """Print the texts that fit a query best, the best first; so many of them, or all."""
    items = [item for item in job.source.read_items() if item is not None]
    printer = Printer("rank", job.as_json)
    for result in sorted(job.iterate(items), key=lambda result: -result.score)[:best]:
        printer.show((None, result))


def find_default_task(model: Any, beside: dict[str, str], options: Mapping[str, Any]) -> str:
    """Return the task that a bundle has by default, or that a second text or labels of one's own ask for."""
    if only := find_only_task(model):
        return only
    if "question" in beside:
        return "answer"
    if "query" in beside:
        return "rank"
    if "candidate_labels" in options:
        return "classify"
    if "pair" in beside and "next_sentence" in model.heads:
        return "next_sentence"
    head_task = next((task for head, task in HEAD_TASKS.items() if head in model.heads), None)
    return head_task or model.tasks[0]


def find_only_task(model: Model) -> str | None:
    """Return the one task that a model has; None of an encoder, which has several."""
    return ONLY_TASK_OF.get(model.task)


def check_task(job: Job) -> None:
    """Refuse a task that the model does not have, and options that the task does not have."""
    task = job.task
    options = job.options
    only = find_only_task(job.model)
    if only != (task if task in ONLY_TASKS else None):
        what = "is an encoder" if only is None else ONLY_TASKS[only]
        raise InputError(f"this bundle {what}; it does not support the task {task!r}")
    for name in options:
        if name not in TASKS[task] and name != "parse_special":
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise InputError(f"{flag} cannot be used with the task {task}")
    for name, flag in FLAGS.items():
        if name in options and "chat" not in options:
            raise InputError(f"{flag} needs --chat")
    if "chat" in options and options.get("num_beams", 1) > 1:
        raise InputError("--num-beams cannot be used with --chat, which prints answers as they are generated")


def check_neighbours(job: Job) -> None:
    """Refuse to show neighbours where there are none to show."""
    if not job.show_neighbours:
        return
    if job.model.task != RETRIEVAL:
        raise InputError("--show-neighbours is for models that read neighbours of their text; leave it out")
    if job.options.get("num_beams", 1) > 1 or "chat" in job.options:
        option = "--chat" if "chat" in job.options else "--num-beams"
        raise InputError(f"--show-neighbours cannot be used with {option}")


def check_second_texts(job: Job) -> None:
    """Refuse a second text that the task has no use for, and a task that lacks its own."""
    model: Any = job.model
    if job.task not in ONLY_TASKS and "candidate_labels" not in job.options:
        model.check_task(job.task)  # labels of one's own have an error of their own
    allowed = {"classify": "pair", "next_sentence": "pair", "answer": "question", "rank": "query"}
    option = allowed.get(job.task)
    for name in job.source.beside:
        if name != option:
            raise InputError(f"--{name} cannot be used with the task {job.task}")
    if option and job.task != "classify" and not job.source.beside and not job.source.file:
        raise InputError(f"{job.task} needs --{option} TEXT, or pairs from --input FILE")


def check_labels(labels: Sequence[str]) -> None:
    """Refuse what seems to be several labels in one: a comma in the only one."""
    if len(labels) == 1 and "," in labels[0]:
        raise InputError(
            f"--candidate-labels {labels[0]!r:.80} is one label; repeat the option for each label"
        )


def read_template_options(given: Sequence[str]) -> dict[str, Any]:
    """Return the variables of a chat template that NAME=VALUE give: values are JSON, else texts."""
    options: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not (name and equals):
            raise InputError(f"--template-option {one!r:.80} must be NAME=VALUE, as in enable_thinking=false")
        if name in options:
            raise InputError(f"--template-option gives {name!r:.80} twice; give it once")
        try:
            options[name] = parse_json(value)
        except (ValueError, RecursionError):
            options[name] = value
    return options


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options of tasks, with the values that words such as true and none stand for."""
    task = given.get("task")
    if task is not None and task not in TASKS:
        raise InputError(f"task {task!r} is not one of {', '.join(TASKS)}{did_you_mean(task, TASKS)}")
    options = {name: given[name] for names in TASKS.values() for name in names if name in given}
    options["parse_special"] = given["parse_special"]
    for name, values in WORDS.items():
        if name in options:
            word = options[name]
            if word not in values:
                option = f"--{name.replace('_', '-')}"
                known = ", ".join(values)
                raise InputError(f"{option} {word!r} must be one of {known}{did_you_mean(word, values)}")
            options[name] = values[word]
    check_labels(options.get("candidate_labels", ()))
    if options.get("truncation") == "none":
        options["truncation"] = None
    if "template_options" in options:
        options["template_options"] = read_template_options(options["template_options"])
    return options
