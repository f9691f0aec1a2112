"""The options that methods share: their names and types.

Each TypedDict is the `**options: Unpack[...]` of the methods that take it, so that an editor completes the
names and a type checker refuses others; `option_checks.check_options` refuses them at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    from pathlib import Path

    from .decoding.chunk import Chunk
    from .decoding.processors import LogitsProcessor

ProgressOption: TypeAlias = bool | Callable[[int], None]
"""True writes a counter to stderr; a callable gets the number of finished texts."""

Truncation: TypeAlias = Literal["head", "tail", "head+tail", "windows"] | None
"""What happens to a text that is too long: None refuses it, "head" keeps its beginning, "tail" its end,
"head+tail" both, "windows" all of it. Each class names those that it takes."""

Pooling: TypeAlias = Literal["cls", "mean", "max", "lasttoken"]
"""How one vector is made of the tokens' last hidden states."""

Layers: TypeAlias = Literal[
    "embeddings", "second_to_last", "last", "sum_last_four", "concat_last_four", "sum_all"
]
"""Whose hidden states `TextEncoder.features` returns."""


class LoadOptions(TypedDict, total=False):
    """The options of `load`, `TextGenerator.load`, `TextEncoder.load` and `Translator.load`.

    Attributes:
        backend: "tensorrt-rtx" and "tensorrt" run the bundle's plan on an NVIDIA GPU, "ort-cuda" its graph in
            ONNX Runtime there, and "ort-cpu" on the CPU; "auto", the default, takes the first of these that
            works here, and a log line says why not a better one. "openvino" runs encoders on the CPU; "auto"
            takes it in bf16 and w8a8, and where `planforge bench --set-default` found it to be the fastest.
        precision: of the graph to run; by default what `planforge bench --set-default` recorded, else on a
            GPU fp16 where it was found to be right, on a CPU the first that was given at export. "int8" and
            "int4" mean "w8a16" and "w4a16" on a GPU.
        threads: cores to use; by default OMP_NUM_THREADS, else the physical cores that this process and its
            cgroup may use.
        max_length: context in tokens (a prompt with its answer); by default, and at most, the bundle's.
        memory_limit: bytes for weights, activations, and the caches, or outputs that are read ahead, of all
            calls that run at one time; no limit by default. A call that needs more is refused beforehand, and
            several texts run in smaller batches where that helps; one that would fit alone waits until others
            are done, for ten minutes at most, and is then refused. An encoder's outputs count while it
            computes, not while an iterator's caller has the turn. Python, the engine and the tokenizer, 70 to
            110 MB, don't count. Without a precision, where a text of full length does not fit in the
            default one, the most exact verified precision that fits is taken, and a log line says so.
        verify: compare the hash of files above 256 MiB too (smaller ones always are); not by default.
        device: the GPU's number, 0 by default; a warning says when no GPU is used though it is not 0.
        cpu_nodes: run a graph on "ort-cuda" also where ONNX Runtime has no kernel on the GPU for some of its
            nodes and computes them on the CPU, at a multiple of the time; refused by default.
        prepared: on a CPU, "auto", the default, opens what `planforge prepare` has kept of the bundle for
            this processor and engine, and makes it anew where it is stale. It writes nothing that was not
            asked for once, as that takes more than twice the weights' size on disk. True prepares the bundle
            where it was not yet; False passes over what is there.
        index: the folder that `planforge index` wrote, for a model that reads neighbours of its text. What it
            takes itself does not count for memory_limit: its keys' encoder, or at most 96 MiB of places that
            are kept, and the numbers of a search, some bytes for each of its chunks.
        index_keys: the encoder's bundle that made the index's keys, where it is no longer where it was. That
            encoder runs on the same backend and device, with as many threads.
    """

    backend: str
    precision: str | None
    threads: int | None
    max_length: int | None
    memory_limit: int | None
    verify: bool
    device: int
    cpu_nodes: bool
    prepared: bool | Literal["auto"]
    index: str | Path | None
    index_keys: str | Path | None


