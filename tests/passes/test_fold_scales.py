"""fold-scales: numbers stay what they were for every family, and every activation that cannot be scaled says why."""

import re

import numpy as np
import pytest

from jaxserve.calibration import calibrate
from jaxserve.errors import UserError
from jaxserve.lowering import trace_model
from jaxserve.models.resolve import resolve
from jaxserve.passes.pipeline import Context, run_pipeline
from jaxserve.passes.printer import print_graph
from jaxserve.passes.recipes import parse_spec
from jaxserve.passes.verify import Verifier, relative_error
from jaxserve.reporting import Reporter
from tests.passes import scale_cases
from tests.passes.helpers import pipeline, report_of, run_graph, trace_tiny

DENSE = "canonicalize,lower-dense-matmul"
FUSE = "fuse-qkv,fuse-gate-up"
AWQ = "fold-scales{method=awq,scheme='w4a16:g32',targets=kernel}"
SMOOTH = "fold-scales{targets=kernel,alpha=0.5}"
NAMES = ("llama", "llama_rope3", "mistral", "qwen2", "qwen3", "stories260K")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        f"{DENSE},fold-scales{{method=awq,scheme='w4a16:g32'}},smooth-attention,{FUSE}",
        f"{DENSE},{FUSE},fold-scales,smooth-attention",
    ],
    ids=["awq", "fused"],
)
def test_every_family_stays_the_same_model(shared, name, text, tmp_path):
    """Calibrated as `compile` does it, on the tokens of the reference; logits do not move, and every fold happens."""
    checkpoint = resolve(shared / "fixtures" / name)
    expected = np.load(shared / "fixtures" / name / "expected.npz")
    case = "" if name == "stories260K" else "_1"
    ids = expected[f"input_ids{case}"][None].astype(np.int32)

    def trace(tokens):
        stored = {path: each.format for path, each in checkpoint.specs().items()}
        return trace_model(checkpoint.config, tokens, tokens, stored)

    passes, count = parse_spec(text), ids.shape[1]
    result = run_pipeline(trace(count), passes, Context(), [Verifier()])
    refused = [
        entry for stage in result.stages if stage.step.keeps_numbers for entry in stage.result.report if not entry
    ]
    assert not refused
    weights = calibrate(trace, passes, checkpoint, ids, tmp_path, Reporter(quiet=True))
    folded = dict(weights.plan.materialize(result.graph, weights.source))
    index = np.arange(count, dtype=np.int32)
    arguments = {"tokens": ids[0], "positions": index, "segments": 0 * index, "logit_rows": index}
    have = run_graph(result.graph, {**folded, **arguments})["logits"]
    np.testing.assert_allclose(have, expected[f"logits{case}"], atol=2e-4, rtol=1e-4)
    before = {path: checkpoint.read(path) for path in checkpoint.specs()}
    assert relative_error(have, run_graph(trace(count), {**before, **arguments})["logits"]) < 1e-5
    moved = [path for path, value in folded.items() if path in before and not np.allclose(value, before[path])]
    assert any("norm/scale" in path for path in moved) and any("o_proj" in path for path in moved)


@pytest.mark.parametrize("text", [SMOOTH, AWQ, "fold-scales{targets=kernel,method=awq-duo}"])
@pytest.mark.parametrize("build", scale_cases.PASSABLE)
def test_scales_pass_what_commutes_with_them(build, text):
    results = scale_cases.assert_same_numbers(build(), text, 0.02 if build is scale_cases.half_precision else 1e-4)
    outs = [entry for entry in results[-1].report if entry.where == "out/kernel"]
    assert len(outs) == 1 and outs[0]


@pytest.mark.parametrize(
    "changes", [{}, {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True}], ids=str
)
@pytest.mark.parametrize("order", [f"{DENSE},{{}},{FUSE}", f"{DENSE},{FUSE},{{}}", f"{DENSE},fuse-qkv,{{}}"])
def test_before_and_after_fusion(changes, order):
    graph = trace_tiny(tokens=6, **changes)
    results = scale_cases.assert_same_numbers(graph, order.format("fold-scales,smooth-attention"))
    assert all(entry for result in results for entry in result.report)


def test_the_program_stays_as_it_is():
    result = pipeline(trace_tiny(layers=2), f"{DENSE},fold-scales,smooth-attention", numbers=False)
    texts = [print_graph(stage.result.graph) for stage in result.stages[1:]]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    "build",
    [
        scale_cases.norm_with_other_readers,
        scale_cases.shared_parameters,
        scale_cases.no_absorber,
        scale_cases.unequal_groups,
        scale_cases.quantized_already,
    ],
)
def test_what_is_refused_keeps_its_numbers(build):
    """Whatever the pass still folds in these graphs is folded rightly; their goldens say what that is."""
    graph = build()
    values = scale_cases.random_values(graph)
    after, folded, _ = scale_cases.fold(graph, values, SMOOTH, numbers=False)
    want, have = run_graph(graph, values), run_graph(after, folded)
    for name in want:
        np.testing.assert_allclose(
            have[name], want[name], rtol=1e-4, atol=1e-4 * np.abs(want[name]).max(), err_msg=name
        )


