"""Chat templates at random: most of them parse, and some would never end."""

from __future__ import annotations

import random

NUMBERS = ("0", "1", "-1", "3", "999999999", "10**9", "2**40", "1e308", "9**9")
VALUES = (
    "messages",
    "m",
    "m.content",
    "m['role']",
    "bos_token",
    "tools",
    "'ab'",
    "'%s'",
    "'{0:99999999}'",
    "none",
    "true",
    "loop",
    "self",
    "x",
    "range(3)",
    "range(999999999)",
    "[1, 2]",
    "{'a': 1}",
    "''",
    "namespace(a=1)",
    "cycler('a')",
    "joiner(',')",
    *NUMBERS,
)
FILTERS = (
    "abs",
    "batch(999999999)",
    "batch(2)",
    "capitalize",
    "center(999999999)",
    "center(9)",
    "default('x')",
    "dictsort",
    "e",
    "filesizeformat",
    "first",
    "forceescape",
    "format(1)",
    "format(999999999)",
    "groupby('role')",
    "indent(999999999)",
    "indent(2)",
    "int",
    "items",
    "join(', ')",
    "last",
    "length",
    "list",
    "lower",
    "map('upper')",
    "map(attribute='__class__')",
    "max",
    "min",
    "pprint",
    "random",
    "reject('none')",
    "replace('a', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa')",
    "replace('', 'b')",
    "reverse",
    "round(400)",
    "safe",
    "select",
    "selectattr('role', 'equalto', 'user')",
    "slice(99999999)",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "tojson(indent=999999999)",
    "trim",
    "truncate(3)",
    "unique",
    "upper",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap(1)",
    "xmlattr",
)
METHODS = (
    ".upper()",
    ".split()",
    ".splitlines()",
    ".format(1)",
    ".replace('a', 'bbbb')",
    ".ljust(999999999)",
    ".zfill(999999999)",
    ".expandtabs(999999999)",
    ".join(['a', 'b'])",
    ".encode()",
    ".translate({97: 'b' * 1000})",
    ".__class__",
    ".mro()",
    ".append(1)",
    ".items()",
    ".get('a')",
    ".to_bytes(999999999)",
    "[::-1]",
    "[0]",
    "[-1:]",
)
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or")


def make_expression(random: random.Random, depth: int) -> str:
    kind = random.randrange(6) if depth > 0 else 5
    if kind == 0:
        return f"({make_expression(random, depth - 1)})|{random.choice(FILTERS)}"
    if kind == 1:
        return f"({make_expression(random, depth - 1)}){random.choice(METHODS)}"
    if kind in (2, 3):
        left, right = (make_expression(random, depth - 1) for _ in range(2))
        return f"({left}) {random.choice(OPERATORS)} ({right})"
    if kind == 4:
        return f"({make_expression(random, depth - 1)}) if x is defined else {random.choice(VALUES)}"
    return random.choice(VALUES)


def make_statement(random: random.Random, depth: int) -> str:
    """Return a statement of a template, with others in it."""
    value = make_expression(random, 2)
    kind = random.randrange(9) if depth > 0 else 8
    if kind == 8:
        return f"{{{{ {value} }}}}"
    inner = "".join(make_statement(random, depth - 1) for _ in range(random.randrange(1, 4)))
    return (
        f"{{% for m in {value} %}}{inner}{{% endfor %}}",
        f"{{% for m in messages %}}{inner}{{% endfor %}}",
        f"{{% for m in messages recursive %}}{inner}{{{{ loop(messages) }}}}{{% endfor %}}",
        f"{{% if {value} %}}{inner}{{% else %}}b{{% endif %}}",
        f"{{% set x = {value} %}}{inner}",
        f"{{% set x %}}{inner}{{% endset %}}{inner}{{{{ x }}}}",
        f"{{% macro f(x) %}}{inner}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f({value}) }}}}",
        f"{{% filter {random.choice(FILTERS)} %}}{inner}{{% endfilter %}}",
    )[kind]


def make_template(random: random.Random) -> str:
    """Return a template of a few statements."""
    return "".join(make_statement(random, 3) for _ in range(random.randrange(1, 4)))
