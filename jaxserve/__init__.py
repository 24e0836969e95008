"""jaxserve: a compiler for LLM inference on JAX/XLA, and the server that runs what it compiled."""

__version__ = "0.1.0"
