"""An engine on an artifact, for whatever drives it: the server, an evaluation, a benchmark."""

import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterator

from jaxserve.artifact import open_artifact
from jaxserve.errors import UserError
from jaxserve.heap import keep_freed_memory
from jaxserve.manifest import Manifest
from jaxserve.pallas_kernels._native.cores import host_threads
from jaxserve.serving.draft import DraftProposer
from jaxserve.serving.engine import Engine
from jaxserve.serving.head import HeadProposer
from jaxserve.serving.load import LowerLimits, compiled_limits, load_runner, serving_limits
from jaxserve.serving.ngram import NgramProposer
from jaxserve.serving.ngram_table import NGRAMS, NgramTable
from jaxserve.serving.request import Limits
from jaxserve.serving.runner import Runner
from jaxserve.serving.speculation import Speculation
from jaxserve.serving.stats import EngineObserver
from jaxserve.text import Tokenizer, load_tokenizer

DRAFT = "draft"  # also the folder of an artifact that may hold one of a draft for it
HEAD = "head"
_HEAD_AND = f"{HEAD}+"  # before the folder of a table of n-grams
SPECULATE = ("off", "ngram", HEAD, DRAFT)


class Session:
    """What an artifact needs to run: a runner, a tokenizer, limits; engines are made on it one at a time."""

    def __init__(self, folder: pathlib.Path, lower: LowerLimits, report: Callable[[str], None]):
        artifact = open_artifact(folder)
        self.folder = folder
        self.manifest: Manifest = artifact.manifest
        self.limits: Limits = serving_limits(compiled_limits(artifact.manifest), lower)
        keep_freed_memory()
        # The engine's thread prepares a step while the device is busy and others format what the last one gave: it
        # should not wait the usual 5 ms for the interpreter's lock.
        sys.setswitchinterval(2e-4)
        self.runner: Runner = load_runner(artifact, report)
        self.tokenizer: Tokenizer = load_tokenizer(artifact.tokenizer)
        self.drafts: dict[pathlib.Path, Runner] = {}  # of the draft models that were asked for
        self._report = report

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
        """For `engine`, with the proposer that --speculate names: one of SPECULATE, the folder of a draft, or
        head+FOLDER: the head and a table of n-grams."""
        if proposer == "off":
            return None
        if proposer == "ngram":
            return Speculation(NgramProposer(), self.limits.row_sizes)
        if proposer == HEAD or proposer.startswith(_HEAD_AND):
            if not self.limits.look_ahead:
                raise UserError(
                    f"--speculate {proposer}: {self.folder} was compiled without a look-ahead head; make one with "
                    f"`jaxserve distill MODEL --head -o HEAD` and compile the model with `--look-ahead HEAD`"
                )
            tables = [self._table(proposer, proposer.removeprefix(_HEAD_AND))] if proposer != HEAD else []
            return Speculation(HeadProposer(*tables), self.limits.row_sizes)
        folder, advice = pathlib.Path(proposer), f"allowed are {', '.join(SPECULATE)}, or the folder of a draft"
        if proposer == DRAFT:
            folder = self.folder / DRAFT
            how = f"`jaxserve compile MODEL --draft layers:N -o {folder}`"
            advice = f"{self.folder} holds none; make one, such as with {how}"
        if not folder.is_dir():
            raise UserError(f"--speculate {proposer}: {advice}")
        made = NgramProposer(self._table(proposer, str(folder))) if (folder / NGRAMS).exists() else self._draft(folder)
        return Speculation(made, self.limits.row_sizes)

    def _table(self, proposer: str, name: str) -> NgramTable:
        """The table of n-grams in the folder `name`, a part of what --speculate got; UserError when there is none, or
        its tokens are not the target's."""
        folder = pathlib.Path(name)
        if not (name and (folder / NGRAMS).exists()):
            why = f"{folder} holds no {NGRAMS}" if name else f"name the folder that holds {NGRAMS}"
            raise UserError(f"--speculate {proposer}: {why}; `jaxserve distill MODEL --ngrams` makes one")
        check_same_tokens(f"--speculate {folder}", load_tokenizer(folder), self.tokenizer)
        return NgramTable.load(folder / NGRAMS, self.limits.vocab_size)

    def _draft(self, folder: pathlib.Path) -> DraftProposer:
        """The artifact in `folder` as a draft; UserError when its tokens are not the target's."""
        artifact = open_artifact(folder)
        check_same_tokens(f"--speculate {folder}", load_tokenizer(artifact.tokenizer), self.tokenizer)
        limits = compiled_limits(artifact.manifest)
        if limits.vocab_size != self.limits.vocab_size:
            raise UserError(
                f"--speculate {folder}: the draft knows {limits.vocab_size} tokens, the target "
                f"{self.limits.vocab_size}; a draft must share the target's tokenizer"
            )
        if folder not in self.drafts:
            self.drafts[folder] = load_runner(artifact, self._report)
        return DraftProposer(self.drafts[folder], limits)

    @contextlib.contextmanager
    def running(self, *, prefix_caching: bool = True, speculation: Speculation | None = None) -> Iterator[Engine]:
        """A started engine, stopped at the end of the block."""
        engine = self.engine(prefix_caching=prefix_caching, speculation=speculation)
        with host_threads():
            engine.start()
            try:
                yield engine
            finally:
                engine.stop()


def check_same_tokens(named: str, draft: Tokenizer, target: Tokenizer) -> None:
    """UserError unless every id stands for the same bytes in both; `named` is the flag and the folder of the draft."""
    reason = ""
    if draft.vocab_size != target.vocab_size:
        reason = f"it knows {draft.vocab_size} tokens, the target's {target.vocab_size}"
    else:
        for token in range(target.vocab_size):
            ours, theirs = target.token_bytes(token), draft.token_bytes(token)
            if ours != theirs:
                reason = f"its token {token} is {theirs!r}, the target's {ours!r}"
                break
    if reason:
        raise UserError(
            f"{named}: it has another tokenizer than the target: {reason}; name one that shares the target's"
        )
