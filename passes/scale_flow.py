"""Where a scale per channel of an activation can come from, and where it goes.

A parameter divided by s along its outputs, and every matmul that reads the result multiplied by s along its inputs,
leave a model as it was. Whether that can be done is dataflow, and two walks answer it:

- `origins` walks back from an activation, through what commutes with a scale per channel, to a *root*: a norm or a
  matmul whose parameter can be scaled row by row;
- `spread` walks forward from a root over everything that reads the scaled rows. It ends in *leaves* that can undo the
  scale (matmuls, and the queries and keys of an attention), or at something that cannot.

Which channel is which is kept as *labels*: an integer for every channel of an activation [T, ...], as an array of its
shape without T, or for every row of a parameter. What moves channels around moves their labels. Channels with equal
labels share a scale, -1 is a channel that stays as it is. Walks that fail give the reason as text.
"""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from jaxserve._compat import Atom, JaxprEqn, Literal, Var, spec_of, vars_of
from jaxserve.passes.graph import Graph, Input, where
from jaxserve.passes.readers import MATMUL, QUANTIZED

NORM, ROPE, ATTENTION = "jaxserve.rms_norm", "jaxserve.rope", "jaxserve.attention"
QUERIES, KEYS, VALUES = 0, 1, 2  # operands of an attention

Labels = np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Root:
    """A norm or matmul with the parameter `entry`, whose rows can be scaled."""

    eqn: JaxprEqn
    entry: Input

    @property
    def result(self) -> Var:
        return self.eqn.outvars[0]

    @property
    def rows(self) -> int:
        return self.entry.aval.shape[0]

    @property
    def labels(self) -> Labels:
        """The row that each channel of the result is made by."""
        return np.broadcast_to(np.arange(self.rows), spec_of(self.result).shape[1:])


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """An equation that can undo the scale of its operand `index`, whose channels have `labels`."""

    eqn: JaxprEqn
    index: int
    labels: Labels

    @property
    def activation(self) -> Var:
        (var,) = vars_of([self.eqn.invars[self.index]])
        return var


@dataclasses.dataclass(frozen=True, eq=False)
class Bias:
    """A parameter [C] that `eqns` broadcast along the last axis of an activation."""

    entry: Input
    eqns: tuple[JaxprEqn, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Spread:
    """All that the rows of a root with `labels` reach: `eqns` in program order, and the `leaves` among them. Scaled
    like the root are `biases`, with the labels of their elements. `scaled` are the activations with a scale on them,
    `rest` what is computed from the root without one."""

    root: Root
    labels: Labels
    leaves: tuple[Leaf, ...]
    biases: tuple[tuple[Bias, Labels], ...]
    eqns: tuple[JaxprEqn, ...]
    scaled: frozenset[Var]
    rest: tuple[Var, ...]


def origins(graph: Graph, atom: Atom) -> Iterator[tuple[Root, Labels] | str]:
    """The roots that `atom` is computed from, with the rows that its channels are made by; why, where there is none."""
    eqn = graph.producer(atom)
    if eqn is None:
        entry = graph.input_of(atom)
        yield f"its input is made of {entry.path if entry else 'a constant'}, which takes no scale"
    elif eqn.primitive.name in (NORM, MATMUL, QUANTIZED):
        root = _root(graph, eqn)
        yield root if isinstance(root, str) else (root, root.labels)
    elif eqn.primitive.name not in _RULES:
        yield f"its input comes through {_stopped(eqn, NO_RULE)}"
    else:
        for index in _SOURCES.get(eqn.primitive.name, (0,)):
            if _is_constant(graph, eqn.invars[index]):
                continue
            for found in origins(graph, eqn.invars[index]):
                if not isinstance(found, str) and eqn.primitive.name != ROPE:  # `spread` sees to the pairs
                    labels = carried(graph, eqn, index, found[1])
                    found = f"its input comes through {labels}" if isinstance(labels, str) else (found[0], labels)
                yield found


def _root(graph: Graph, eqn: JaxprEqn) -> Root | str:
    if eqn.primitive.name == QUANTIZED:
        return f"its input comes from {where(eqn)}, which is quantized already"
    entry = graph.param_of(eqn.invars[1])
    if entry is None:
        return f"its input comes from {where(eqn)}, whose weight is computed"
    return shared(graph, entry, eqn) or Root(eqn, entry)


def shared(graph: Graph, entry: Input, reader: JaxprEqn) -> str | None:
    """Why a parameter cannot change for one of its readers, or None."""
    if graph.only_user(graph.var(entry.path)) is reader:
        return None
    return f"{entry.path} has other readers (tied weights stay as they are)"


def _is_constant(graph: Graph, atom: Atom) -> bool:
    return isinstance(atom, Literal) or bias_of(graph, atom) is not None


def spread(graph: Graph, root: Root, labels: Labels) -> Spread | str:
    """Follows the scale of a root's rows with `labels` to where it ends."""
    known: dict[Var, Labels] = {root.result: labels[root.labels]}
    region, queue, rest = {id(root.eqn)}, [root.result], list[Var]()
    leaves, biases = list[Leaf](), list[tuple[Bias, Labels]]()
    while queue:
        var = queue.pop()
        if graph.is_output(var):
            return f"the result of {where(root.eqn)} is also an output of the graph"
        for user in graph.users(var):
            region.add(id(user))
            index = user.invars.index(var)
            if sum(atom in known for atom in vars_of(user.invars)) > 1:
                return _blocked(root, _stopped(user, "which combines two scaled activations"))
            if _is_leaf(user, index):
                leaves.append(Leaf(user, index, known[var]))
                continue
            after = carried(graph, user, index, known[var])
            if isinstance(after, str):
                return _blocked(root, after)
            (result,) = user.outvars
            if (after < 0).all():
                rest.append(result)
                continue
            known[result] = after
            queue.append(result)
            if user.primitive.name == "add":
                found = _scaled_bias(graph, user, index, after)
                if isinstance(found, str):
                    return found
                biases.append(found)
                region.update(map(id, found[0].eqns))
    eqns = tuple(eqn for eqn in graph.eqns if id(eqn) in region)
    leaves.sort(key=lambda leaf: eqns.index(leaf.eqn))
    return Spread(root, labels, tuple(leaves), tuple(biases), eqns, frozenset(known), tuple(rest))


def _blocked(root: Root, reason: str) -> str:
    return f"the result of {where(root.eqn)} also goes through {reason}"


def _is_leaf(eqn: JaxprEqn, index: int) -> bool:
    name = eqn.primitive.name
    return (name in (MATMUL, QUANTIZED) and index == 0) or (name == ATTENTION and index in (QUERIES, KEYS))


def _scaled_bias(graph: Graph, add: JaxprEqn, index: int, labels: Labels) -> tuple[Bias, Labels] | str:
    """The bias that is added to a scaled activation, with the labels of its elements."""
    bias = bias_of(graph, add.invars[1 - index])
    assert bias is not None
    rows = labels.reshape(-1, labels.shape[-1])
    if (rows != rows[0]).any():
        return f"{bias.entry.path} is added to channels of different scales"
    for eqn, reader in pairwise((*bias.eqns, add)):
        if graph.only_user(eqn.outvars[0]) is not reader:
            return f"{bias.entry.path} has other readers"
    return shared(graph, bias.entry, bias.eqns[0]) or (bias, rows[0])


def bias_of(graph: Graph, atom: Atom) -> Bias | None:
    """The bias that `atom` is, or None."""
    eqns: list[JaxprEqn] = []
    while (eqn := graph.producer(atom)) is not None:
        name, rank = eqn.primitive.name, spec_of(eqn.outvars[0]).ndim
        along_last = (rank - 1,), tuple(range(rank))
        if name == "broadcast_in_dim" and eqn.params["broadcast_dimensions"] not in along_last:
            return None
        if name not in ("broadcast_in_dim", "convert_element_type"):
            return None
        eqns.insert(0, eqn)
        atom = eqn.invars[0]
    entry = graph.param_of(atom)
    return Bias(entry, tuple(eqns)) if eqns and entry is not None and len(entry.aval.shape) == 1 else None


# What each operation does with the labels of its operand `index`; text says why it does not let a scale through.
Rule = Callable[[Graph, JaxprEqn, int, Labels], Labels | str]
NO_RULE = "which does not commute with a scale"


def carried(graph: Graph, eqn: JaxprEqn, index: int, labels: Labels) -> Labels | str:
    """The labels of an operation's result, given those of its operand `index`; text when no scale can pass it."""
    rule = _RULES.get(eqn.primitive.name)
    after = NO_RULE if rule is None else rule(graph, eqn, index, labels)
    return _stopped(eqn, after) if isinstance(after, str) else after


def _stopped(eqn: JaxprEqn, why: str) -> str:
    return f"{eqn.primitive.name.removeprefix('jaxserve.')} at {where(eqn)}, {why}"


def _same(graph: Graph, eqn: JaxprEqn, index: int, labels: Labels) -> Labels | str:
    """Elementwise operations that are linear in this operand; they may broadcast it."""
    return np.broadcast_to(labels, spec_of(eqn.outvars[0]).shape[1:])


def _numerator(graph: Graph, eqn: JaxprEqn, index: int, labels: Labels) -> Labels | str:
    return _same(graph, eqn, index, labels) if index == 0 else "which divides by it"


def _relu(graph: Graph, eqn: JaxprEqn, index: int, labels: Labels) -> Labels | str:
    other = eqn.invars[1 - index]
    return _same(graph, eqn, index, labels) if isinstance(other, Literal) and other.val == 0 else NO_RULE


def _add(graph: Graph, eqn: JaxprEqn, index: int, labels: Labels) -> Labels | str:
    if bias_of(graph, eqn.invars[1 - index]) is None:
        return "where it is added to something else (a residual)"
    return _same(graph, eqn, index, labels)


def _reshape(graph: Graph, eqn: JaxprEqn, index: int, labels: Labels) -> Labels | str:
    tokens, *channels = spec_of(eqn.outvars[0]).shape
    kept = tokens == spec_of(eqn.invars[0]).shape[0]
    return labels.reshape(channels) if kept else "which mixes tokens with channels"


def _slice(graph: Graph, eqn: JaxprEqn, index: int, labels: Labels) -> Labels | str:
    steps = eqn.params["strides"] or (1,) * (labels.ndim + 1)
    bounds = zip(eqn.params["start_indices"], eqn.params["limit_indices"], steps, strict=True)
    return labels[tuple(slice(*bound) for bound in list(bounds)[1:])]


def _broadcast(graph: Graph, eqn: JaxprEqn, index: int, labels: Labels) -> Labels | str:
    first, *rest = eqn.params["broadcast_dimensions"]
    tokens, *channels = eqn.params["shape"]
    if first != 0 or tokens != spec_of(eqn.invars[0]).shape[0]:
        return "which mixes tokens with channels"
    kept = [1] * len(channels)
    for axis, size in zip(rest, labels.shape, strict=True):
        kept[axis - 1] = size
    return np.broadcast_to(labels.reshape(kept), channels)


def _mixed_values(graph: Graph, eqn: JaxprEqn, index: int, labels: Labels) -> Labels | str:
    """Attention is linear in V; the query heads of a group all read one KV head."""
    if index != VALUES:
        return NO_RULE
    heads = spec_of(eqn.outvars[0]).shape[1]
    return np.repeat(labels, heads // labels.shape[0], axis=0)


def rotary_pairs(eqn: JaxprEqn, labels: Labels) -> tuple[Labels, Labels]:
    """The labels [n, H] of the channels that a rope turns, as two halves: each channel with its partner."""
    spec = eqn.params["spec"]
    turned = labels[..., : spec.dim]
    if spec.interleaved:
        return turned[..., 0::2], turned[..., 1::2]
    return turned[..., : spec.dim // 2], turned[..., spec.dim // 2 :]


def _rope(graph: Graph, eqn: JaxprEqn, index: int, labels: Labels) -> Labels | str:
    first, second = rotary_pairs(eqn, labels)
    return labels if (first == second).all() else "which turns channels of different scales into each other"


_RULES: dict[str, Rule] = {
    "convert_element_type": _same,
    "copy": _same,
    "neg": _same,
    "mul": _same,
    "div": _numerator,
    "max": _relu,
    "add": _add,
    "reshape": _reshape,
    "slice": _slice,
    "broadcast_in_dim": _broadcast,
    ATTENTION: _mixed_values,
    ROPE: _rope,
}
# The operands that a scale on the result may come from, where it is not the first alone.
_SOURCES = {"mul": (0, 1), "add": (0, 1), "max": (0, 1), ATTENTION: (VALUES,)}
