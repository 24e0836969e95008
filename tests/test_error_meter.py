"""Errors measured while edits run, against outputs that are really computed."""

import numpy as np
import pytest

from jaxserve.calibration import calibrate
from jaxserve.error_meter import ErrorMeter, OutputError, energy
from jaxserve.lowering import trace_model
from jaxserve.pallas_kernels import QuantFormat, quantize_rtn
from jaxserve.passes.graph import Graph
from jaxserve.passes.pipeline import PipelineResult
from jaxserve.passes.recipes import parse_spec
from jaxserve.passes.statistics import compute
from jaxserve.passes.weights import ValueSource, WeightEdit
from jaxserve.reporting import Reporter
from tests.passes.helpers import pipeline, random_values, tiny, trace_tiny

FORM = QuantFormat(4, 64, "minimum", "float16")
LAYER = "layers_0/self_attn"
PARTS = [f"{LAYER}/{name}_proj/kernel" for name in "qkv"]
QKV, O_PROJ = f"{LAYER}/qkv_proj/kernel", f"{LAYER}/o_proj/kernel"
RNG = np.random.default_rng(0)
WEIGHTS = {path: RNG.normal(size=(16 if "q_proj" in path else 8, 16)).astype("float32") for path in PARTS}
X = (RNG.normal(size=(50, 16)) * np.linspace(0.1, 3, 16)).astype("float32")


@pytest.fixture(scope="module")
def result() -> PipelineResult:
    spec = "canonicalize,lower-dense-matmul,fuse-qkv,quantize-matmul{rules='self_attn=w4a16'}"
    return pipeline(trace_tiny(), spec, numbers=False)


def edit_of(reads: list[str], writes: list[str]) -> WeightEdit:
    return WeightEdit(tuple(reads), tuple(writes), lambda *values: values)


def measured(x: np.ndarray, weight: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(x @ (other - weight).T) / np.linalg.norm(x @ weight.T))


def quantize(meter: ErrorMeter, path: str, weight: np.ndarray, noise: float, x: np.ndarray) -> np.ndarray:
    """Hands the meter an edit that quantizes the weight worse than rounding would; gives what the codes stand for."""
    tensor = quantize_rtn(weight + noise * RNG.normal(size=weight.shape).astype("float32"), FORM)
    edit = edit_of([path, f"stats/gram/{path}"], [f"{path}/{field}" for field in FORM.fields])
    meter(edit, [weight, compute("gram", x)], [tensor.arrays[field] for field in FORM.fields])
    return tensor.dequantize()


def test_energy_is_the_length_of_the_outputs():
    weight = WEIGHTS[PARTS[0]]
    assert energy(weight, compute("gram", X)) == pytest.approx(np.mean(np.sum((X @ weight.T) ** 2, axis=1)), rel=1e-5)


def test_a_weight_that_is_only_quantized(result):
    meter, weight = ErrorMeter(result), WEIGHTS[PARTS[0]]
    found = quantize(meter, O_PROJ, weight, 0.1, X)
    (path, error), *others = meter.errors().items()
    assert path == O_PROJ and not others
    assert error.after == pytest.approx(measured(X, weight, found), rel=1e-4)
    assert error.before == pytest.approx(measured(X, weight, quantize_rtn(weight, FORM).dequantize()), rel=1e-4)
    assert error.before is not None and error.after is not None and error.before < error.after


def test_before_is_what_it_was_before_its_scales_were_folded(result):
    """q, k and v are folded apart, then quantized together: both errors are of all three."""
    meter, scales = ErrorMeter(result), np.linspace(0.2, 4, 16).astype("float32")
    reads = [name for path in PARTS for name in (path, f"stats/gram/{path}")]
    values = [value for path in PARTS for value in (WEIGHTS[path], compute("gram", X))]
    meter(edit_of(reads, PARTS), values, [WEIGHTS[path] * scales for path in PARTS])
    whole = np.concatenate([WEIGHTS[path] for path in PARTS])
    found = quantize(meter, QKV, whole * scales, 0.01, X / scales)
    error = meter.errors()[QKV]
    assert error.before == pytest.approx(measured(X, whole, quantize_rtn(whole, FORM).dequantize()), rel=1e-4)
    assert error.after == pytest.approx(measured(X / scales, whole * scales, found), rel=1e-4)


def test_when_a_part_was_not_measured_the_whole_is(result):
    meter = ErrorMeter(result)
    meter(edit_of([PARTS[0], f"stats/gram/{PARTS[0]}"], [PARTS[0]]), [WEIGHTS[PARTS[0]], compute("gram", X)], [X])
    assert meter.errors() == {}
    whole = np.concatenate([WEIGHTS[path] for path in PARTS])
    quantize(meter, QKV, whole, 0.01, X)
    before = meter.errors()[QKV].before
    assert before == pytest.approx(measured(X, whole, quantize_rtn(whole, FORM).dequantize()), rel=1e-4)


def test_edits_without_a_gram_or_of_other_weights_are_not_measured(result):
    meter, weight = ErrorMeter(result), WEIGHTS[PARTS[0]]
    meter(edit_of([O_PROJ], [f"{O_PROJ}/codes"]), [weight], [weight])
    meter(edit_of(["other", "stats/gram/other"], ["other"]), [weight, compute("gram", X)], [weight])
    meter(edit_of([O_PROJ, f"stats/absmax/{O_PROJ}"], [O_PROJ]), [weight, X[0]], [weight])
    assert meter.errors() == {}


def test_a_weight_without_outputs_has_no_relative_error(result):
    meter = ErrorMeter(result)
    quantize(meter, O_PROJ, np.zeros((16, 16), "float32"), 0.0, X)
    assert meter.errors().get(O_PROJ, OutputError()) == OutputError()


def test_every_matmul_of_a_calibrated_pipeline_is_measured(tmp_path):
    """GPTQ with its own statistics: better than rounding on the text that it was calibrated on."""
    config = tiny(layers=2, vocab=64, width=64, heads=2, head_dim=32, kv_heads=1, mlp=96)
    text = "canonicalize,lower-dense-matmul,fuse-qkv,fuse-gate-up,quantize-matmul{rules='layers_=w3a16',method=gptq}"

    def trace(tokens: int) -> Graph:
        return trace_model(config, tokens, tokens, {})

    graph, passes = trace(16), parse_spec(text)
    meter = ErrorMeter(pipeline(graph, text, numbers=False))
    values = random_values(graph)
    ids = np.random.default_rng(1).integers(0, 64, (8, 16)).astype("int32")
    calibrate(trace, passes, ValueSource(values), ids, tmp_path, Reporter(quiet=True), meter)
    errors = meter.errors()
    assert len(errors) == 8 and {path.rsplit("/", 2)[1] for path in errors} == {
        "qkv_proj", "o_proj", "gate_up_proj", "down_proj",
    }  # fmt: skip
    for error in errors.values():
        assert error.before is not None and error.after is not None and 0 < error.after < error.before < 1
