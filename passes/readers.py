"""Who reads a weight: matmuls and embedding lookups, the two regions that passes know how to substitute; and how one
layer's vector is cut out of a stack."""

import jax

from jaxserve._compat import Atom, JaxprEqn, spec_of
from jaxserve.passes.graph import Graph, Input, where
from jaxserve.passes.match import Match, NoMatch, Pattern

MATMUL = "jaxserve.dense_matmul"
QUANTIZED = "jaxserve.quantized_matmul"


def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """An embedding lookup; ids outside the table read its nearest row."""
    return table.at[ids].get(mode="clip", wrap_negative_indices=False)


ROWS = tuple(
    Pattern(take_rows, jax.ShapeDtypeStruct((4, 3), dtype), jax.ShapeDtypeStruct((2,), "int32"))
    for dtype in ("float32", "bfloat16")
)


def weight_readers(graph: Graph, entry: Input) -> list[Match] | NoMatch:
    """Every region that reads the weight, or why they cannot all be substituted."""
    if graph.is_output(graph.var(entry.path)):
        return NoMatch(entry.path, "it is also an output of the graph, so it stays dense")
    readers: list[Match] = []
    for user in graph.users(graph.var(entry.path)):
        found = _weight_reader(graph, entry, user)
        if isinstance(found, NoMatch):
            return found
        readers.append(found)
    return readers


def _weight_reader(graph: Graph, entry: Input, user: JaxprEqn) -> Match | NoMatch:
    """The region that reads the weight `entry` in `user`.

    Its last equation is a dense_matmul with operands (x, w), or the gather of a lookup with operands (w, ids).
    """
    if user.primitive.name == MATMUL and graph.param_of(user.invars[1]) is entry:
        note = f"{entry.path} {list(entry.aval.shape)}"
        return Match(where(user), tuple(user.invars), (user,), tuple(user.outvars), note)
    if user.primitive.name == "dot_general":
        return NoMatch(where(user), f"{entry.path} is read by a plain dot_general: run lower-dense-matmul first")
    for pattern in ROWS:
        found = pattern.match(graph, user.outvars[0])
        if isinstance(found, Match):
            note = f"{entry.path} {list(entry.aval.shape)}, rows"
            return Match(found.where, found.operands, found.eqns, found.results, note)
    return NoMatch(where(user), f"{entry.path} is read by {user.primitive.name}, so it stays dense")


def cut_of_stack(graph: Graph, vector: Atom) -> tuple[JaxprEqn, ...]:
    """The slice and squeeze that cut one layer's vector out of a stack [L, D]; none if it is no such part."""
    squeeze = graph.producer(vector)
    cut = graph.producer(squeeze.invars[0]) if squeeze is not None and squeeze.primitive.name == "squeeze" else None
    if squeeze is None or cut is None or cut.primitive.name != "slice" or graph.param_of(cut.invars[0]) is None:
        return ()
    stack, part = spec_of(cut.invars[0]).shape, spec_of(cut.outvars[0]).shape
    return (cut, squeeze) if len(stack) == 2 and part == (1, stack[1]) else ()
