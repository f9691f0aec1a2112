"""A translator for programs with an event loop."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, overload

from ..translate.results import Translation
from ..translate.translator import Translator
from .model import AsyncModel, run_in_thread, wait_for_result

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ..options import BatchTranslationOptions, LoadOptions


class AsyncTranslator(AsyncModel[Translator]):
    """A `Translator` whose translations are awaited. Make one with `await AsyncTranslator.load(...)`."""

    @classmethod
    async def load(cls, bundle: str | Path, **options: Unpack[LoadOptions]) -> Self:
        """Open a bundle; see `Translator.load`."""
        return cls(await run_in_thread(lambda: Translator.load(bundle, **options), Translator.close))

    @overload
    async def translate(  # type: ignore[overload-overlap]  # a str is no iterable of texts here
        self, texts: str, **options: Unpack[BatchTranslationOptions]
    ) -> Translation: ...
    @overload
    async def translate(
        self, texts: Iterable[str], **options: Unpack[BatchTranslationOptions]
    ) -> list[Translation]: ...
    async def translate(
        self, texts: str | Iterable[str], **options: Unpack[BatchTranslationOptions]
    ) -> Translation | list[Translation]:
        """Translate one text, or each of several, with the options of `Translator.submit`."""
        many = [texts] if isinstance(texts, str) else texts
        future = await run_in_thread(
            lambda: self.model.submit(many, client=self.client, **options), Future.cancel
        )
        translations = await wait_for_result(future, future.cancel)
        return translations[0] if isinstance(texts, str) else translations
