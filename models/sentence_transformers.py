"""Reads sentence-transformers folders: modules.json and the modules that it lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PureWindowsPath
from typing import Any

from .folder import read_file, read_json, read_json_list, read_published_shapes
from .late_interaction import (
    DOCUMENT,
    PYLATE,
    QUERY,
    STANFORD,
    RoleSettings,
    merge_settings,
    read_length,
    read_lengths,
    read_mask,
    read_pylate,
    read_stanford,
)
from .pair_messages import MESSAGES, MessageSettings, read_messages
from .retrieval_vectors import SpladeConfig, TokenVectorConfig, TokenWeightConfig
from .sentence import DenseConfig, NormalizeConfig, SentenceConfig
from .sentence_parts import (
    Modules,
    activation_of,
    read_layers,
    read_pair_scores,
    read_score_tokens,
    read_sentence,
    read_splade,
    read_token_vectors,
)

MODULES = "modules.json"
ROOT_SETTINGS = "config_sentence_transformers.json"
# Orders of modules, by what they make of a text, and the task of their transformer.
LAYERS = "( Dense| LayerNorm| Dropout| Normalize)*"
ORDERS = {
    "scores": ("Transformer", "sequence-classification"),
    "token scores": ("Transformer LogitScore", "text-generation"),
    "pooled scores": (f"Transformer Pooling{LAYERS} Dense", "feature-extraction"),
    "static": (f"StaticEmbedding{LAYERS}", ""),
    "static weights": ("SparseStaticEmbedding", ""),
    "sentence": (f"Transformer Pooling{LAYERS}", "feature-extraction"),
    "sparse": ("Transformer SpladePooling", "fill-mask"),
    "token vectors": ("Transformer( Dense| Dropout| Normalize| MultiVectorMask)+", "feature-extraction"),
}
SCORES = ("scores", "token scores", "pooled scores")  # the orders that read pairs
KINDS = (
    "Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize", "LogitScore", "SpladePooling",
    "MultiVectorMask", "StaticEmbedding", "SparseStaticEmbedding", "Router",
)  # fmt: skip
ALIASES = {"MLMTransformer": "Transformer"}  # classes' older names
PROJECTION = "linear.weight"  # of Stanford's ColBERT
ROUTES = {QUERY, DOCUMENT}
# Files of BGE-M3's layers that make weights and vectors of tokens, by our settings for them.
EXTRA_HEADS = {"sparse": "sparse_linear", "token_vectors": "colbert_linear"}
PYLATE_DENSE = "pylate.models.Dense.Dense"
# What a transformer of each task gives to the module behind it, and nothing else.
GIVES = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
    "fill-mask": ("logits", "token_embeddings"),
}


@dataclass(frozen=True)
class SentenceModules:
    """The additions of a sentence-transformers folder to its transformer.

    Attributes:
        transformer: the folder of config.json and the weights, or of a table of rows and the tokenizer.
        is_static: whether it has a table of rows, and no transformer.
        sentence, sparse, token_vectors: what the modules make of a text, as in `EncoderConfig`; all None
            where they score pairs.
        pair_scores: how they pool a pair and make scores of that; None for others.
        dense_folders: the folders of the dense layers' weights, in order.
        norm_folders: those of the LayerNorm modules' weights.
        max_seq_length: tokens after which it cuts a text, special ones included; None: the model's.
        prompts: texts to put before a text, by name.
        default_prompt: the name of the prompt that every text gets.
        activation: the class by which a CrossEncoder makes scores of logits; None where the folder does not
            say.
        score_tokens: the token whose logit is the score, and one whose logit is taken from it, or None;
            None where no token's is.
        messages: how a pair becomes messages for a chat template; None where it stays two texts.
        similarity: the name of the function that compares two vectors; None for the usual one.
        roles: what differs between queries and documents.
        max_active_dims: how many of a text's sparse weights it keeps, the largest; None for all.
        query: the modules that read queries, where these read documents.
        extra_heads: files of the layers that make tokens' weights and vectors beside the text's, as BGE-M3
            has them.
        pickled_heads: those that are pickles, which are never opened.
    """

    transformer: Path
    is_static: bool = False
    sentence: SentenceConfig | None = None
    sparse: SpladeConfig | TokenWeightConfig | None = None
    token_vectors: TokenVectorConfig | None = None
    pair_scores: SentenceConfig | None = None
    dense_folders: tuple[Path, ...] = ()
    norm_folders: tuple[Path, ...] = ()
    max_seq_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    activation: str | None = None
    score_tokens: tuple[int, int | None] | None = None
    messages: MessageSettings | None = None
    similarity: str | None = None
    roles: RoleSettings = field(default_factory=RoleSettings)
    max_active_dims: int | None = None
    query: SentenceModules | None = None
    extra_heads: Mapping[str, Path] = field(default_factory=dict)
    pickled_heads: tuple[Path, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of an `EncoderConfig` that the modules give."""
        names = ("sentence", "sparse", "token_vectors", "score_tokens", "pair_scores")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        labels = None if self.score_tokens is None else 1
        if self.pair_scores is not None:
            labels = getattr(self.pair_scores.layers[-1], "out_features", None)
        head = {} if labels is None else {"heads": ("sequence_classification",), "num_labels": labels}
        return {**given, **head}


