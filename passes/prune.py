"""prune: the weights that matter least become zero, before anything is quantized."""

import dataclasses
import math
import re
from typing import ClassVar, Literal

import numpy as np

from jaxserve.errors import UserError
from jaxserve.passes.graph import Graph, Input
from jaxserve.passes.in_place import LAYERS, edit_weights
from jaxserve.passes.pipeline import Context, Pass, PassResult
from jaxserve.passes.weights import Value, dense

KEPT, OF = 2, 4  # the pattern 2:4, which sparse tensor cores take


@dataclasses.dataclass(frozen=True)
class Prune(Pass):
    """The part `sparsity` of a matmul's weight [O, I] that scores lowest becomes 0.

    The regex `targets` selects weights; one that has other readers beside one matmul is refused. `method` scores:

    - wanda (Sun et al., arXiv:2306.11695): |W_oi| ||X_i||_2, with X the calibration text's activations, compared
      within each output's row; X is what the pruned layers before give, as in the authors' own implementation;
    - magnitude: |W_oi|, compared within the whole weight.

    `pattern` unstructured takes the smallest of these; 2:4 the two smallest of every four neighbouring inputs, where
    `sparsity` can only be 0.5. Ties go to the first. Nothing is gained in speed yet: kernels read zeros as they read
    anything. Zeros survive quantization in symmetric formats and those with an integer zero point; a float minimum
    moves them by rounding.

    Raises UserError for a sparsity outside [0, 1), one that is not 0.5 with 2:4, or a regex that cannot be read.
    """

    name: ClassVar[str] = "prune"
    method: Literal["wanda", "magnitude"] = "wanda"
    sparsity: float = 0.5
    pattern: Literal["unstructured", "2:4"] = "unstructured"
    targets: str = LAYERS

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise UserError(f"pass prune: sparsity={self.sparsity:g} is not in [0, 1)")
        if self.pattern == "2:4" and self.sparsity != 0.5:
            raise UserError(f"pass prune: pattern 2:4 means sparsity=0.5, not {self.sparsity:g}")
        try:
            re.compile(self.targets)
        except re.error as error:
            raise UserError(f"pass prune: targets={self.targets!r} is not a regular expression ({error})") from None

    def run(self, graph: Graph, context: Context) -> PassResult:
        del context
        part = "two of every four inputs" if self.pattern == "2:4" else f"{self.sparsity:.4g} of it"
        return edit_weights(
            graph,
            self._prune,
            targets=self.targets,
            kinds=("square",) if self.method == "wanda" else (),
            refuse=self._refuse,
            # The scores that go are the smallest: they hold at most their share of the energy, which is sparsity.
            tolerance=math.sqrt(self.sparsity),
            note=f"{part} become 0 by {self.method}",
        )

    def _refuse(self, entry: Input) -> str:
        inputs = entry.aval.shape[1]
        return f"its {inputs} inputs are no multiple of {OF}" if self.pattern == "2:4" and inputs % OF else ""

    def _prune(self, path: str, value: Value, square: np.ndarray | None = None) -> Value:
        weight = dense(value).astype(np.float32)
        if not np.isfinite(weight).all():
            raise UserError(f"{path} holds infinities or NaN, so its weights cannot be ranked")
        scores = np.abs(weight) if square is None else np.abs(weight) * np.sqrt(square.astype(np.float32))
        if self.pattern == "2:4":
            dropped = smallest(scores.reshape(-1, OF), OF - KEPT)
        elif self.method == "wanda":
            dropped = smallest(scores, round(scores.shape[1] * self.sparsity))
        else:
            dropped = smallest(scores.reshape(1, -1), round(scores.size * self.sparsity))
        return np.where(dropped.reshape(weight.shape), np.float32(0), weight)


def smallest(scores: np.ndarray, count: int) -> np.ndarray:
    """Where the `count` smallest scores of each row are, as booleans [rows, columns]; ties go to the first columns."""
    order = np.argsort(scores, axis=1, kind="stable")[:, :count]
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen
