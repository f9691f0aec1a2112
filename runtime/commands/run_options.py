"""The options of `planforge run`, in panels by what they are for, and which of them each task has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

GENERATION_PANEL = "Text generation"
CHAT_PANEL = "Conversations"
SEARCH_PANEL = "Beam search: text generation, translation"
TRANSLATION_PANEL = "Translation"
ENCODER_PANEL = "Encoders"
LONG_PANEL = "Long texts, many texts"
INPUT_PANEL = "Input and output"
ENGINE_PANEL = "Engine"


def panel_option(panel: str, *names: str, **settings: Any) -> Any:
    """Return an option that `--help` shows in a panel; without names it is called as its parameter."""
    return typer.Option(*names, rich_help_panel=panel, **settings)


BundleArgument = Annotated[Path, typer.Argument(help="The folder that export wrote.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

SEARCH = ("num_beams", "length_penalty", "early_stopping", "n_best", "no_repeat_ngram_size")
MANY = ("truncation", "batch_size")
GENERATION = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "generation",
    "speculative",
    "top_logprobs",
    *SEARCH,
    *MANY,
    "chat",
    "system",
)
TRANSLATION = ("max_new_tokens", "min_new_tokens", "repetition_penalty", *SEARCH, *MANY)
ALL_TEXTS = (*MANY, "stride")
# The options of each task, beside those of all.
TASKS: dict[str, tuple[str, ...]] = {
    "generate": GENERATION,
    "translate": TRANSLATION,
    "embed": (*ALL_TEXTS, "pooling", "truncate_dim", "prompt_name", "prompt"),
    "features": (*ALL_TEXTS, "layers"),
    "classify": ALL_TEXTS,
    "rank": (*ALL_TEXTS, "top_k"),
    "next_sentence": ALL_TEXTS,
    "fill_mask": (*ALL_TEXTS, "top_k"),
    "tag": ALL_TEXTS,
    "answer": (*ALL_TEXTS, "n_best"),
}
TextsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TEXT]...", help="Texts; without any, a line each from stdin."),
]
TaskOption = Annotated[
    str | None,
    panel_option(INPUT_PANEL, help=f"{', '.join(TASKS)}.", show_default="by the bundle's heads"),
]
InputFileOption = Annotated[
    Path | None,
    panel_option(
        INPUT_PANEL,
        "--input",
        help='JSON lines, "-" for stdin: {"text"}, {"text", "pair"}, {"question", "context"} or'
        ' {"query", "text"}.',
        show_default=False,
    ),
]
ParseSpecialOption = Annotated[
    bool, panel_option(INPUT_PANEL, "--parse-special", help="Read <|endoftext|>, [SEP] and the like.")
]
JsonLinesOption = Annotated[
    bool, panel_option(INPUT_PANEL, "--json", help="Print JSON for machines: a line for each text.")
]

# Text generation
MaxNewTokensOption = Annotated[
    int | None,
    panel_option(
        GENERATION_PANEL,
        help="At most so many new tokens.",
        show_default="64; of a translation the checkpoint's, or all its positions",
    ),
]
TemperatureOption = Annotated[
    float | None,
    panel_option(GENERATION_PANEL, help="Sample at this temperature; 0 is greedy.", show_default="greedy"),
]
TopKOption = Annotated[
    int | None,
    panel_option(
        GENERATION_PANEL,
        help="Sample from the k likeliest; fill_mask, rank: show k.",
        show_default=False,
    ),
]
TopPOption = Annotated[
    float | None, panel_option(GENERATION_PANEL, help="Sample from the nucleus.", show_default="all")
]
MinPOption = Annotated[
    float | None,
    panel_option(
        GENERATION_PANEL,
        help="Sample from what has this share of the likeliest token's probability.",
        show_default="all",
    ),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    panel_option(GENERATION_PANEL, help="1.0 does nothing; of translations too.", show_default="1.0"),
]
NoRepeatOption = Annotated[
    int | None,
    panel_option(
        GENERATION_PANEL,
        "--no-repeat-ngram-size",
        help="No run of so many tokens twice; of translations too.",
        show_default="off",
    ),
]
SeedOption = Annotated[
    int | None,
    panel_option(GENERATION_PANEL, help="Make sampling repeatable.", show_default=False),
]
StopOption = Annotated[
    list[str] | None, panel_option(GENERATION_PANEL, help="End at this text.", show_default=False)
]
IgnoreEosOption = Annotated[
    bool | None,
    panel_option(GENERATION_PANEL, "--ignore-eos", help="Go on behind the end token.", show_default=False),
]
GenerationOption = Annotated[
    str | None,
    panel_option(
        GENERATION_PANEL,
        help="'checkpoint' samples as the checkpoint's generation_config says, 'none' does not.",
        show_default="none; of --chat checkpoint",
    ),
]
SpeculativeOption = Annotated[
    str | None,
    panel_option(
        GENERATION_PANEL,
        help="'prompt-lookup' guesses from what came before: faster where it repeats, the same but for ties.",
        show_default="off",
    ),
]
TopLogprobsOption = Annotated[
    int | None,
    panel_option(
        GENERATION_PANEL, help="With --json, so many likeliest tokens of each step.", show_default="none"
    ),
]

# Conversations
ChatOption = Annotated[
    bool | None,
    panel_option(
        CHAT_PANEL,
        "--chat",
        help="Texts are a user's messages, worded by the checkpoint's chat template; lines on stdin are one"
        " conversation, in which /reset begins anew and /exit ends.",
        show_default=False,
    ),
]
SystemOption = Annotated[
    str | None, panel_option(CHAT_PANEL, help="What a --chat begins with.", show_default=False)
]

# Beam search
NumBeamsOption = Annotated[
    int | None,
    panel_option(SEARCH_PANEL, help="Beams of the search; 1 is greedy.", show_default="1; the checkpoint's"),
]
NBestOption = Annotated[
    int | None,
    panel_option(SEARCH_PANEL, help="How many candidates; of the task answer, answers.", show_default="1"),
]
LengthPenaltyOption = Annotated[
    float | None,
    panel_option(SEARCH_PANEL, help="Above 0 favours long texts.", show_default="1; the checkpoint's"),
]
EarlyStoppingOption = Annotated[
    str | None,
    panel_option(SEARCH_PANEL, help="true, false or never.", show_default="false; the checkpoint's"),
]

# Translation
MinNewTokensOption = Annotated[
    int | None,
    panel_option(TRANSLATION_PANEL, help="No end before.", show_default="the checkpoint's"),
]
AttentionOption = Annotated[
    Path | None,
    panel_option(
        TRANSLATION_PANEL,
        help="Draw what each token of a translation looked at; needs an export with --outputs"
        " cross_attentions.",
        show_default=False,
    ),
]
AttentionLayerOption = Annotated[
    int | None, panel_option(TRANSLATION_PANEL, help="Of --attention.", show_default="average")
]
AttentionHeadOption = Annotated[
    int | None, panel_option(TRANSLATION_PANEL, help="Of --attention.", show_default="average")
]

# Encoders
PairOption = Annotated[
    str | None, panel_option(ENCODER_PANEL, help="A second text beside each.", show_default=False)
]
QuestionOption = Annotated[
    str | None, panel_option(ENCODER_PANEL, help="What each text is to answer.", show_default=False)
]
QueryOption = Annotated[
    str | None,
    panel_option(ENCODER_PANEL, help="Rank the texts by how well they fit it.", show_default=False),
]
PoolingOption = Annotated[
    str | None, panel_option(ENCODER_PANEL, help="cls, mean or max.", show_default="the checkpoint's")
]
TruncateDimOption = Annotated[
    int | None,
    panel_option(ENCODER_PANEL, help="Keep only so many of a vector's first numbers.", show_default="all"),
]
PromptNameOption = Annotated[
    str | None,
    panel_option(ENCODER_PANEL, help="A prompt of the checkpoint, by its name.", show_default=False),
]
PromptOption = Annotated[
    str | None,
    panel_option(ENCODER_PANEL, help="A text to put before each, '' for none.", show_default=False),
]
LayersOption = Annotated[
    str | None,
    panel_option(
        ENCODER_PANEL,
        help="embeddings, second_to_last, last, sum_last_four, concat_last_four, sum_all.",
        show_default="last",
    ),
]

# Long texts, many texts
TruncationOption = Annotated[
    str | None,
    panel_option(
        LONG_PANEL,
        help="Of too long a text keep its head, its tail, head+tail, or all of it in windows; none refuses"
        " it. Text generation: tail or none; translation: head, tail or none.",
        show_default="by the task",
    ),
]
StrideOption = Annotated[
    int | None,
    panel_option(LONG_PANEL, help="Tokens that two windows share.", show_default="a quarter"),
]
BatchSizeOption = Annotated[
    int | None,
    panel_option(
        LONG_PANEL,
        help="Texts that run together; 1 answers each line as soon as it comes.",
        show_default="the bundle's most",
    ),
]

# Engine
BackendOption = Annotated[
    str, panel_option(ENGINE_PANEL, help="auto, tensorrt-rtx, tensorrt, ort-cuda or ort-cpu.")
]
DeviceOption = Annotated[int, panel_option(ENGINE_PANEL, help="The GPU's number.")]
PrecisionOption = Annotated[
    str | None,
    panel_option(
        ENGINE_PANEL,
        help="One that the bundle has: fp32, fp16, int8, int4, or these with -kv8.",
        show_default="as recorded by bench --set-default, else the bundle's first",
    ),
]
ThreadsOption = Annotated[
    int | None, panel_option(ENGINE_PANEL, help="Cores to use.", show_default="the physical cores")
]
