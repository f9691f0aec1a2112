"""The checked options of one call of `TextGenerator`: the caller's, the checkpoint's, the defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ..bundle.defaults import GenerationDefaults
from ..decoding.beam import Search
from ..decoding.checks import check_integer
from ..decoding.chunk import OnToken
from ..decoding.constraints import Constraints
from ..decoding.sampling import PENALTIES, Sampling
from ..errors import InputError
from ..option_checks import check_choice, check_options, check_switch, check_whole
from ..options import BatchGenerationOptions, GenerationOptions, ProgressOption
from ..suggest import did_you_mean
from ..text.wording import Wording, check_options_of_template
from .structure import KINDS, Structure, read_structure
from .tools import Tools, read_tools

BEAMS = ("num_beams", "length_penalty", "early_stopping")
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p")
NO_CONSTRAINTS = Constraints(eos=())
SWITCHES = ("ignore_eos", "parse_special", "reuse_prompt", "logprobs", "continue_final_message")


@dataclass(frozen=True)
class GenerationRequest:
    """The checked options of a call, as `GenerationOptions` says what they mean."""

    sampling: Sampling
    max_new_tokens: int = 64
    stop: str | Sequence[str] | None = None
    ignore_eos: bool = False
    truncation: Literal["tail"] | None = None
    parse_special: bool = False
    speculative: Literal["prompt-lookup"] | None = None
    reuse_prompt: bool = False
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n_best: int = 1
    logprobs: bool = True
    top_logprobs: int = 0
    structure: Structure | None = None
    tools: Tools | None = None
    template_options: Mapping[str, Any] | None = None
    continue_final_message: bool = False
    on_token: OnToken | None = None
    progress: ProgressOption = False
    batch_size: int | None = None
    min_new_tokens: int = 0
    max_length: int | None = None  # of a prompt with its answer, where the checkpoint says so
    search: Search | None = None  # how beams are searched, from the options that say so; None without beams
    adapter: str | None = None
    adapter_slot: int = 0  # of the adapter, from the bundle

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_whole("min_new_tokens", self.min_new_tokens, 0)
        check_choice("truncation", self.truncation, (None, "tail"))
        check_choice("speculative", self.speculative, (None, "prompt-lookup"))
        for name in SWITCHES:
            check_switch(name, getattr(self, name))
        check_options_of_template(self.template_options)
        check_integer("top_logprobs", self.top_logprobs, 0, "0 gives none")
        if self.on_token is not None and not callable(self.on_token):
            raise InputError(
                f"on_token={self.on_token!r:.80} must be a function that takes a chunk, or None",
                option="on_token",
            )
        if self.tools is not None and self.tools.forced and self.structure is not None:
            raise InputError(
                f"tool_choice and {self.structure.kind} both set the form of the answer; give one of them",
                option="tool_choice",
            )
        if self.sampling.structured and self.ignore_eos:
            name = "tool_choice" if self.structure is None else self.structure.kind
            raise InputError(f"ignore_eos=True cannot be used with {name}; leave it out", option="ignore_eos")

    @property
    def one_by_one(self) -> bool:
        """Whether several prompts run one after the other instead of as a batch."""
        return self.speculative is not None or self.reuse_prompt

    @property
    def wording(self) -> Wording:
        """How a conversation is worded."""
        definitions = () if self.tools is None else self.tools.definitions
        return Wording(definitions, self.template_options or {}, self.continue_final_message)

    def find_limit(self, prompt_length: int) -> int:
        """Return the most new tokens behind a prompt."""
        if self.max_length is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.max_length - prompt_length)

    def bind(self, eos: Sequence[int], adapters: Sequence[str] = ()) -> GenerationRequest:
        """Return the request for a model with these end tokens and adapters."""
        constraints = self.make_constraints(eos)
        acts = constraints != Constraints(eos=constraints.eos)
        return replace(
            self,
            sampling=replace(self.sampling, constraints=constraints if acts else None),
            adapter_slot=find_adapter(self.adapter, adapters),
        )

    def make_constraints(self, eos: Sequence[int]) -> Constraints:
        """Return the checkpoint's rules with the call's own, of a model with these end tokens."""
        return replace(
            self.sampling.constraints or NO_CONSTRAINTS,
            eos=() if self.ignore_eos else tuple(eos),
            min_new_tokens=self.min_new_tokens,
        )

    def list_options_without_beams(self) -> list[tuple[str, Any]]:
        """Return the options that are set and that beams do not take, with their values."""
        sampling = self.sampling
        drawing = () if sampling.greedy else SAMPLING_OPTIONS
        values = {name: getattr(sampling, name) for name in (*drawing, "logit_bias", "logits_processor")}
        values |= {name: getattr(sampling, name) for name in PENALTIES}
        for name in ("stop", "speculative", "reuse_prompt", "top_logprobs", "on_token"):
            values[name] = getattr(self, name)
        if self.tools is not None and self.tools.forced:
            values["tool_choice"] = ", ".join(self.tools.forced)
        if self.structure is not None:
            values[self.structure.kind] = self.structure.text
        given = [(name, value) for name, value in values.items() if value]
        if sampling.seed is not None:  # 0 is one too
            given.append(("seed", sampling.seed))
        return given


def find_adapter(name: str | None, adapters: Sequence[str]) -> int:
    """Return the slot of an adapter of a bundle, 0 for None; refuse one that it has not."""
    if name is None:
        return 0
    if not isinstance(name, str):
        raise InputError(f"adapter={name!r:.80} must be one name: requests choose theirs", option="adapter")
    if name not in adapters:
        known = (
            f"the bundle has {', '.join(adapters)}" if adapters else "the bundle has none beside its model"
        )
        hint = did_you_mean(name, adapters)
        raise InputError(f"there is no adapter {name!r:.80}; {known}{hint}", option="adapter")
    return 1 + adapters.index(name)


def resolve_request(
    options: GenerationOptions, checkpoint: CheckpointOptions, *, streams: bool = False, several: bool = False
) -> GenerationRequest:
    """Return a call's request: the options given, before the checkpoint's, before the defaults.

    Options of the checkpoint give way where they do not go with those that are given: its beams to drawn
    tokens, streams and what else beams do not take, its drawing and stop strings to beams, its max_length to
    max_new_tokens. An option that is given wins, also
    as None. The checkpoint's count with generation="checkpoint"; `several` prompts bring more options.
    """
    check_options(options, BatchGenerationOptions if several else GenerationOptions)
    given: dict[str, Any] = dict(options)
    source = given.pop("generation", None)
    check_choice("generation", source, (None, "checkpoint"))
    request = make_request(given)
    if source is None:
        return request
    left_out: set[str] = set()
    if request.num_beams != 1:
        left_out = {*SAMPLING_OPTIONS, "stop"}
    elif streams or request.list_options_without_beams():
        left_out = {*BEAMS}
    if "max_new_tokens" in given:
        left_out.add("max_length")
    usual = {name: value for name, value in checkpoint.items() if name not in left_out}
    return make_request({**usual, **given})


def make_request(options: Mapping[str, Any]) -> GenerationRequest:
    """Return the request that options make, some of them those of `Sampling`, `Structure` and `Tools`."""
    structure = read_structure(options)
    tools = read_tools(options.get("tools"), options.get("tool_choice"))
    names = {field.name for field in fields(Sampling)}
    left_out = {*names, *KINDS, "tools", "tool_choice"}
    drawing = {name: value for name, value in options.items() if name in names}
    others = {name: value for name, value in options.items() if name not in left_out}
    structured = structure is not None or (tools is not None and bool(tools.forced))
    sampling = Sampling(**drawing, structured=structured)
    return GenerationRequest(sampling=sampling, structure=structure, tools=tools, **others)


class CheckpointOptions(GenerationOptions, total=False):
    """The options that a checkpoint may ask for, of which the last two are no caller's."""

    max_length: int
    constraints: Constraints


