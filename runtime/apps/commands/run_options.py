"""The options of `planforge run`, in panels by what they are for, and which of them each task has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer


def make_option(
    text: str,
    *names: str,
    show_default: str | bool = False,
    panel: str | None = None,
    minimum: int | None = None,
) -> Any:
    """Return an option with the text that `--help` shows; without names it is called as its parameter.

    What `--help` says of the default is `show_default`: a text, or with True the default itself.
    """
    return typer.Option(*names, help=text, show_default=show_default, rich_help_panel=panel, min=minimum)


generation_option = partial(make_option, panel="Text generation")
chat_option = partial(make_option, panel="Conversations")
search_option = partial(make_option, panel="Beam search: text generation, translation")
translation_option = partial(make_option, panel="Translation")
encoder_option = partial(make_option, panel="Encoders")
long_option = partial(make_option, panel="Long texts, many texts")
input_option = partial(make_option, panel="Input and output")
engine_option = partial(make_option, panel="Engine")

BundleArgument = Annotated[Path, typer.Argument(help="The folder that export wrote.", show_default=False)]
JsonOption = Annotated[bool, make_option("Print JSON for machines.", "--json")]

SEARCH = ("num_beams", "length_penalty", "early_stopping", "n_best", "no_repeat_ngram_size")
MANY = ("truncation", "batch_size")
GENERATION = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "min_new_tokens",
    "generation",
    "speculative",
    "top_logprobs",
    *SEARCH,
    *MANY,
    "chat",
    "system",
    "template_options",
    "continue_from",
)
TRANSLATION = ("max_new_tokens", "min_new_tokens", "repetition_penalty", *SEARCH, *MANY)
ALL_TEXTS = (*MANY, "stride")
# The options of each task, beside those of all.
TASKS: dict[str, tuple[str, ...]] = {
    "generate": GENERATION,
    "translate": TRANSLATION,
    "embed": (*ALL_TEXTS, "pooling", "truncate_dim", "prompt_name", "prompt"),
    "features": (*ALL_TEXTS, "layers"),
    "classify": (*ALL_TEXTS, "candidate_labels", "hypothesis_template", "multi_label", "logits"),
    "rank": (*ALL_TEXTS, "top_k"),
    "next_sentence": ALL_TEXTS,
    "fill_mask": (*ALL_TEXTS, "top_k"),
    "tag": ALL_TEXTS,
    "answer": (*ALL_TEXTS, "n_best"),
}
# Options of conversations alone, by the names of the runtime's parameters.
FLAGS = {"system": "--system", "template_options": "--template-option", "continue_from": "--continue"}

TextsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts; without any, a line each from stdin.")
]
TaskOption = Annotated[str | None, input_option(f"{', '.join(TASKS)}.", show_default="by the bundle's heads")]
InputFileOption = Annotated[
    Path | None,
    input_option(
        'JSON lines, "-" for stdin: {"text"}, {"text", "pair"}, {"question", "context"} or'
        ' {"query", "text"}.',
        "--input",
    ),
]
ParseSpecialOption = Annotated[
    bool, input_option("Read <|endoftext|>, [SEP] and the like.", "--parse-special")
]
JsonLinesOption = Annotated[bool, input_option("Print JSON for machines: a line for each text.", "--json")]

MaxNewTokensOption = Annotated[
    int | None,
    generation_option(
        "At most so many new tokens.",
        show_default="64; of a translation the checkpoint's, or all its positions",
    ),
]
TemperatureOption = Annotated[
    float | None, generation_option("Sample at this temperature; 0 is greedy.", show_default="greedy")
]
TopKOption = Annotated[int | None, generation_option("Sample from the k likeliest; fill_mask, rank: show k.")]
TopPOption = Annotated[float | None, generation_option("Sample from the nucleus.", show_default="all")]
MinPOption = Annotated[
    float | None,
    generation_option(
        "Sample from what has this share of the likeliest token's probability.", show_default="all"
    ),
]
RepetitionPenaltyOption = Annotated[
    float | None, generation_option("1.0 does nothing; of translations too.", show_default="1.0")
]
FrequencyPenaltyOption = Annotated[
    float | None,
    generation_option("Taken from a token's logit for each time that the answer has it.", show_default="0.0"),
]
PresencePenaltyOption = Annotated[
    float | None,
    generation_option("Taken from the logit of each token that the answer has.", show_default="0.0"),
]
NoRepeatOption = Annotated[
    int | None, generation_option("No run of so many tokens twice; of translations too.", show_default="off")
]
SeedOption = Annotated[int | None, generation_option("Make sampling repeatable.")]
StopOption = Annotated[list[str] | None, generation_option("End at this text.")]
IgnoreEosOption = Annotated[bool | None, generation_option("Go on behind the end token.", "--ignore-eos")]
GenerationOption = Annotated[
    str | None,
    generation_option(
        "'checkpoint' samples as the checkpoint's generation_config says, 'none' does not.",
        show_default="none; of --chat checkpoint",
    ),
]
SpeculativeOption = Annotated[
    str | None,
    generation_option(
        "'prompt-lookup' guesses from what came before: faster where it repeats, the same but for ties.",
        show_default="off",
    ),
]
TopLogprobsOption = Annotated[
    int | None, generation_option("With --json, so many likeliest tokens of each step.", show_default="none")
]

ChatOption = Annotated[
    bool | None,
    chat_option(
        "Texts are a user's messages, worded by the checkpoint's chat template; lines on stdin are one"
        " conversation, in which /reset begins anew and /exit ends.",
        "--chat",
    ),
]
SystemOption = Annotated[str | None, chat_option("What a --chat begins with.")]
TemplateOption = Annotated[
    list[str] | None,
    chat_option(
        "NAME=VALUE, a variable of the chat template, such as enable_thinking=false: JSON, else a text; any"
        " number of them.",
        "--template-option",
    ),
]
ContinueOption = Annotated[
    str | None, chat_option("What answers begin with: the model goes on from there.", "--continue")
]

NumBeamsOption = Annotated[
    int | None, search_option("Beams of the search; 1 is greedy.", show_default="1; the checkpoint's")
]
NBestOption = Annotated[
    int | None, search_option("How many candidates; of the task answer, answers.", show_default="1")
]
LengthPenaltyOption = Annotated[
    float | None, search_option("Above 0 favours long texts.", show_default="1; the checkpoint's")
]
EarlyStoppingOption = Annotated[
    str | None, search_option("true, false or never.", show_default="false; the checkpoint's")
]

MinNewTokensOption = Annotated[
    int | None,
    generation_option("No end before; of translations too.", show_default="0, or the checkpoint's"),
]
AttentionOption = Annotated[
    Path | None,
    translation_option(
        "Draw what each token of a translation looked at; needs an export with --outputs cross_attentions."
    ),
]
AttentionLayerOption = Annotated[int | None, translation_option("Of --attention.", show_default="average")]
AttentionHeadOption = Annotated[int | None, translation_option("Of --attention.", show_default="average")]

PairOption = Annotated[str | None, encoder_option("A second text beside each.")]
QuestionOption = Annotated[str | None, encoder_option("What each text is to answer.")]
QueryOption = Annotated[str | None, encoder_option("Rank the texts by how well they fit it.")]
CandidateLabelsOption = Annotated[
    list[str] | None,
    encoder_option("classify: a label of your own, which a model of inference judges by; once for each."),
]
HypothesisOption = Annotated[
    str | None,
    encoder_option("What is said of a text, with {} for the label.", show_default="This example is {}."),
]
MultiLabelOption = Annotated[bool | None, encoder_option("Judge each of them by itself.", "--multi-label")]
LogitsOption = Annotated[bool | None, encoder_option("classify: with --json, the logits too.", "--logits")]
PoolingOption = Annotated[
    str | None, encoder_option("cls, mean, max or lasttoken.", show_default="the checkpoint's")
]
TruncateDimOption = Annotated[
    int | None, encoder_option("Keep only so many of a vector's first numbers.", show_default="all")
]
PromptNameOption = Annotated[str | None, encoder_option("A prompt of the checkpoint, by its name.")]
PromptOption = Annotated[str | None, encoder_option("A text to put before each, '' for none.")]
LayersOption = Annotated[
    str | None,
    encoder_option(
        "embeddings, second_to_last, last, sum_last_four, concat_last_four, sum_all.", show_default="last"
    ),
]

TruncationOption = Annotated[
    str | None,
    long_option(
        "Of too long a text keep its head, its tail, head+tail, or all of it in windows; none refuses it."
        " Text generation: tail or none; translation: head, tail or none.",
        show_default="by the task",
    ),
]
StrideOption = Annotated[int | None, long_option("Tokens that two windows share.", show_default="a quarter")]
BatchSizeOption = Annotated[
    int | None,
    long_option(
        "Texts that run together; 1 answers each line as soon as it comes.", show_default="the bundle's most"
    ),
]

BackendOption = Annotated[
    str, engine_option("auto, tensorrt-rtx, tensorrt, ort-cuda or ort-cpu.", show_default=True)
]
DeviceOption = Annotated[int, engine_option("The GPU's number.", show_default=True)]
PrecisionOption = Annotated[
    str | None,
    engine_option(
        "One that the bundle has: fp32, fp16, int8, int4, or these with -kv8.",
        show_default="as recorded by bench --set-default, else the bundle's first",
    ),
]
ThreadsOption = Annotated[int | None, engine_option("Cores to use.", show_default="the physical cores")]
