"""`planforge run`: texts from arguments, stdin or a file through a bundle, by its task. Loads no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from ..runtime.errors import InputError
from .console import errors, running
from .run_chat import converse
from .run_options import (
    TASKS,
    AttentionHeadOption,
    AttentionLayerOption,
    AttentionOption,
    BackendOption,
    BundleArgument,
    ChatOption,
    DeviceOption,
    EarlyStoppingOption,
    InputFileOption,
    JsonOption,
    LayersOption,
    LengthPenaltyOption,
    MaxNewTokensOption,
    MinNewTokensOption,
    NBestOption,
    NoRepeatOption,
    NumBeamsOption,
    PairOption,
    ParseSpecialOption,
    PoolingOption,
    PrecisionOption,
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
    TopPOption,
    TruncationOption,
)
from .run_translation import BLANK_LINE, Item, Picture, translate

# What a bundle with this head does unless told otherwise; the first that it has counts.
HEAD_TASKS = {
    "sequence_classification": "classify",
    "token_classification": "tag",
    "question_answering": "answer",
    "masked_lm": "fill_mask",
    "next_sentence": "next_sentence",
}
# What a line of JSON has, beside keys of the user's own; of a pair in order.
JSON_KEYS = (("text",), ("text", "pair"), ("question", "context"), ("query", "text"))


def run(
    bundle: BundleArgument,
    texts: TextsArgument = None,
    task: TaskOption = None,
    pair: PairOption = None,
    question: QuestionOption = None,
    query: QueryOption = None,
    input_file: InputFileOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    stop: StopOption = None,
    seed: SeedOption = None,
    speculative: SpeculativeOption = None,
    chat: ChatOption = None,
    system: SystemOption = None,
    truncation: TruncationOption = None,
    stride: StrideOption = None,
    pooling: PoolingOption = None,
    prompt: PromptOption = None,
    layers: LayersOption = None,
    n_best: NBestOption = None,
    num_beams: NumBeamsOption = None,
    length_penalty: LengthPenaltyOption = None,
    early_stopping: EarlyStoppingOption = None,
    min_new_tokens: MinNewTokensOption = None,
    no_repeat_ngram_size: NoRepeatOption = None,
    attention: AttentionOption = None,
    attention_layer: AttentionLayerOption = None,
    attention_head: AttentionHeadOption = None,
    parse_special: ParseSpecialOption = False,
    backend: BackendOption = "auto",
    device: DeviceOption = 0,
    precision: PrecisionOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Generate, translate, embed, classify, tag, answer: what the bundle's model does. Loads no torch."""
    given = {name: value for name, value in locals().items() if value is not None}
    options = {name: given[name] for names in TASKS.values() for name in names if name in given}
    beside: dict[str, str] = {n: given[n] for n in ("pair", "question", "query") if n in given}
    with running() as progress:
        from ..runtime import load

        picture = Picture(attention, attention_layer, attention_head)
        check_sources(texts, input_file, beside)
        with load(bundle, backend=backend, precision=precision, threads=threads, device=device) as model:
            chosen = checked_task(task or task_of(model, beside), model, options)
            check_beside(model, chosen, beside, input_file)
            items = items_of(texts, input_file, beside, keep_blank=chosen == "translate")
            picture.check(chosen)
            options |= {} if chosen == "fill_mask" else {"parse_special": parse_special}  # it always does
            typed = not (texts or input_file) and sys.stdin.isatty()
            if options.pop("chat", False):
                one = not (texts or input_file)
                converse(model, items, options, one, options.pop("system", None), as_json)
            elif chosen == "generate":
                generate(model, items, options, as_json)
            elif chosen == "translate":
                translate(model, items, options, typed, as_json, picture, progress)
            else:
                encode(model, chosen, items, options, typed, query is not None, as_json, progress)


