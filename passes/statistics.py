"""Statistics of activations: what a calibrated pass asks for, and how each is computed.

A pass runs on shapes alone, so it cannot look at numbers. It names a `Statistic` in its result and reads it in its
weight edits, under a path like any parameter's; `jaxserve.calibration` fills it in, layer by layer, before it applies
the edits.
"""

import dataclasses
from typing import Literal

from jaxserve._compat import Var

StatisticKind = Literal["absmax", "absmean", "square", "range", "gram"]


@dataclasses.dataclass(frozen=True)
class Statistic:
    """`kind` of the activation `var` [T, ...] (a variable of the graph before the pass), under the name `path`.

    With x the activation over all T tokens of the calibration text:

    - absmax [...]: max_t |x_t|;
    - absmean [...]: mean_t |x_t|;
    - square [...]: mean_t x_t^2, the gram's diagonal for those who need no more of it;
    - range [2]: the smallest and the largest element of x;
    - gram [I, I], for x [T, I]: mean_t x_t x_t^T, so that the mean squared error of a change E of a weight [O, I] is
      trace(E gram E^T).

    All are float32.
    """

    path: str
    var: Var
    kind: StatisticKind


def statistic_path(kind: StatisticKind, path: str) -> str:
    """The name of a statistic at the input of the matmul with the weight at `path`."""
    return f"stats/{kind}/{path}"
