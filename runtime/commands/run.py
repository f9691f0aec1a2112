"""`planforge run`: texts from arguments, stdin or a file through a bundle, by its task. Loads no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import InputError
from ..suggest import did_you_mean
from .console import emit, say, show_stages
from .run_chat import converse
from .run_input import Item, TextSource, blame_data, with_blanks
from .run_options import (
    TASKS,
    AttentionHeadOption,
    AttentionLayerOption,
    AttentionOption,
    BackendOption,
    BatchSizeOption,
    BundleArgument,
    ChatOption,
    DeviceOption,
    EarlyStoppingOption,
    GenerationOption,
    IgnoreEosOption,
    InputFileOption,
    JsonLinesOption,
    LayersOption,
    LengthPenaltyOption,
    MaxNewTokensOption,
    MinNewTokensOption,
    MinPOption,
    NBestOption,
    NoRepeatOption,
    NumBeamsOption,
    PairOption,
    ParseSpecialOption,
    PoolingOption,
    PrecisionOption,
    PromptNameOption,
    PromptOption,
    QueryOption,
    QuestionOption,
    RepetitionPenaltyOption,
    SeedOption,
    SpeculativeOption,
    StopOption,
    StrideOption,
    SystemOption,
    TaskOption,
    TemperatureOption,
    TextsArgument,
    ThreadsOption,
    TopKOption,
    TopLogprobsOption,
    TopPOption,
    TruncateDimOption,
    TruncationOption,
)
from .run_output import Printer
from .run_translation import Picture
from .stages import Stages

if TYPE_CHECKING:
    from .. import TextEncoder, TextGenerator, Translator

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
ONLY_TASKS = {"generate": "generates text", "translate": "translates"}
# Options that are words on the command line, and the values that they stand for.
WORDS: dict[str, dict[str, Any]] = {
    "early_stopping": {"true": True, "false": False, "never": "never"},
    "generation": {"checkpoint": "checkpoint", "none": None},
}


def run(
    bundle: BundleArgument,
    texts: TextsArgument = None,
    task: TaskOption = None,
    input_file: InputFileOption = None,
    as_json: JsonLinesOption = False,
    parse_special: ParseSpecialOption = False,
    max_new_tokens: MaxNewTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    no_repeat_ngram_size: NoRepeatOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    ignore_eos: IgnoreEosOption = None,
    generation: GenerationOption = None,
    speculative: SpeculativeOption = None,
    top_logprobs: TopLogprobsOption = None,
    chat: ChatOption = None,
    system: SystemOption = None,
    num_beams: NumBeamsOption = None,
    n_best: NBestOption = None,
    length_penalty: LengthPenaltyOption = None,
    early_stopping: EarlyStoppingOption = None,
    min_new_tokens: MinNewTokensOption = None,
    attention: AttentionOption = None,
    attention_layer: AttentionLayerOption = None,
    attention_head: AttentionHeadOption = None,
    pair: PairOption = None,
    question: QuestionOption = None,
    query: QueryOption = None,
    pooling: PoolingOption = None,
    truncate_dim: TruncateDimOption = None,
    prompt_name: PromptNameOption = None,
    prompt: PromptOption = None,
    layers: LayersOption = None,
    truncation: TruncationOption = None,
    stride: StrideOption = None,
    batch_size: BatchSizeOption = None,
    backend: BackendOption = "auto",
    device: DeviceOption = 0,
    precision: PrecisionOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Generate, translate, embed, classify, tag, answer: what the bundle's model does. Loads no torch."""
    given = {name: value for name, value in locals().items() if value is not None}
    options = {name: given[name] for names in TASKS.values() for name in names if name in given}
    beside: dict[str, str] = {name: given[name] for name in ("pair", "question", "query") if name in given}
    source = TextSource(tuple(texts or ()), input_file, beside)
    picture = Picture(attention, attention_layer, attention_head)
    with show_stages() as stages:
        from .. import load

        source.check()
        check_task_name(task)
        translate_words(options)
        with load(bundle, backend=backend, precision=precision, threads=threads, device=device) as model:
            task = task or default_task(model, beside)
            check_task(task, model, options)
            check_second_texts(task, model, source)
            picture.check(task)
            if task != "fill_mask":  # it always does
                options["parse_special"] = parse_special
            run_job(Job(model, task, source, options, picture, as_json, stages))


@dataclass(frozen=True)
class Job:
    """One call of `planforge run`, whose model is loaded and whose options were checked against its task.

    Attributes:
        options: of the task, by the names of the runtime's parameters.
        picture: where to draw a translation's attention.
    """

    model: Model
    task: str
    source: TextSource
    options: dict[str, Any]
    picture: Picture
    as_json: bool
    stages: Stages

    def iterate(self, texts: Iterable[Any]) -> Iterator[Any]:
        """Compute the texts' results one after the other, reading ahead."""
        from .. import TextEncoder

        if isinstance(self.model, TextEncoder):
            return self.model.iterate(self.task, texts, **self.options)  # type: ignore[call-overload, no-any-return]
        return self.model.iterate(map(self.check_text, texts), **self.options)

    def check_text(self, item: Item) -> str:
        """Refuse a pair where the task takes texts."""
        if not isinstance(item, str):
            what = "text generation takes prompts" if self.task == "generate" else "translation takes texts"
            raise InputError(f"{what}, not pairs of texts")
        return item


