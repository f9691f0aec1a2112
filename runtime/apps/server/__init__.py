"""An HTTP server of models, whose routes for text and embeddings are OpenAI's. Needs the extra `serve`."""

from .app import make_app
from .settings import ServerSettings

__all__ = ["ServerSettings", "make_app"]