class EncoderOptions(TypedDict, total=False):
    """The options of every task of an encoder.

    Attributes:
        truncation: what happens to a text that is longer than the model: "head", "tail", "head+tail",
            "windows", or None, which refuses it.
        max_tokens: of a sequence, special tokens included; at most, and by default, what the model takes.
        stride: tokens that neighbouring windows share; a quarter of the model's length unless given.
        parse_special: read special tokens such as [SEP] in the text as such.
        batch_size: the most sequences that run together, fewer if long; by default what the bundle allows.
        progress: True counts finished texts on stderr; a callable gets their number.
    """

    truncation: Truncation
    max_tokens: int | None
    stride: int | None
    parse_special: bool
    batch_size: int | None
    progress: ProgressOption


class ScoreOptions(EncoderOptions, total=False):
    """The options of pairs, before the first of which a prompt stands, or where a chat template has it.

    Attributes:
        prompt_name: of the checkpoint's prompt before each text; its special tokens are read as such.
        prompt: a text in its place, "" for none, read as the texts are; takes precedence over prompt_name.
    """

    prompt_name: str | None
    prompt: str | None


class PromptOptions(ScoreOptions, total=False):
    """The options of `TextEncoder.embed_multi`, and of all tasks that embed texts.

    Attributes:
        input_type: "query" or "document", where a model reads them in two ways: by a prompt of its own, its
            length, tokens that expand a query, or another graph. Otherwise it changes nothing.
    """

    input_type: Literal["query", "document"] | None


class EmbedOptions(PromptOptions, total=False):
    """The options of `TextEncoder.embed`.

    Attributes:
        pooling: "cls", "mean", "max" or "lasttoken" of the last hidden states; the checkpoint's by default.
        normalize: to length 1; the checkpoint's choice unless given.
        truncate_dim: keep only so many of a vector's first numbers, before it is normalized.
        precision: "float32"; "int8" or "uint8" by the export's ranges; "binary" or "ubinary": signs as bits.
    """

    pooling: Pooling | None
    normalize: bool | None
    truncate_dim: int | None
    precision: Literal["float32", "int8", "uint8", "binary", "ubinary"]


class SparseOptions(PromptOptions, total=False):
    """The options of `TextEncoder.embed_sparse`.

    Attributes:
        max_active_dims: keep only so many of a text's weights, the largest.
        min_weight: leave out weights that are not above it; 0 unless given.
    """

    max_active_dims: int | None
    min_weight: float


class FeatureOptions(EncoderOptions, total=False):
    """The options of `TextEncoder.features`.

    Attributes:
        layers: whose hidden states; all but "last" need a bundle exported with `--outputs hidden_states`.
    """

    layers: Layers


class ClassifyOptions(EncoderOptions, total=False):
    """The options of `TextEncoder.classify`.

    Attributes:
        logits: give the logits too; the mean of those of a text's windows.
        candidate_labels: labels of your own, which a model of natural language inference (one with a label
            "entailment") judges each text by: zero-shot classification. Each costs a sequence of its own.
        hypothesis_template: what is said of a text, {} being the label; by default "This example is {}.".
        multi_label: judge each label by itself, as several may hold; their probabilities do not sum to 1.
    """

    logits: bool
    candidate_labels: Sequence[str] | None
    hypothesis_template: str
    multi_label: bool


class RankOptions(ScoreOptions, total=False):
    """The options of `TextEncoder.rank`.

    Attributes:
        top_k: return only so many texts.
    """

    top_k: int | None


class FillMaskOptions(EncoderOptions, total=False):
    """The options of `TextEncoder.fill_mask`, which always reads special tokens as such.

    Attributes:
        top_k: words for each place, 5 unless given.
    """

    top_k: int


class AnswerOptions(EncoderOptions, total=False):
    """The options of `TextEncoder.answer`.

    Attributes:
        n_best: how many answers, 1 unless given.
        max_answer_tokens: the most tokens of an answer, 30 unless given.
    """

    n_best: int
    max_answer_tokens: int