def run_job(job: Job) -> None:
    """Run a task over its texts and print every result."""
    options = job.options
    is_chat = options.pop("chat", False)
    system = options.pop("system", None)
    best = options.pop("top_k", None) if job.task == "rank" else None
    if best is not None and "query" not in job.source.beside:
        raise InputError("--top-k of rank goes with --query; pairs of --input keep their order")
    if job.task == "generate":
        if "top_logprobs" in options and not job.as_json:
            raise InputError("--top-logprobs goes with --json, which shows them")
        options["logprobs"] = job.as_json
    list(job.iterate([]))  # refuses wrong values of options before a text is read
    with blame_data(job.source):
        if is_chat:
            converse(job.model, job.source, options, system, job.as_json)  # type: ignore[arg-type]
        elif "query" in job.source.beside:
            print_ranking(job, best)
        else:
            print_results(job)


def print_results(job: Job) -> None:
    """Print the result of every text: as it comes, as soon as it was typed, or in batches."""
    source = job.source
    options = job.options
    items = source.items()
    if job.picture.path is not None:
        items = job.picture.draw_only(job.model, items, options)  # type: ignore[arg-type]
    several = job.task in ONLY_TASKS and options.get("n_best", 1) > 1
    is_search = several or options.get("num_beams", 1) > 1
    printer = Printer(job.task, job.as_json, several)
    is_single = source.is_typed or len(source.texts) == 1
    if job.task == "generate" and is_single and not (job.as_json or is_search):
        for item in items:
            with report_typed_errors(source):
                stream(job, item)
    elif source.is_typed:
        for item in items:
            with report_typed_errors(source):
                for result in with_blanks(iter([item]), job.iterate):
                    printer.show(result)
    else:
        if not sys.stdout.isatty():
            options["progress"] = job.stages.count
        for result in with_blanks(items, job.iterate):
            printer.show(result)


@contextmanager
def report_typed_errors(source: TextSource) -> Iterator[None]:
    """Print the error of a text that was typed into a terminal, instead of ending the command."""
    try:
        yield
    except InputError as error:
        if not source.is_typed:
            raise
        say(f"error: {error}")


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
    items = [item for item in job.source.items() if item is not None]
    printer = Printer("rank", job.as_json)
    for result in sorted(job.iterate(items), key=lambda result: -result.score)[:best]:
        printer.show((None, result))


def check_task_name(task: str | None) -> None:
    """Refuse a task that there is not."""
    if task is not None and task not in TASKS:
        raise InputError(f"task {task!r} is not one of {', '.join(TASKS)}{did_you_mean(task, TASKS)}")


def default_task(model: Model, beside: dict[str, str]) -> str:
    """Return the task that a bundle has by default."""
    from .. import TextEncoder

    if only := only_task(model):
        return only
    assert isinstance(model, TextEncoder)
    if "question" in beside:
        return "answer"
    if "query" in beside:
        return "rank"
    if "pair" in beside and "next_sentence" in model.heads:
        return "next_sentence"
    return next((task for head, task in HEAD_TASKS.items() if head in model.heads), "embed")


def only_task(model: Model) -> str | None:
    """Return the one task that a model has; None of an encoder, which has several."""
    from .. import TextGenerator, Translator

    if isinstance(model, Translator):
        return "translate"
    return "generate" if isinstance(model, TextGenerator) else None


def check_task(task: str, model: Model, options: Mapping[str, Any]) -> None:
    """Refuse a task that the model does not have, and options that the task does not have."""
    only = only_task(model)
    if only != (task if task in ONLY_TASKS else None):
        what = "is an encoder" if only is None else ONLY_TASKS[only]
        raise InputError(f"this bundle {what}, which does not go with the task {task!r}")
    for name in options:
        if name not in TASKS[task]:
            raise InputError(f"--{name.replace('_', '-')} is no option of the task {task}")
    if "system" in options and "chat" not in options:
        raise InputError("--system goes with --chat")
    if "chat" in options and options.get("num_beams", 1) > 1:
        raise InputError("--num-beams does not go with --chat, whose answers are shown as they are made")


def check_second_texts(task: str, model: Model, source: TextSource) -> None:
    """Refuse a second text that the task has no use for, and a task that lacks its own."""
    from .. import TextEncoder

    if isinstance(model, TextEncoder):
        model.check_task(task)
    allowed = {"classify": "pair", "next_sentence": "pair", "answer": "question", "rank": "query"}
    option = allowed.get(task)
    for name in source.beside:
        if name != option:
            raise InputError(f"--{name} is no option of the task {task}")
    if option and task != "classify" and not source.beside and not source.file:
        raise InputError(f"{task} needs --{option} TEXT beside each text, or pairs by --input FILE")


def translate_words(options: dict[str, Any]) -> None:
    """Replace words such as true and none by the values that they stand for."""
    for name, values in WORDS.items():
        if name in options:
            word = options[name]
            if word not in values:
                option = f"--{name.replace('_', '-')}"
                known = ", ".join(values)
                raise InputError(f"{option} {word!r} must be one of {known}{did_you_mean(word, values)}")
            options[name] = values[word]
    if options.get("truncation") == "none":
        options["truncation"] = None