def read_modules(folder: Path) -> SentenceModules | None:
    """Read a sentence-transformers folder; return None where `folder` is a plain checkpoint.

    Raises:
        ValueError: a module, or a setting of one, that we don't implement; names it.
    """
    if not (folder / MODULES).is_file():
        return read_stanford_modules(folder)
    modules = [module_of(folder, module) for module in read_json_list(folder / MODULES)]
    settings = read_json(folder / ROOT_SETTINGS, missing={})
    if [kind for kind, _ in modules] == ["Router"]:
        return read_router(modules[0][1], folder, settings)
    return read_chain(folder, modules, settings)


def read_stanford_modules(folder: Path) -> SentenceModules | None:
    """Read a folder of Stanford's ColBERT, whose projection is among the transformer's weights; else None."""
    named = read_json(folder / "config.json", missing={}).get("architectures")
    if not isinstance(named, list) or STANFORD not in named:
        return None
    shape = read_published_shapes(folder).get(PROJECTION, ())
    if len(shape) != 2:
        raise ValueError(f"{folder}: config.json names {STANFORD}, but the weights have no {PROJECTION}")
    layers = (DenseConfig(shape[1], shape[0], bias=False), NormalizeConfig())
    return SentenceModules(
        transformer=folder,
        token_vectors=TokenVectorConfig(layers),
        max_seq_length=max_seq_length(folder, {}),
        roles=read_stanford(folder),
    )


def read_chain(folder: Path, modules: Modules, root_settings: Mapping[str, Any]) -> SentenceModules:
    """Return what modules say that follow each other; `root_settings` are the whole folder's."""
    path = folder / ROOT_SETTINGS
    makes = find_order(folder, modules, root_settings)
    prompts, default_prompt = prompts_of(path, root_settings)
    whole = SentenceModules(
        transformer=modules[0][1],
        is_static=makes.startswith("static"),
        dense_folders=tuple(own for kind, own in modules if kind == "Dense"),
        norm_folders=tuple(own for kind, own in modules if kind == "LayerNorm"),
        prompts=prompts,
        default_prompt=default_prompt,
        activation=activation_of(path, root_settings),
        similarity=root_settings.get("similarity_fn_name"),
        max_active_dims=read_length(root_settings, "max_active_dims", path),
    )
    if makes == "static weights":
        return replace(whole, sparse=TokenWeightConfig())
    if makes == "static":
        return replace(whole, sentence=SentenceConfig(("mean",), read_layers(modules[1:])))
    file, settings = transformer_settings(whole.transformer, makes, folder)
    if makes == "sentence":
        whole = add_extra_heads(whole)
    is_pylate = root_settings.get("model_type") == PYLATE
    masks = [read_mask(own) for kind, own in modules if kind == "MultiVectorMask"]
    own_lengths = read_lengths(settings, whole.transformer)
    return replace(
        whole,
        sentence=read_sentence(modules[1:]) if makes == "sentence" else None,
        sparse=read_splade(modules[1][1]) if makes == "sparse" else whole.sparse,
        token_vectors=(
            read_token_vectors(modules[1:], is_pylate) if makes == "token vectors" else whole.token_vectors
        ),
        score_tokens=read_score_tokens(modules[1][1]) if makes == "token scores" else None,
        pair_scores=read_pair_scores(modules[1:]) if makes == "pooled scores" else None,
        messages=read_messages(settings, file, GIVES[ORDERS[makes][1]][0]) if makes in SCORES else None,
        max_seq_length=max_seq_length(whole.transformer, settings),
        roles=merge_settings([own_lengths, *masks, read_pylate(root_settings, path)]),
    )


