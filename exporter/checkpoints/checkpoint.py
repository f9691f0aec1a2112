"""A checkpoint to export: its config, tokenizers and task, as its files say; weights are read later."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ...runtime.bundle.defaults import EncoderDefaults, GenerationDefaults, SpecialTokens
from ...runtime.bundle.image_defaults import ImageDefaults, LikenessDefaults, PromptDefaults
from ...runtime.bundle.retrieval_defaults import RetrievalDefaults
from ...runtime.bundle.word_defaults import WordDefaults
from ...runtime.errors import InputError
from ...runtime.text.piece_tokenizer import PIECES, PLAIN, open_tokenizer
from ...runtime.text.tokenizer import Tokenizer
from ..errors import CheckpointError, raise_checkpoint_errors
from ..targets import find_target
from ..task_traits import TRAITS, TaskTraits
from ..tracing.recipes import RECIPES, Recipe, TraceOptions, make_all_recipes
from .chat_template import TemplateFile, read_chat_template
from .generation_config import Settings, merge_settings, read_decoder_defaults, read_translation_defaults
from .likeness import read_likeness
from .pair_templates import read_pair_templates
from .roles import (
    add_special_tokens,
    check_query_tokenizer,
    compose_prompts,
    find_prefix_tokens,
    read_roles,
    warn_of_pickles,
)
from .source import Source
from .tokenizers.files import (
    build_tokenizer_json,
    find_frames,
    find_role_names,
    find_special_tokens,
    read_settings,
    reads_segments,
)
from .tokenizers.translation import build_translation_tokenizers
from .tokenizers.unknown_tokens import remove_unknown_tokens

if TYPE_CHECKING:
    from ...models.diffusers_folder import Pipeline
    from ...models.quantized_files import FileCodes
    from ...models.sentence_transformers import SentenceModules

log = logging.getLogger("planforge")

CHOICE = "choice"  # the label of a model that gives each of several choices a logit
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
# Steps and guidance scale of diffusers' classes: of models without an embedded guidance scale, and with one.
PICTURE_DEFAULTS = ((50, 7.5), (4, 8.5))
WIDEN = "set max_positions of its config.json to export it for longer texts"
USUAL_LENGTH = 4096  # of a longer context, where an export names none: memory and checks grow with it


class Checkpoint:
    """A checkpoint's config and all that follows from it, with a user's choices or the family's defaults."""

    exporter = ""  # the exporter of its graphs, if it is not PlanForge
    unshared = ""  # why its attention cannot run over shared buffers, if that is known
    modules: SentenceModules | None = None  # that sentence-transformers adds
    prefix_tokens: Mapping[str, int] = {}  # special tokens that stand before queries and documents
    pipeline: Pipeline | None = None  # the parts of a diffusers folder
    images: ImageDefaults | None = None
    likeness: LikenessDefaults | None = None
    words: WordDefaults | None = None
    retrieval: RetrievalDefaults | None = None
    explanations: Mapping[str, Recipe] = {}  # of the graphs that explain the model, if they were asked for

    def read_codes(self) -> Mapping[str, FileCodes]:
        """Return the codes of weights that others quantized, by the names of our model's parameters."""
        from ...models.checkpoint import describe
        from ...models.weights import read_kept_codes

        with raise_checkpoint_errors():
            return read_kept_codes(describe(self.source.folder))

    def __init__(
        self,
        source: Source,
        max_batch: int | None = None,
        max_length: int | None = None,
        outputs: tuple[str, ...] = (),
        extrapolate: bool = False,
    ) -> None:
        from ...models.checkpoint import describe

        self.source = source
        with raise_checkpoint_errors():
            found = describe(source.folder)
        self.pipeline = found.pipeline
        self.folder = found.folder if found.pipeline is None else found.pipeline.tokenizer
        self.config_json = found.config_json
        self.config: Any = found.config
        self.family = found.family.name
        self.task = found.task
        recipes = RECIPES[self.task]
        self.modules = found.modules
        length = self.choose_length(max_length, recipes.read_context(self.config), extrapolate)
        batch = max_batch or recipes.MAX_BATCH
        self.choices = TraceOptions(batch, length, outputs, bool(found.adapters))
        self.recipes, self.explanations = make_all_recipes(self.task, self.config, self.choices)
        self.read_tokenizers()
        self.generation = self.read_generation()
        if found.adapters and self.generation is not None:
            self.generation = replace(self.generation, adapters=found.adapters)
        self.encoder = self.read_encoder()
        if found.pipeline is not None:
            self.images = self.read_images(found.pipeline)
        if self.traits.compares_images:
            self.likeness = read_likeness(self.folder, self.read_prompts(), self.config)
        if self.traits.has_word_vectors:
            self.words = self.read_words()
        if self.traits.reads_neighbours:
            config: Any = self.config
            sizes = config.chunk_length, config.neighbours, config.neighbour_length
            self.retrieval = RetrievalDefaults(*sizes)

    @property
    def is_static(self) -> bool:
        """Return whether the model is a table of rows alone."""
        return self.modules is not None and self.modules.is_static

    def choose_length(self, asked: int | None, context: int, extrapolate: bool = False) -> int:
        """Return the length asked for, else the model's context, or the cut of sentence-transformers.

        A longer one than the context is for `extrapolate`, where positions are computed.
        """
        least = self.traits.min_length
        computes = getattr(self.config, "computes_positions", False)
        is_recurrent = getattr(self.config, "is_recurrent", False)
        if extrapolate and is_recurrent:
            raise InputError(
                f"extrapolate is for models with positions, and a recurrent model has none; {WIDEN}"
            )
        if extrapolate and not computes:
            raise InputError(
                f"extrapolate is for positions that are computed; this model has learned those of {context}"
                " tokens and no others. Leave it out, and cut longer texts"
            )
        if asked is not None and not (least <= asked and (asked <= context or extrapolate)):
            hint = "; extrapolate=True (--extrapolate) computes positions beyond it" if computes else ""
            hint = f"; {WIDEN}" if is_recurrent else hint
            raise InputError(
                f"max_length={asked} must be from {least} to the model's context of {context}{hint}"
            )
        if asked is not None and asked > context:
            log.warning(
                "positions behind %d tokens, the longest text of the model's training, are computed: it has"
                " not learned from such texts, and verification compares with PyTorch alone",
                context,
            )
        cut = None if self.modules is None else self.modules.max_seq_length
        length = asked or min(context, cut or context)
        if asked is not None or length <= USUAL_LENGTH or self.is_static:
            return length
        log.warning(
            "the bundle's context is %s tokens, the model's is %s; --max-length %d exports all of it, but"
            " takes more memory and time",
            f"{USUAL_LENGTH:,}",
            f"{length:,}",
            length,
        )
        return USUAL_LENGTH

    def read_tokenizers(self) -> None:
        """Open the tokenizers, and check that they fit the model's vocabulary and can encode any text."""
        from ...models.vocabulary import find_hint

        folder = self.folder
        config = self.config
        if self.traits.has_sources:
            self.tokenizer_kind, (source, target) = build_translation_tokenizers(folder)
            found = [
                ("tokenizer.source", source, config.source_vocab_size),
                ("tokenizer.target", target, config.target_vocab_size),
            ]
        else:
            self.tokenizer_kind = PLAIN
            data = build_tokenizer_json(folder)
            if self.modules is not None and self.modules.roles.prefixes:
                prefixes = dict(self.modules.roles.prefixes).values()
                self.prefix_tokens = find_prefix_tokens(data, prefixes)
                data = add_special_tokens(data, self.prefix_tokens)
            if self.modules is not None and self.modules.query is not None:
                query = self.modules.query
                other = build_tokenizer_json(query.transformer)
                check_query_tokenizer(
                    data, other, query.transformer, config.query.vocab_size, query.is_static
                )
            found = [("tokenizer", data, config.vocab_size)]
        self.chat_template: TemplateFile | None = None
        if self.traits.continues_texts:
            self.chat_template = read_chat_template(dict.fromkeys((folder, self.source.folder)))
        self.tokenizer_files: dict[str, bytes] = {}
        self.tokenizers: list[Tokenizer] = []
        remove = cache(remove_unknown_tokens)  # warns once of a tokenizer that source and target share
        for stem, data, size in found:
            known = remove(data, size, str(folder)) if self.tokenizer_kind == PLAIN else data
            opened = open_tokenizer(known, f"{folder / stem}.json", self.tokenizer_kind, size)
            if opened.vocab_size > size:
                # The embedding has as many rows as config.json says: that has been compared.
                raise CheckpointError(
                    f"{folder}: {stem}.json has {opened.vocab_size} tokens, but config.json's vocabulary and"
                    f" the embedding {size}: {find_hint('vocab_size', size, opened.vocab_size)}"
                )
            if not self.traits.has_word_vectors:
                # Fails here, not at a user's text, without a token for the unknown.
                opened.encode("Zoë 我 🙂")
            self.tokenizer_files[stem] = known
            self.tokenizers.append(opened)
        first = next(iter(self.tokenizer_files.values()))
        self.frames = None if self.tokenizer_kind == PIECES else find_frames(first, str(folder))

    @property
    def traits(self) -> TaskTraits:
        """Return the traits of the checkpoint's task."""
        return TRAITS[self.task]

    @property
    def special_tokens(self) -> SpecialTokens:
        """Return the special tokens that the tokenizer puts around a text, as far as they are known."""
        return SpecialTokens() if self.frames is None else self.frames[0]

    def list_recipes(self, target: str) -> list[Recipe]:
        """Return the recipes of a target's graphs: in its dialects where it has those, else in portable."""
        taker = find_target(target)
        found = []
        for graph, keeps_cache in {r.graph: r.keeps_cache for r in self.recipes.values()}.items():
            precisions = ("fp32", "fp16")
            dialects = dict.fromkeys(taker.find_dialect(keeps_cache, precision) for precision in precisions)
            own = [self.recipes[f"{graph}.{d}"] for d in dialects if f"{graph}.{d}" in self.recipes]
            fitting = [recipe for recipe in own if not (taker.on_gpu and recipe.computes_sizes)]
            found += fitting or [self.recipes[f"{graph}.portable"]]
        return found

    def find_recipes(self, ids: Iterable[str]) -> dict[str, Recipe]:
        """Return recipes by their ids, also of graphs that explain the model."""
        known = {**self.recipes, **self.explanations}
        return {recipe_id: known[recipe_id] for recipe_id in ids}

    def read_generation(self) -> GenerationDefaults | None:
        """Return how sequences begin and end, by generation_config.json or config.json; None for encoders."""
        from ...models.folder import read_json

        traits = self.traits
        if not (traits.continues_texts or traits.has_sources):
            return None
        folder = self.folder
        with raise_checkpoint_errors():
            generation = read_json(folder / "generation_config.json", missing={})
        merged = merge_settings(self.config_json, generation)
        settings = Settings(merged, str(folder), self.config.vocab_size)
        if self.traits.continues_texts:
            return replace(
                read_decoder_defaults(settings, self.choices.max_length), prefix=self.special_tokens.prefix
            )
        defaults = read_translation_defaults(settings, self.choices.max_length)
        special = self.special_tokens
        if len(special.suffix) > 1:
            count = len(special.suffix)
            raise CheckpointError(f"{folder}: the tokenizer puts {count} tokens after a source text, not one")
        return replace(defaults, source_eos=self.find_source_eos(defaults.eos[0]), prefix=special.prefix)

    def find_source_eos(self, eos: int) -> int:
        """Return the source's end token: spelled as the tokenizer's files say, else as the target's."""
        source, target = self.tokenizers
        spelled = "</s>" if self.tokenizer_kind == PIECES else target.spell(eos)
        name = find_role_names(read_settings(self.folder)).get("eos", spelled)
        found = source.find_id(name)
        if found is None:
            raise CheckpointError(f"{self.folder}: the source's tokenizer has no end token {name!r}")
        if target.decode([eos]):
            log.warning(
                "the end token %r is not special in the target's tokenizer, so it will show",
                target.spell(eos),
            )
        return found

    def read_encoder(self) -> EncoderDefaults | None:
        """Return the meaning of an encoder's results; None for a model that generates."""
        config = self.config
        modules = self.modules
        if not self.traits.encodes:
            return None
        tokens = find_special_tokens(self.folder, self.tokenizers[0])
        classifies = {"sequence_classification", "token_classification"} & set(config.output_heads)
        embeds: dict[str, Any] = {}
        if modules is not None:
            embeds = {"prompts": compose_prompts(modules), "default_prompt": modules.default_prompt}
            warn_of_pickles(modules)
            embeds["roles"] = read_roles(modules, self.tokenizers[0], tokens, self.choices.max_length)
            embeds["pairs"] = read_pair_templates(modules)
        if config.sentence is not None:
            embeds |= {
                "pooling": "+".join(config.sentence.pooling),
                "normalize": config.sentence.normalize,
                "include_prompt": config.sentence.include_prompt,
            }
        return EncoderDefaults(
            max_length=self.choices.max_length,
            tokens={role: tokens[role] for role in ("cls", "sep", "pad", "mask") if role in tokens},
            **self.read_frames(tokens),
            segments=reads_segments(self.folder, next(iter(self.tokenizer_files.values()))),
            heads=config.output_heads,
            labels=self.read_labels(config.num_labels) if classifies else (),
            problem_type=self.read_problem_type(config.num_labels)
            if "sequence_classification" in config.heads
            else None,
            score_activation=self.read_score_activation(),
            **embeds,
        )

    def read_images(self, pipeline: Pipeline) -> ImageDefaults:
        """Return what a model of pictures reads, and the defaults that diffusers' class of it has."""
        if pipeline.has_safety_checker:
            log.warning(
                "the checkpoint's safety checker is left out: no picture is looked at before it is given out,"
                " so check them yourself where others may ask for any"
            )
        steps, guidance = PICTURE_DEFAULTS[pipeline.config.unet.time_cond_proj_dim is not None]
        multiple = pipeline.config.vae.shrinks_by
        return ImageDefaults(
            **vars(self.read_prompts()),
            scheduler=pipeline.scheduler,
            height=pipeline.config.unet.sample_size * multiple,
            width=pipeline.config.unet.sample_size * multiple,
            multiple=multiple,
            scaling_factor=pipeline.config.vae.scaling_factor,
            steps=steps,
            guidance_scale=guidance,
            guidance_features=pipeline.config.unet.time_cond_proj_dim,
        )

    def read_words(self) -> WordDefaults:
        """Return how word vectors are asked, and which vector stands for words without one."""
        from ...models.word_vectors import UNKNOWN

        return WordDefaults(self.choices.max_length, self.tokenizers[0].find_id(UNKNOWN))

    def read_prompts(self) -> PromptDefaults:
        """Return how texts are read that belong to pictures."""
        tokens = find_special_tokens(self.folder, self.tokenizers[0])
        if missing := {"bos", "eos"} - set(tokens):
            raise CheckpointError(
                f"{self.folder}: the tokenizer has no {' and no '.join(sorted(missing))} token"
            )
        return PromptDefaults(
            max_length=self.choices.max_length,
            start=tokens["bos"],
            end=tokens["eos"],
            pad=tokens.get("pad", tokens["eos"]),
        )

    def read_frames(self, tokens: Mapping[str, int]) -> dict[str, Any]:
        """Return the settings of `EncoderDefaults` that say which tokens stand around texts.

        Raises:
            CheckpointError: the tokenizer's special tokens cannot be told, or it has no choice token.
        """
        if self.reads_choice_token:
            return {"framed": "own", "frames": self.end_with_choice(tokens)}
        if self.is_static or self.frames == (SpecialTokens(), SpecialTokens()):
            return {"framed": "none"}
        missing = {"cls", "sep"} - set(tokens)
        if self.frames is None and missing:
            raise CheckpointError(
                f"{self.folder}: the tokenizer adds special tokens, but names no"
                f" {' and no '.join(sorted(missing))} token; add tokenizer_config.json or"
                " special_tokens_map.json"
            )
        if self.frames is None:
            return {"framed": "all"}
        if not missing:
            single, pair = self.frames
            if (single, pair) == (SpecialTokens((tokens["cls"],), (), (tokens["sep"],)), SpecialTokens()):
                return {"framed": "single"}
            defaults = EncoderDefaults(1, tokens, separators=max(1, len(pair.between)))
            if (single, pair) == (defaults.make_special_tokens(), defaults.make_special_tokens(is_pair=True)):
                return {"framed": "all", "separators": defaults.separators}
        return {"framed": "own", "frames": self.frames}

    @property
    def chooses(self) -> bool:
        """Return whether the model gives each of several choices a logit."""
        return bool(getattr(self.config, "chooses", False))  # no graph of another exporter does

    @property
    def reads_choice_token(self) -> bool:
        """Return whether the model reads a choice at a token of its own."""
        return bool(getattr(self.config, "reads_choice_token", False))

    def end_with_choice(self, tokens: Mapping[str, int]) -> tuple[SpecialTokens, SpecialTokens]:
        """Return the special tokens around texts, with the choice token behind all others."""
        if "cls" not in tokens:
            raise CheckpointError(
                f"{self.folder}: the tokenizer has no choice token, which a double-heads model reads: with"
                " transformers, tokenizer.add_special_tokens({'cls_token': '[CLS]'}),"
                " model.resize_token_embeddings(len(tokenizer)), and train the head on it"
            )
        single, pair = self.frames or (SpecialTokens(), SpecialTokens())
        choice = (tokens["cls"],)
        ended = [
            frame if frame.suffix[-1:] == choice else replace(frame, suffix=(*frame.suffix, *choice))
            for frame in (single, pair)
        ]
        return ended[0], ended[1]

    def read_labels(self, count: int) -> tuple[str, ...]:
        """Return the classes' names from config.json's id2label; LABEL_0 and so on without one."""
        if self.chooses:
            return (CHOICE,)
        named = self.config_json.get("id2label")
        if named is None:
            log.warning("config.json has no id2label; the classes are called LABEL_0 to LABEL_%d", count - 1)
            return tuple(f"LABEL_{i}" for i in range(count))
        if not isinstance(named, dict) or sorted(named, key=str) != sorted(map(str, range(count))):
            raise CheckpointError(
                f"config.json's id2label must name the classes 0 to {count - 1}, which the weights have; it"
                f" has {sorted(named) if isinstance(named, dict) else named!r}"
            )
        labels = tuple(str(named[str(i)]) for i in range(count))
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise CheckpointError(
                f"config.json's id2label has {twice} more than once; give each its own name"
            )
        return labels

    def read_problem_type(self, count: int) -> str:
        """Return the problem type of the logits; where config.json has none, as transformers infers it."""
        kind = self.config_json.get("problem_type")
        if kind is None or self.chooses:
            return "regression" if count == 1 else "single_label_classification"
        if kind not in PROBLEM_TYPES:
            raise CheckpointError(f"config.json: problem_type {kind!r} is not one of {PROBLEM_TYPES}")
        if count == 1 and kind == "single_label_classification":
            raise CheckpointError(
                f"config.json: problem_type {kind!r} with one label gives every text the probability 1; set"
                " multi_label_classification if the label's probability is the sigmoid of its logit, or"
                " regression if the logit is the result"
            )
        return str(kind)

    def read_score_activation(self) -> str:
        """Return how a cross-encoder's logit becomes a score, as in sentence-transformers."""
        if self.chooses:
            return "identity"
        settings: Any = self.config_json.get("sentence_transformers")
        own = settings.get("activation_fn") if isinstance(settings, dict) else None
        named = {"config.json": own or self.config_json.get("sbert_ce_default_activation_function")}
        if self.modules is not None:
            named = {"config_sentence_transformers.json": self.modules.activation} | named
        for file, name in named.items():
            if name is None:
                continue
            if not str(name).startswith("torch."):
                log.warning("%s: the activation %r is ignored, as it is not a class of torch", file, name)
                continue
            kind = str(name).rpartition(".")[2].lower()
            if kind not in ("sigmoid", "identity"):
                raise CheckpointError(f"{file}: a score's activation {name!r} must be Sigmoid or Identity")
            return kind
        return "sigmoid"