def read_checkpoint_options(defaults: GenerationDefaults) -> CheckpointOptions:
    """Return the options that a bundle's checkpoint asks for; none of a bundle that keeps nothing of them.

    As with transformers, temperature, top_k, top_p and min_p count only where the checkpoint means its
    tokens to be drawn, and num_beams, length_penalty and early_stopping only where it does not.
    """
    options: CheckpointOptions = {}
    if defaults.max_new_tokens is not None:
        options["max_new_tokens"] = defaults.max_new_tokens
    elif defaults.max_total_tokens is not None:
        options["max_length"] = defaults.max_total_tokens
        options["max_new_tokens"] = max(1, defaults.max_total_tokens - 1)  # behind the shortest prompt
    if defaults.min_new_tokens:
        options["min_new_tokens"] = defaults.min_new_tokens
    if defaults.stop:
        options["stop"] = defaults.stop
    constraints = Constraints(
        eos=(), suppressed=defaults.suppressed, renormalize=defaults.renormalize, rules=defaults.rules
    )
    if constraints != NO_CONSTRAINTS:
        options["constraints"] = constraints
    if defaults.do_sample:
        options["temperature"] = 1.0 if defaults.temperature is None else defaults.temperature
        options["top_k"] = defaults.top_k
        options["top_p"] = defaults.top_p
        options["min_p"] = defaults.min_p
    elif defaults.num_beams > 1:
        options["num_beams"] = defaults.num_beams
        options["length_penalty"] = defaults.length_penalty
        stopping = defaults.early_stopping
        options["early_stopping"] = "never" if stopping == "never" else bool(stopping)
    if defaults.repetition_penalty != 1.0:
        options["repetition_penalty"] = defaults.repetition_penalty
    if defaults.no_repeat_ngram_size is not None:
        options["no_repeat_ngram_size"] = defaults.no_repeat_ngram_size
    return options


def describe_request(request: GenerationRequest) -> str:
    """Return how a call chooses its tokens, such as "temperature=0.7, top_p=0.9, max_new_tokens=64"."""
    sampling = request.sampling
    named: dict[str, Any] = {}
    if request.num_beams > 1:
        named |= {name: getattr(request, name) for name in BEAMS}
    elif not sampling.greedy:
        named |= {name: getattr(sampling, name) for name in SAMPLING_OPTIONS}
    if sampling.repetition_penalty != 1.0:
        named["repetition_penalty"] = sampling.repetition_penalty
    named["no_repeat_ngram_size"] = sampling.no_repeat_ngram_size
    if request.max_length is None:
        named["max_new_tokens"] = request.max_new_tokens
    named["max_length"] = request.max_length
    named["stop"] = request.stop or None
    listed = ", ".join(f"{name}={value}" for name, value in named.items() if value is not None)
    if sampling.constraints is not None:
        listed += f", {sampling.constraints.describe()}"
    return f"greedy, {listed}" if request.num_beams == 1 and sampling.greedy else listed
