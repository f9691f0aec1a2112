"""Explanations against transformers, captum and scikit-learn, which compute them in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import captum.attr
import numpy as np
import pytest
import sklearn.cluster
import sklearn.decomposition
import torch
import transformers
from sentence_transformers import SentenceTransformer

from planforge.exporter.checkpoints.source import resolve_source
from planforge.runtime.apps.explain import explain

from ....helpers.explained import open_model

PROMPT = "In the beginning God created the"
NEAR = 1e-5  # of the largest: fp32 that adds in another order


def largest_difference(got: Any, want: Any) -> float:
    """The largest difference, as a share of the largest number."""
    return float(np.abs(np.asarray(got) - np.asarray(want)).max() / np.abs(np.asarray(want)).max())


def make_forward(reference: Any, row: int, target: int, probability: bool = False) -> Callable[..., Any]:
    """Return the score of a token behind `row` by embeddings, as captum wants it."""

    def forward(embeddings: Any) -> Any:
        logits = reference(inputs_embeds=embeddings).logits[:, row]
        return (logits.softmax(-1) if probability else logits)[:, target]

    return forward


@pytest.mark.parametrize("objective", ["logit", "probability"])
def test_gradient_x_input_is_captums(gpt2: Any, gpt2_reference: Any, objective: str) -> None:
    result: Any = explain(gpt2, PROMPT, max_new_tokens=4, methods=["gradient"], objective=objective)
    ids = torch.tensor([[token.id for token in result.tokens]])
    embeddings = gpt2_reference.get_input_embeddings()(ids).detach()
    for number, target in enumerate(result.targets):
        row = target.token - 1
        forward = make_forward(gpt2_reference, row, int(ids[0, target.token]), objective == "probability")
        products = (
            captum.attr.InputXGradient(forward)
            .attribute(embeddings.clone().requires_grad_())[0, : row + 1]
            .detach()
        )
        signed = result.saliency["gradient_x_input"][number]
        assert largest_difference(signed[: row + 1], products.sum(-1)) < NEAR
        assert np.isnan(signed[row + 1 :]).all()
        norms = products.norm(dim=-1)
        shares = result.saliency["gradient_norm"][number][: row + 1]
        assert largest_difference(shares, norms / norms.sum()) < NEAR
    logits = gpt2_reference(ids).logits[0]
    for target in result.targets:
        own = logits[target.token - 1]
        share = own.softmax(-1)[ids[0, target.token]].detach()
        assert target.probability == pytest.approx(float(share), rel=1e-4)
        if objective == "logit":
            assert target.logit == pytest.approx(float(own[ids[0, target.token]].detach()), rel=1e-5)


def test_integrated_gradients_are_captums_and_complete(gpt2: Any, gpt2_reference: Any) -> None:
    result: Any = explain(gpt2, PROMPT, " earth", methods=["integrated_gradients"])
    ids = torch.tensor([[token.id for token in result.tokens]])
    embeddings = gpt2_reference.get_input_embeddings()(ids).detach()
    row = result.targets[0].token - 1
    forward = make_forward(gpt2_reference, row, int(ids[0, -1]))
    with torch.no_grad():
        difference = float(forward(embeddings) - forward(torch.zeros_like(embeddings)))
    own = result.saliency["integrated_gradients"][0, : row + 1]
    assert own.sum() == pytest.approx(difference, rel=0.01)
    assert result.missing[0] <= 0.01
    want = captum.attr.IntegratedGradients(forward).attribute(
        embeddings, n_steps=2000, internal_batch_size=50
    )
    assert largest_difference(own, want[0, : row + 1].sum(-1)) < 0.02


@pytest.mark.parametrize("name", ["gemma 2", "transformer-demo"])
def test_integrated_gradients_are_complete(explained: Callable[[str], Path], name: str) -> None:
    texts = {"transformer-demo": ("3 may 1998",)}
    with open_model(explained(name) / "bundle") as model:
        result: Any = explain(model, *texts.get(name, (PROMPT, " earth")), methods=["integrated_gradients"])
    assert result.missing.max() <= 0.01


@pytest.mark.parametrize("name", ["gpt2-demo", "gemma 2"])
def test_layers_are_transformers(explained: Callable[[str], Path], gpt2_reference: Any, name: str) -> None:
    """Ranks by the final norm and the head of each layer's state, attention weights, gradients."""
    folder = explained(name)
    reference = gpt2_reference
    if name != "gpt2-demo":
        kind: Any = transformers.AutoModelForCausalLM
        reference = kind.from_pretrained(folder / "checkpoint", attn_implementation="eager").eval()
    with open_model(folder / "bundle") as model:
        result: Any = explain(model, PROMPT, " heavens and the earth")
    ids = torch.tensor([[token.id for token in result.tokens]])
    with torch.no_grad():
        outputs = reference(ids, output_hidden_states=True, output_attentions=True)
    weights = np.stack([layer[0].numpy() for layer in outputs.attentions])
    assert np.abs(result.attention["self"].weights - weights).max() < NEAR
    inner = reference.transformer if name == "gpt2-demo" else reference.model
    norm = inner.ln_f if name == "gpt2-demo" else inner.norm
    rows = [target.token - 1 for target in result.targets]
    targets = ids[0, 1:][rows]
    for layer, state in enumerate(outputs.hidden_states):
        is_last = layer == len(outputs.hidden_states) - 1  # which transformers gives behind the norm
        with torch.no_grad():
            logits = reference.lm_head(state if is_last else norm(state))[0, rows]
        if (cap := getattr(reference.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        own = logits.gather(1, targets[:, None])
        near = 1e-5 * logits.abs().max()
        above = (logits > own + near).sum(-1) + 1
        level = (logits > own - near).sum(-1)  # with those that tie but for rounding
        ranks = torch.tensor(result.lens.ranks[layer])
        assert ((ranks >= above) & (ranks <= torch.maximum(above, level))).all(), layer
    number = len(rows) - 1
    embeddings = reference.get_input_embeddings()(ids).detach().requires_grad_()
    score = reference(inputs_embeds=embeddings).logits[0, rows[number], targets[number]]
    (gradient,) = torch.autograd.grad(score, embeddings)
    products = (gradient * embeddings)[0, : rows[number] + 1].sum(-1).detach()
    signed = result.saliency["gradient_x_input"][number, : rows[number] + 1]
    assert largest_difference(signed, products) < NEAR


@pytest.mark.parametrize("name", ["classifier", "ranker"])
def test_labels_are_transformers(explained: Callable[[str], Path], name: str) -> None:
    folder = explained(name)
    kind: Any = transformers.AutoModelForSequenceClassification
    reference = kind.from_pretrained(folder / "checkpoint").eval()
    with open_model(folder / "bundle") as model:
        result: Any = explain(model, "one small film", pair="a great man")
        labels = list(model.labels)
    ids = torch.tensor([[token.id for token in result.tokens]])
    second = [token.part for token in result.tokens].index("special", 1) + 1
    segments = torch.tensor([[int(place >= second) for place in range(ids.shape[1])]])
    embeddings = reference.get_input_embeddings()(ids).detach().requires_grad_()
    logits = reference(inputs_embeds=embeddings, token_type_ids=segments).logits[0]
    assert [target.text for target in result.targets] == [labels[i] for i in logits.argsort(descending=True)]
    for number, target in enumerate(result.targets):
        score = logits[labels.index(target.text)]
        assert target.logit == pytest.approx(float(score.detach()), abs=1e-5)
        (gradient,) = torch.autograd.grad(score, embeddings, retain_graph=True)
        products = (gradient * embeddings)[0].sum(-1).detach()
        assert largest_difference(result.saliency["gradient_x_input"][number], products) < NEAR


def test_likeness_is_the_cosine_of_sentence_transformers(explained: Callable[[str], Path]) -> None:
    """Of vectors that are not of length 1, with what the cosine's gradient is in PyTorch."""
    folder = explained("vectors")
    texts = ("a fine film", "a good movie")
    with open_model(folder / "bundle") as model:
        result: Any = explain(
            model, texts[0], pair=texts[1], methods=["gradient", "integrated_gradients", "lens", "occlusion"]
        )
    reference = SentenceTransformer(str(folder / "checkpoint"), device="cpu")
    vectors = reference.encode(list(texts), convert_to_tensor=True)
    assert (vectors.norm(dim=1) - 1).abs().min() > 0.1
    cosine = float(torch.cosine_similarity(vectors[:1], vectors[1:]))
    assert result.targets[0].logit == pytest.approx(cosine, abs=1e-5)
    assert result.lens.logprobs[-1, 0] == pytest.approx(cosine, abs=1e-5)
    bert: Any = reference[0].auto_model
    ids = torch.tensor([[token.id for token in result.tokens]])
    embeddings = bert.get_input_embeddings()(ids).detach().requires_grad_()
    state = bert(inputs_embeds=embeddings).last_hidden_state.mean(1)
    (gradient,) = torch.autograd.grad(torch.cosine_similarity(state, vectors[1:].clone()).sum(), embeddings)
    products = (gradient * embeddings)[0].sum(-1).detach()
    assert largest_difference(result.saliency["gradient_x_input"][0], products) < NEAR
    with torch.no_grad():
        zeros = bert(inputs_embeds=torch.zeros_like(embeddings)).last_hidden_state.mean(1)
    change = cosine - float(torch.cosine_similarity(zeros, vectors[1:].clone()))
    assert result.saliency["integrated_gradients"][0].sum() == pytest.approx(change, rel=0.01)


@pytest.mark.parametrize("name", ["classifier", "ranker"])
def test_occlusion_of_labels_is_what_transformers_says_without_the_token(
    explained: Callable[[str], Path], name: str
) -> None:
    folder = explained(name)
    kind: Any = transformers.AutoModelForSequenceClassification
    reference = kind.from_pretrained(folder / "checkpoint").eval()
    with open_model(folder / "bundle") as model:
        result: Any = explain(model, "one small film", pair="a great man", methods=["occlusion"])
        chosen = [model.labels.index(target.text) for target in result.targets]
    second = [token.part for token in result.tokens].index("special", 1) + 1
    segments = [int(place >= second) for place in range(len(result.tokens))]

    def answer(places: list[int]) -> Any:
        ids = torch.tensor([[result.tokens[place].id for place in places]])
        kinds = torch.tensor([[segments[place] for place in places]])
        with torch.no_grad():
            return reference(ids, token_type_ids=kinds).logits[0, chosen].numpy()

    places = list(range(len(result.tokens)))
    whole = answer(places)
    for place, token in enumerate(result.tokens):
        falls = result.saliency["occlusion"][:, place]
        if token.part == "special":
            assert np.isnan(falls).all()
        else:
            assert np.abs(falls - (whole - answer([p for p in places if p != place]))).max() < NEAR


def read_neurons(reference: Any, ids: list[int]) -> list[Any]:
    """What each layer's neurons of transformers' GPT-2 are above 0: (N, T)."""
    kept: list[Any] = []
    hooks = [
        block.mlp.c_proj.register_forward_pre_hook(lambda module, args: kept.append(args[0][0].detach()))
        for block in reference.transformer.h
    ]
    with torch.no_grad():
        reference(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return [np.maximum(layer.numpy(), 0).T for layer in kept]


@pytest.mark.parametrize(("grouping", "layer"), [("nmf", None), ("nmf", 2), ("kmeans", None), ("kmeans", 1)])
def test_neurons_are_transformers_and_their_groups_scikit_learns(
    gpt2: Any, gpt2_reference: Any, grouping: str, layer: int | None
) -> None:
    options: dict[str, Any] = {"methods": ["neurons"], "factors": 4, "grouping": grouping, "layer": layer}
    result: Any = explain(gpt2, PROMPT, " heavens and the earth.", **options)
    layers = read_neurons(gpt2_reference, [token.id for token in result.tokens])
    matrix = np.concatenate(layers if layer is None else [layers[layer - 1]])  # (N, T)
    groups = result.neurons
    own = np.linalg.norm(matrix - groups.neurons.T @ groups.activations) / np.linalg.norm(matrix)
    assert groups.error == pytest.approx(own, rel=1e-3)
    if grouping == "nmf":
        model = sklearn.decomposition.NMF(4, init="nndsvda", max_iter=2000, tol=1e-6, random_state=0)
        error = model.fit(matrix).reconstruction_err_
    else:
        model = sklearn.cluster.KMeans(4, n_init=10, random_state=1).fit(matrix)
        error = model.inertia_**0.5
        members = groups.neurons > 0
        assert (members.sum(0) == 1).all()  # each neuron is of one group, whose row is its members' mean
        for row, own_members in zip(groups.activations, members, strict=True):
            mean = matrix[own_members].mean(0)
            np.testing.assert_allclose(row, mean / mean.max(), rtol=0, atol=1e-4)
    assert groups.error <= 1.01 * error / np.linalg.norm(matrix)
    assert groups.activations.max() == pytest.approx(1)
    assert groups.layers.shape == (4, len(layers))
    assert np.allclose(groups.layers.sum(1), 1)
    if layer is not None:
        assert np.allclose(groups.layers[:, layer - 1], 1)
    check_firing(groups, matrix)


def check_firing(groups: Any, matrix: Any) -> None:
    """The chart has the most active neurons, by group."""
    strongest = np.sort(matrix.max(axis=1))[::-1][: len(groups.firing)]
    np.testing.assert_allclose(np.sort(groups.firing.max(axis=1))[::-1], strongest, rtol=0, atol=1e-4)
    assert (np.diff(groups.groups) >= 0).all()
    assert len(groups.firing) == min(400, len(matrix))
    for neuron, group in zip(groups.firing[::50], groups.groups[::50], strict=True):
        place = np.abs(matrix - neuron).max(axis=1).argmin()
        assert groups.neurons[:, place].argmax() == group


@pytest.mark.slow
def test_without_the_most_salient_token_the_answer_is_less_likely(gpt2: Any) -> None:
    """Of 200 prompts: taking it out costs more than taking out another, drawn by chance, in 70 % at least."""
    text = (resolve_source("gpt2-demo").folder / "prompts.txt").read_text().split()
    random = np.random.default_rng(0)
    wins = 0
    for begin in random.choice(len(text) - 14, 200, replace=False):
        result: Any = explain(
            gpt2, " ".join(text[begin : begin + 14]), max_new_tokens=1, methods=["gradient"]
        )
        ids = [token.id for token in result.tokens]
        salient = int(np.nanargmax(result.saliency["gradient_norm"][0]))
        other = int(random.integers(len(ids) - 1))
        if other == salient:
            other = (other + 1) % (len(ids) - 1)
        falls = [gpt2.score([*ids[:p], *ids[p + 1 :]]).logprobs[-1] for p in (salient, other)]
        wins += falls[0] < falls[1]
    assert wins >= 140