class TranslationOptions(TypedDict, total=False):
    """The options of every method that translates: as in transformers, and the checkpoint's unless given.

    Attributes:
        num_beams: translations that are followed at a time; 1 is greedy.
        length_penalty: above 0 favours long translations.
        early_stopping: True, False or "never".
        n_best: candidates that are returned; num_beams is at least as many unless it is given.
        max_new_tokens: the most tokens of a translation.
        min_new_tokens: the fewest.
        no_repeat_ngram_size: no sequence of so many tokens comes twice.
        repetition_penalty: above 1.0 makes tokens less likely that the translation already has.
        on_token: called with the chunk of each text after each step; returning True ends that text's
            translation with "cancelled", and is the last call for it. With num_beams=1 only: of beams it is
            known at the end which one is the translation.
        truncation: None refuses a text that is too long, "head" keeps its beginning, "tail" its end.
        parse_special: read special tokens such as </s> in the text as such.
    """

    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    n_best: int | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    no_repeat_ngram_size: int | None
    repetition_penalty: float | None
    on_token: Callable[[Chunk], bool | None] | None
    truncation: Literal["head", "tail"] | None
    parse_special: bool


class BatchTranslationOptions(TranslationOptions, total=False):
    """The options of the methods of `Translator` that take several texts.

    Attributes:
        alignment: give what each token of a translation looked at; of a bundle that was exported with
            `--outputs cross_attentions`.
        progress: True counts finished texts on stderr; a callable gets their number.
        batch_size: the most texts that run together; as many as the bundle allows unless given.
    """

    alignment: bool
    progress: ProgressOption
    batch_size: int | None