def add_extra_heads(modules: SentenceModules) -> SentenceModules:
    """Return the modules with BGE-M3's layers, which lie beside its transformer's weights."""
    heads: dict[str, Path] = {}
    pickled: list[Path] = []
    for name, file in EXTRA_HEADS.items():
        path = modules.transformer / f"{file}.safetensors"
        if path.is_file():
            heads[name] = path
        elif path.with_suffix(".pt").is_file():
            pickled.append(path.with_suffix(".pt"))
    modules = replace(modules, extra_heads=heads, pickled_heads=tuple(pickled))
    if "sparse" in heads:
        modules = replace(modules, sparse=TokenWeightConfig())
    if "token_vectors" in heads:
        weight = read_file(heads["token_vectors"]).get("weight")
        if weight is None or weight.ndim != 2:
            raise ValueError(f"{heads['token_vectors']} has no weight of two axes")
        layers = (DenseConfig(weight.shape[1], weight.shape[0]), NormalizeConfig())
        modules = replace(modules, token_vectors=TokenVectorConfig(layers))
    return modules


def read_router(router: Path, folder: Path, root_settings: Mapping[str, Any]) -> SentenceModules:
    """Return the modules that read documents, with those that read queries."""
    path = router / "router_config.json"
    config = read_json(path)
    structure = config.get("structure")
    types = config.get("types")
    settings = config.get("parameters") or {}
    if not isinstance(structure, dict) or not isinstance(types, dict) or not isinstance(settings, dict):
        raise ValueError(f"{path} must have structure, types and parameters")
    mappings = settings.get("route_mappings")
    if set(structure) != ROUTES or mappings:
        raise ValueError(
            f"{path} has the routes {sorted(structure)} and route_mappings={mappings!r:.60}; supported are"
            f" {' and '.join(sorted(ROUTES))}, without mappings"
        )
    if settings.get("default_route") not in (DOCUMENT, None):
        raise ValueError(
            f"{path} sets default_route={settings['default_route']!r:.60}; only {DOCUMENT!r} is supported:"
            " pass input_type='query' for queries"
        )
    chains = {
        route: read_chain(
            router, [module_of(router, {"type": types.get(n), "path": n}) for n in names], root_settings
        )
        for route, names in structure.items()
    }
    own, query = chains[DOCUMENT], chains[QUERY]
    if own.is_static and not query.is_static:
        raise ValueError(
            f"{path}: a table reads documents and a transformer queries; only the other way works"
        )
    if not query.is_static and (own.max_seq_length, own.roles) != (query.max_seq_length, query.roles):
        raise ValueError(
            f"{path}: queries are cut or expanded otherwise than documents by the settings of their own"
            " transformer, which is not supported; export the two encoders as two bundles"
        )
    return replace(own, query=query)


