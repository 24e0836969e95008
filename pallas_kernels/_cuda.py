"""Registers the Pallas kernels; their modules, and Pallas, are loaded when a program for a GPU asks for them."""

import importlib
from typing import Any

from jaxserve.pallas_kernels._op import Kernel, Op
from jaxserve.pallas_kernels.add_rms_norm.op import OP as ADD_RMS_NORM
from jaxserve.pallas_kernels.dense_matmul.op import OP as DENSE_MATMUL
from jaxserve.pallas_kernels.kv_write.op import OP as KV_WRITE
from jaxserve.pallas_kernels.paged_attention.op import OP as PAGED_ATTENTION
from jaxserve.pallas_kernels.quantized_matmul.op import OP as QUANTIZED_MATMUL
from jaxserve.pallas_kernels.quantized_norm.op import OP as QUANTIZED_NORM
from jaxserve.pallas_kernels.rms_norm.op import OP as RMS_NORM


def _late(module: str, name: str) -> Kernel:
    def kernel(*avals: Any, **params: Any) -> Any:
        return getattr(importlib.import_module(f"jaxserve.pallas_kernels.{module}"), name)(*avals, **params)

    return kernel


def _register(op: Op, function: str, name: str, module: str = "mosaic_gpu", folder: str = "") -> None:
    op.register("cuda", _late(f"{folder or op.name}.{module}", function), name=name)


_register(DENSE_MATMUL, "kernel", "mosaic")
_register(QUANTIZED_MATMUL, "kernel", "mosaic-w4a8", "mosaic_w4a8")
_register(QUANTIZED_MATMUL, "narrow_kernel", "mosaic-narrow")
_register(QUANTIZED_MATMUL, "kernel", "mosaic")
_register(PAGED_ATTENTION, "kernel", "mosaic")
_register(KV_WRITE, "kernel", "mosaic")
_register(RMS_NORM, "kernel", "mosaic")
_register(ADD_RMS_NORM, "add_kernel", "mosaic", folder="rms_norm")
_register(QUANTIZED_NORM, "quantized_kernel", "mosaic", folder="rms_norm")
