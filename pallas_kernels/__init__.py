"""The ops of our dialect, one folder an op: each a JAX primitive with a reference in plain JAX and a seam for kernels.

Import modules of an op's folder with `from`: the function of the same name hides the folder as an attribute here.
"""

import jaxserve.pallas_kernels._cuda
import jaxserve.pallas_kernels.add_rms_norm.cpu
import jaxserve.pallas_kernels.dense_matmul.cpu
import jaxserve.pallas_kernels.gated_activation.cpu
import jaxserve.pallas_kernels.kv_write.cpu
import jaxserve.pallas_kernels.paged_attention.cpu
import jaxserve.pallas_kernels.quantized_matmul.cpu
import jaxserve.pallas_kernels.rms_norm.cpu
import jaxserve.pallas_kernels.rope.cpu
import jaxserve.pallas_kernels.rope_qkv.cpu
import jaxserve.pallas_kernels.sample_logits.cpu  # noqa: F401  (kernels register themselves)
from jaxserve.pallas_kernels._op import OPS, Choice, Kernel, Op, Refusal
from jaxserve.pallas_kernels.add_rms_norm.op import add_rms_norm
from jaxserve.pallas_kernels.attention.op import attention
from jaxserve.pallas_kernels.dense_matmul.op import dense_matmul
from jaxserve.pallas_kernels.gated_activation.op import gated_activation
from jaxserve.pallas_kernels.kv_write.format import KV_FORMATS, KvFormat
from jaxserve.pallas_kernels.kv_write.op import kv_write
from jaxserve.pallas_kernels.paged_attention.op import paged_attention
from jaxserve.pallas_kernels.quantized_matmul.format import QuantFormat, QuantizedTensor, pack_int4, unpack_int4
from jaxserve.pallas_kernels.quantized_matmul.op import quantized_matmul
from jaxserve.pallas_kernels.quantized_matmul.rtn import quantize_rtn
from jaxserve.pallas_kernels.quantized_norm.op import quantized_norm
from jaxserve.pallas_kernels.quantized_take.op import quantized_take
from jaxserve.pallas_kernels.rms_norm.op import rms_norm
from jaxserve.pallas_kernels.rope.op import rope
from jaxserve.pallas_kernels.rope.spec import LinearScaling, Llama3Scaling, RopeSpec
from jaxserve.pallas_kernels.rope_qkv.op import rope_qkv
from jaxserve.pallas_kernels.sample_logits.op import sample_logits

__all__ = [
    "KV_FORMATS",
    "OPS",
    "Choice",
    "Kernel",
    "KvFormat",
    "LinearScaling",
    "Llama3Scaling",
    "Op",
    "QuantFormat",
    "QuantizedTensor",
    "Refusal",
    "RopeSpec",
    "add_rms_norm",
    "attention",
    "dense_matmul",
    "gated_activation",
    "kv_write",
    "pack_int4",
    "paged_attention",
    "quantize_rtn",
    "quantized_matmul",
    "quantized_norm",
    "quantized_take",
    "rms_norm",
    "rope",
    "rope_qkv",
    "sample_logits",
    "unpack_int4",
]
