"""A server process for the signal tests: prints its port once it accepts connections."""

from jaxserve.serving.api import ServerConfig, create_app
from jaxserve.serving.server import serve_app
from tests.serving.api.support import LIMITS, FakeEngine, Script, byte_tokenizer


def main() -> None:
    tokenizer = byte_tokenizer()
    engine = FakeEngine(tokenizer)
    engine.script = Script(reply=lambda request, index: b"word " * 10, delay=0.15)
    app = create_app(engine, tokenizer, ServerConfig(("tiny",), LIMITS))
    serve_app(app, engine, port=0, drain_timeout=10, on_ready=lambda host, port: print(port, flush=True))


if __name__ == "__main__":
    main()
