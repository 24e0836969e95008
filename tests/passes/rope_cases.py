"""Graphs with arrays in which queries, keys and values lie side by side, and with all that only looks like it."""

from jaxserve.pallas_kernels import attention, rope
from jaxserve.passes.graph import Graph
from tests.passes.helpers import make_graph
from tests.passes.scale_cases import INDEX, ROPE, scope


def parts_that_are_not_turned_together() -> Graph:
    """A q that is not turned, angles that differ, a q of its own, keys after values, an array with a rest, rows of a
    larger one, a bias of q alone, one for each row; then a sound triple that two attentions share."""

    def function(v):
        x, wide, at = v["x"], v["wide"], v["positions"]
        heads = lambda part: part.reshape(4, -1, 8)  # noqa: E731
        cut = lambda array, first, last: heads(array[:4, first:last])  # noqa: E731
        turned = lambda part, by=at: rope(part, by, spec=ROPE)  # noqa: E731
        mix = lambda name, q, k, u: scope(name, lambda: attention(q, k, u, at, v["segments"], scale=0.5))  # noqa: E731
        own, key, value = turned(cut(x, 0, 16)), turned(cut(x, 16, 24)), cut(x, 24, 32)
        return {
            "plain": mix("plain", cut(x, 0, 16), key, value),
            "angles": mix("angles", own, turned(cut(x, 16, 24), at * 2), value),
            "alone": mix("alone", turned(heads(v["q"])), key, value),
            "two": mix("two_arrays", turned(cut(wide, 0, 16)), key, value),
            "swapped": mix("swapped", own, turned(cut(x, 24, 32)), cut(x, 16, 24)),
            "rest": mix("rest", turned(cut(wide, 0, 16)), turned(cut(wide, 16, 24)), cut(wide, 24, 32)),
            "rows": mix("rows", turned(cut(v["tall"], 0, 16)), turned(cut(v["tall"], 16, 24)), cut(v["tall"], 24, 32)),
            "biased": mix("one_bias", turned(heads(x[:, :16] + v["bias"])), key, value),
            "row": mix("bias_a_row", turned(heads(x[:, :16] + v["x"][:, 24:25])), key, value),
            "first": mix("first", own, key, value),
            "second": mix("second", own, key, value),
        }  # fmt: skip

    args = {"x": (4, 32), "wide": (4, 40), "tall": (5, 32), "q": (4, 16), "positions": INDEX, "segments": INDEX}
    return make_graph(function, {"bias": (16,)}, args)
