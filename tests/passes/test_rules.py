"""Rules that choose a quantization for a weight."""

import pytest

from jaxserve.errors import UserError
from jaxserve.pallas_kernels import QuantFormat
from jaxserve.passes.rules import RuleBook, parse_rules, parse_scheme
from tests.passes.helpers import pipeline, report_of, trace_tiny


@pytest.mark.parametrize(
    ("text", "expected", "activation"),
    [
        ("skip", None, None),
        ("native", None, None),
        ("w8a16", QuantFormat(8, None, "none", "float32"), None),
        ("w8a16:g32", QuantFormat(8, 32, "none", "float16"), None),
        ("w4a16", QuantFormat(4, 64, "minimum", "float16"), None),
        ("w4a16:asym", QuantFormat(4, 64, "minimum", "float16"), None),
        ("w4a16:g32:sym", QuantFormat(4, 32, "none", "float16"), None),
        ("w4a16:zero:g128", QuantFormat(4, 128, "zero", "float16"), None),
        ("w4a16:channel", QuantFormat(4, None, "minimum", "float32"), None),
        ("w3a16:g128", QuantFormat(3, 128, "minimum", "float16"), None),
        ("w8a8", QuantFormat(8, None, "none", "float32"), "int8"),
        ("w8a8:static", QuantFormat(8, None, "none", "float32"), "int8-static"),
        ("w4a8", QuantFormat(4, 64, "zero", "float32", level2="channel"), "int8"),
        ("w4a8:g128:static", QuantFormat(4, 128, "zero", "float32", level2="channel"), "int8-static"),
        ("fp8", QuantFormat(8, None, "none", "float32", element="e4m3"), "e4m3"),
        (" w8a16 ", QuantFormat(8, None, "none", "float32"), None),
    ],
)
def test_schemes(text, expected, activation):
    scheme = parse_scheme(text)
    assert (scheme.format, scheme.activation, scheme.text) == (expected, activation, text.strip())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w5a16", "unknown quantization scheme 'w5a16'; allowed: skip, native, w8a16, w4a16, w3a16, w8a8, w4a8, fp8"),
        ("", "unknown quantization scheme"),
        ("skip:g64", "unknown option 'g64'; allowed: none"),
        ("w8a16:static", "unknown option 'static'; allowed: g32, g64, g128, channel, sym, asym, zero"),
        ("w8a8:g64", "unknown option 'g64'; allowed: static"),
        ("w4a8:sym", "unknown option 'sym'; allowed: g32, g64, g128, static"),
        ("w4a16:g48", "unknown option 'g48'; allowed: g32, g64, g128, channel, sym, asym, zero"),
        ("w4a16:", "unknown option ''"),
        ("w4a16:g32:channel", "scheme 'w4a16:g32:channel': g32 and channel decide the same; leave one out"),
        ("w4a16:sym:g32:asym", "sym and asym decide the same"),
        ("w8a8:static:static", "static and static decide"),
    ],
)
def test_bad_schemes(text, message):
    with pytest.raises(UserError, match=message):
        parse_scheme(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w8a16", "rule 'w8a16' is not REGEX=SCHEME"),
        ("=w8a16", "rule '=w8a16' is not REGEX=SCHEME"),
        ("a=w8a16;(b=skip", r"rule '\(b=skip': '\(b' is not a regular expression"),
        ("a=w8a16;b=w9", "unknown quantization scheme 'w9'"),
    ],
)
def test_bad_rules(text, message):
    with pytest.raises(UserError, match=message):
        parse_rules(text)


def test_the_first_match_wins():
    book = RuleBook(parse_rules(r"mlp/down=skip; layers_\d+/mlp=w4a16:g32 ;(?=lm)lm_head=native;.*=w8a16;never=skip;"))
    found = [
        book.find(path) for path in ("layers_0/mlp/down", "layers_3/mlp/up_proj/kernel", "lm_head/kernel", "norm/scale")
    ]
    assert [scheme.text if scheme else None for scheme in found] == ["skip", "w4a16:g32", "native", "w8a16"]
    assert [str(rule) for rule in book.unused] == ["never=skip"]


def test_no_rule_matches():
    book = RuleBook(parse_rules("a=skip"))
    assert book.find("b") is None and parse_rules(" ; ") == ()


def test_report_of_quantize_matmul_names_every_matrix_and_unused_rules():
    rules = "o_proj=w8a16;attn=w4a16:sym;nothing=skip;o_proj=skip;up_proj=native;down=skip"
    result = pipeline(trace_tiny(), f"lower-dense-matmul,quantize-matmul{{rules='{rules}'}}")
    assert report_of(result, "quantize-matmul") == [
        "embed_tokens/embedding: no match, no rule selects it: it stays dense",
        "layers_0/mlp/down_proj/kernel: no match, a rule says skip: it stays dense",
        "layers_0/mlp/gate_proj/kernel: no match, no rule selects it: it stays dense",
        "layers_0/mlp/up_proj/kernel: no match, the checkpoint stores it in no quantized form that we keep: "
        "it stays dense",
        "layers_0/self_attn/k_proj: layers_0/self_attn/k_proj/kernel [8, 16]: int4 g64 none f16 by rtn",
        "layers_0/self_attn/o_proj: layers_0/self_attn/o_proj/kernel [16, 16]: int8 row none f32 by rtn",
        "layers_0/self_attn/q_proj: layers_0/self_attn/q_proj/kernel [16, 16]: int4 g64 none f16 by rtn",
        "layers_0/self_attn/v_proj: layers_0/self_attn/v_proj/kernel [8, 16]: int4 g64 none f16 by rtn",
        "lm_head/kernel: no match, no rule selects it: it stays dense",
        "rule nothing=skip: no match, selects no weight that an earlier rule left",
        "rule o_proj=skip: no match, selects no weight that an earlier rule left",
    ]
