"""`planforge explain`: why a model answered so, as a page, JSON or a table. Loads no torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from ..load import load
from .console import print_json, print_tables, say, show_stages, split_names
from .run_options import (
    BackendOption,
    BundleArgument,
    JsonOption,
    PrecisionOption,
    ThreadsOption,
    make_option,
)
from .tables import FittingTable

if TYPE_CHECKING:
    from ..explain import Explanation, Lens, Target

NAMED = 3  # tokens that the table names of each target
TextArgument = Annotated[
    str, typer.Argument(help="A prompt, a text to classify or translate; of a ranker the query.")
]
AnswerOption = Annotated[
    str | None,
    make_option(
        "What to explain: an answer or a translation of yours, or a label.",
        show_default="the model's own answer",
    ),
]
PairOption = Annotated[
    str | None, make_option("The other text, of models that read pairs; of one that embeds, to compare with.")
]
HtmlOption = Annotated[Path | None, make_option("Write one page that shows it offline.", "--html")]
MethodsOption = Annotated[
    str | None,
    make_option(
        "gradient, integrated_gradients, occlusion, lens, attention, neurons; several separated by commas.",
        show_default="gradient,lens,attention; occlusion where the bundle has no graphs for them",
    ),
]
ObjectiveOption = Annotated[
    str, make_option("What gradients are of: logit or probability.", show_default=True)
]
WatchOption = Annotated[
    list[str] | None,
    make_option("A word of one token whose ranks the lens tells too, such as ' God'; may be repeated."),
]
FactorsOption = Annotated[int, make_option("How many groups of neurons.", show_default=True, minimum=1)]
MaxNewTokensOption = Annotated[int, make_option("Of the model's own answer.", show_default=True, minimum=1)]


def explain(
    bundle: BundleArgument,
    text: TextArgument,
    answer: AnswerOption = None,
    pair: PairOption = None,
    html: HtmlOption = None,
    methods: MethodsOption = None,
    objective: ObjectiveOption = "logit",
    watch: WatchOption = None,
    factors: FactorsOption = 5,
    max_new_tokens: MaxNewTokensOption = 20,
    backend: BackendOption = "auto",
    precision: PrecisionOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say by which words a model chose its answer, and at which layer. Loads no torch.

    Export with --outputs explain for all of it; occlusion works with any bundle.
    """
    with show_stages() as progress:
        if html is not None and not html.absolute().parent.is_dir():
            raise InputError(f"--html {html}: there is no folder {html.absolute().parent}")
        progress("loading it")
        with load(bundle, backend=backend, precision=precision, threads=threads) as model:
            progress("explaining")
            choices: dict[str, Any] = {
                "methods": split_names(methods),
                "objective": objective,
                "factors": factors,
            }
            beside = {"--pair": pair, "--watch": watch}
            result = explain_by_task(model, text, answer, beside, max_new_tokens, choices)
        if html is not None:
            result.to_html(html)
            say(f"{html} shows it in any browser, offline")
    if as_json:
        print_json(result.to_json())
    elif html is None:
        print_tables([tabulate(result)])


def explain_by_task(
    model: Any, text: str, answer: str | None, beside: dict[str, Any], max_new_tokens: int, choices: Any
) -> Explanation:
    """Return the explanation; refuse options that the bundle's task has no use for."""
    task = model._TASK
    useless = {"text-encoding": ["--watch"], "text-generation": ["--pair"], "translation": ["--pair"]}
    for name in useless[task]:
        if beside[name]:
            raise InputError(f"{name} is no option of a bundle for {task}")
    result: Explanation
    if task == "text-encoding":
        result = model.explain(text, beside["--pair"], label=answer, **choices)
    elif task == "translation":
        result = model.explain(text, answer, watch=beside["--watch"] or (), **choices)
    else:
        watch = beside["--watch"] or ()
        result = model.explain(text, answer, watch=watch, max_new_tokens=max_new_tokens, **choices)
    return result


def tabulate(result: Explanation) -> FittingTable:
    """Return a row for each target, with the tokens that counted most."""
    columns = ["answer" if result.targets[0].token is not None else "label", "probability"]
    names = list(result.saliency)
    columns += [f"counted most, by {name.replace('_', ' ')}" for name in names]
    if result.lens is not None:
        columns.append("first in rank 1")
    rows = []
    for number, target in enumerate(result.targets):
        row = [repr(target.text), describe_probability(target)]
        row += [name_strongest(result, name, number) for name in names]
        if result.lens is not None:
            row.append(find_first_layer(result.lens, number))
        rows.append(row)
    return FittingTable(f"{result.kind} by {result.model}", columns, rows)


def describe_probability(target: Target) -> str:
    """Return a target's probability; of a number that is none, the number."""
    if target.probability is not None:
        return f"{100 * target.probability:.3g} %"
    return "" if target.logit is None else f"score {target.logit:.3g}"


def find_first_layer(lens: Lens, number: int) -> str:
    """Return after which layer a target is the likeliest for the first time; else its last rank."""
    ranks = lens.ranks[:, number].tolist()
    if 1 not in ranks:
        return f"never; at last {ranks[-1]}"
    layer = ranks.index(1)
    return f"layer {layer}" if layer else "embeddings"


def name_strongest(result: Explanation, method: str, number: int) -> str:
    """Return the tokens that counted most for a target, with their shares or numbers.

    Of equal tokens each has its place among all behind it, counted from 0 as in Python.
    """
    texts = Counter(token.text for token in result.tokens)

    def name(place: int) -> str:
        text = result.tokens[place].text
        return repr(text) if texts[text] == 1 else f"{text!r}[{place}]"

    row = result.saliency[method][number].tolist()
    known = [place for place, value in enumerate(row) if value == value]  # the others are NaN: not read
    strongest = sorted(known, key=lambda place: -abs(row[place]))[:NAMED]
    is_share = method == "gradient_norm"
    return ", ".join(
        f"{name(place)} {100 * row[place]:.0f} %" if is_share else f"{name(place)} {row[place]:+.2f}"
        for place in strongest
    )
