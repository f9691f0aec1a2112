"""`planforge explain`: why a model answered so, as a table or JSON, and as a page. Loads no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import InputError
from ...load import load
from ..explain.tasks import explain as explain_model
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
    from ..explain.explanation import Explanation, Lens, Target

FACTORS = 5  # groups of neurons
GROUPING = "nmf"
NAMED = 3  # tokens that the table names of each target
# How messages begin to speak of a parameter of Python's, and what the command calls it.
SPELLINGS = {
    "answer": ("answer=", "--answer "),
    "pair": ("pair[= ]", "--pair "),
    "methods": ("method ", "--methods: "),
    "objective": ("objective=", "--objective "),
    "watch": ("watch ", "--watch "),
    "factors": ("factors=", "--factors "),
    "grouping": ("grouping=", "--grouping "),
    "layer": ("layer=", "--layer "),
    "max_new_tokens": ("max_new_tokens[= ]", "--max-new-tokens "),
}
TextArgument = Annotated[
    str, typer.Argument(help="A prompt, a text to classify or translate, or a ranker's query.")
]
AnswerOption = Annotated[
    str | None,
    make_option(
        "What to explain: your own answer or translation, or a label.",
        show_default="the model's own answer",
    ),
]
PairOption = Annotated[
    str | None,
    make_option("The second text, for models that read pairs; for embeddings, the text to compare with."),
]
HtmlOption = Annotated[
    Path | None, make_option("Also write an HTML page that shows everything, and works offline.", "--html")
]
MethodsOption = Annotated[
    str | None,
    make_option(
        "gradient, integrated_gradients, occlusion, lens, attention, neurons; several separated by commas.",
        show_default="gradient,lens,attention; occlusion where the bundle has no graphs for them",
    ),
]
ObjectiveOption = Annotated[
    str, make_option("What to take gradients of: logit or probability.", show_default=True)
]
WatchOption = Annotated[
    list[str] | None,
    make_option(
        "A word of one token, such as ' God', whose rank at each layer the lens shows too; may be repeated."
    ),
]
FactorsOption = Annotated[int, make_option("Number of groups of neurons.", show_default=True, minimum=1)]
GroupingOption = Annotated[str, make_option("How neurons are grouped: nmf or kmeans.", show_default=True)]
LayerOption = Annotated[
    int | None, make_option("Group the neurons of this layer alone.", show_default="all", minimum=1)
]
FiringOption = Annotated[
    Path | None,
    make_option("Also draw how neurons fire at each token; needs --methods neurons.", "--firing"),
]
MaxNewTokensOption = Annotated[
    int | None,
    make_option("At most this many tokens of the model's own answer.", show_default="20", minimum=1),
]


def explain(
    bundle: BundleArgument,
    text: TextArgument,
    answer: AnswerOption = None,
    pair: PairOption = None,
    html: HtmlOption = None,
    methods: MethodsOption = None,
    objective: ObjectiveOption = "logit",
    watch: WatchOption = None,
    factors: FactorsOption = FACTORS,
    grouping: GroupingOption = GROUPING,
    layer: LayerOption = None,
    firing: FiringOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    backend: BackendOption = "auto",
    precision: PrecisionOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which words led a model to its answer, and at which layer. Does not load torch.

    All methods but occlusion need an export with --outputs explain. A head of fit-head is explained if it was
    fitted on --features embedding.
    """
    with show_stages() as progress:
        check_file("--html", html)
        check_file("--firing", firing)
        chosen = split_names("--methods", methods)
        if "neurons" not in (chosen or ()):
            refuse_options_of_neurons(factors, grouping, layer, firing)
        progress("loading it")
        with load(bundle, backend=backend, precision=precision, threads=threads) as model:
            progress("explaining")
            with speaking_of_options():
                result = explain_model(
                    model,
                    text,
                    answer,
                    pair=pair,
                    methods=chosen,
                    objective=objective,
                    watch=watch or (),
                    factors=factors,
                    grouping=grouping,
                    layer=layer,
                    max_new_tokens=max_new_tokens,
                )
        if html is not None:
            result.to_html(html)
        if firing is not None:
            from ..diagnostics.plots import save

            save(result.plot_neurons(), firing)
    if as_json:
        print_json(result.to_json())
    else:
        print_tables([tabulate(result), *([] if result.neurons is None else [tabulate_neurons(result)])])
    if firing is not None:
        say(f"{firing} shows how the neurons fire")
    if html is not None:
        say(f"{html} shows it in any browser, offline")


def refuse_options_of_neurons(factors: int, grouping: str, layer: int | None, firing: Path | None) -> None:
    """Refuse options that only groups of neurons have."""
    given = {
        "--factors": factors != FACTORS,
        "--grouping": grouping != GROUPING,
        "--layer": layer is not None,
        "--firing": firing is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise InputError(f"{name} is for groups of neurons: add --methods neurons, or leave it out")


def tabulate_neurons(result: Explanation) -> FittingTable:
    """Return a row for each group of neurons, with the tokens at which it is most active."""
    assert result.neurons is not None
    rows = []
    for number, strongest in enumerate(result.neurons.list_strongest(), 1):
        layer = int(result.neurons.layers[number - 1].argmax()) + 1
        tokens = " ".join(repr(result.tokens[index].text) for index in strongest[:NAMED])
        rows.append((str(number), str(layer), tokens))
    return FittingTable("groups of neurons", ("group", "most of it in layer", "most active at"), rows)


def check_file(option: str, file: Path | None) -> None:
    """Refuse a place where no file can be, before the work begins."""
    if file is None:
        return
    if file.is_dir():
        raise InputError(f"{option} {file}: this is a folder; give the name of a file")
    if not file.absolute().parent.is_dir():
        raise InputError(f"{option} {file}: the folder {file.absolute().parent} does not exist")


@contextmanager
def speaking_of_options() -> Iterator[None]:
    """Let errors name the command's options, where those of the runtime name parameters."""
    try:
        yield
    except InputError as error:
        parameter, option = SPELLINGS.get(error.option or "", ("", ""))
        message = re.sub(f"(^|: ){parameter}", rf"\1{option}", str(error), count=1)
        raise InputError(message, option=error.option) from error


def tabulate(result: Explanation) -> FittingTable:
    """Return a row for each target, with the tokens that counted most."""
    columns = ["answer" if result.targets[0].token is not None else "label", "probability"]
    names = list(result.saliency)
    columns += [f"counted most, by {name.replace('_', ' ')}" for name in names]
    ranked = result.lens if result.kind not in ("ranking", "similarity") else None  # one number has no rank
    if ranked is not None:
        columns.append("first in rank 1")
    rows = []
    for number, target in enumerate(result.targets):
        row = [repr(target.text), describe_probability(target)]
        row += [name_strongest(result, name, number) for name in names]
        if ranked is not None:
            row.append(find_first_layer(ranked, number))
        rows.append(row)
    return FittingTable(f"{result.kind} by {result.model}", columns, rows)


def describe_probability(target: Target) -> str:
    """Return a target's probability; of a number that is none, the number."""
    if target.probability is not None:
        return f"{100 * target.probability:.3g} %"
    return "" if target.logit is None else f"score {target.logit:.3g}"


def find_first_layer(lens: Lens, number: int) -> str:
    """Return after which layer a target is the likeliest first, and its last rank if that is another."""
    ranks = lens.ranks[:, number].tolist()
    first = "never"
    if 1 in ranks:
        first = f"layer {ranks.index(1)}" if ranks[0] != 1 else "embeddings"
    return first if ranks[-1] == 1 else f"{first}; at last {ranks[-1]}"


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
