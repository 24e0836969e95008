"""An engine on an artifact, for whatever drives it: the server, an evaluation, a benchmark."""

import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterator

from jaxserve.artifact import open_artifact
from jaxserve.errors import UserError
from jaxserve.manifest import Manifest
from jaxserve.serving.engine import Engine
from jaxserve.serving.load import LowerLimits, compiled_limits, load_runner, serving_limits
from jaxserve.serving.ngram import NgramProposer
from jaxserve.serving.request import Limits
from jaxserve.serving.runner import Runner, keep_freed_memory
from jaxserve.serving.speculation import Speculation
from jaxserve.serving.stats import EngineObserver
from jaxserve.text import Tokenizer, load_tokenizer

SPECULATE = ("off", "ngram")


class Session:
    """What an artifact needs to run: a runner, a tokenizer, limits; engines are made on it one at a time."""

    def __init__(self, folder: pathlib.Path, lower: LowerLimits, report: Callable[[str], None]):
        artifact = open_artifact(folder)
        self.manifest: Manifest = artifact.manifest
        self.limits: Limits = serving_limits(compiled_limits(artifact.manifest), lower)
        keep_freed_memory()
        # The engine's thread prepares a step while the device is busy and others format what the last one gave: it
        # should not wait the usual 5 ms for the interpreter's lock.
        sys.setswitchinterval(2e-4)
        self.runner: Runner = load_runner(artifact, report)
        self.tokenizer: Tokenizer = load_tokenizer(artifact.tokenizer)

    def engine(
        self,
        observer: EngineObserver | None = None,
        *,
        prefix_caching: bool = True,
        speculation: Speculation | None = None,
    ) -> Engine:
        """A new engine, not started. The one before it must have stopped."""
        return Engine(
            self.runner,
            self.tokenizer,
            self.limits,
            observer,
            prefix_caching=prefix_caching,
            speculation=speculation,
        )

    def speculation(self, proposer: str) -> Speculation | None:
        """For `engine`, with the proposer that --speculate names: one of SPECULATE."""
        if proposer == "off":
            return None
        if proposer == "ngram":
            return Speculation(NgramProposer(), self.limits.row_sizes)
        raise UserError(f"--speculate {proposer}: allowed are {', '.join(SPECULATE)}")

    @contextlib.contextmanager
    def running(self, *, prefix_caching: bool = True, speculation: Speculation | None = None) -> Iterator[Engine]:
        """A started engine, stopped at the end of the block."""
        engine = self.engine(prefix_caching=prefix_caching, speculation=speculation)
        engine.start()
        try:
            yield engine
        finally:
            engine.stop()