def encode(
    model: Any,
    task: str,
    items: Iterator[Item],
    options: dict[str, Any],
    typed: bool,
    one_query: bool,
    as_json: bool,
    progress: Callable[[str], None],
) -> None:
    """Runs an encoder's task over the items and prints every result."""
    if not sys.stdout.isatty():
        options["progress"] = lambda done: progress(f"{done} texts")
    if "prompt" in options:
        options["prompt_name"] = options.pop("prompt")
    if task == "rank":
        keep = options.pop("top_k", None)
        if keep is not None and not one_query:
            raise InputError("--top-k of rank goes with --query; pairs of --input keep their order")
    if task == "rank" and one_query:
        ranked = sorted(model.iterate("rank", items, **options), key=lambda result: -result.score)
        show_results(ranked[:keep], task, as_json)
    else:
        show_results(streamed(model, task, items, options, typed), task, as_json)


def task_of(model: Any, beside: dict[str, str]) -> str:
    """What a bundle does unless told otherwise."""
    if only := only_task(model):
        return only
    if "question" in beside:
        return "answer"
    if "query" in beside:
        return "rank"
    if "pair" in beside and "next_sentence" in model.heads:
        return "next_sentence"
    return next((task for head, task in HEAD_TASKS.items() if head in model.heads), "embed")


# Tasks of models that have no other, and what such models do.
ONLY_TASKS = {"generate": "generates text", "translate": "translates"}


def only_task(model: Any) -> str | None:
    """The one task that a model has; None of an encoder, which has several."""
    from ..runtime import TextGenerator, Translator

    if isinstance(model, Translator):
        return "translate"
    return "generate" if isinstance(model, TextGenerator) else None


def checked_task(task: str, model: Any, options: dict[str, Any]) -> str:
    """Refuses a task that the model does not have, and options that the task does not have."""
    if task not in TASKS:
        raise InputError(f"task {task!r} is not one of {', '.join(TASKS)}")
    only = only_task(model)
    if only != (task if task in ONLY_TASKS else None):
        what = "is an encoder" if only is None else ONLY_TASKS[only]
        raise InputError(f"this bundle {what}, which does not go with the task {task!r}")
    for name in options:
        if name not in TASKS[task]:
            raise InputError(f"--{name.replace('_', '-')} is no option of the task {task}")
    if "system" in options and "chat" not in options:
        raise InputError("--system goes with --chat")
    return task


def check_beside(model: Any, task: str, beside: dict[str, str], input_file: Path | None) -> None:
    """Refuses a second text that the task has no use for, and a task that lacks its own."""
    if task not in ONLY_TASKS:
        model.check_task(task)
    allowed = {"classify": "pair", "next_sentence": "pair", "answer": "question", "rank": "query"}
    option = allowed.get(task)
    for name in beside:
        if name != option:
            raise InputError(f"--{name} is no option of the task {task}")
    if option and task != "classify" and not beside and not input_file:
        raise InputError(f"{task} needs --{option} TEXT beside each text, or pairs by --input FILE")


def generate(model: Any, items: Iterable[Item], options: dict[str, Any], as_json: bool) -> None:
    """Continues prompts, each shown as it comes."""
    for prompt in items:
        if not isinstance(prompt, str):
            raise InputError("text generation takes prompts, not pairs of texts")
        if as_json:
            answer = model.generate(prompt, **options)
            typer.echo(json.dumps({"prompt": prompt, **answer.to_json()}, ensure_ascii=False))
        else:
            pieces = model.stream(prompt, **options)  # checks everything before anything shows
            typer.echo(prompt, nl=False)
            for piece in pieces:
                typer.echo(str(piece), nl=False)
            typer.echo()


def streamed(
    model: Any, task: str, items: Iterable[Item], options: dict[str, Any], typed: bool
) -> Iterator[Any]:
    """An encoder's results; where lines are typed, each as soon as its line is there, else in batches."""
    if typed:
        return (result for item in items for result in model.iterate(task, [item], **options))
    return model.iterate(task, items, **options)  # type: ignore[no-any-return]


