"""From an artifact folder to a runner: weights and programs are loaded, nothing is traced or compiled."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import executables, weights_io
from jaxserve.artifact import Artifact
from jaxserve.errors import UserError
from jaxserve.executables import Loading
from jaxserve.heap import use_large_pages
from jaxserve.manifest import Manifest, Program
from jaxserve.serving.request import Limits
from jaxserve.serving.runner import Runner
from jaxserve.serving.state import init_state
from jaxserve.serving.step import Bucket
from jaxserve.targets import Target, find_target

# Tokens of a short chat with its template: the bucket that takes it is wanted first.
_SHORT_PROMPT = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowerLimits:
    """What serving may lower; 0 keeps what the artifact was compiled for."""

    max_num_seqs: int = 0
    max_model_len: int = 0
    kv_tokens: int = 0


class Programs(Mapping[Bucket, Callable[..., Any]]):
    """Step programs by bucket, loaded behind the first requests; looking one up loads it if need be."""

    def __init__(self, loading: Mapping[Bucket, Loading]):
        self._loading = loading

    def __getitem__(self, bucket: Bucket) -> Callable[..., Any]:
        return self._loading[bucket].result()

    def is_loaded(self, bucket: Bucket) -> bool:
        """Whether looking the bucket up returns at once."""
        return self._loading[bucket].done

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._loading)

    def __len__(self) -> int:
        return len(self._loading)


def compiled_limits(manifest: Manifest) -> Limits:
    """The limits that the artifact's programs were compiled for."""
    limits = manifest.limits
    longest = {kind: max(p.tokens for p in manifest.programs if p.kind == kind) for kind in ("step", "score")}
    return Limits(
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        page_size=limits.page_size,
        num_pages=limits.num_pages,
        vocab_size=limits.vocab_size,
        token_budget=longest["step"],
        score_budget=longest["score"],
        eos_ids=tuple(manifest.generation.get("eos_ids", ())),
        look_ahead=limits.look_ahead,
    )


def serving_limits(compiled: Limits, lower: LowerLimits) -> Limits:
    """The compiled limits, lowered. UserError when more is asked for than was compiled, naming the compile flag."""
    ceilings = {
        "max_num_seqs": compiled.max_num_seqs,
        "max_model_len": compiled.max_model_len,
        "kv_tokens": compiled.num_pages * compiled.page_size,
    }
    for name, ceiling in ceilings.items():
        asked, flag = getattr(lower, name), "--" + name.replace("_", "-")
        if asked < 0 or asked > ceiling:
            raise UserError(
                f"{flag} {asked} is not between 1 and {ceiling}, which the artifact was compiled for; "
                f"compile it again with {flag} {asked}"
            )
    return dataclasses.replace(
        compiled,
        max_num_seqs=lower.max_num_seqs or compiled.max_num_seqs,
        max_model_len=lower.max_model_len or compiled.max_model_len,
        num_pages=max(1, lower.kv_tokens // compiled.page_size) if lower.kv_tokens else compiled.num_pages,
    )


def load_runner(artifact: Artifact, report: Callable[[str], None]) -> Runner:
    """A runner with the artifact's weights, empty caches and programs, which load in the background.

    `report` gets one line for each program that has to be compiled again, and why.
    """
    manifest = artifact.manifest
    target = find_target(manifest.target)
    check_machine(target, report)
    programs = sorted(manifest.programs, key=_when_wanted)
    loading = executables.load_in_background(artifact, [program.name for program in programs], target, report)
    params, caches = weights_io.load_weights(artifact), empty_caches(manifest)
    if target.platform == "cpu":
        for array in jax.tree.leaves((params, caches)):
            use_large_pages(array.unsafe_buffer_pointer(), array.nbytes)
    limits = compiled_limits(manifest)
    steps = {
        Bucket("score" if program.kind == "score" else "step", program.tokens, program.seqs): loading[program.name]
        for program in programs
        if program.tokens
    }
    step_programs = Programs(steps)
    return Runner(
        step_programs,
        admit=_when_loaded(loading["admit"]),
        load_penalties=_when_loaded(loading["load-penalties"]),
        copy_pages=_when_loaded(loading["copy-pages"]),
        params=params,
        caches=caches,
        state=init_state(limits),
        limits=limits,
        is_loaded=step_programs.is_loaded,
    )


def check_machine(target: Target, report: Callable[[str], None]) -> None:
    """UserError when what `target` runs cannot run on this machine's device; a card of another name is reported."""
    device = jax.devices()[0]
    platform = {"gpu": "cuda"}.get(device.platform, device.platform)
    if platform != target.platform:
        raise UserError(
            f"the artifact was compiled for {target.name}, and JAX runs on {device.device_kind} ({platform}) here; "
            f"compile the model for this machine, with --target"
        )
    if target.platform == "cuda" and device.device_kind != target.device_kind:
        report(f"the artifact was compiled for {target.device_kind}, and this is {device.device_kind}")


def empty_caches(manifest: Manifest) -> dict[str, jax.Array]:
    """Zeroed caches in memory of their own, which the first step can take over."""
    return {
        spec.name: jax.device_put(np.zeros(spec.shape, jnp.dtype(spec.dtype)), may_alias=False)
        for spec in manifest.caches
    }


def _when_wanted(program: Program) -> tuple[int, int]:
    """The order of loading: what a first short request needs, larger prompts, company, the rest."""
    if program.name == "admit":
        return 0, 0
    if program.kind == "step" and program.tokens != program.seqs:
        return (0, 1) if program.tokens == _SHORT_PROMPT else (1, program.tokens)
    if program.tokens == program.seqs == 1 and program.kind == "step":
        return 0, 2
    return (2, program.tokens) if program.kind == "step" else (3, program.tokens)


def _when_loaded(future: Loading) -> Callable[..., Any]:
    return lambda *arguments: future.result()(*arguments)
