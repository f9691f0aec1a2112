"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from msgspec import UNSET, to_builtins
from msgspec.structs import replace
from starlette.responses import Response

from ...generate.generation import Generation
from ...generate.pending import PendingGeneration
from ...generate.text_generator import TextGenerator
from ...scheduling.steps import Steps
from .answers import GenerationUsage, PromptDetails, Record
from .bodies import ChatRequest, CompletionRequest, GenerationRequest
from .calls import SMALL, Call, cancel_when_gone, wait_for_all
from .errors import ApiError, find_api_error
from .forms import ChatForm, CompletionForm, Form
from .json_text import encode_pieces
from .streaming import DONE, EventStream, EventWriter, Feed, Item, wait_for_first, write_event
from .structure import asks_for_grammar, read_structure

COMPLETION_TOKENS = 16  # of a completion that does not say how many, as OpenAI has it
PARALLEL = 'parallel_tool_calls=false needs tool_choice="required" or a function, which give a single call'
SEEDS = 2**64
MAX_LISTED = 2**19  # log-probabilities of a request: some 40 MB of JSON
FEW_ANSWERS = 4  # that are written in less time than it takes to wake another thread
FORBIDDEN = -100  # a bias that forbids a token, as OpenAI has it

# Options of ours that a client knows by other names.
NAMES = {
    "max_new_tokens": "max_tokens",
    "json_schema": "response_format",
    "template_options": "chat_template_kwargs",
}

Submit = Callable[..., list[PendingGeneration]]


async def chat(call: Call[ChatRequest]) -> Response:
    """Answer a conversation; what is not given is as the checkpoint's generation_config says."""
    model = get_generator(call)
    body = call.body
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs", code="invalid_value")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        reason = "max_tokens and max_completion_tokens are the same option, but differ; give one of them"
        raise ApiError(400, reason, param="max_tokens", code="invalid_value")
    if body.tools and not model.has_tools:
        message = (
            f"the chat template of the model {call.served.name!r} does not support tools; leave tools out"
        )
        raise ApiError(400, message, param="tools", code="unsupported_parameter")
    options = read_options(call)
    options["logprobs"] = bool(body.logprobs)
    options |= call.take("top_logprobs", "tools", "tool_choice", template_options="chat_template_kwargs")
    check_continuation(body)
    options |= call.take("continue_final_message")
    limit = next(iter(limits), None)
    usual = (model.defaults.max_new_tokens, model.defaults.max_total_tokens)
    if limit is None and usual == (None, None):
        limit = model.max_length
    if limit is not None:
        options["max_new_tokens"] = limit
    check_messages(call)
    messages = [{"content": "", **to_builtins(message)} for message in body.messages]
    if body.parallel_tool_calls is False and body.tool_choice in (None, "auto") and body.tools:
        raise ApiError(400, PARALLEL, param="parallel_tool_calls", code="unsupported_parameter")
    check_size(call, "messages", list_texts(messages))
    count = body.n or 1
    check_listed(call, count, options)
    submits = [partial(model.submit_answers, messages, count, client=call.client, chat=True, **options)]
    names = [tool.function.name for tool in body.tools or [] if body.tool_choice != "none"]
    form = ChatForm(model.tokenizer, logprobs=options["logprobs"], tools=names)
    return await answer(call, submits, form, compiles=must_compile(call, options))


def check_continuation(body: ChatRequest) -> None:
    """Refuse to begin an answer and to go on with one, and to do neither."""
    begins = body.add_generation_prompt
    if begins is not None and begins == bool(body.continue_final_message):
        reason = "add_generation_prompt and continue_final_message cannot both be true, nor both false"
        raise ApiError(400, reason, param="add_generation_prompt", code="invalid_value")


async def complete(call: Call[CompletionRequest]) -> Response:
    """Continue one prompt, or each of several; tokens are drawn at temperature 1 unless it is given."""
    model = get_generator(call)
    body = call.body
    options = {"temperature": 1.0, **read_options(call)}
    options["max_new_tokens"] = body.max_tokens or COMPLETION_TOKENS
    options["logprobs"] = body.logprobs is not None
    options["top_logprobs"] = body.logprobs or 0
    prompts = list_prompts(body.prompt)
    count = body.n or 1
    for prompt in prompts:
        if isinstance(prompt, str):
            check_size(call, "prompt", [prompt])
    check_listed(call, len(prompts) * count, options)
    submits = [
        partial(model.submit_answers, prompt, count, client=call.client, **options) for prompt in prompts
    ]
    form = CompletionForm(model.tokenizer, logprobs=options["logprobs"])
    return await answer(call, submits, form, compiles=must_compile(call, options))


