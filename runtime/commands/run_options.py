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


def make_option(panel: str, help: str, shown: str | bool = False, name: str | None = None) -> Any:
    """Return an option that `--help` shows in a panel, with what stands there for its default.

    True shows the default itself. Without a name the option is called as its parameter.
    """
    names = () if name is None else (name,)
    return typer.Option(*names, help=help, show_default=shown, rich_help_panel=panel)


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
TaskOption = Annotated[str | None, make_option(INPUT_PANEL, f"{', '.join(TASKS)}.", "by the bundle's heads")]
InputFileOption = Annotated[
    Path | None,
    make_option(
        INPUT_PANEL,
        'JSON lines, "-" for stdin: {"text"}, {"text", "pair"}, {"question", "context"} or'
        ' {"query", "text"}.',
        name="--input",
    ),
]
ParseSpecialOption = Annotated[
    bool, make_option(INPUT_PANEL, "Read <|endoftext|>, [SEP] and the like.", True, "--parse-special")
]
JsonLinesOption = Annotated[
    bool, make_option(INPUT_PANEL, "Print JSON for machines: a line for each text.", True, "--json")
]

# Text generation
MaxNewTokensOption = Annotated[
    int | None,
    make_option(
        GENERATION_PANEL,
        "At most so many new tokens.",
        "64; of a translation the checkpoint's, or all its positions",
    ),
]
TemperatureOption = Annotated[
    float | None, make_option(GENERATION_PANEL, "Sample at this temperature; 0 is greedy.", "greedy")
]
TopKOption = Annotated[
    int | None, make_option(GENERATION_PANEL, "Sample from the k likeliest; fill_mask, rank: show k.")
]
TopPOption = Annotated[float | None, make_option(GENERATION_PANEL, "Sample from the nucleus.", "all")]
MinPOption = Annotated[
    float | None,
    make_option(
        GENERATION_PANEL, "Sample from what has this share of the likeliest token's probability.", "all"
    ),
]
RepetitionPenaltyOption = Annotated[
    float | None, make_option(GENERATION_PANEL, "1.0 does nothing; of translations too.", "1.0")
]
NoRepeatOption = Annotated[
    int | None, make_option(GENERATION_PANEL, "No run of so many tokens twice; of translations too.", "off")
]
SeedOption = Annotated[int | None, make_option(GENERATION_PANEL, "Make sampling repeatable.")]
StopOption = Annotated[list[str] | None, make_option(GENERATION_PANEL, "End at this text.")]
IgnoreEosOption = Annotated[
    bool | None, make_option(GENERATION_PANEL, "Go on behind the end token.", name="--ignore-eos")
]
GenerationOption = Annotated[
    str | None,
    make_option(
        GENERATION_PANEL,
        "'checkpoint' samples as the checkpoint's generation_config says, 'none' does not.",
        "none; of --chat checkpoint",
    ),
]
SpeculativeOption = Annotated[
    str | None,
    make_option(
        GENERATION_PANEL,
        "'prompt-lookup' guesses from what came before: faster where it repeats, the same but for ties.",
        "off",
    ),
]
TopLogprobsOption = Annotated[
    int | None, make_option(GENERATION_PANEL, "With --json, so many likeliest tokens of each step.", "none")
]

# Conversations
ChatOption = Annotated[
    bool | None,
    make_option(
        CHAT_PANEL,
        "Texts are a user's messages, worded by the checkpoint's chat template; lines on stdin are one"
        " conversation, in which /reset begins anew and /exit ends.",
        name="--chat",
    ),
]
SystemOption = Annotated[str | None, make_option(CHAT_PANEL, "What a --chat begins with.")]

# Beam search
NumBeamsOption = Annotated[
    int | None, make_option(SEARCH_PANEL, "Beams of the search; 1 is greedy.", "1; the checkpoint's")
]
NBestOption = Annotated[
    int | None, make_option(SEARCH_PANEL, "How many candidates; of the task answer, answers.", "1")
]
LengthPenaltyOption = Annotated[
    float | None, make_option(SEARCH_PANEL, "Above 0 favours long texts.", "1; the checkpoint's")
]
EarlyStoppingOption = Annotated[
    str | None, make_option(SEARCH_PANEL, "true, false or never.", "false; the checkpoint's")
]

# Translation
MinNewTokensOption = Annotated[
    int | None, make_option(TRANSLATION_PANEL, "No end before.", "the checkpoint's")
]
AttentionOption = Annotated[
    Path | None,
    make_option(
        TRANSLATION_PANEL,
        "Draw what each token of a translation looked at; needs an export with --outputs cross_attentions.",
    ),
]
AttentionLayerOption = Annotated[int | None, make_option(TRANSLATION_PANEL, "Of --attention.", "average")]
AttentionHeadOption = Annotated[int | None, make_option(TRANSLATION_PANEL, "Of --attention.", "average")]

# Encoders
PairOption = Annotated[str | None, make_option(ENCODER_PANEL, "A second text beside each.")]
QuestionOption = Annotated[str | None, make_option(ENCODER_PANEL, "What each text is to answer.")]
QueryOption = Annotated[str | None, make_option(ENCODER_PANEL, "Rank the texts by how well they fit it.")]
PoolingOption = Annotated[str | None, make_option(ENCODER_PANEL, "cls, mean or max.", "the checkpoint's")]
TruncateDimOption = Annotated[
    int | None, make_option(ENCODER_PANEL, "Keep only so many of a vector's first numbers.", "all")
]
PromptNameOption = Annotated[
    str | None, make_option(ENCODER_PANEL, "A prompt of the checkpoint, by its name.")
]
PromptOption = Annotated[str | None, make_option(ENCODER_PANEL, "A text to put before each, '' for none.")]
LayersOption = Annotated[
    str | None,
    make_option(
        ENCODER_PANEL, "embeddings, second_to_last, last, sum_last_four, concat_last_four, sum_all.", "last"
    ),
]

# Long texts, many texts
TruncationOption = Annotated[
    str | None,
    make_option(
        LONG_PANEL,
        "Of too long a text keep its head, its tail, head+tail, or all of it in windows; none refuses it."
        " Text generation: tail or none; translation: head, tail or none.",
        "by the task",
    ),
]
StrideOption = Annotated[int | None, make_option(LONG_PANEL, "Tokens that two windows share.", "a quarter")]
BatchSizeOption = Annotated[
    int | None,
    make_option(
        LONG_PANEL, "Texts that run together; 1 answers each line as soon as it comes.", "the bundle's most"
    ),
]

# Engine
BackendOption = Annotated[
    str, make_option(ENGINE_PANEL, "auto, tensorrt-rtx, tensorrt, ort-cuda or ort-cpu.", True)
]
DeviceOption = Annotated[int, make_option(ENGINE_PANEL, "The GPU's number.", True)]
PrecisionOption = Annotated[
    str | None,
    make_option(
        ENGINE_PANEL,
        "One that the bundle has: fp32, fp16, int8, int4, or these with -kv8.",
        "as recorded by bench --set-default, else the bundle's first",
    ),
]
ThreadsOption = Annotated[int | None, make_option(ENGINE_PANEL, "Cores to use.", "the physical cores")]
