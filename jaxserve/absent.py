"""Compiling for a GPU that this machine does not have: takes JAX's CUDA plugin and ptxas, no card and no driver."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.errors import UserError
from jaxserve.pallas_kernels._target import compiling_for
from jaxserve.targets import Gpu

WHEELS = "jax-cuda12-plugin, jax-cuda12-pjrt (the version of jax) and nvidia-cuda-nvcc-cu12, each with --no-deps"
OPTIONS: dict[str, str | bool | int | float] = {"xla_gpu_enable_triton_gemm": False}
"""Without a device to time them on, XLA picks poor tiles for its own Triton matmuls."""


class AbsentGpu:
    """A GPU by its description. UserError when the plugin that compiles for it is not installed."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu
        try:
            topology = topologies.get_topology_desc(
                platform="cuda", topology="1x1x1", target_config=gpu.target_config()
            )
        except Exception as error:  # JAX raises many kinds here, for a platform that is unknown too
            line = re.sub(r"\s+", " ", str(error))[:200]
            raise UserError(f"cannot compile for {gpu.name} here ({line}); it takes the packages {WHEELS}") from error
        self._mesh = topologies.make_mesh(topology, (1,), ("x",))

    def specs(self, tree: Any) -> Any:
        """The same shapes and dtypes, of arrays that live on the card."""
        sharding = NamedSharding(self._mesh, PartitionSpec())
        return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding), tree)

    @contextlib.contextmanager
    def lowering(self) -> Iterator[None]:
        """What is lowered in the block is for the card."""
        with compiling_for(self.gpu), jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            yield

    def compile(self, function: Callable[..., Any], *specs: Any, donate: tuple[int, ...] = ()) -> Any:
        """A `jax.stages.Compiled` of `function` at the given shapes, trees of `jax.ShapeDtypeStruct`."""
        with self.lowering():
            lowered = jax.jit(function, donate_argnums=donate).lower(*self.specs(specs))
            return lowered.compile(compiler_options=OPTIONS)

    def check_memory(self, name: str, compiled: Any) -> None:
        """UserError when what a program takes, keeps and computes with does not fit the card at once."""
        memory = compiled.memory_analysis()
        parts = {
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        }
        if sum(parts.values()) > self.gpu.memory_bytes:
            listed = ", ".join(f"{what} {size / 1e9:.1f} GB" for what, size in parts.items())
            raise UserError(
                f"{name} does not fit {self.gpu.name}'s {self.gpu.memory_bytes / 1e9:.1f} GB ({listed}); lower "
                "--kv-tokens or --max-num-batched-tokens"
            )
