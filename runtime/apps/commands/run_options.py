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
picture_option = partial(make_option, panel="Pictures")
engine_option = partial(make_option, panel="Engine")

BundleArgument = Annotated[
    Path, typer.Argument(help="The bundle: a folder that `planforge export` wrote.", show_default=False)
]
JsonOption = Annotated[bool, make_option("Print JSON.", "--json")]

SEARCH = ("num_beams", "length_penalty", "early_stopping", "n_best", "no_repeat_ngram_size")
MANY = ("truncation", "batch_size")
GENERATION = (
    "adapter",
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
PROMPTED = ("input_type", "prompt_name", "prompt")
PICTURES = (
    "negative_prompt",
    "steps",
    "guidance_scale",
    "height",
    "width",
    "image",
    "strength",
    "num_images",
    "scheduler",
    "seed",
)
# The options of each task, beside those of all.
TASKS: dict[str, tuple[str, ...]] = {
    "generate": GENERATION,
    "translate": TRANSLATION,
    "embed": (*ALL_TEXTS, "pooling", "truncate_dim", *PROMPTED),
    "embed_sparse": (*ALL_TEXTS, "max_active_dims", "min_weight", *PROMPTED),
    "embed_multi": (*ALL_TEXTS, *PROMPTED),
    "embed_hybrid": (*ALL_TEXTS, *PROMPTED),
    "features": (*ALL_TEXTS, "layers"),
    "classify": (*ALL_TEXTS, "candidate_labels", "hypothesis_template", "multi_label", "logits"),
    "rank": (*ALL_TEXTS, "top_k", "prompt_name", "prompt"),
    "next_sentence": ALL_TEXTS,
    "fill_mask": (*ALL_TEXTS, "top_k"),
    "tag": ALL_TEXTS,
    "answer": (*ALL_TEXTS, "n_best"),
    "draw": PICTURES,
    "match": ("image",),
    "neighbours": ("negative", "together", "top_k"),
}
# Options of conversations alone, by the names of the runtime's parameters.
FLAGS = {"system": "--system", "template_options": "--template-option", "continue_from": "--continue"}

TextsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT", help="Texts; if none are given, each line of stdin is one."),
]
TaskOption = Annotated[str | None, input_option(f"{', '.join(TASKS)}.", show_default="depends on the bundle")]
InputFileOption = Annotated[
    Path | None,
    input_option(
        'JSON lines, "-" for stdin: {"text"}, {"text", "pair"}, {"question", "context"} or'
        ' {"query", "text"}.',
        "--input",
    ),
]
ParseSpecialOption = Annotated[
    bool, input_option("Read special tokens, such as <|endoftext|> or [SEP], in texts.", "--parse-special")
]
JsonLinesOption = Annotated[bool, input_option("Print JSON: one line for each text.", "--json")]

MaxNewTokensOption = Annotated[
    int | None,
    generation_option(
        "Generate at most this many tokens.",
        show_default="64; for translation the checkpoint's, or all its positions",
    ),
]
TemperatureOption = Annotated[
    float | None, generation_option("Sample at this temperature; 0 is greedy.", show_default="greedy")
]
TopKOption = Annotated[
    int | None,
    generation_option("Sample from the k likeliest tokens; fill_mask, rank, neighbours: show k results."),
]
TopPOption = Annotated[
    float | None,
    generation_option(
        "Sample from the likeliest tokens that have this total probability.", show_default="all"
    ),
]
MinPOption = Annotated[
    float | None,
    generation_option(
        "Sample from tokens with at least this share of the likeliest token's probability.",
        show_default="all",
    ),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    generation_option(
        "Above 1 makes tokens that came before less likely; also for translation.", show_default="1.0"
    ),
]
FrequencyPenaltyOption = Annotated[
    float | None,
    generation_option(
        "Subtracted from a token's logit each time it occurs in the answer.", show_default="0.0"
    ),
]
PresencePenaltyOption = Annotated[
    float | None,
    generation_option(
        "Subtracted from the logit of each token that occurs in the answer.", show_default="0.0"
    ),
]
NoRepeatOption = Annotated[
    int | None,
    generation_option("Repeat no sequence of this many tokens; also for translation.", show_default="off"),
]
SeedOption = Annotated[int | None, generation_option("Make sampling repeatable.")]
StopOption = Annotated[list[str] | None, generation_option("Stop generating at this text; may be repeated.")]
IgnoreEosOption = Annotated[bool | None, generation_option("Continue after the end token.", "--ignore-eos")]
GenerationOption = Annotated[
    str | None,
    generation_option(
        "'checkpoint' uses the checkpoint's generation_config, 'none' does not.",
        show_default="none; with --chat checkpoint",
    ),
]
SpeculativeOption = Annotated[
    str | None,
    generation_option(
        "'prompt-lookup' guesses tokens from earlier text: faster where text repeats, same answer except for"
        " ties.",
        show_default="off",
    ),
]
TopLogprobsOption = Annotated[
    int | None,
    generation_option("With --json, show this many likeliest tokens per step.", show_default="none"),
]

