"""Perplexity of an artifact on a text, through the engine that serves it.

The text is tokenized whole and cut into windows of `context` tokens (beginning with BOS where the tokenizer adds one);
every position but a window's first is scored: perplexity = exp(mean over all windows of -log p(token | window so far)).
"""

import asyncio
import dataclasses
import math
import pathlib
from collections.abc import Sequence

from jaxserve.errors import UserError
from jaxserve.reporting import Reporter
from jaxserve.serving.engine import Engine
from jaxserve.serving.request import GenerationRequest, SamplingParams
from jaxserve.text import Tokenizer, encode_text

DEFAULT_CONTEXT = 2048  # tokens a window, where the model takes as many


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """`tokens` counts the scored positions of `windows` windows."""

    perplexity: float
    windows: int
    tokens: int

    @staticmethod
    def of(total: float, windows: int, tokens: int) -> "Perplexity":
        """From the sum of all -log p."""
        return Perplexity(perplexity_of(total / tokens), windows, tokens)


def perplexity_of(mean: float) -> float:
    """exp of a mean -log p; inf for a model that is so wrong that no float holds it."""
    return math.exp(mean) if mean < 700 else math.inf


def text_windows(
    tokenizer: Tokenizer, vocab: int, text: str, context: int, limit: int, report: Reporter
) -> list[tuple[int, ...]]:
    """The first `limit` whole windows of a text (0: all of them) for a model that knows `vocab` tokens; says when the
    text holds fewer. UserError when it does not hold one, or tokens that the model does not know."""
    ids = encode_text(tokenizer, text, vocab)
    first = tokenizer.encode_prompt("")  # BOS, if the tokenizer adds one
    size = context - len(first)
    windows = [(*first, *ids[start : start + size]) for start in range(0, len(ids) - size + 1, size)]
    if not windows:
        raise UserError(f"the text has {len(ids)} tokens, less than one window of --context {context}")
    if len(windows) < limit:
        report.note(f"--windows {limit}: the text holds no more than {len(windows)} of {context} tokens")
    return windows[:limit] if limit else windows


def measure_perplexity(engine: Engine, windows: Sequence[tuple[int, ...]], report: Reporter) -> Perplexity:
    """Scores windows on a started engine."""
    return asyncio.run(_measure(engine, windows, report))


async def _measure(engine: Engine, windows: Sequence[tuple[int, ...]], report: Reporter) -> Perplexity:
    total, tokens, found = 0.0, 0, Perplexity(math.nan, 0, 0)
    with report.stage("eval", f"{len(windows)} windows of {len(windows[0])} tokens", total=len(windows)) as stage:
        for number, window in enumerate(windows):
            params = SamplingParams(max_tokens=0, prompt_logprobs=0)
            async for output in engine.submit(GenerationRequest(f"eval-{number}", window, params)):
                if output.error:
                    raise UserError(f"window {number}: {output.error}")
                scored = [entry.logprob for entry in output.prompt_logprobs or () if entry.logprob is not None]
                total -= math.fsum(scored)
                tokens += len(scored)
            found = Perplexity.of(total, number + 1, tokens)
            stage.advance(f"perplexity {found.perplexity:.3f}")
        stage.done(f"perplexity {found.perplexity:.3f} over {tokens} tokens")
    return found


def read_text(path: pathlib.Path) -> str:
    """A UTF-8 text file as it is; UserError when it cannot be read."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"--text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--text {path} is not UTF-8 at byte {error.start}") from None
