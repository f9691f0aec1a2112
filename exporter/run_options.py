"""The options of `planforge run`, and which of them each task has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BundleArgument = Annotated[Path, typer.Argument(help="The folder that export wrote.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

GENERATION = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "stop",
    "seed",
    "truncation",
    "speculative",
    "chat",
    "system",
)
TRANSLATION = (
    *("num_beams", "length_penalty", "early_stopping", "n_best", "max_new_tokens"),
    *("min_new_tokens", "no_repeat_ngram_size"),
)
ALL_TEXTS = ("truncation", "stride")
# The options of each task, beside those of all.
TASKS: dict[str, tuple[str, ...]] = {
    "generate": GENERATION,
    "translate": TRANSLATION,
    "embed": (*ALL_TEXTS, "pooling", "prompt"),
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
    str | None, typer.Option(help=f"{', '.join(TASKS)}.", show_default="by the bundle's heads")
]
PairOption = Annotated[str | None, typer.Option(help="A second text beside each.", show_default=False)]
QuestionOption = Annotated[str | None, typer.Option(help="What each text is to answer.", show_default=False)]
QueryOption = Annotated[
    str | None, typer.Option(help="Rank the texts by how well they fit it.", show_default=False)
]
InputFileOption = Annotated[
    Path | None,
    typer.Option(
        "--input",
        help='JSON lines, "-" for stdin: {"text"}, {"text", "pair"}, {"question", "context"} or'
        ' {"query", "text"}.',
        show_default=False,
    ),
]
MaxNewTokensOption = Annotated[
    int | None,
    typer.Option(
        help="At most so many new tokens.",
        show_default="64; of a translation the checkpoint's, or all its positions",
    ),
]
TemperatureOption = Annotated[
    float | None, typer.Option(help="Sample at this temperature.", show_default="greedy")
]
TopKOption = Annotated[
    int | None,
    typer.Option(help="Sample from the k likeliest; fill_mask, rank: show k.", show_default=False),
]
TopPOption = Annotated[float | None, typer.Option(help="Sample from the nucleus.", show_default="all")]
RepetitionPenaltyOption = Annotated[float | None, typer.Option(help="1.0 does nothing.", show_default="1.0")]
StopOption = Annotated[list[str] | None, typer.Option(help="End at this text.", show_default=False)]
SeedOption = Annotated[
    int | None,
    typer.Option(help="Make sampling repeatable.", show_default=False),
]
SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        help="'prompt-lookup' guesses from what came before: faster where it repeats, the same but for ties.",
        show_default="off",
    ),
]
ChatOption = Annotated[
    bool | None,
    typer.Option(
        "--chat",
        help="Texts are a user's messages, worded by the checkpoint's chat template; lines on stdin are one"
        " conversation.",
        show_default=False,
    ),
]
SystemOption = Annotated[str | None, typer.Option(help="What a --chat begins with.", show_default=False)]
TruncationOption = Annotated[
    str | None,
    typer.Option(
        help="Of too long a text, keep its head, tail, head+tail, or all of it in windows; of a prompt its"
        " tail.",
        show_default="by the task",
    ),
]
StrideOption = Annotated[
    int | None, typer.Option(help="Tokens that two windows share.", show_default="a quarter")
]
PoolingOption = Annotated[str | None, typer.Option(help="cls, mean or max.", show_default="the checkpoint's")]
PromptOption = Annotated[
    str | None, typer.Option(help="A prompt of the checkpoint, by its name.", show_default=False)
]
LayersOption = Annotated[
    str | None,
    typer.Option(
        help="embeddings, second_to_last, last, sum_last_four, concat_last_four, sum_all.",
        show_default="last",
    ),
]
NBestOption = Annotated[int | None, typer.Option(help="How many answers or translations.", show_default="1")]
NumBeamsOption = Annotated[
    int | None, typer.Option(help="Beams of the search; 1 is greedy.", show_default="the checkpoint's")
]
LengthPenaltyOption = Annotated[
    float | None,
    typer.Option(help="Above 0 favours long translations.", show_default="the checkpoint's"),
]
EarlyStoppingOption = Annotated[
    str | None, typer.Option(help="true, false or never.", show_default="the checkpoint's")
]
MinNewTokensOption = Annotated[
    int | None, typer.Option(help="No end before.", show_default="the checkpoint's")
]
NoRepeatOption = Annotated[
    int | None,
    typer.Option("--no-repeat-ngram-size", help="No run of so many tokens twice.", show_default="off"),
]
AttentionOption = Annotated[
    Path | None,
    typer.Option(
        help="Draw what each token of a translation looked at; needs an export with --outputs"
        " cross_attentions.",
        show_default=False,
    ),
]
AttentionLayerOption = Annotated[int | None, typer.Option(help="Of --attention.", show_default="average")]
AttentionHeadOption = Annotated[int | None, typer.Option(help="Of --attention.", show_default="average")]
ParseSpecialOption = Annotated[
    bool, typer.Option("--parse-special", help="Read <|endoftext|>, [SEP] and the like.")
]
DeviceOption = Annotated[int, typer.Option(help="The GPU's number.")]
BackendOption = Annotated[str, typer.Option(help="auto, tensorrt-rtx, tensorrt, ort-cuda or ort-cpu.")]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        help="One that the bundle has: fp32, fp16, int8, int4, or these with -kv8.",
        show_default="as recorded by bench --set-default, else the bundle's first",
    ),
]
ThreadsOption = Annotated[int | None, typer.Option(help="Cores to use.", show_default="the physical cores")]