ChatOption = Annotated[
    bool | None,
    chat_option(
        "Texts are user messages, formatted by the checkpoint's chat template; lines on stdin are one"
        " conversation, which /reset restarts and /exit ends.",
        "--chat",
    ),
]
SystemOption = Annotated[str | None, chat_option("The system message of --chat.")]
TemplateOption = Annotated[
    list[str] | None,
    chat_option(
        "NAME=VALUE, a variable of the chat template, such as enable_thinking=false; the value is JSON or"
        " text. May be repeated.",
        "--template-option",
    ),
]
ContinueOption = Annotated[
    str | None, chat_option("The beginning of each answer, which the model continues.", "--continue")
]

OutputOption = Annotated[
    Path | None,
    picture_option("The file of the picture; of several FILE-1.png, FILE-2.png and so on.", "--output", "-o"),
]
NegativePromptOption = Annotated[str | None, picture_option("What the picture shall not show.")]
StepsOption = Annotated[
    int | None,
    picture_option("How often the UNet runs: more is finer.", show_default="the model's, mostly 50"),
]
GuidanceOption = Annotated[
    float | None,
    picture_option("How much the text counts; 1 is fastest.", show_default="the model's, mostly 7.5"),
]
HeightOption = Annotated[int | None, picture_option("In pixels.", show_default="the model's, or the image's")]
WidthOption = Annotated[int | None, picture_option("In pixels.", show_default="the model's, or the image's")]
ImageOption = Annotated[Path | None, picture_option("A picture to begin with.")]
StrengthOption = Annotated[
    float | None, picture_option("How much of --image is made anew, up to 1.", show_default="0.8")
]
NumImagesOption = Annotated[int | None, picture_option("Pictures of each text.", show_default="1")]
SchedulerOption = Annotated[
    str | None,
    picture_option(
        "ddim, pndm, euler, euler_ancestral, dpm++2m, dpm++2m_karras or lcm.", show_default="the model's"
    ),
]
AdapterOption = Annotated[
    str | None,
    generation_option("The name of an adapter beside the model.", show_default="the model alone"),
]
NumBeamsOption = Annotated[
    int | None, search_option("Beams of the search; 1 is greedy.", show_default="1; the checkpoint's")
]
NBestOption = Annotated[
    int | None,
    search_option("Number of candidates to show; for the task answer, of answers.", show_default="1"),
]
LengthPenaltyOption = Annotated[
    float | None, search_option("Above 0 favours long texts.", show_default="1; the checkpoint's")
]
EarlyStoppingOption = Annotated[
    str | None, search_option("true, false or never.", show_default="false; the checkpoint's")
]

MinNewTokensOption = Annotated[
    int | None,
    generation_option(
        "Generate at least this many tokens; also for translation.", show_default="0, or the checkpoint's"
    ),
]
AttentionOption = Annotated[
    Path | None,
    translation_option(
        "Write a picture of the cross-attention of a translation; needs an export with --outputs"
        " cross_attentions."
    ),
]
AttentionLayerOption = Annotated[int | None, translation_option("The layer to draw.", show_default="average")]
AttentionHeadOption = Annotated[
    int | None, translation_option("The attention head to draw.", show_default="average")
]

