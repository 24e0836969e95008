"""The textual spec, choosing passes, and running them."""

import dataclasses
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import UserError
from jaxserve.passes.insert_paged_kv import InsertPagedKv
from jaxserve.passes.pipeline import Context, Pass, PassResult, for_platform, parse_pipeline, run_pipeline, select
from jaxserve.passes.quantize_matmul import QuantizeMatmul
from jaxserve.passes.recipes import PASSES, RECIPES, find_recipe, parse_spec
from jaxserve.passes.roll_layers import RollLayers
from tests.passes.helpers import trace_tiny


@dataclasses.dataclass(frozen=True)
class Everything(Pass):
    """Has an option of every kind."""

    name: ClassVar[str] = "every-thing"
    a_text: str = "default"
    count: int = 3
    ratio: float = 0.5
    flag: bool = False
    mode: Literal["fast", "slow"] = "fast"

    def run(self, graph, context):
        return PassResult(graph)


@dataclasses.dataclass(frozen=True)
class Plain(Everything):
    name: ClassVar[str] = "plain"


REGISTRY: dict[str, type[Pass]] = {"every-thing": Everything, "plain": Plain}

everything = st.builds(
    Everything,
    a_text=st.text(),
    count=st.integers(),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
    mode=st.sampled_from(["fast", "slow"]),
)


@given(st.lists(st.one_of(everything, st.just(Plain())), max_size=4))
def test_specs_round_trip(passes):
    text = ",".join(map(str, passes))
    assert parse_pipeline(text, REGISTRY) == tuple(passes)


@given(st.text(alphabet="ab-{}=,'\" 1.é|\n", max_size=30))
def test_any_text_parses_or_is_refused(text):
    try:
        passes = parse_pipeline(text, {**REGISTRY, "a": Plain, "b": Everything})
    except UserError as error:
        assert str(error)
    else:
        assert all(isinstance(step, Pass) for step in passes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("  ", ()),
        ("plain", (Plain(),)),
        ("plain{}", (Plain(),)),
        (" plain , every-thing{ count = -4 , a-text = 'x, y' } ", (Plain(), Everything(count=-4, a_text="x, y"))),
        ("every-thing{a-text='',flag=true,ratio=1e-3}", (Everything(a_text="", flag=True, ratio=1e-3),)),
        ("every-thing{a_text='it''s {=}',mode=slow}", (Everything(a_text="it's {=}", mode="slow"),)),
        (r"every-thing{a-text='^l_\d+/mlp=w4a16:g64;.*=skip'}", (Everything(a_text=r"^l_\d+/mlp=w4a16:g64;.*=skip"),)),
    ],
)
def test_specs(text, expected):
    assert parse_pipeline(text, REGISTRY) == expected


def test_text_form_shows_what_is_not_default():
    assert str(Everything()) == "every-thing"
    assert str(Everything(count=4, flag=True, a_text="a b")) == "every-thing{a-text='a b',count=4,flag=true}"
    assert str(Everything(a_text="it's")) == "every-thing{a-text='it''s'}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plain,", "expected a pass name at position 6, found the end"),
        ("plain plain", "expected ',' at position 6, found 'plain'"),
        ("plain','plain", "expected ',' at position 5, found ','"),
        (",plain", "expected a pass name at position 0, found ','"),
        ("'plain'", "expected a pass name at position 0, found 'plain'"),
        ("nothing", "unknown pass 'nothing'; known: every-thing, plain"),
        ("plain{count=1", r"expected ',' or '}' .* at position 13, found the end"),
        ("plain{", "expected an option's name at position 6, found the end"),
        ("plain{count}", "expected '=' at position 11, found '}'"),
        ("plain{count=}", "expected a value at position 12, found '}'"),
        ("plain{a-text=,}", "expected a value at position 13, found ','"),
        ("plain{'count'=1}", "expected an option's name at position 6, found 'count'"),
        ("plain{count'='1}", "expected '=' at position 11, found '='"),
        ("plain{count=1 2}", r"quote values .* at position 14, found '2'"),
        ("plain{count=1,count=2}", "option 'count' is given twice, again at position 14"),
        ("plain{a-text='x}", r"cannot read \"'x}\" at position 13"),
        ("plain{color=red}", "pass plain: unknown option 'color'; options: a-text, count, ratio, flag, mode"),
        ("plain{count=x}", "pass plain: option count='x' is not a whole number"),
        ("plain{ratio=x}", "pass plain: option ratio='x' is not a number"),
        ("plain{flag=yes}", "pass plain: option flag='yes' is not true or false"),
        ("plain{mode=medium}", "pass plain: option mode='medium'; allowed: fast, slow"),
    ],
)
def test_errors_say_where_and_what_is_allowed(text, message):
    with pytest.raises(UserError, match=message):
        parse_pipeline(text, REGISTRY)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("canonicalize{page=4}", "pass canonicalize: unknown option 'page'; options: none"),
        ("insert-paged-kv{page=0}", "page=0; allowed: 1 and more"),
        ("insert-paged-kv{kv=f64}", "kv='f64'; allowed: f32, bf16, int8, int4, fp8"),
        ("quantize-matmul{rules='(=w8a16'}", "not a regular expression"),
        ("quantize-matmul{rules='.*=w3'}", "unknown quantization scheme 'w3'"),
        ("quantize-matmul{method=awq}", "method='awq'; allowed: rtn, clip, gptq"),
        ("quantize-matmul{method=clip,act-order=static}", "option act-order does not belong to method=clip"),
        ("quantize-matmul{damp=0.1}", "option damp does not belong to method=rtn"),
        ("quantize-matmul{method=gptq,damp=0}", "damp=0 is not above 0 and up to 1"),
    ],
)
def test_options_of_the_real_passes_are_checked_when_parsed(text, message):
    with pytest.raises(UserError, match=message):
        parse_spec(text)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("options", [{}, {"rules": "lm_head=w8a16;.*norm=skip", "page": 8, "kv": "f32"}], ids=str)
