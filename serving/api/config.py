"""What the operator fixes for the HTTP server."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jaxserve.serving.request import Limits

SAMPLING_DEFAULTS = frozenset({"temperature", "top_k", "top_p", "min_p", "repetition_penalty"})


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Names, key, and every bound on what one client may ask.

    served_model_names: names that requests may use; the first is the one /v1/models shows as the root.
    limits: the engine's own.
    defaults: what a request that leaves out one of SAMPLING_DEFAULTS gets (the model's generation_config).
    max_choices: prompts times n of one request.
    max_logprob_entries: log-probabilities that one request may get: tokens times alternatives times choices.
    max_active: generation requests in progress at once; more are answered 503.
    body_timeout: seconds a client may take to send a body.
    """

    served_model_names: tuple[str, ...]
    limits: Limits
    api_key: str | None = None
    defaults: Mapping[str, float] = MappingProxyType({})
    max_body_bytes: int = 4 * 2**20
    max_messages: int = 2048
    max_prompts: int = 256
    max_choices: int = 256
    max_logprob_entries: int = 4 * 2**20
    max_active: int = 1024
    body_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ValueError("served_model_names is empty: name at least one model")
        if self.api_key == "":
            raise ValueError("api_key is empty: leave it out to serve without one")
        unknown = set(self.defaults) - SAMPLING_DEFAULTS
        if unknown:
            raise ValueError(f"defaults has {sorted(unknown)}, allowed are {sorted(SAMPLING_DEFAULTS)}")
