"""The programs of an artifact: one a bucket and three helpers, exported, compiled and serialized."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax

from jaxserve import artifact as artifacts
from jaxserve import executables
from jaxserve._compat import spec_of
from jaxserve.absent import OPTIONS, AbsentGpu
from jaxserve.artifact import ArtifactWriter
from jaxserve.look_ahead import head_function
from jaxserve.lowering import graph_forward, specs_of
from jaxserve.manifest import ArraySpec, CachedExecutable, Program
from jaxserve.pallas_kernels import OPS
from jaxserve.pallas_kernels._native import CUSTOM_CALLS, is_available
from jaxserve.pallas_kernels._target import compiling_for
from jaxserve.passes.graph import Graph
from jaxserve.passes.pipeline import run_pipeline
from jaxserve.plan import Plan
from jaxserve.reporting import Reporter, StageProgress
from jaxserve.serving import state as slot_state
from jaxserve.serving import step as steps
from jaxserve.serving.step import Bucket
from jaxserve.targets import Gpu, Target


def build_programs(
    plan: Plan, params: Sequence[ArraySpec], writer: ArtifactWriter, report: Reporter
) -> tuple[Program, ...]:
    """Exports every program; two threads compile what is exported, since XLA leaves the interpreter lock."""
    buckets = steps.default_buckets(plan.limits)
    absent = AbsentGpu(plan.target) if isinstance(plan.target, Gpu) else None
    with (
        compiling_for(plan.target),
        report.stage("programs", f"{len(buckets)} buckets", total=len(buckets) + 3) as stage,
        _compilers() as pool,
    ):
        futures = []
        caches: dict[str, jax.ShapeDtypeStruct] = {}
        for bucket in buckets:
            graph = run_pipeline(plan.graph(bucket), plan.passes, plan.context(bucket)).graph
            heads = plan.heads(bucket)
            _same_params((graph, *heads.values()), params)
            caches = specs_of(graph, "cache")
            program = _bucket_program(plan, bucket)
            exported = export_bucket(plan, bucket, graph, heads)
            futures.append(pool.submit(_compile_one, plan, program, exported, writer, stage, absent))
        for program, exported in _helper_programs(plan, caches):
            futures.append(pool.submit(_compile_one, plan, program, exported, writer, stage, absent))
        programs = tuple(future.result() for future in futures)
        stage.done(f"{len(programs)} programs: " + ", ".join(f"{b.kind} {b.tokens}x{b.seqs}" for b in buckets))
    return programs


def chosen_kernels(graph: Graph, target: Target) -> list[str]:
    """Who computes a graph's ops on a target, a line for each kernel and each set of reasons why others refused."""
    found: collections.Counter[str] = collections.Counter()
    with compiling_for(target):
        for eqn in graph.eqns:
            if op := OPS.get(eqn.primitive.name):
                choice = op.choose(target.platform, *map(spec_of, eqn.invars), **eqn.params)
                reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.refusals)
                found[f"{op.name} by {choice.name}{f' ({reasons})' if reasons else ''}"] += 1
    return [f"{count}x {line}" for line, count in found.items()]


@contextlib.contextmanager
def _compilers() -> Iterator[concurrent.futures.Executor]:
    """Two threads. Leaving early waits for what they are at, not for all that is queued."""
    pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="compile")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _bucket_program(plan: Plan, bucket: Bucket) -> Program:
    name = f"{bucket.kind}-{bucket.tokens}x{bucket.seqs}"
    return Program(
        name=name,
        kind=bucket.kind,
        export=f"{artifacts.STEP}/{name}.export",
        tokens=bucket.tokens,
        seqs=bucket.seqs,
        donate=(1, 2),
        inputs=array_specs(steps.input_specs(bucket, plan.limits)),
    )


def export_bucket(plan: Plan, bucket: Bucket, graph: Graph, heads: Mapping[int, Graph] | None = None) -> bytes:
    """StableHLO of the step around a rewritten graph, and around those of its look-ahead head by their rows."""
    heads = heads or {}
    functions = {rows: head_function(head) for rows, head in heads.items()}
    step = steps.step_function(graph_forward(graph, loops=plan.loops), bucket, plan.limits, functions)
    specs = (
        dict(_param_specs((graph, *heads.values()))),
        specs_of(graph, "cache"),
        slot_state.state_specs(plan.limits),
        steps.InputLayout.of(bucket, plan.limits).spec,
    )
    custom_calls = CUSTOM_CALLS if plan.target.platform == "cpu" and is_available() else ()
    return executables.export_program(
        step, *specs, donate=(1, 2), platform=plan.target.platform, custom_calls=custom_calls
    )


def _helper_programs(plan: Plan, caches: Mapping[str, jax.ShapeDtypeStruct]) -> list[tuple[Program, bytes]]:
    """The programs beside the steps: loading a slot, loading its penalty rows, copying pages."""
    limits, state = plan.limits, slot_state.state_specs(plan.limits)
    functions = {
        "admit": (slot_state.admit, (state, *slot_state.admit_specs(limits))),
        "load-penalties": (slot_state.load_penalties, (state, *slot_state.load_penalties_specs(limits))),
        "copy-pages": (steps.copy_pages, (dict(caches), *steps.copy_specs())),
    }
    built = []
    for name, (function, specs) in functions.items():
        program = Program(name=name, kind="helper", export=f"{artifacts.STEP}/{name}.export", donate=(0,))
        exported = executables.export_program(function, *specs, donate=(0,), platform=plan.target.platform)
        built.append((program, exported))
    return built


def _compile_one(
    plan: Plan,
    program: Program,
    exported: bytes,
    writer: ArtifactWriter,
    stage: StageProgress,
    absent: AbsentGpu | None,
) -> Program:
    if absent is None:
        compiled = executables.compile_program(exported, donate=program.donate)
    else:
        call, arguments = executables.exported_call(exported)
        compiled = absent.compile(call, *arguments, donate=program.donate)
        absent.check_memory(program.name, compiled)
        program = dataclasses.replace(program, compiler_options=OPTIONS)
    file = f"{artifacts.EXECUTABLES}/{program.name}.bin"
    writer.write(program.export, exported)
    writer.write(file, executables.serialize(compiled))
    stage.advance(program.name)
    key = executables.executable_key(plan.target, program.compiler_options)
    return dataclasses.replace(program, executables=(CachedExecutable(key=key, file=file),))


def _param_specs(graphs: Sequence[Graph]) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    return itertools.chain(*(specs_of(graph, "param").items() for graph in graphs))


def _same_params(graphs: Sequence[Graph], params: Sequence[ArraySpec]) -> None:
    found = {(path, spec.shape, spec.dtype.name) for path, spec in _param_specs(graphs)}
    if found != {(spec.name, spec.shape, spec.dtype) for spec in params}:
        raise AssertionError("passes gave two buckets different parameters: none may depend on the bucket")


def array_specs(specs: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[ArraySpec, ...]:
    return tuple(ArraySpec(name=name, shape=spec.shape, dtype=spec.dtype.name) for name, spec in specs.items())
