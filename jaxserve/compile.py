"""`jaxserve compile`: checkpoint to artifact, through the whole pipeline.

resolve -> trace -> passes (verified) -> weights -> programs (exported, compiled, serialized) -> manifest
"""

import importlib.metadata
import itertools
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from jaxserve import artifact as artifacts
from jaxserve._compat import spec_of
from jaxserve.artifact import ArtifactWriter
from jaxserve.errors import UserError
from jaxserve.final_weights import FinalWeights, calibration_text, check_calibration, write_weights
from jaxserve.look_ahead import load_head
from jaxserve.lowering import specs_of
from jaxserve.manifest import (
    CacheGroup,
    Manifest,
    ModelInfo,
    PassRecord,
    Program,
    Sizes,
    StaticLimits,
)
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.config import ModelConfig
from jaxserve.models.resolve import resolve
from jaxserve.passes.graph import Graph
from jaxserve.passes.insert_paged_kv import InsertPagedKv
from jaxserve.passes.pipeline import Pass, PipelineResult, Stage, run_pipeline
from jaxserve.passes.printer import print_graph
from jaxserve.passes.verify import NumberCheck, Verifier
from jaxserve.plan import CompileOptions, Plan, make_plan
from jaxserve.programs import array_specs, build_programs, chosen_kernels
from jaxserve.report_html import report_data, write_report
from jaxserve.reporting import Reporter
from jaxserve.serving import state as slot_state
from jaxserve.serving import step as steps
from jaxserve.shrink import check_shrunk
from jaxserve.text import Tokenizer, load_tokenizer


def compile_model(options: CompileOptions, report: Reporter) -> dict[str, Any]:
    """Compiles a model into an artifact; returns the summary (sizes, capacity, programs, seconds).

    Raises UserError for anything the user can put right; nothing is left behind then.
    """
    start = time.perf_counter()
    with report.stage("resolve", options.model) as stage:
        checkpoint = resolve(options.model)
        stage.done(f"{checkpoint.origin}: {describe(checkpoint.config)}")
    if options.draft and options.look_ahead:
        raise UserError(
            "--look-ahead: its head reads what the whole model computes, not a draft; leave out one of them"
        )
    if options.draft:
        checkpoint = _draft_of(checkpoint, options.draft)
        report.note(f"draft: {describe(checkpoint.config)}")
    if checkpoint.unused:
        report.note(
            f"{len(checkpoint.unused)} tensors of the checkpoint are not used: {', '.join(checkpoint.unused[:5])}"
        )
    if options.output is None:
        if options.look_ahead:
            raise UserError(
                "--look-ahead puts a head into the steps, and --stop-after makes none; leave out one of them"
            )
        if options.stop_after is None:
            raise UserError("say where to write the artifact: -o DIR (or use --stop-after PASS to look at the IR only)")
        plan = make_plan(options, checkpoint, checkpoint.config.vocab)
        check_calibration(options.calibration, _run_reference(plan, options, report, None))
        return {"stopped_after": options.stop_after}
    with ArtifactWriter(options.output) as writer:
        folder = writer.path(artifacts.TOKENIZER)
        folder.mkdir()
        checkpoint.write_tokenizer(folder)
        tokenizer = _load_copied_tokenizer(folder, checkpoint.origin)
        vocab, head = min(checkpoint.config.vocab, tokenizer.vocab_size), None
        if options.look_ahead is not None:
            head = load_head(options.look_ahead, checkpoint.config.width, vocab, tokenizer)
            report.note(f"look-ahead head: {head.tokens.size} tokens, {head.module.mlp} hidden channels")
        plan = make_plan(options, checkpoint, vocab, head)
        _need_paged_kv(plan.passes)
        result = _run_reference(plan, options, report, writer)
        text = calibration_text(options.calibration, result, tokenizer, checkpoint.config)
        if options.verify:
            with report.stage("verify", "two-layer model through the paged cache") as stage:
                stage.done(f"logits moved by {check_shrunk(plan.checkpoint.config, plan.passes):.1e}")
        made = write_weights(plan, result, text, writer, report)
        programs = build_programs(plan, made.params, writer, report)
        manifest = _manifest(options, plan, result, made, programs)
        write_report(
            writer.path(artifacts.REPORT), report_data(manifest, result, str(made.calibration or ""), made.errors)
        )
        manifest = writer.finish(manifest)
    return summary(manifest, options.output, time.perf_counter() - start, made.calibration_seconds)


