"""From sampled tokens to what a client reads: text deltas, stop strings, log-probabilities."""

from jaxserve.serving.plan import StepResult
from jaxserve.serving.request import SamplingParams, Sequence, TokenLogprob
from jaxserve.text import StopScanner, StreamDecoder, Tokenizer


class TextAssembler:
    """The text of one choice, token by token. Text that may become a stop string, or half a character, is held back."""

    __slots__ = ("_decoder", "_min_tokens", "_scanner")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self._decoder = StreamDecoder(tokenizer, continuation=True)
        self._scanner = StopScanner(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens

    def push(self, token: int, number: int) -> tuple[str, str | None]:
        """(new text, stop string that was hit) of the choice's number-th token, counted from 1."""
        delta = self._decoder.push((token,))
        if self._scanner is None:
            return delta, None
        return self._scanner.push(delta, armed=number > self._min_tokens)

    def flush(self) -> tuple[str, str | None]:
        """Everything held back, at the end. Its last characters may still complete a stop string."""
        delta = self._decoder.flush()
        if self._scanner is None:
            return delta, None
        text, hit = self._scanner.push(delta)
        return (text, hit) if hit else (text + self._scanner.flush(), None)


def token_logprob(seq: Sequence, row: int, result: StepResult) -> TokenLogprob:
    """Of the token that row `row` of a step sampled for `seq`."""
    top = result.top[row][: seq.params.logprobs] if result.top else []
    return TokenLogprob(result.tokens[row], result.logprob[row], top)


def prompt_logprobs(seq: Sequence) -> list[TokenLogprob] | None:
    """One entry a prompt token; None when they were not asked of this choice, or it ended before they were complete.

    Nothing predicts the first token.
    """
    if not seq.wants_scores or len(seq.prompt_scores) < seq.prompt_len - 1:
        return None
    return [TokenLogprob(seq.tokens[0], None, []), *seq.prompt_scores]
