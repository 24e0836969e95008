"""One server for the tests that only ask; each test starts with an engine that says 'Hello, world!'."""

from collections.abc import Iterator

import pytest

from tests.serving.api.support import Running, Script, serving


@pytest.fixture(scope="package")
def shared_server() -> Iterator[Running]:
    with serving(max_logprob_entries=1_000_000) as server:
        yield server


@pytest.fixture
def server(shared_server: Running) -> Running:
    shared_server.engine.script = Script()
    shared_server.engine.healthy = True
    shared_server.engine.crash = None
    return shared_server
