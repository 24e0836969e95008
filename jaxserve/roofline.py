"""What a step must read, write and compute, counted from a rewritten graph, and the least time that a GPU takes for it.

The time of one op is the larger of bytes / bandwidth and operations / rate (Williams et al., "Roofline", 2009); ops run
one after the other, so a step takes their sum. Elementwise work is left out: XLA fuses it into its neighbours.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxserve._compat import Atom, JaxprEqn, spec_of
from jaxserve.pallas_kernels._shapes import size
from jaxserve.passes.graph import Graph
from jaxserve.targets import Gpu

# A graph is traced with so many tokens and rows of logits, different ones, so that an op shows which of them it is for.
TOKENS, ROWS = 3, 1


@dataclasses.dataclass(frozen=True)
class Load:
    """How much work a step is: T tokens, R rows of logits, and of attention the cached keys that are read, and the
    pairs of a query and a key that it sees."""

    tokens: int
    rows: int
    keys: int
    pairs: int


def decode_load(batch: int, context: int) -> Load:
    """One new token for each of `batch` sequences of `context` tokens."""
    return Load(tokens=batch, rows=batch, keys=batch * context, pairs=batch * context)


def prefill_load(context: int) -> Load:
    """A prompt of `context` tokens at once: token i sees i keys, and each key has to be read once."""
    return Load(tokens=context, rows=1, keys=context, pairs=context * (context + 1) // 2)


@dataclasses.dataclass(frozen=True)
class Cost:
    """One op: bytes that it reads whatever the step is, and bytes and operations for each token (or row of logits), for
    each key read and for each pair. Operations are of `unit`, a name in `Gpu.rates`."""

    op: str
    unit: str
    fixed_bytes: int = 0
    token_bytes: float = 0
    token_ops: float = 0
    key_bytes: float = 0
    pair_ops: float = 0
    of_rows: bool = False
    window: int | None = None

    def bytes(self, load: Load) -> float:
        """Bytes that cross the memory bus at least."""
        return self.fixed_bytes + self.token_bytes * self._tokens(load) + self.key_bytes * self._seen(load, load.keys)

    def ops(self, load: Load) -> float:
        """Multiplications and additions."""
        return self.token_ops * self._tokens(load) + self.pair_ops * self._seen(load, load.pairs)

    def _tokens(self, load: Load) -> int:
        return load.rows if self.of_rows else load.tokens

    def _seen(self, load: Load, count: int) -> int:
        """`count` keys or pairs, no more than the window lets each token see."""
        return count if self.window is None else min(count, load.tokens * self.window)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A step's time on paper: seconds in all, and those of the ops bound by memory and by computing."""

    bytes: float
    ops: float
    memory_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        return self.memory_seconds + self.compute_seconds

    @property
    def bound(self) -> str:
        """What most of the time goes to."""
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"


def roofline(costs: Sequence[Cost], load: Load, gpu: Gpu) -> Roofline:
    """The least time that `gpu` takes for a step; KeyError for a unit that it does not have."""
    memory = compute = total_bytes = total_ops = 0.0
    for cost in costs:
        moved, ops = cost.bytes(load), cost.ops(load)
        reading, computing = moved / gpu.bandwidth, ops / gpu.rates[cost.unit] if ops else 0.0
        total_bytes, total_ops = total_bytes + moved, total_ops + ops
        if reading >= computing:
            memory += reading
        else:
            compute += computing
    return Roofline(total_bytes, total_ops, memory, compute)


def count(graph: Graph) -> tuple[Cost, ...]:
    """The costs of a graph's ops; it must have been traced for `TOKENS` tokens and `ROWS` rows of logits."""
    costs = []
    for eqn in graph.eqns:
        name = eqn.primitive.name.removeprefix("jaxserve.")
        if counter := _COUNTERS.get(name):
            costs.append(counter(name, eqn))
        elif name in ("gather", "quantized_take") and graph.param_of(eqn.invars[0]):
            costs.append(Cost(name, "f32", token_bytes=2 * _bytes(eqn.outvars[0]) / TOKENS))
    return tuple(costs)


def _bytes(atom: Atom) -> int:
    return size(spec_of(atom))


def _matmul(name: str, eqn: JaxprEqn) -> Cost:
    array, *weights = eqn.invars
    x, y = spec_of(array), spec_of(eqn.outvars[0])
    layer, activation, format = (eqn.params.get(name) for name in ("layer", "activation", "format"))
    specs = map(spec_of, weights[: len(format.fields)] if format else weights)  # without the scale of x
    stored = sum(size(spec) // (1 if layer is None else spec.shape[0]) for spec in specs)
    rows = math.prod(x.shape[:-1])
    unit = {"int8": "int8", "int8-static": "int8", "e4m3": "fp8"}.get(activation or "")
    return Cost(
        name,
        unit or ("f32" if x.dtype.name == "float32" else "bf16"),
        fixed_bytes=stored,
        token_bytes=size(x, y) / rows,
        token_ops=2 * x.shape[-1] * y.shape[-1],
        of_rows=rows == ROWS,
    )


def _attention(name: str, eqn: JaxprEqn) -> Cost:
    q, *caches, _, _, _ = eqn.invars
    _, heads, head_dim = spec_of(q).shape
    return Cost(
        name,
        "bf16",
        token_bytes=2 * _bytes(q) / TOKENS,
        key_bytes=_bytes_per_slot(caches, eqn),
        pair_ops=4 * heads * head_dim,
        window=eqn.params["window"],
    )


def _kv_write(name: str, eqn: JaxprEqn) -> Cost:
    *caches, k, v, _ = eqn.invars
    return Cost(name, "f32", token_bytes=(_bytes(k) + _bytes(v)) / TOKENS + _bytes_per_slot(caches, eqn))


def _bytes_per_slot(caches: Sequence[Atom], eqn: JaxprEqn) -> int:
    """Bytes that one token takes in one layer's caches [L, pages, B, ...]."""
    leading = 2 if eqn.params["layer"] is None else 3
    return sum(math.prod(spec.shape[leading:]) * spec.dtype.itemsize for spec in map(spec_of, caches))


def _rows(name: str, eqn: JaxprEqn) -> Cost:
    """An op that reads and writes rows of its first operand."""
    x = eqn.invars[0]
    rows = spec_of(x).shape[0]
    return Cost(name, "f32", 0, (_bytes(x) + _bytes(eqn.outvars[0])) / rows, of_rows=rows == ROWS)


def _norm(name: str, eqn: JaxprEqn) -> Cost:
    """Rows in and out, with a sum two of each; of a stack of weights one."""
    *arrays, weight = eqn.invars
    rows = spec_of(arrays[0]).shape[0]
    stack = 1 if eqn.params["layer"] is None else spec_of(weight).shape[0]
    each = sum(map(_bytes, (*arrays, *eqn.outvars))) / rows
    return Cost(name, "f32", _bytes(weight) // stack, each, of_rows=rows == ROWS)


_COUNTERS = {
    "dense_matmul": _matmul,
    "quantized_matmul": _matmul,
    "paged_attention": _attention,
    "kv_write": _kv_write,
    "rms_norm": _norm,
    "add_rms_norm": _norm,
    "quantized_norm": _norm,
    "rope": _rows,
}