PairOption = Annotated[str | None, encoder_option("The second text of each pair.")]
QuestionOption = Annotated[str | None, encoder_option("The question to answer from each text.")]
QueryOption = Annotated[str | None, encoder_option("Rank the texts by how well they match this query.")]
CandidateLabelsOption = Annotated[
    list[str] | None,
    encoder_option(
        "classify: your own label, for zero-shot classification with an NLI model; may be repeated."
    ),
]
HypothesisOption = Annotated[
    str | None,
    encoder_option(
        "The hypothesis for a candidate label; {} is the label.", show_default="This example is {}."
    ),
]
MultiLabelOption = Annotated[
    bool | None, encoder_option("Score each candidate label on its own.", "--multi-label")
]
LogitsOption = Annotated[
    bool | None, encoder_option("classify: with --json, show the logits too.", "--logits")
]
PoolingOption = Annotated[
    str | None, encoder_option("cls, mean, max or lasttoken.", show_default="the checkpoint's")
]
TruncateDimOption = Annotated[
    int | None,
    encoder_option("Keep only the first dimensions of an embedding, this many.", show_default="all"),
]
MaxActiveDimsOption = Annotated[
    int | None,
    encoder_option("embed_sparse: keep only the largest weights, this many.", show_default="all"),
]
MinWeightOption = Annotated[
    float | None,
    encoder_option("embed_sparse: leave out weights that are not above this.", show_default="0"),
]
InputTypeOption = Annotated[
    str | None,
    encoder_option("query or document, where a model reads them in two ways.", show_default="as encode does"),
]
PromptNameOption = Annotated[str | None, encoder_option("Name of a prompt of the checkpoint.")]
PromptOption = Annotated[str | None, encoder_option("Text to put before each text; '' for none.")]
LayersOption = Annotated[
    str | None,
    encoder_option(
        "embeddings, second_to_last, last, sum_last_four, concat_last_four, sum_all.", show_default="last"
    ),
]

NegativeOption = Annotated[
    list[str] | None,
    input_option(
        "Word vectors: a word that is taken away from the sum of the others, as in king woman --negative man;"
        " may be repeated."
    ),
]
TogetherOption = Annotated[
    bool | None, input_option("Word vectors: add all words, instead of one question each.", "--together")
]

TruncationOption = Annotated[
    str | None,
    long_option(
        "What to keep of a text that is too long: head, tail, head+tail, or windows (all of it); none refuses"
        " it. Text generation: tail or none; translation: head, tail or none.",
        show_default="depends on the task",
    ),
]
StrideOption = Annotated[
    int | None, long_option("Tokens by which windows overlap.", show_default="a quarter")
]
BatchSizeOption = Annotated[
    int | None,
    long_option(
        "Texts per batch; 1 answers each line as soon as it arrives.", show_default="the bundle's maximum"
    ),
]

BackendOption = Annotated[
    str, engine_option("auto, tensorrt-rtx, tensorrt, ort-cuda, openvino or ort-cpu.", show_default=True)
]
DeviceOption = Annotated[int, engine_option("The GPU's number.", show_default=True)]
PrecisionOption = Annotated[
    str | None,
    engine_option(
        "A precision of the bundle: fp32, fp16, int8, int4, w8a16, w4a16, or one of these with -kv8.",
        show_default="set by bench --set-default, else the bundle's first",
    ),
]
ThreadsOption = Annotated[int | None, engine_option("CPU threads.", show_default="one per physical core")]
IndexOption = Annotated[
    Path | None,
    engine_option("The index that a model finds neighbours of its text in; `planforge index` makes it."),
]
IndexKeysOption = Annotated[
    Path | None,
    engine_option("The encoder's bundle that made the index's keys.", show_default="where the index says"),
]
ShowNeighboursOption = Annotated[
    bool, input_option("Print the neighbours that were read below each answer.", "--show-neighbours")
]
MaxMemoryOption = Annotated[
    str | None,
    engine_option(
        "Most memory for weights, caches and activations, such as 4GB, beside 70 to 110 MB of the engine; a"
        " smaller precision is taken where only that fits.",
        show_default="no limit",
    ),
]


def read_max_memory(text: str | None) -> int | None:
    """Return the bytes of --max-memory; None where it was not given."""
    from ...memory_needs import parse_size

    return None if text is None else parse_size("--max-memory", text)