def find_order(folder: Path, modules: Modules, root_settings: Mapping[str, Any]) -> str:
    """Return the key of `ORDERS` that fits a folder's modules."""
    kinds = " ".join(kind for kind, _ in modules)
    model_type = root_settings.get("model_type")
    unfit = {"pooled scores"} if model_type != "CrossEncoder" else {"sentence"}
    if model_type not in ("MultiVectorEncoder", PYLATE) and "Mask" not in kinds:
        unfit.add("token vectors")
    for makes, (order, _) in ORDERS.items():
        if re.fullmatch(order, kinds) and makes not in unfit:
            return makes
    raise ValueError(
        f"{folder / MODULES} lists {kinds.replace(' ', ', ') or 'nothing'}, an order that is not supported;"
        " supported are of a CrossEncoder Transformer alone, with LogitScore, or with Pooling and at last a"
        " Dense; of others Transformer, Pooling, then"
        " any of Dense, LayerNorm, Dropout and Normalize; StaticEmbedding, then the same; Transformer,"
        " SpladePooling; a Router of such for query and document; and of a"
        " MultiVectorEncoder Transformer, then any of Dense, Dropout, Normalize and MultiVectorMask"
    )


def module_of(folder: Path, module: Any) -> tuple[str, Path]:
    """Return the class name of one entry of modules.json, and its folder, which lies inside `folder`."""
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise ValueError(f"{folder / MODULES}: an entry is not a module with a type: {module!r:.80}")
    kind = module["type"].rpartition(".")[2]
    kind = ALIASES.get(kind, kind)
    # Old: sentence_transformers.models.Pooling; others' classes of these names may do anything.
    is_known = module["type"].startswith("sentence_transformers.") or module["type"] == PYLATE_DENSE
    if kind not in KINDS or not is_known:
        raise ValueError(
            f"{folder / MODULES}: module {module['type']!r} is not supported; known are"
            f" sentence_transformers' {', '.join(KINDS)}"
        )
    path = str(module.get("path") or ".")
    if PureWindowsPath(path).anchor or ".." in PureWindowsPath(path).parts:  # takes / and \ alike
        raise ValueError(f"{folder / MODULES}: path {path!r} leaves the folder")
    return kind, folder / path


def transformer_settings(transformer: Path, makes: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Read sentence_bert_config.json, or the file that old versions wrote instead; refuse other settings.

    `makes` is the key of `ORDERS` of all modules. Messages of pairs are left to `read_messages`.
    """
    task = ORDERS[makes][1]
    for name in ("bert", "distilbert"):
        path = transformer / f"sentence_{name}_config.json"
        if settings := read_json(path, missing={}):
            break
    if "transformer_task" not in settings and task == "sequence-classification":
        raise ValueError(
            f"{folder / MODULES} lists a Transformer alone; add a Pooling to embed texts, or for a"
            " CrossEncoder a transformer_task in sentence_bert_config.json"
        )
    output, name = GIVES[task]
    wanted = {
        "transformer_task": task,
        "modality_config": {"text": {"method": "forward", "method_output_name": output}},
        "module_output_name": name,
    }
    for name, value in wanted.items():
        given = settings.get(name, value)
        if makes in SCORES and isinstance(given, dict):
            given = {kind: own for kind, own in given.items() if kind != MESSAGES}
        if given != value:
            raise ValueError(f"{path} sets {name}={settings[name]!r}; only {value!r} is supported")
    return path, settings


def max_seq_length(folder: Path, settings: Mapping[str, Any]) -> int | None:
    """Return the tokens after which texts are cut; since version 6 only the tokenizer's config has it."""
    path = folder / "sentence_bert_config.json"
    name = "max_seq_length"
    if settings.get(name) is None:
        path = folder / "tokenizer_config.json"
        name = "model_max_length"
        settings = read_json(path, missing={})
    length = settings.get(name)
    if isinstance(length, float):  # 1e30, of a tokenizer that knows no limit
        return None
    if length is not None and (type(length) is not int or length < 3):
        raise ValueError(f"{path}: {name}={length!r} must be an integer of at least 3")
    return length


def prompts_of(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the one that every text gets."""
    if settings.get("truncate_dim") is not None:
        raise ValueError(
            f"{path} sets truncate_dim={settings['truncate_dim']!r}, which is not supported; set it to null,"
            " and cut the vectors where you use them"
        )
    prompts = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ValueError(f"{path}: prompts must be an object of strings, not {prompts!r:.80}")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ValueError(f"{path}: default_prompt_name={default!r} is not one of {sorted(prompts)}")
    return prompts, default
