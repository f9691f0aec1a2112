"""Reads bodies of multipart/form-data, which OpenAI's clients send where a picture is uploaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from .bodies import MAX_OPTION_BYTES, Body
from .decode_body import refuse_body
from .errors import ApiError, refuse

MEDIA_TYPE = "multipart/form-data"
MAX_FILES = 4
MAX_FIELDS = 64

B = TypeVar("B", bound=Body)


def check_text(name: str, text: str) -> str:
    """Refuse half characters, which a form can have by the charset that it names."""
    if not text.isascii() and any("\ud800" <= sign <= "\udfff" for sign in text):
        refuse(name, "has half a character (a lone surrogate)")
    return text


def decode_form(data: bytes, headers: Headers, kind: type[B]) -> B:
    """Return the parameters of a form: files as their bytes, numbers as their texts say.

    Call it in a thread that has no event loop. Raises an ApiError that names what cannot be used.
    """
    fields = asyncio.run(read_fields(data, headers))
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        refuse_body(str(error), fields, kind)


async def read_fields(data: bytes, headers: Headers) -> dict[str, Any]:
    """Return a form's members by their names: texts, and bytes of files."""

    async def give() -> AsyncGenerator[bytes, None]:
        yield data

    parser = MultiPartParser(
        headers, give(), max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=MAX_OPTION_BYTES
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        reason = f"the body is not {MEDIA_TYPE} that can be read: {error.message}"
        raise ApiError(400, reason, code="invalid_form") from None
    fields: dict[str, Any] = {}
    try:
        for given, value in form.multi_items():
            name = given.removesuffix("[]")  # clients that may send several files
            if name in fields:
                refuse(name, "is given several times; give it once")
            fields[name] = await value.read() if isinstance(value, UploadFile) else check_text(name, value)
    finally:
        await form.close()
    return fields
