"""The check of lower-dense-matmul allows the rounding of long sums, and nothing beyond it."""

import pytest

from jaxserve.passes import lower_dense_matmul
from jaxserve.passes.graph import Graph
from jaxserve.passes.lower_dense_matmul import LowerDenseMatmul, linear
from jaxserve.passes.pipeline import Context, run_pipeline
from jaxserve.passes.verify import NumberCheck, Verifier, VerifyError
from tests.passes.helpers import make_graph


def lower(graph: Graph) -> int:
    """Runs the pass with its numbers checked; how many regions were."""
    numbers = NumberCheck()
    run_pipeline(graph, [LowerDenseMatmul()], Context(), [Verifier(numbers)])
    return numbers.checked


@pytest.mark.parametrize("inputs", [64, 8192, 28672])
def test_sums_of_many_inputs_may_be_added_in_another_order(inputs):
    # 28672 is the MLP of Llama 70B. XLA adds up one row's products one after the other.
    assert lower(make_graph(lambda v: linear(v["x"], v["w"]), {"w": (256, inputs)}, {"x": (1, inputs)})) == 1


@pytest.mark.parametrize("inputs", [64, 28672])
def test_a_product_that_is_wrong_by_a_few_roundings_is_caught(monkeypatch, inputs):
    right = lower_dense_matmul.dense_matmul
    monkeypatch.setattr(lower_dense_matmul, "dense_matmul", lambda *x, **options: right(*x, **options) * (1 + 1e-5))
    with pytest.raises(VerifyError, match="after lower-dense-matmul"):
        lower(make_graph(lambda v: linear(v["x"], v["w"]), {"w": (16, inputs)}, {"x": (1, inputs)}))
