"""How an op of our dialect is made: a primitive, its reference, and the kernels that may stand in for it.

An op means what its reference computes. A kernel is another way to compute the same thing on one platform; it may
refuse a call it does not support, with a reason, and then the next kernel is asked and finally the reference is used.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from jaxserve._compat import Primitive, ad, batching, mlir

Operand = jax.Array | np.ndarray
"""What the ops take; they return `jax.Array`."""

PLATFORMS = ("cpu", "cuda")

TRACED = "traced"
"""The parameter `layer` of a call in a loop over layers: which layer it is stands in one more operand, the last, an
int32 [] that is known only when the program runs."""

OPS: dict[str, "Op"] = {}
"""Every op of the dialect by the name of its primitive, for the verifier and the printer."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A kernel's answer to a call it does not support."""

    reason: str


class Kernel(Protocol):
    """Given the abstract operands and the parameters of a call, returns a function of the arrays, or refuses."""

    def __call__(self, *avals: Any, **params: Any) -> Callable[..., Any] | Refusal: ...


@dataclasses.dataclass(frozen=True)
class Choice:
    """What will compute one call: the kernel's name (`reference` if none took it), and who refused and why."""

    name: str
    function: Callable[..., Any]
    refusals: tuple[tuple[str, str], ...]


class Op:
    """An operation of the dialect: a JAX primitive named `jaxserve.<name>`.

    - `reference(*arrays, **params)` is plain JAX and defines the numbers. It is the lowering on every platform, and the
      source of the derivative and batching rules.
    - `shape_rule(*avals, **params)` returns a `jax.ShapeDtypeStruct` (a tuple of them if `multiple_results`) and raises
      TypeError, naming the operand, for a call that makes no sense.
    - Parameters are static: hashable, with a readable repr.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        shape_rule: Callable[..., Any],
        *,
        multiple_results: bool = False,
    ):
        self.name = name
        self.reference = reference
        self.shape_rule = shape_rule
        self.multiple_results = multiple_results
        self.primitive = Primitive(f"jaxserve.{name}")
        self.primitive.multiple_results = multiple_results
        self._kernels: dict[str, dict[str, Kernel]] = {platform: {} for platform in PLATFORMS}
        self._takes_traced: set[tuple[str, str]] = set()
        self._eager = jax.jit(self._bind, static_argnums=0)
        self.primitive.def_impl(self._impl)
        self.primitive.def_abstract_eval(self._abstract_eval)
        ad.primitive_jvps[self.primitive] = self._jvp
        batching.primitive_batchers[self.primitive] = self._batch
        mlir.register_lowering(self.primitive, self._lowering(None))

    def __repr__(self) -> str:
        return f"Op({self.name})"

    def __call__(self, *operands: Any, **params: Any) -> Any:
        """Applies the op to arrays or tracers; two results come as a tuple."""
        results = self.primitive.bind(*operands, **params)
        return tuple(results) if self.multiple_results else results

    def publish(self) -> "Op":
        """Enters the op in `OPS`; an op made for a test stays out of it."""
        if self.primitive.name in OPS:
            raise ValueError(f"there is already an op named {self.primitive.name}")
        OPS[self.primitive.name] = self
        return self

    def register(self, platform: str, kernel: Kernel, *, name: str, traced: bool = False) -> None:
        """Adds a kernel for a platform, asked before those already there; compiled programs keep what they have.

        With `traced` it takes calls whose layer is TRACED: it is asked without the layer's aval, and its function takes
        the layer as the last array.
        """
        if platform not in PLATFORMS:
            raise ValueError(f"unknown platform {platform!r}, expected one of {', '.join(PLATFORMS)}")
        if name in self._kernels[platform] or name == "reference":
            raise ValueError(f"{self.name} already has a kernel named {name!r} on {platform}")
        self._kernels[platform] = {name: kernel, **self._kernels[platform]}
        if traced:
            self._takes_traced.add((platform, name))
        mlir.register_lowering(self.primitive, self._lowering(platform), platform=platform)

    def unregister(self, platform: str, name: str) -> None:
        """Removes a kernel that `register` added."""
        del self._kernels[platform][name]
        self._takes_traced.discard((platform, name))

    def kernel(self, platform: str, name: str) -> Kernel:
        """The kernel registered under a name; KeyError if there is none."""
        return self._kernels[platform][name]

    def choose(self, platform: str | None, *avals: Any, **params: Any) -> Choice:
        """Who computes a call on a platform: the first kernel that does not refuse, else the reference."""
        refusals, traced = [], params.get("layer") == TRACED
        for name, kernel in self._kernels.get(platform or "", {}).items():
            if traced and (platform, name) not in self._takes_traced:
                refusals.append((name, "the layer must be known when it is compiled"))
                continue
            answer = kernel(*(avals[:-1] if traced else avals), **params)
            if not isinstance(answer, Refusal):
                return Choice(name, answer, tuple(refusals))
            refusals.append((name, answer.reason))
        return Choice("reference", self._reference(params), tuple(refusals))

    def _reference(self, params: dict[str, Any]) -> Callable[..., Any]:
        def reference(*operands: Any) -> Any:
            if params.get("layer") == TRACED:
                return self.reference(*operands[:-1], **{**params, "layer": operands[-1]})
            return self.reference(*operands, **params)

        reference.__name__ = self.name
        return reference

    def _bind(self, params: tuple[tuple[str, Any], ...], *operands: Any) -> Any:
        return self.primitive.bind(*operands, **dict(params))

    def _impl(self, *operands: Any, **params: Any) -> Any:
        return self._eager(tuple(sorted(params.items())), *operands)

    def _abstract_eval(self, *avals: Any, **params: Any) -> Any:
        if params.get("layer") == TRACED:
            avals, params = avals[:-1], {**params, "layer": 0}
        results = self.shape_rule(*avals, **params)
        if self.multiple_results:
            return [ShapedArray(result.shape, result.dtype) for result in results]
        return ShapedArray(results.shape, results.dtype)

    def _lowering(self, platform: str | None) -> Callable[..., Any]:
        def lower(context: Any, *operands: Any, **params: Any) -> Any:
            choice = self.choose(platform, *context.avals_in, **params)
            return mlir.lower_fun(choice.function, multiple_results=self.multiple_results)(context, *operands)

        return lower

    def _jvp(self, primals: Any, tangents: Any, **params: Any) -> Any:
        # Operands without a tangent (indices, codes, constants) are closed over: jax.jvp would want float0 for them.
        primals = [jnp.asarray(primal) for primal in primals]
        active = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

        def of_active(*operands: Any) -> Any:
            merged = list(primals)
            for i, operand in zip(active, operands, strict=True):
                merged[i] = operand
            return self._reference(params)(*merged)

        results, dots = jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])
        return (list(results), list(dots)) if self.multiple_results else (results, dots)

    def _batch(self, operands: Any, axes: Any, **params: Any) -> Any:
        operands = [jnp.asarray(operand) for operand in operands]
        results = jax.vmap(self._reference(params), in_axes=tuple(axes))(*operands)
        return (list(results), [0] * len(results)) if self.multiple_results else (results, 0)


def spec_like(operand: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an operand, with one or the other replaced."""
    return jax.ShapeDtypeStruct(operand.shape if shape is None else shape, np.dtype(dtype or operand.dtype))
