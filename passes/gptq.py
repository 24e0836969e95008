"""GPTQ: each input's codes make up for the rounding of those before it (Frantar et al., arXiv:2210.17323)."""

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from jaxserve.pallas_kernels import QuantFormat, QuantizedTensor
from jaxserve.pallas_kernels.quantized_matmul.grid import Grid, channel_scale
from jaxserve.pallas_kernels.quantized_matmul.rtn import check_weight
from jaxserve.passes.statistics import StatisticKind

ActOrder = Literal["off", "static", "permuted"]
BLOCK = 128  # inputs that are caught up with at once, where groups do not say how many


def quantize_gptq(
    weight: np.ndarray,
    format: QuantFormat,
    statistics: Mapping[StatisticKind, np.ndarray],
    act_order: ActOrder = "off",
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
    that order, for which `format` must be ordered if it has groups.

    Raises ValueError for a weight that cannot be quantized (`quantize_rtn`), or that has another width than H.
    """
    check_weight(weight, format)
    gram = np.asarray(statistics["gram"], np.float64)
    inputs = weight.shape[1]
    if gram.shape != (inputs, inputs):
        raise ValueError(f"the gram of a weight with {inputs} inputs must be [{inputs}, {inputs}], got {gram.shape}")
    order = np.arange(inputs) if act_order == "off" else np.argsort(-np.diag(gram), kind="stable")
    feedback = feedback_of(gram[np.ix_(order, order)], damp)
    columns = weight.astype(np.float32).T[order]
    groups = _Groups(weight, format, fixed=act_order == "static", places=order if act_order == "static" else None)
    codes = _round_columns(columns, feedback, groups)
    grid = groups.grid()
    if format.ordered:
        return grid.tensor(codes.T, order)
    natural = np.empty_like(codes)
    natural[order] = codes
    return grid.tensor(natural.T)


def feedback_of(gram: np.ndarray, damp: float) -> np.ndarray:
    """C [I, I] float32, C_kj = U_kj / U_jj: how much the error at input k moves the target of a later input j.

    The factor U of H = U U^T is that of Cholesky read backwards.
    """
    damped = gram.copy()
    diagonal = np.einsum("ii->i", damped)  # a view
    diagonal += damp * diagonal.mean()
    diagonal[diagonal == 0] = 1
    upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return (upper / np.diag(upper)).astype(np.float32)


def _round_columns(columns: np.ndarray, feedback: np.ndarray, groups: "_Groups") -> np.ndarray:
    """Codes [I, O] float32 of a weight given as `columns` [I, O], in the order of processing."""
    codes, errors = np.empty_like(columns), np.empty_like(columns)
    for start, stop in groups.blocks(len(columns)):
        moved = -(feedback[:start, start:stop].T @ errors[:start])
        if groups.wanted(start):
            # Where these columns would go if they, too, could still take any value: row j less what row k < j makes.
            groups.add(columns[start:stop] + np.linalg.solve(feedback[start:stop, start:stop].T, moved))
        for j in range(start, stop):
            target = columns[j] + moved[j - start] - feedback[start:j, j] @ errors[start:j]
            grid = groups.of(j)
            codes[j] = grid.nearest(target)
            errors[j] = grid.values(codes[j]) - columns[j]
    return codes


class _Groups:
    """The grids of a weight's groups, all outputs of a group in one.

    They are taken when a block, which then is a group, begins; or from the original weight if they are `fixed` or there
    is only one. `places` are the inputs in the order of processing, if groups are not of neighbours in that order.
    """

    def __init__(self, weight: np.ndarray, format: QuantFormat, fixed: bool, places: np.ndarray | None):
        inputs = weight.shape[1]
        self._format, self._size = format, format.group_size(inputs)
        channel = channel_scale(weight, format)
        self._channel = None if channel is None else channel[:, 0]
        self._places, self._fixed = places, fixed or self._size == inputs
        self._grids: list[Grid] = []
        if self._fixed:
            for start in range(0, inputs, self._size):
                self.add(weight[:, start : start + self._size].T)

    def add(self, columns: np.ndarray) -> None:
        """The next group spans columns [n, O]."""
        low, high = columns.min(axis=0), columns.max(axis=0)
        self._grids.append(Grid.spanning(low, high, self._format, self._channel))

    def blocks(self, inputs: int) -> Iterator[tuple[int, int]]:
        """First and last input, exclusive, of what is caught up with at once."""
        size = BLOCK if self._fixed else self._size
        for start in range(0, inputs, size):
            yield start, min(start + size, inputs)

    def wanted(self, start: int) -> bool:
        """Whether the block at `start` begins a group without a grid."""
        return len(self._grids) * self._size <= start

    def of(self, place: int) -> Grid:
        """The grid of the input that is processed as number `place`."""
        return self._grids[(place if self._places is None else self._places[place]) // self._size]

    def grid(self) -> Grid:
        """All groups as one grid with fields [O, G]."""
        fields = {name: np.stack([grid.fields[name] for grid in self._grids], axis=1) for name in self._grids[0].fields}
        if self._channel is not None:
            fields["channel"] = self._channel[:, None]
        return Grid(self._format, fields)