def test_recipes_parse_and_round_trip(name, options):
    passes = parse_spec(find_recipe(name).spec(**options))
    assert parse_spec(",".join(map(str, passes))) == passes
    assert [step.name for step in passes[-2:]] == [InsertPagedKv.name, RollLayers.name]
    quantizes = any(step.name == QuantizeMatmul.name for step in passes)
    assert quantizes == bool(RECIPES[name].scheme or options)


def test_a_platform_gets_the_passes_that_serve_its_kernels():
    passes = parse_spec("fuse-norm,quantize-norm,fuse-epilogue")
    assert [step.name for step in for_platform(passes, "cpu")] == ["fuse-norm", "fuse-epilogue"]
    assert [step.name for step in for_platform(passes, "cuda")] == ["fuse-norm", "quantize-norm"]


def test_the_user_s_rules_go_before_the_recipe_s_and_group_is_added():
    (step,) = [
        step
        for step in parse_spec(find_recipe("w4a16").spec(rules="x=skip", group=":g32"))
        if isinstance(step, QuantizeMatmul)
    ]
    assert step.rules == r"x=skip;^layers_\d+/=w4a16:g32"
    with pytest.raises(UserError, match="unknown recipe 'w2'; recipes: f32, bf16, native, w8a16, w4a16, "):
        find_recipe("w2")


def test_registry_is_named_as_the_passes_are():
    assert all(cls.name == name for name, cls in PASSES.items())


STEPS = (Plain(), Everything(), QuantizeMatmul())


def test_select():
    assert select(STEPS) == STEPS
    assert select(STEPS, ["every-thing"]) == (Plain(), QuantizeMatmul())
    assert select(STEPS, stop_after="every-thing") == (Plain(), Everything())
    assert select(STEPS, ["plain", "every-thing"], "every-thing") == ()
    for disabled, stop_after in ((["fold"], None), ((), "fold")):
        with pytest.raises(UserError, match="no pass 'fold' in this pipeline; it has: plain, every-thing, quantize"):
            select(STEPS, disabled, stop_after)


def test_run_pipeline_gives_every_hook_the_graph_before_and_the_stage():
    graph = trace_tiny()
    seen = []
    passes = parse_spec("canonicalize,lower-dense-matmul,insert-paged-kv{page=4,kv=f32}")
    result = run_pipeline(graph, passes, Context(), [lambda before, stage: seen.append((before, stage))])
    assert [stage.step for _, stage in seen] == list(passes) and tuple(stage for _, stage in seen) == result.stages
    assert seen[0][0] is graph and seen[1][0] is seen[0][1].result.graph and seen[2][1].result.graph is result.graph
    assert [stage.result.matches for stage in result.stages] == [0, 8, 1]
    assert all(stage.seconds >= 0 for stage in result.stages)