def _draft_of(checkpoint: Checkpoint, draft: str) -> Checkpoint:
    """What --draft asks for of a checkpoint: its first N layers."""
    kind, _, number = draft.partition(":")
    layers = checkpoint.config.layers
    if kind != "layers" or not number.isdecimal() or not 1 <= int(number) <= layers:
        raise UserError(f"--draft {draft}: allowed is layers:N with N from 1 to {layers}, the model's own layers")
    return checkpoint.first_layers(int(number))


def _load_copied_tokenizer(folder: pathlib.Path, origin: str) -> Tokenizer:
    try:
        return load_tokenizer(folder)
    except UserError as error:  # it names the copy, in a hidden folder that is about to vanish
        raise UserError(f"{origin}: {str(error).replace(f'{folder}/', '')}") from None


def describe(config: ModelConfig) -> str:
    """One line on a model for people."""
    return (
        f"{config.family}, {config.layers} layers, width {config.width}, {config.heads}/{config.kv_heads} heads of "
        f"{config.head_dim}, vocabulary {config.vocab}"
    )


def summary(
    manifest: Manifest, folder: pathlib.Path, seconds: float, calibration_seconds: float = 0.0
) -> dict[str, Any]:
    """What a compile made and what it cost, as JSON data."""
    limits = manifest.limits
    return {
        "artifact": str(folder),
        "model": manifest.model.name,
        "recipe": manifest.recipe,
        "activations": manifest.activations,
        "calibration": str(manifest.calibration) if manifest.calibration else None,
        "calibration_seconds": round(calibration_seconds, 1),
        "checkpoint_bytes": manifest.sizes.checkpoint_bytes,
        "weight_bytes": manifest.sizes.weight_bytes,
        "kv_tokens": limits.kv_tokens,
        "kv_bytes": sum(group.bytes_per_token for group in manifest.cache_groups) * limits.kv_tokens,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "buckets": [f"{p.kind} {p.tokens}x{p.seqs}" for p in manifest.programs if p.tokens],
        "seconds": round(seconds, 1),
    }


def _need_paged_kv(passes: Sequence[Pass]) -> None:
    if not any(isinstance(step, InsertPagedKv) for step in passes):
        raise UserError(
            "the pipeline does not insert a KV cache, so its graph cannot be served: end it with insert-paged-kv, or "
            "leave out -o and look at it with --stop-after"
        )


def _run_reference(
    plan: Plan, options: CompileOptions, report: Reporter, writer: ArtifactWriter | None
) -> PipelineResult:
    """Traces one bucket and runs the passes with every check, print and dump; the other buckets follow it silently."""
    buckets = [bucket for bucket in steps.default_buckets(plan.limits) if not bucket.decode and bucket.kind == "step"]
    bucket = buckets[0] if buckets else steps.default_buckets(plan.limits)[0]
    with report.stage("trace", f"{bucket.tokens} tokens, {bucket.seqs} sequences") as stage:
        graph = plan.graph(bucket)
        stage.done(f"{len(graph.eqns)} equations, {len(graph.of_kind('param'))} parameters")
    numbers = NumberCheck() if options.verify else None
    _emit_ir(options, report, writer, 0, "trace", graph)
    order = itertools.count(1)

    def after(before: Graph, ran: Stage) -> None:
        report.ran_pass(ran, explain=options.explain)
        Verifier(numbers)(before, ran)
        _emit_ir(options, report, writer, next(order), ran.step.name, ran.result.graph)

    result = run_pipeline(graph, plan.passes, plan.context(bucket), [after])
    if options.explain:
        for line in chosen_kernels(result.graph, plan.target):
            report.note(line)
    if numbers is not None:
        report.note(f"{numbers.checked} distinct rewritten regions give the numbers of what they replace")
    return result