class GenerationOptions(TypedDict, total=False):
    """The options of every method of `TextGenerator` that generates.

    Without temperature, top_k, top_p and min_p, and with temperature=0, the likeliest token is always taken
    (greedy); else tokens are drawn. Processors run in transformers' order: logit_bias, frequency_penalty and
    presence_penalty, repetition_penalty, no_repeat_ngram_size, logits_processor, then temperature, top_k,
    top_p, min_p. Before them all tokens are forbidden that json_schema, regex, grammar or choices do not
    allow.

    speculative="prompt-lookup" is faster where the answer repeats parts of the prompt or of itself: what
    followed the newest tokens before is taken for a guess of what comes next, and one step verifies all of
    it. A guess counts only if the model, with the same options and the same draws of a seed, chooses that
    token itself, so the answer is the one without; a text without repetition costs next to nothing more.
    Engines add up in another order when a step has several tokens: where the logits of two tokens are equal
    to within that rounding (1e-5 in fp32; with int8 and int4 weights, whose engines round activations to 8
    bits too, up to that rounding's own noise), the other of them may be chosen, as from one machine to
    another.

    reuse_prompt=True keeps the KV cache of the call when it ends; the next call with reuse_prompt=True
    reuses the prefix that both share: a chat that grows, a long instruction with another question. The cache
    is made for the whole context once, and counts for `memory_limit` (a call that needs the memory frees
    it). One is kept; `forget_prompt` frees it.

    With either of the two several prompts run one after the other, as engines verify one row at a time.

    Attributes:
        adapter: the name of one that stays beside the model; the model alone answers unless given.
        max_new_tokens: at least 1; 64 unless given. Generation that fills the context ends with "context".
        temperature: divides the logits; 0 is greedy, and next to 0 as good as that.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the likeliest tokens that together reach this probability.
        min_p: draw from tokens that have at least this share of the likeliest one's probability.
        repetition_penalty: above 1.0 makes tokens less likely that the prompt or the answer already has.
        no_repeat_ngram_size: no sequence of so many tokens comes twice, prompt included.
        min_new_tokens: no end token comes before so many others; 0 unless given.
        frequency_penalty: OpenAI's, from -2 to 2: is taken off a token's logit for each time that the answer
            has it already; the prompt does not count.
        presence_penalty: OpenAI's, from -2 to 2: is taken off a token's logit once the answer has it.
        logit_bias: is added to the logits of these tokens; -inf forbids one.
        logits_processor: a function of your own; see `LogitsProcessor`.
        seed: makes the draws repeatable.
        stop: a string or several that end the answer, which does not show them. Special tokens are searched
            too, such as "<|im_end|>", or "<|im_start|>user", where one stands before plain text.
        json_schema: a JSON schema, as a mapping or a text, that the answer is valid by: the answer is JSON.
            {"type": "object"} allows any object. A keyword that cannot be enforced is a `SchemaError`, which
            names its place. At most one of json_schema, regex, grammar and choices may be given. Tokens that
            lead out of it are never chosen, and the answer ends where nothing may follow ("stop"), at an end
            token where that may, or unfinished at max_new_tokens ("length"). Needs llguidance.
        regex: a regular expression that the whole answer matches, without look-around and backreferences.
            Its digits are 0 to 9.
        grammar: a grammar in Lark's form, as llguidance reads it, that the answer follows.
        choices: texts, of which the answer is one.
        tools: functions that the model may call, in a conversation whose chat template words tools:
            mappings {"type": "function", "function": {"name", "description", "parameters"}}, where
            parameters is a JSON schema. The answer's `tool_calls` has the calls that it asks for.
        tool_choice: "auto", the default, lets the model decide; "none" hides the tools; "required", or
            {"type": "function", "function": {"name": ...}}, holds the answer to a call whose arguments are
            valid by the schema.
        template_options: variables of the chat template by name, such as {"enable_thinking": False}: texts,
            numbers, lists and mappings. A name that it does not read is refused, and so is one that the
            conversation sets.
        continue_final_message: the model goes on with the assistant's last message, instead of answering
            behind it. The answer's text is what it adds.
        ignore_eos: go on behind end tokens, up to max_new_tokens.
        truncation: None refuses a prompt that is too long. "tail" keeps the end of one to which
            max_new_tokens would not fit, half a context of it at least, and the special tokens that begin
            every prompt.
        parse_special: read special tokens such as <|endoftext|> in the prompt as such.
        speculative: "prompt-lookup" guesses tokens, see above.
        reuse_prompt: whether to reuse and keep a KV cache, see above.
        num_beams: answers that are followed at a time, as transformers' beam search does; 1 is none.
            repetition_penalty (of log-probabilities there, as in transformers), no_repeat_ngram_size,
            min_new_tokens and ignore_eos go with beams. Options that draw tokens, seed, logit_bias,
            logits_processor, stop, json_schema, regex, grammar, choices, top_logprobs, speculative,
            reuse_prompt, on_token and streams do not; nor do frequency_penalty and presence_penalty.
        length_penalty: of beams; an answer is ranked by its log-probability divided by its number of new
            tokens to this power. Above 0 favours long answers.
        early_stopping: of beams; True ends at num_beams finished answers, False where the best running one
            is not better than those as it is now, "never" where it could not become so.
        n_best: candidates of the beams that are returned; at most num_beams.
        logprobs: False skips computing log-probabilities.
        top_logprobs: how many of the likeliest tokens to give for each new one, with log-probabilities.
        generation: "checkpoint" takes what the checkpoint's generation_config says of temperature, top_k,
            top_p, min_p, num_beams, length_penalty, early_stopping, repetition_penalty,
            no_repeat_ngram_size, min_new_tokens, max_new_tokens (or max_length, of prompt and answer
            together) and stop_strings where they are not given; it draws no tokens where do_sample is not
            true there. Its beams count only without streams and where nothing is given that they do not
            take, and what it says of drawing and of stop_strings only without beams. Its suppress_tokens,
            begin_suppress_tokens, bad_words_ids, sequence_bias, min_length and
            exponential_decay_length_penalty hold always. What `chat` and `stream_chat` do unless given None.
        on_token: called with the chunk of each prompt after each step; returning True ends that prompt's
            answer with "cancelled", and is the last call for it.
    """

    adapter: str | None
    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    no_repeat_ngram_size: int | None
    min_new_tokens: int
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    logits_processor: LogitsProcessor | None
    seed: int | None
    stop: str | Sequence[str] | None
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | None
    choices: Sequence[str] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: Literal["auto", "none", "required"] | Mapping[str, Any] | None
    template_options: Mapping[str, Any] | None
    continue_final_message: bool
    ignore_eos: bool
    truncation: Literal["tail"] | None
    parse_special: bool
    speculative: Literal["prompt-lookup"] | None
    reuse_prompt: bool
    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    n_best: int
    logprobs: bool
    top_logprobs: int
    generation: Literal["checkpoint"] | None
    on_token: Callable[[Chunk], bool | None] | None


class BatchGenerationOptions(GenerationOptions, total=False):
    """The options of the methods of `TextGenerator` that take several prompts.

    Attributes:
        progress: True counts finished prompts on stderr; a callable gets their number.
        batch_size: the most prompts that run together; as many as the bundle allows unless given.
    """

    progress: ProgressOption
    batch_size: int | None