def get_generator(call: Call[Any]) -> TextGenerator:
    return cast(TextGenerator, call.served.model)  # the capabilities say so


def list_prompts(prompt: Any) -> list[Any]:
    """Return the prompts of a completion: texts, or lists of token ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def list_texts(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the texts of a conversation, of which some may be lists of parts."""
    calls = [called for message in messages for called in message.get("tool_calls") or ()]
    arguments = [called["function"]["arguments"] for called in calls]
    return [message["content"] for message in messages] + arguments


def check_messages(call: Call[ChatRequest]) -> None:
    """Refuse calls of tools and their results where they have no effect."""
    for number, message in enumerate(call.body.messages):
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(message, name) is not None and message.role != role:
                place = f"messages[{number}].{name}"
                reason = f"{place} is only allowed for the role {role!r}, not {message.role!r}"
                raise ApiError(400, reason, param=place, code="invalid_value")
        if message.tool_calls and not get_generator(call).has_tools:
            place = f"messages[{number}].tool_calls"
            model = call.served.name
            reason = f"the chat template of the model {model!r} does not support tools; leave {place} out"
            raise ApiError(400, reason, param=place, code="unsupported_parameter")


def check_size(call: Call[Any], name: str, texts: Sequence[Any]) -> None:
    """Refuse a prompt that cannot fit the context, before its tokens fill the memory; texts may be parts."""
    served = call.served
    parts = [part for text in texts for part in (text if isinstance(text, list) else [text])]
    strings = [part["text"] if isinstance(part, dict) else part for part in parts]
    size = sum(len(string.encode()) for string in strings if isinstance(string, str))
    if size > served.max_bytes:
        raise ApiError(
            400,
            f"the prompt has {size} bytes; at most {served.max_bytes} are allowed with a context of"
            f" {served.context} tokens, even with truncation; shorten it",
            param=name,
            code="context_length_exceeded",
        )


def check_listed(call: Call[GenerationRequest], count: int, options: Mapping[str, Any]) -> None:
    """Refuse so many log-probabilities that a request's answers would not fit the memory."""
    if not options["logprobs"]:
        return
    most = call.served.context
    tokens = min(options.get("max_new_tokens", most), most)
    listed = count * tokens * (1 + options.get("top_logprobs", 0))
    if listed > MAX_LISTED:
        name = "top_logprobs" if getattr(call.body, "top_logprobs", None) else "logprobs"
        raise ApiError(
            400,
            f"{count} answers of up to {tokens} tokens, each with {options.get('top_logprobs', 0)} likeliest"
            f" ones, may list {listed} log-probabilities; a request may have {MAX_LISTED};"
            f" ask for a smaller n, max_tokens or {name}",
            param=name,
            code="invalid_value",
        )


def read_options(call: Call[GenerationRequest]) -> dict[str, Any]:
    """Return the options of generation that both routes have."""
    body = call.body
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options", code="invalid_value")
    options = call.take(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "frequency_penalty",
        "presence_penalty",
        "seed",
        "ignore_eos",
        "truncation",
        "parse_special",
    )
    if options.get("top_p") == 0:  # leaves the likeliest token alone
        del options["top_p"]
        options["temperature"] = 0.0
    if "seed" in options:
        options["seed"] %= SEEDS  # negative ones have their own draws too
    if body.stop:
        options["stop"] = body.stop
    if body.logit_bias:
        forbidden = float("-inf")
        options["logit_bias"] = {
            token: forbidden if bias == FORBIDDEN else bias for token, bias in body.logit_bias.items()
        }
    options["adapter"] = call.served.adapter
    return options | read_structure(body)


def check_places(call: Call[GenerationRequest], count: int) -> None:
    """Refuse more answers to one request than there is ever room for."""
    places = get_generator(call).count_places()
    if count > 1 and count > places:
        raise ApiError(
            400,
            f"{count} answers (n for each prompt) are more than the {places} that this server may run"
            " (--parallel) and queue (--queue-size); ask for fewer",
            param="n" if call.body.n else "prompt",
            code="invalid_value",
        )


def must_compile(call: Call[GenerationRequest], options: Mapping[str, Any]) -> bool:
    """Return whether a grammar must be compiled before an answer begins; of a large one it may be."""
    if not asks_for_grammar(call.body):
        return False
    return call.size > SMALL or not get_generator(call).has_compiled(**options)