def show_results(results: Iterable[Any], task: str, as_json: bool) -> None:
    """A line of JSON for each result, or lines for a reader."""
    for number, result in enumerate(results):
        if as_json:
            typer.echo(json.dumps(result.to_json(), ensure_ascii=False))
        else:
            if number and task in SEVERAL_LINES:
                typer.echo()  # between the lines of two texts
            for line in LINES[task](result):
                typer.echo(line)


SEVERAL_LINES = ("features", "fill_mask", "tag", "answer")
LINES: dict[str, Callable[[Any], list[str]]] = {
    "embed": lambda r: [" ".join(f"{number:.6g}" for number in r.vector)],
    "features": lambda r: [
        f"{token}\t{' '.join(f'{number:.6g}' for number in vector)}"
        for token, vector in zip(r.tokens, r.vectors, strict=True)
    ],
    "classify": lambda r: [f"{r.label}\t{r.score:.4f}"],
    "rank": lambda r: [f"{r.score:.4f}\t{r.text}"],
    "next_sentence": lambda r: [f"{'follows' if r.is_next else 'does not follow'}\t{r.probability:.4f}"],
    "fill_mask": lambda r: [
        "\t".join(f"{fill.token} {fill.score:.4f}" for fill in fills) for fills in r.masks
    ],
    "tag": lambda r: [f"{e.label}\t{e.text}\t{e.start}-{e.end}\t{e.score:.4f}" for e in r.entities],
    "answer": lambda r: [f"{a.text}\t{a.start}-{a.end}\t{a.score:.4f}" for a in r.answers],
}


def check_sources(texts: list[str] | None, input_file: Path | None, beside: dict[str, str]) -> None:
    """Refuses texts from two places."""
    if len(beside) > 1:
        raise InputError(f"give one of {', '.join('--' + name for name in beside)}")
    if texts and input_file:
        raise InputError("give texts as arguments or with --input, not both")
    if beside and input_file:
        raise InputError(f"--{next(iter(beside))} goes with texts, --input has pairs of its own")


def items_of(
    texts: list[str] | None, input_file: Path | None, beside: dict[str, str], keep_blank: bool
) -> Iterator[Item]:
    """Texts or pairs, from the arguments, a file of JSON lines, or stdin, whose blank lines may count."""
    if not texts and not input_file and sys.stdin.isatty():
        errors.print("[dim]a text a line, end with Ctrl-D[/dim]")
    stripped = (line.rstrip("\r\n") if line.strip() else BLANK_LINE for line in sys.stdin)
    lines = (line for line in stripped if keep_blank or line != BLANK_LINE)
    return at_least_one(
        paired(item, beside) for item in texts or (json_lines(input_file) if input_file else lines)
    )


def at_least_one(items: Iterable[Item]) -> Iterator[Item]:
    """The items; an error where there are none."""
    count = 0
    for item in items:
        yield item
        count += 1
    if not count:
        raise InputError("there are no texts: give arguments, lines on stdin, or --input FILE")


def paired(item: Item, beside: dict[str, str]) -> Item:
    """A text together with what an option puts beside it: --pair after it, the others before it."""
    if not beside or not isinstance(item, str):
        return item
    ((name, other),) = beside.items()
    return (item, other) if name == "pair" else (other, item)


def json_lines(path: Path) -> Iterator[Item]:
    """The text or pair of every line, read as it is needed; "-" is stdin."""
    try:
        with sys.stdin if str(path) == "-" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield item_of(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--input {path} cannot be read: {error}") from error


def item_of(line: str, where: str) -> Item:
    """The text or pair of one line of JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # the latter: nested thousands deep
        raise InputError(f"{where} is not JSON: {error}") from error
    if isinstance(value, dict):
        given = {key for keys in JSON_KEYS for key in keys if key in value}
        for keys in JSON_KEYS:
            if given == set(keys) and all(isinstance(value[key], str) for key in keys):
                return value[keys[0]] if len(keys) == 1 else (value[keys[0]], value[keys[1]])
    raise InputError(
        f'{where} must be an object with "text", "text" and "pair", "question" and "context", or "query" and'
        f' "text", such as {{"text": "Hello"}}'
    )
