"""GPTQ: each input's codes make up for the rounding of those before it (Frantar et al., arXiv:2210.17323)."""

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor
from jaxserve.pallas_kernels.quantized_matmul.grid import Grid, channel_scale
from jaxserve.pallas_kernels.quantized_matmul.rtn import check_weight
from jaxserve.passes.ranges import best_grid, check_gram
from jaxserve.passes.statistics import StatisticKind

ActOrder = Literal["off", "static", "permuted"]
Ranges = Literal["search", "minmax"]
BLOCK = 128  # inputs that are caught up with at once, where groups do not say how many


def quantize_gptq(
    weight: np.ndarray,
    format: QuantFormat,
    statistics: Mapping[StatisticKind, np.ndarray],
    act_order: ActOrder = "off",
    ranges: Ranges = "search",
    damp: float = 0.01,
) -> QuantizedTensor:
    """Chooses codes for a weight W [O, I], input after input, so that trace((Q - W) H (Q - W)^T) stays small.

    H is the statistic `gram` [I, I] with `damp` times the mean of its diagonal added to its diagonal. With H = U U^T, U
    upper triangular, input j is rounded from w_j - sum_{k<j} (U_kj / U_jj) (q_k - w_k), the best real value given what
    has been rounded: exactly the numbers of the published algorithm, whose Cholesky factor of H^-1 is U^-1. All outputs
    go together; earlier inputs are caught up with in one product a block. An input that is never active is simply
    rounded.

    `act_order` says in which order: `off` as they come, each group's range taken when it begins; `static` by descending
    H_jj, with the ranges of the groups of the original weight; `permuted` by descending H_jj, groups being formed in
    that order, for which `format` must be ordered if it has groups. A range spans the smallest and largest weight with
    `ranges="minmax"`, as published; `search` tries smaller ones on sum_j U_jj^2 (q_j - w_j)^2, which is what an error
    costs after later inputs have made up for it.

    Raises ValueError for a weight that cannot be quantized (`quantize_rtn`), or an H of another width or that
    is not finite.
    """
    check_weight(weight, format)
    inputs = weight.shape[1]
    gram = check_gram(statistics["gram"], inputs)
    order = np.arange(inputs) if act_order == "off" else np.argsort(-np.diag(gram), kind="stable")
    natural = np.argsort(order)
    feedback, costs = feedback_of(gram if act_order == "off" else gram[np.ix_(order, order)], damp)
    columns = weight.astype(np.float32).T[order]
    groups = _Groups(format, inputs, channel_scale(weight, format), ranges)
    if act_order == "static" or groups.size == inputs:
        groups.fix(columns[natural], costs[natural], order)
    codes = _round_columns(columns, feedback, costs, groups)
    return groups.grid().tensor(codes.T, order) if format.ordered else groups.grid().tensor(codes[natural].T)


def feedback_of(gram: np.ndarray, damp: float) -> tuple[np.ndarray, np.ndarray]:
    """C [I, I], C_kj = U_kj / U_jj: how much the error at input k moves the target of a later input j; and U_jj^2 [I].

    Both float32. The factor U of H = U U^T is that of Cholesky (which numpy computes in float64) read backwards. Raises
    ValueError if H is not positive definite.
    """
    damped = np.array(gram[::-1, ::-1], np.float32)
    diagonal = np.einsum("ii->i", damped)  # a view
    diagonal += damp * diagonal.mean(dtype=np.float64)
    diagonal[diagonal == 0] = 1
    try:
        lower = np.linalg.cholesky(damped)
    except np.linalg.LinAlgError:
        raise ValueError(f"damp={damp:g} is too little for the activations of the calibration text") from None
    scale = np.diag(lower).copy()
    lower /= scale
    return np.ascontiguousarray(lower[::-1, ::-1]), np.square(scale[::-1])


def _round_columns(columns: np.ndarray, feedback: np.ndarray, costs: np.ndarray, groups: "_Groups") -> np.ndarray:
    """Codes [I, O] float32 of a weight given as `columns` [I, O], in the order of processing."""
    codes, errors = np.empty_like(columns), np.empty_like(columns)
    for start, stop in groups.blocks():
        moved = -(feedback[:start, start:stop].T @ errors[:start])
        if not groups.fixed:
            # Where these columns would go if they, too, could still take any value: row j less what row k < j makes.
            free = np.linalg.solve(feedback[start:stop, start:stop].T, moved)
            groups.add(columns[start:stop] + free, costs[start:stop])
        for j in range(start, stop):
            target = columns[j] + moved[j - start] - feedback[start:j, j] @ errors[start:j]
            grid = groups.of(j)
            codes[j] = grid.nearest(target)
            errors[j] = grid.values(codes[j]) - columns[j]
    return codes


class _Groups:
    """The grids of a weight's groups, all outputs of a group in one: fixed before all, or added as groups begin."""

    def __init__(self, format: QuantFormat, inputs: int, channel: np.ndarray | None, ranges: Ranges):
        self.size, self.fixed = format.group_size(inputs), False
        self._format, self._inputs, self._ranges, self._channel = format, inputs, ranges, channel
        self._places: np.ndarray | None = None
        self._grids: list[Grid] = []

    def fix(self, columns: np.ndarray, costs: np.ndarray, order: np.ndarray) -> None:
        """Groups of neighbours among `columns` [I, O], which are processed in this order."""
        self.fixed, self._places = True, order
        for start in range(0, self._inputs, self.size):
            self.add(columns[start : start + self.size], costs[start : start + self.size])

    def add(self, columns: np.ndarray, costs: np.ndarray) -> None:
        """The next group is for columns [n, O], whose errors cost [n]."""

        def error(grid: Grid) -> np.ndarray:
            return costs @ np.square(grid.values(grid.nearest(columns)) - columns)

        channel = None if self._channel is None else self._channel[:, 0]
        ends = columns.min(axis=0), columns.max(axis=0)
        if self._ranges == "search":
            self._grids.append(best_grid(*ends, self._format, channel, error))
        else:
            self._grids.append(Grid.spanning(*ends, self._format, channel))

    def blocks(self) -> Iterator[tuple[int, int]]:
        """First and last input, exclusive, of what is caught up with at once: a group that is not fixed is a block."""
        size = BLOCK if self.fixed else self.size
        for start in range(0, self._inputs, size):
            yield start, min(start + size, self._inputs)

    def of(self, place: int) -> Grid:
        """The grid of the input that is processed as number `place`."""
        return self._grids[(place if self._places is None else self._places[place]) // self.size]

    def grid(self) -> Grid:
        """All groups as one grid with fields [O, G]."""
        fields = {name: np.stack([grid.fields[name] for grid in self._grids], axis=1) for name in self._grids[0].fields}
        if self._channel is not None:
            fields["channel"] = self._channel
        return Grid(self._format, fields)