def _emit_ir(
    options: CompileOptions, report: Reporter, writer: ArtifactWriter | None, index: int, name: str, graph: Graph
) -> None:
    wanted = name in options.print_ir_after or "all" in options.print_ir_after
    if not (wanted or options.dump_ir or writer):
        return
    text, file = print_graph(graph), f"{index:03d}_{name}.txt"
    if wanted:
        report.ir(name, text)
    if options.dump_ir:
        try:
            options.dump_ir.mkdir(parents=True, exist_ok=True)
            (options.dump_ir / file).write_text(text)
        except OSError as error:
            raise UserError(f"--dump-ir {options.dump_ir}: {error.strerror}") from None
    if writer:
        writer.write(f"{artifacts.GRAPH}/{file}", text)


def _kv_format(passes: Sequence[Pass]) -> str:
    return next(step.kv for step in passes if isinstance(step, InsertPagedKv))


def _cache_groups(config: ModelConfig, graph: Graph, form: str) -> tuple[CacheGroup, ...]:
    """Layers by window; the i-th attention is layer i in every family there is."""
    groups: dict[int | None, list[int]] = {}
    for layer, window in enumerate(config.windows):
        groups.setdefault(window, []).append(layer)
    writes = [eqn for eqn in graph.eqns if eqn.primitive.name == "jaxserve.kv_write"]

    def per_token(layer: int) -> int:
        arrays = [spec_of(cache) for cache in writes[layer].outvars]  # each [L, pages, B, ...]
        return sum(math.prod(spec.shape[3:]) * spec.dtype.itemsize for spec in arrays)

    return tuple(
        CacheGroup(
            layers=tuple(layers),
            kind="full" if window is None else "window",
            window=window,
            bytes_per_token=sum(map(per_token, layers)),
            format=form,
        )
        for window, layers in groups.items()
    )


def _manifest(
    options: CompileOptions,
    plan: Plan,
    result: PipelineResult,
    made: FinalWeights,
    programs: tuple[Program, ...],
) -> Manifest:
    limits, checkpoint = plan.limits, plan.checkpoint
    versions = {name: importlib.metadata.version(name) for name in ("jaxserve", "jax", "jaxlib", "flax")}
    return Manifest(
        model=ModelInfo(
            family=checkpoint.config.family,
            name=pathlib.Path(options.model).name.removesuffix(".gguf"),
            origin=checkpoint.origin,
            config=checkpoint.config.to_json(),
        ),
        recipe=plan.recipe,
        activations=plan.activations,
        target=plan.target.name,
        versions=versions,
        limits=StaticLimits(
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            kv_tokens=limits.num_pages * limits.page_size,
            page_size=limits.page_size,
            num_pages=limits.num_pages,
            vocab_size=limits.vocab_size,
            look_ahead=limits.look_ahead,
        ),
        pass_spec=plan.spec,
        passes=tuple(_pass_record(stage) for stage in result.stages),
        calibration=made.calibration,
        params=made.params,
        caches=array_specs(specs_of(result.graph, "cache")),
        state=array_specs(slot_state.state_specs(limits)),
        cache_groups=_cache_groups(checkpoint.config, result.graph, _kv_format(plan.passes)),
        programs=programs,
        generation=checkpoint.generation.to_json(),
        sizes=Sizes(checkpoint_bytes=checkpoint.stored_bytes, weight_bytes=made.nbytes),
    )


def _pass_record(stage: Stage) -> PassRecord:
    refused: dict[str, int] = {}
    for entry in stage.result.report:
        if not entry:
            refused[entry.reason] = refused.get(entry.reason, 0) + 1
    return PassRecord(name=stage.step.name, matches=stage.result.matches, refused=refused)
