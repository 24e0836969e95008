"""The OpenAI-compatible HTTP API: `create_app(engine, tokenizer, ServerConfig(...))`."""

from jaxserve.serving.api.app import create_app
from jaxserve.serving.api.config import ServerConfig

__all__ = ["ServerConfig", "create_app"]
