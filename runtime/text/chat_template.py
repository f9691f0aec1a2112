"""Renders a checkpoint's chat template as transformers does, in jinja2's sandbox and within limits.

A template is data from elsewhere. It reaches no file, no attribute that begins with "_" and no method that
changes what it was given. What it may spend in time and memory is in template_limits.py.
Needs jinja2, which nothing else of the runtime loads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ..errors import BackendUnavailableError, BundleError, InputError, suggest_install
from .special_tokens import MARK, SPELLED_MARK, FormedTokenError
from .template_limits import (
    CALL_STEPS,
    Budget,
    LimitError,
    Watch,
    Weight,
    check_size,
    keep,
    list_generators,
)
from .tokenizer import join_lines

MIN_VERSION = (3, 1, 6)  # those before have known ways out of the sandbox
MAX_CHARACTERS = 2**20  # of what is rendered, and for each character of the messages so many more:
CHARACTERS_EACH = 16
# Filters that no template can name: they stand between loops, `~`, comparisons, keys or slices, and their
# operands.
COUNTED = "counted steps"
JOINED = "joined texts"
READ = "read whole"
CUT = "cut"


class ChatTemplate:
    """A compiled template, which errors call `source`; safe to use from several threads.

    Attributes:
        variables: names that it reads and does not set itself.
    """

    def __init__(self, text: str, source: str) -> None:
        found = version("jinja2")
        if tuple(int(number) for number in found.split(".")[:3] if number.isdecimal()) < MIN_VERSION:
            raise BackendUnavailableError(
                f"chat templates need jinja2 3.1.6 or newer, installed is {found}: {suggest_install('chat')}"
            )
        self.source = source
        self._environment = Sandbox()
        self._lock = threading.Lock()  # one count of steps
        try:
            self._template = self._environment.from_string(text)
            self.variables = find_undeclared_variables(self._environment.parse(text))
        except Exception as error:  # the compiler's own, and Python's of what it made of the template
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise BundleError(
                f"{source}{line}: the chat template is not a valid Jinja template ({join_lines(error)});"
                " correct it in the checkpoint, and export again"
            ) from error

    def render(self, variables: Mapping[str, Any], watch: Watch = keep) -> str:
        """Return the text of a conversation.

        Args:
            variables: nothing but texts, numbers, lists and dicts.
            watch: see `Budget`.
        """
        pieces = []
        length = 0
        try:
            with self._lock:
                self._environment.budget.steps = 0
                self._environment.budget.watch = watch
                given = Weight([variables])
                most = MAX_CHARACTERS + CHARACTERS_EACH * given.nested
                for piece in self._template.generate(variables):
                    if not isinstance(piece, str):  # a block's filter returns whatever it likes
                        raise TypeError(f"a filter of a block returns a {type(piece).__name__}, no text")
                    length += len(piece)
                    check_size("what is rendered", length, most, "characters")
                    pieces.append(piece)
        except (LimitError, SecurityError, OverflowError, MemoryError, RecursionError) as error:
            raise BundleError(f"{self.source}: the chat template was stopped: {join_lines(error)}") from error
        except Refused as error:
            raise InputError(
                f"the chat template refuses the messages: {describe_error(error)}", option="messages"
            ) from error
        except FormedTokenError as error:
            raise InputError(
                f"{error}; remove the text from which it is formed from the messages, or give"
                " parse_special=True",
                option="messages",
            ) from error
        except Exception as error:  # whatever its operators and filters raise
            raise InputError(
                f"the chat template cannot render these messages: {describe_error(error)}; give them the"
                f" roles and keys that {self.source} reads",
                option="messages",
            ) from error
        return "".join(pieces)


def describe_error(error: Exception) -> str:
    """Return what an error says on one line, without the marks in the texts that it quotes."""
    return join_lines(error).replace(MARK, "").replace(SPELLED_MARK, "")[:500]


class Refused(jinja2.TemplateError):
    """A template's own raise_exception."""


class Sandbox(ImmutableSandboxedEnvironment):
    """transformers' environment, in which everything is paid for."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        self.budget = Budget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, loopcontrols],
            optimized=False,  # nothing is computed while it is compiled, where nobody counts
            finalize=self.budget.write,
        )
        self.filters["tojson"] = write_json
        for functions in (self.filters, self.tests):
            for name, function in list(functions.items()):
                functions[name] = self.budget.guard(name, function)
        self.filters |= {
            COUNTED: self.budget.count_steps,
            JOINED: self.budget.join,
            READ: self.budget.read,
            CUT: self.budget.cut,
        }
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": format_now,
            "dict": make_dict,
            "namespace": PublicNamespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        bounded: nodes.Template = Bounds().visit(super()._parse(source, name, filename))
        bounded.set_environment(self)
        return bounded

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.step(CALL_STEPS)

        def make() -> Any:
            return super(Sandbox, self).call(context, called, *whole, **named)

        whole = list_generators(args)
        named = dict(zip(kwargs, list_generators(kwargs.values()), strict=True))
        method = getattr(called, "__wrapped__", called)  # the sandbox wraps str.format
        receiver = getattr(method, "__self__", None)
        if not isinstance(receiver, str | bytes | int | float | Collection):
            return make()  # a macro, or one of the functions above
        return self.budget.call(method.__name__, receiver, [*whole, *named.values()], make)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.check_operands(operator, left, right)
        made = super().call_binop(context, operator, left, right)
        return self.budget.watch("%", made, [left, right]) if operator == "%" else made

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = super().getitem(obj, argument)
        return self.budget.watch("[]", found, [obj]) if isinstance(obj, str) else found


class Bounds(NodeTransformer):
    """Puts filters that count between operands and what takes their time without a call."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (jinja2's way to name them)
        self.generic_visit(node)
        node.iter = add_filter(node.iter, COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return add_filter(nodes.List(node.nodes, lineno=node.lineno), JOINED)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = add_filter(node.expr, READ)
        for operand in node.ops:
            operand.expr = add_filter(operand.expr, READ)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = add_filter(node.key, READ)  # it is hashed
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            bounds = [node.arg.start, node.arg.stop, node.arg.step]
            given = [bound or nodes.Const(None, lineno=node.lineno) for bound in bounds]
            return add_filter(node.node, CUT, given)
        if node.ctx == "load" and not isinstance(node.arg, nodes.Const):
            node.arg = add_filter(node.arg, READ)
        return node


def add_filter(node: nodes.Node, name: str, arguments: Sequence[nodes.Node] = ()) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


class Generation(Extension):
    """The tag {% generation %}, which marks what a model was trained to say: rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PublicNamespace(Namespace):
    """`namespace(...)` whose names never begin with "_"."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace's {name!r} begins with '_'")


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return `dict(...)`: a template gets no type, nor what can be reached from it."""
    return dict(*args, **kwargs)


def write_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; jinja2's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: Any) -> NoReturn:
    raise Refused(str(message))


def format_now(form: str) -> str:
    return datetime.now().strftime(form)