def submit_all(call: Call[Any], submits: Sequence[Submit]) -> Steps[list[PendingGeneration]]:
    """Submit all, or, where one is refused, none: one in each step, as each reads its prompt."""
    pendings: list[PendingGeneration] = []
    try:
        for number, submit in enumerate(submits):
            if number:
                yield
            pendings += submit(timeout=call.timeout)
    except BaseException:
        for pending in pendings:
            pending.cancel()
        raise
    return pendings


async def answer(
    call: Call[GenerationRequest], submits: Sequence[Submit], form: Form, *, compiles: bool
) -> Response:
    """Submit the requests, and return their answers, whole or as they come."""
    check_places(call, len(submits) * (call.body.n or 1))
    pool = call.readers.choose(call.size, compiles=compiles)
    pendings = await call.run_steps(submit_all(call, submits), pool)
    form.continues = [bool(pending.row.context) for pending in pendings]
    exchange = Exchange(call, pendings, form)
    if not call.body.stream:
        return await exchange.collect()
    first, events = await wait_for_first(
        exchange.stream(), lambda error: write_event(find_api_error(error, NAMES).to_json())
    )
    return EventStream(first, events)


@dataclass(frozen=True)
class Exchange:
    """The answers to one call, in the form of its route."""

    call: Call[GenerationRequest]
    pendings: Sequence[PendingGeneration]
    form: Form

    def cancel(self) -> None:
        """End the answers; their rows are free within a step."""
        for pending in self.pendings:
            pending.cancel()

    async def collect(self) -> Response:
        """Return the answer that has all answers."""
        async with cancel_when_gone(self.call.request, self.cancel):
            answers = await wait_for_all([pending.future for pending in self.pendings])

        def write() -> Steps[Record]:
            choices: Any = yield from encode_pieces(self.form.write_answer, answers)
            usage = self._count_tokens(answers)
            return self.form.answer(**self._describe(), choices=choices, usage=usage)

        few = len(answers) <= FEW_ANSWERS and not self.form.logprobs
        return await self.call.write(write(), few=few)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield events; what fails once they began is an event too."""
        options = self.call.body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        event = self.form.event(**self._describe(), choices=[], usage=None if wants_usage else UNSET)
        writer = EventWriter(event)
        running = set(range(len(self.pendings)))
        started: set[int] = set()
        async with cancel_when_gone(self.call.request, self.cancel):
            feed = Feed(self.pendings)
            while running:
                items = await feed.get_all()
                write = partial(self._write_events, items, writer, started)
                # Many log-probabilities take longer to write than the event loop may.
                events = await self.call.run_amid_answer(write) if self.form.logprobs else write()
                failure = next((item for _, item in items if isinstance(item, BaseException)), None)
                if failure is not None:
                    if not started:
                        raise failure
                    self.cancel()
                    yield events + write_event(find_api_error(failure, NAMES).to_json())
                    return
                running -= {index for index, item in items if item is None}
                if events:
                    yield events
            answers = [pending.future.result() for pending in self.pendings]
        if wants_usage:
            yield write_event(replace(event, usage=self._count_tokens(answers)))
        yield DONE

    def _write_events(self, items: Sequence[Item], writer: EventWriter, started: set[int]) -> bytes:
        """Return the events of what came, up to what went wrong; note which answers began."""
        choices: list[Record] = []
        for index, item in items:
            if isinstance(item, BaseException):
                break
            if item is None:
                choices += self.form.write_end(index, self.pendings[index].future.result())
                continue
            if index not in started:
                started.add(index)
                choices += self.form.write_start(index)
            choices += self.form.write_chunk(index, item)
        return b"".join(map(writer.write, choices))

    def _describe(self) -> dict[str, Any]:
        """Return what an answer, or each of its chunks, begins with."""
        return {
            "id": f"{self.form.prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.call.served.name,
            "system_fingerprint": self.call.served.fingerprint,
        }

    def _count_tokens(self, answers: Sequence[Generation]) -> GenerationUsage:
        """Return the usage: a prompt that has several answers counts once."""
        prompts = answers[:: self.call.body.n or 1]
        prompt = sum(one.usage.prompt_tokens for one in prompts)
        completion = sum(one.usage.completion_tokens for one in answers)
        reused = sum(one.prompt_tokens_reused for one in prompts)
        return GenerationUsage(prompt, completion, prompt + completion, PromptDetails(reused))
