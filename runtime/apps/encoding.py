"""What a text file begins with: a mark of UTF-8 is passed over, another encoding is refused by name."""

from __future__ import annotations

import codecs

from ..errors import InputError

MARK = codecs.BOM_UTF8  # that some programs, Excel among them, put at the beginning of UTF-8
LONGEST_MARK = 4  # bytes
# UTF-32's mark begins as that of UTF-16 does, and so comes first.
OTHERS = (
    ("UTF-32", (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)),
    ("UTF-16", (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
)


def remove_mark(begin: bytes, name: str) -> bytes:
    """Return the beginning of a text file without a mark of UTF-8.

    Args:
        begin: the file's first bytes, `LONGEST_MARK` or more where it has so many.
        name: of the file, for the error.

    Raises:
        InputError: it is the mark of UTF-16 or UTF-32.
    """
    for encoding, marks in OTHERS:
        if begin.startswith(marks):
            raise InputError(f"{name} is {encoding}, not UTF-8; convert it: iconv -f {encoding} -t UTF-8")
    return begin.removeprefix(MARK)
