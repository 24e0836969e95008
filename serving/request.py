"""What a client asks for, what it gets back, and the sequence that lives in between. Plain Python: no jax."""

import dataclasses
import enum
import hashlib
import secrets

MAX_LOGIT_BIAS = 100.0  # the OpenAI API's own bound; -100 and 100 already ban and force a token
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512  # characters; the scanner holds back up to this much text


SPARE_ROWS = 16  # tokens that any step may choose, so that few sequences can bring proposals


class InvalidRequest(ValueError):
    """The request itself is wrong. `param` names the field, `message` what is allowed. Becomes HTTP 400."""

    def __init__(self, param: str, message: str):
        super().__init__(f"{param}: {message}")
        self.param = param
        self.message = message


class EngineClosed(RuntimeError):
    """The engine takes no requests: it is draining, stopped, or died. Becomes HTTP 503."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Static limits of an engine; the compiled step programs depend on most of them.

    look_ahead says whether the programs have a head that foresees the token after the one they choose.
    token_budget is T of the largest 'step' bucket, score_budget T of the largest 'score' bucket (prompt
    log-probabilities; its logits are [T, V], so it is kept small).
    """

    max_num_seqs: int
    max_model_len: int
    page_size: int
    num_pages: int
    vocab_size: int
    token_budget: int
    eos_ids: tuple[int, ...] = ()
    score_budget: int = 128
    max_logprobs: int = 20
    max_bias: int = 300
    max_stop_ids: int = 16
    look_ahead: bool = False

    def __post_init__(self):
        for name in ("max_num_seqs", "max_model_len", "page_size", "num_pages", "vocab_size", "score_budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"limits: {name} is {getattr(self, name)}, must be at least 1")
        if self.token_budget < self.max_num_seqs:
            raise ValueError(
                f"limits: token_budget {self.token_budget} is below max_num_seqs {self.max_num_seqs}: "
                "a step could not decode every running sequence"
            )

    @property
    def pages_per_seq(self) -> int:
        """P: width of a block table."""
        return -(-self.max_model_len // self.page_size)

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """The sizes of steps without prompts: powers of two, and last the most tokens that a step chooses."""
        most = max(self.max_num_seqs, min(SPARE_ROWS, self.token_budget))
        return (*(2**n for n in range((most - 1).bit_length())), most)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    temperature 0 is greedy. top_k 0 is off. `logprobs` None is off, n reports the chosen token and the n likeliest (0:
    only the chosen one); `prompt_logprobs` likewise for the prompt. The first `min_tokens` generated tokens are neither
    an EOS nor a stop id, and no stop string is looked for in them. `ignore_eos` ignores the model's EOS ids, not
    `stop_token_ids`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False

    @property
    def uses_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def validate(self, limits: Limits) -> None:
        """Raises InvalidRequest naming the first field that is out of its range."""
        _require_range("temperature", self.temperature, 0, 100)
        _require_range("top_k", self.top_k, 0, 2**31 - 1)
        _require_range("top_p", self.top_p, 0, 1, open_low=True)
        _require_range("min_p", self.min_p, 0, 1)
        _require_range("presence_penalty", self.presence_penalty, -2, 2)
        _require_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _require_range("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        _require_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _require_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _require_range("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_range(name, getattr(self, name), 0, limits.max_logprobs)
        self._validate_tokens(limits)
        self._validate_stops()

    def _validate_tokens(self, limits: Limits) -> None:
        if len(self.logit_bias) > limits.max_bias:
            raise InvalidRequest("logit_bias", f"{len(self.logit_bias)} entries, at most {limits.max_bias} are allowed")
        if len({token for token, _ in self.logit_bias}) != len(self.logit_bias):
            raise InvalidRequest("logit_bias", "a token id stands in it twice")
        for token, bias in self.logit_bias:
            _require_token("logit_bias", token, limits)
            _require_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if len(self.stop_token_ids) > limits.max_stop_ids:
            raise InvalidRequest(
                "stop_token_ids", f"{len(self.stop_token_ids)} ids, at most {limits.max_stop_ids} are allowed"
            )
        for token in self.stop_token_ids:
            _require_token("stop_token_ids", token, limits)

    def _validate_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"{len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
        for stop in self.stop:
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise InvalidRequest("stop", f"a stop string of {len(stop)} characters, must be 1 to {MAX_STOP_LENGTH}")


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """One prompt, `n` choices. `extras` (a cache salt, an adapter's name) separates prefix-cache entries."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    extras: bytes = b""

    def validate(self, limits: Limits) -> None:
        """Raises InvalidRequest for everything that can be known before running it."""
        prompt_len, params = len(self.prompt_ids), self.params
        if prompt_len == 0:
            raise InvalidRequest("prompt", "is empty: it must hold at least one token")
        if prompt_len > limits.max_model_len:
            raise InvalidRequest("prompt", f"has {prompt_len} tokens, the model takes at most {limits.max_model_len}")
        if min(self.prompt_ids) < 0 or max(self.prompt_ids) >= limits.vocab_size:
            for token in self.prompt_ids:
                _require_token("prompt", token, limits)
        _require_range("n", self.n, 1, MAX_CHOICES)
        params.validate(limits)
        if prompt_len == limits.max_model_len and params.max_tokens > 0:
            raise InvalidRequest(
                "prompt", f"has {prompt_len} tokens, the model's whole length: no room is left to generate"
            )
        positions = prompt_len + max(max_new_tokens(prompt_len, params, limits) - 1, 0)  # the last token needs no KV
        capacity = limits.num_pages * limits.page_size
        if positions > capacity:
            raise InvalidRequest(
                "max_tokens" if prompt_len <= capacity else "prompt",
                f"{prompt_len} prompt tokens and max_tokens {params.max_tokens} need {positions} tokens of KV cache, "
                f"the server has {capacity}",
            )


def max_new_tokens(prompt_len: int, params: SamplingParams, limits: Limits) -> int:
    return min(params.max_tokens, limits.max_model_len - prompt_len)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """log p(id) under the model before any sampling option, and the likeliest alternatives, best first.

    For the first token of a prompt, which nothing predicts, logprob is None and top is empty.
    """

    id: int
    logprob: float | None
    top: list[tuple[int, float]]


@dataclasses.dataclass(slots=True)
class Output:
    """A piece of one choice's result. Text and token ids are deltas; text may lag behind (it is held back at times).

    `token_ids` holds every generated token, also an EOS or stop token, whose text is left out. `logprobs` is aligned
    with it. `prompt_logprobs` (one entry a prompt token) comes once, with choice 0's first output. `stop_reason` is the
    stop string or stop token id that ended it (None for an EOS). `error` says what went wrong when finish_reason is
    'error'.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None  # 'stop', 'length', 'abort', 'error'
    stop_reason: str | int | None = None
    error: str | None = None


@dataclasses.dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue: new, or preempted
    RUNNING = "running"  # holds a slot and pages
    PREEMPTED = "preempted"  # takes part in no new step; goes to the queue once nothing of it is in flight
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """One choice of one request, as the scheduler and the runner see it.

    `tokens` is the prompt and every confirmed output. The device may be ahead: `num_computed` positions are dispatched,
    and `num_pending` tokens that dispatched steps sample are not yet known here.
    """

    id: str
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    max_new: int
    stop_ids: frozenset[int]  # EOS ids (unless ignored) and stop_token_ids
    seed: tuple[int, int]  # two uint32: the sampling key, folded by absolute position on the device
    index: int = 0  # which choice
    extras: bytes = b""
    parent: "Sequence | None" = None  # choice 0, whose prompt pages this one shares

    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    slot: int = -1
    blocks: list[int] = dataclasses.field(default_factory=list)  # page of position p: blocks[p // page_size]
    keys: list[bytes] = dataclasses.field(default_factory=list)  # prefix keys of its full pages, as far as computed
    num_registered: int = 0  # leading blocks offered to the prefix cache
    num_sent: int = 0  # leading blocks that the runner's table has
    num_admitted: int = 0  # positions already in its pages when last admitted: the device's `length` at that time
    num_computed: int = 0
    num_pending: int = 0
    foreseen: bool = False  # the step that samples its newest token also foresees the one after it
    in_flight: int = 0  # dispatched, unconfirmed plans that it takes part in
    cached_tokens: int = 0
    admitted_once: bool = False
    scoring: bool = False  # prompt log-probabilities are wanted of it, and not all dispatched
    prompt_scores: list[TokenLogprob] = dataclasses.field(default_factory=list)  # of prompt tokens 1, 2, ...

    @staticmethod
    def create(
        request: GenerationRequest, limits: Limits, index: int = 0, parent: "Sequence | None" = None
    ) -> "Sequence":
        params, prompt_len = request.params, len(request.prompt_ids)
        return Sequence(
            id=f"{request.request_id}/{index}",
            tokens=list(request.prompt_ids),
            prompt_len=prompt_len,
            params=params,
            max_new=max_new_tokens(prompt_len, params, limits),
            stop_ids=frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else limits.eos_ids),
            seed=resolve_seed(params.seed, index),
            index=index,
            extras=request.extras,
            parent=parent,
            scoring=index == 0 and params.prompt_logprobs is not None and prompt_len > 1,
        )

    @property
    def prompt_ids(self) -> list[int]:
        return self.tokens[: self.prompt_len]

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def wants_scores(self) -> bool:
        """Prompt log-probabilities were asked for; choice 0 alone computes them."""
        return self.index == 0 and self.params.prompt_logprobs is not None

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len


def resolve_seed(seed: int | None, index: int) -> tuple[int, int]:
    """Two uint32 from the request's seed and the choice's index: choices differ, reproducibly. None: random."""
    digest = secrets.token_bytes(8) if seed is None else hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def _require_range(param: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    if not (value <= high and (value > low if open_low else value >= low)):  # NaN fails too
        bound = "above" if open_low else "at least"
        raise InvalidRequest(param, f"is {value}, must be {bound} {low} and at most {high}")


def _require_token(param: str, token: int, limits: Limits) -> None:
    if not 0 <= token < limits.vocab_size:
        raise InvalidRequest(param, f"token id {token} is outside the vocabulary of {limits.vocab_size}")
