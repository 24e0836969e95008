"""What the engine measures: host time of each phase of a step, and the times of each request."""

import dataclasses
from typing import Any, Protocol

PHASES = ("schedule", "prepare", "dispatch", "wait", "collect", "deliver", "host", "processor")
BOUNDS = tuple(1e-5 * 2**i for i in range(18))  # seconds: 10 us to 1.3 s


class PhaseTimes:
    """Count, sum, largest and a histogram of one phase's seconds. Written by one thread; reading it may lag a step."""

    __slots__ = ("buckets", "count", "largest", "total")

    def __init__(self):
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self.buckets = [0] * (len(BOUNDS) + 1)  # buckets[i]: seconds in [BOUNDS[i - 1], BOUNDS[i])

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.largest = max(self.largest, seconds)
        self.buckets[min(int(seconds * 1e5).bit_length(), len(BOUNDS))] += 1

    def summary(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "seconds": self.total,
            "mean": self.total / self.count if self.count else 0.0,
            "max": self.largest,
            "bounds": list(BOUNDS),
            "buckets": self.buckets.copy(),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class RequestTimings:
    """Of one choice that ended. Seconds; None where it ended before getting there."""

    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    queue: float | None  # submitted until first admitted
    prefill: float | None  # admitted until first token
    decode: float | None  # first token until last
    first_token: float | None  # submitted until first token
    end_to_end: float


class EngineObserver(Protocol):
    """Told by the engine's thread as things happen; must be quick and must not raise."""

    def step(self, prompt_tokens: int, generated_tokens: int) -> None:
        """Tokens of one step: prompt positions computed (recomputed ones too), tokens delivered."""

    def first_token(self, seconds: float) -> None:
        """Submission to first token of a choice."""

    def inter_token(self, seconds: float) -> None:
        """Between two tokens of a choice."""

    def request_finished(self, timings: RequestTimings) -> None:
        """Once a choice."""


class NullObserver:
    def step(self, prompt_tokens: int, generated_tokens: int) -> None:
        pass

    def first_token(self, seconds: float) -> None:
        pass

    def inter_token(self, seconds: float) -> None:
        pass

    def request_finished(self, timings: RequestTimings) -> None:
        pass