@pytest.mark.parametrize(
    ("build", "path", "reason"),
    [
        (
            "norm_with_other_readers",
            "residual/kernel",
            r"residual_norm also goes through add at block, .*\(a residual\)",
        ),
        ("norm_with_other_readers", "gated/kernel", "gated_norm also goes through logistic at gate"),
        ("norm_with_other_readers", "output/kernel", "output_norm is also an output of the graph"),
        ("norm_with_other_readers", "twice/kernel", "twice_norm also goes through rms_norm at inner_norm"),
        ("norm_with_other_readers", "square/kernel", "mul at square_norm, which combines two scaled activations"),
        ("norm_with_other_readers", "tokens/kernel", "reshape .* mixes tokens with channels"),
        ("shared_parameters", "tied/kernel", r"tied/kernel has other readers \(tied weights"),
        ("shared_parameters", "first/kernel", "both/scale has other readers"),
        ("shared_parameters", "down/kernel", "bias has other readers"),
        ("shared_parameters", "value/kernel", "once/kernel has other readers"),
        ("shared_parameters", "out/kernel", "out/kernel has other readers"),
        ("no_absorber", "input/kernel", "its input is made of x, which takes no scale"),
        ("no_absorber", "sum/kernel", "comes through add at stream"),
        ("no_absorber", "down/kernel", "comes through tanh at act, which does not commute"),
        ("no_absorber", "after/kernel", "comes from made, whose weight is computed"),
        ("no_absorber", "over/kernel", "made of x"),
        ("no_absorber", "plain/kernel", "in a plain dot_general"),
        ("quantized_already", "q/kernel", "k/kernel/codes reads the same activation and is quantized already"),
        ("quantized_already", "k/kernel/codes", "it is quantized already"),
        ("quantized_already", "down/kernel", "comes from up, which is quantized already"),
        ("unequal_groups", "out/kernel", "comes through gather at groups, which does not commute"),
    ],
)
def test_reasons(build, path, reason):
    result = pipeline(getattr(scale_cases, build)(), SMOOTH, numbers=False)
    found = [line for line in report_of(result, "fold-scales") if line.startswith(f"{path}: ")]
    assert len(found) == 1 and re.search(f"no match, .*{reason}", found[0]), found


def test_query_heads_of_a_group_share_the_scale_of_their_kv_head():
    """Equal over a group in o_proj, and what v_proj is divided by; different scales would change the model."""
    graph = trace_tiny(heads=4, kv_heads=2, head_dim=8, width=32)
    values = scale_cases.random_values(graph)
    _, folded, _ = scale_cases.fold(graph, values, f"{DENSE},fold-scales{{targets=o_proj,alpha=0.7}}")
    o, v = (f"layers_0/self_attn/{name}_proj/kernel" for name in "ov")
    ratio = (folded[o] / values[o]).mean(axis=0).reshape(2, 2, 8)
    np.testing.assert_allclose(ratio[:, 0], ratio[:, 1], rtol=1e-5)
    assert np.ptp(ratio[:, 0]) > 0.1
    np.testing.assert_allclose((values[v] / folded[v]).mean(axis=1), ratio[:, 0].reshape(-1), rtol=1e-5)


def test_targets_bring_along_what_shares_their_input():
    result = pipeline(trace_tiny(layers=2), f"{DENSE},fold-scales{{targets='layers_1/.*k_proj'}}", numbers=False)
    lines = report_of(result, "fold-scales")
    assert [line.split(":")[0] for line in lines] == [f"layers_1/self_attn/{name}_proj/kernel" for name in "qkv"]
    assert len(result.stages[-1].result.edits) == 1
    nothing = pipeline(trace_tiny(), f"{DENSE},fold-scales{{targets=none}}", numbers=False)
    assert report_of(nothing, "fold-scales") == ["targets none: no match, selects no weight that a matmul reads"]


def test_statistics_are_asked_for_once_an_activation():
    result = pipeline(trace_tiny(), f"{DENSE},fold-scales{{alpha=0.5}}", numbers=False).stages[-1].result
    assert [statistic.path.split("/", 2)[2] for statistic in result.statistics] == [
        f"layers_0/{name}_proj/kernel" for name in ("self_attn/q", "self_attn/o", "mlp/gate", "mlp/down")
    ]
    assert {statistic.kind for statistic in result.statistics} == {"absmax"}


def test_a_folded_weight_is_no_longer_what_the_checkpoint_stores():
    from jaxserve.pallas_kernels import QuantFormat
    from tests.passes.helpers import tiny

    form = QuantFormat(8, 8, "none", "float16")
    paths = [f"layers_0/self_attn/{name}_proj/kernel" for name in "qkvo"]
    graph = trace_model(tiny(), 4, 2, dict.fromkeys(paths, form))
    result = pipeline(graph, f"{DENSE},fold-scales{{targets=k_proj}}", numbers=False)
    stored = {entry.path: entry.stored for entry in result.graph.inputs if entry.path in paths}
    assert [stored[path] is None for path in paths] == [True, True, True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alpha=1.5", "alpha='1.5'; allowed: auto, or a number from 0 to 1"),
        ("alpha=nan", "alpha='nan'"),
        ("alpha=best", "alpha='best'"),
        ("method=gptq", "allowed: smoothquant, awq, awq-duo"),
        ("scheme=w5", "unknown quantization scheme 'w5'"),
        ("scheme=skip", "scheme='skip' says nothing about rounding, which alpha=auto needs"),
        ("targets='('", r"targets='\(' is not a regular expression"),
    ],
)
def test_bad_options(text, message):
    with pytest.raises(UserError, match=message):
        parse_spec(f"fold-scales{{{text}}}")


def test_the_text_form_parses_back():
    (step,) = parse_spec("fold-scales{method=awq,alpha=0.5,scheme='w4a16:g64',targets='mlp/'}")
    assert parse_spec(str(step)) == (step,)
