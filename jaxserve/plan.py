"""What a compile was asked to do, and every decision that follows, made before anything is computed."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from jaxserve.calibration import CalibrationOptions
from jaxserve.errors import UserError
from jaxserve.look_ahead import rewrite_head
from jaxserve.lowering import stored_forms, trace_model
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.look_ahead import Head
from jaxserve.passes.graph import Graph
from jaxserve.passes.insert_paged_kv import InsertPagedKv
from jaxserve.passes.narrow_matmul import NarrowMatmul
from jaxserve.passes.pipeline import Context, KvGeometry, Pass, PipelineResult, for_platform, select
from jaxserve.passes.recipes import RECIPES, find_recipe, parse_spec
from jaxserve.passes.roll_layers import RollLayers
from jaxserve.serving.request import Limits
from jaxserve.serving.step import Bucket
from jaxserve.sizing import pool_tokens, small_graph
from jaxserve.targets import Gpu, Target, find_target

DEFAULT_MODEL_LEN = 4096
DEFAULT_KV_TOKENS = 16384
DEFAULT_PAGE, LARGEST_PAGE = 16, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """What to compile and for what. None and 0 mean the default described in `jaxserve compile --help`."""

    model: str
    output: pathlib.Path | None
    draft: str | None = None
    look_ahead: pathlib.Path | None = None
    recipe: str | None = None
    activations: str | None = None
    kv_dtype: str | None = None
    pipeline: str | None = None
    rules: tuple[str, ...] = ()
    group: str = ""
    calibration: CalibrationOptions | None = None
    page_size: int | None = None
    max_num_seqs: int = 32
    max_model_len: int = 0
    kv_tokens: int = 0
    max_num_batched_tokens: int = 512
    target: str = "cpu"
    disabled: tuple[str, ...] = ()
    stop_after: str | None = None
    print_ir_after: tuple[str, ...] = ()
    dump_ir: pathlib.Path | None = None
    explain: bool = False
    verify: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything decided before anything is computed."""

    checkpoint: Checkpoint
    recipe: str
    activations: str
    passes: tuple[Pass, ...]
    limits: Limits
    target: Target
    head: Head | None = None

    @property
    def spec(self) -> str:
        return ",".join(map(str, self.passes))

    def graph(self, bucket: Bucket) -> Graph:
        """The model's graph before any pass, at a bucket's sizes."""
        return self.trace(bucket.tokens, bucket.logit_rows)

    def trace(self, tokens: int, rows: int) -> Graph:
        """The model's graph before any pass, for T tokens and R rows of logits."""
        forms = stored_forms(self.checkpoint)
        return trace_model(self.checkpoint.config, tokens, rows, forms, hidden=self.head is not None)

    def head_passes(self, rows: int) -> PipelineResult | None:
        """The look-ahead head's graph for R rows after its passes, if there is a head."""
        if self.head is None:
            return None
        return rewrite_head(self.head, rows, self.limits.vocab_size, self.activations, self.target.platform)

    def heads(self, bucket: Bucket) -> dict[int, Graph]:
        """Its graphs after its passes, by their rows, as steps of the bucket need them; none without a head."""
        found = {rows: self.head_passes(rows) for rows in bucket.look_ahead_rows}
        return {rows: made.graph for rows, made in found.items() if made}

    def context(self, bucket: Bucket) -> Context:
        geometry = KvGeometry(self.limits.num_pages, self.limits.pages_per_seq, bucket.seqs)
        return Context(geometry, loops=self.target.platform == "cpu")

    @property
    def loops(self) -> bool:
        """Whether layers that compute alike run in a loop."""
        return self.target.platform == "cpu" and any(isinstance(step, RollLayers) for step in self.passes)


def make_plan(options: CompileOptions, checkpoint: Checkpoint, vocab: int, head: Head | None = None) -> Plan:
    """The plan for a checkpoint whose tokenizer knows `vocab` ids; UserError names the flag that does not fit."""
    recipe = find_recipe(options.recipe or ("native" if checkpoint.native else "bf16"))
    page = DEFAULT_PAGE if options.page_size is None else options.page_size
    if not 1 <= page <= LARGEST_PAGE:
        raise UserError(f"--page-size {page} is not between 1 and {LARGEST_PAGE}")
    if options.pipeline is not None:
        _check_idle(options)
        passes = parse_spec(options.pipeline)
    else:
        if options.group and not recipe.grouped:
            takes = ", ".join(name for name, each in RECIPES.items() if each.grouped)
            raise UserError(f"--group and --sym belong to recipes {takes}; not to {recipe.name}")
        passes = parse_spec(
            recipe.spec(
                rules=";".join(options.rules),
                group=options.group,
                page=page,
                activations=options.activations or "",
                kv=options.kv_dtype or "",
            )
        )
    passes = select(passes, options.disabled, options.stop_after)
    activations = "bf16" if any(isinstance(step, NarrowMatmul) for step in passes) else "f32"
    page = next((step.page for step in passes if isinstance(step, InsertPagedKv)), page)
    target = find_target(options.target)
    passes = for_platform(passes, target.platform)
    _check_printed(options.print_ir_after, [step.name for step in passes])
    if isinstance(target, Gpu) and not options.kv_tokens and any(isinstance(step, InsertPagedKv) for step in passes):
        graph = small_graph(checkpoint.config, stored_forms(checkpoint), passes)
        options = dataclasses.replace(options, kv_tokens=pool_tokens(graph, target))
    limits = dataclasses.replace(_limits(options, checkpoint, vocab, page), look_ahead=head is not None)
    name = "custom" if options.pipeline is not None else recipe.name
    return Plan(
        checkpoint=checkpoint,
        recipe=name,
        activations=activations,
        passes=passes,
        limits=limits,
        target=target,
        head=head,
    )


def _check_idle(options: CompileOptions) -> None:
    given = {
        "--recipe": options.recipe,
        "--activations": options.activations,
        "--kv-dtype": options.kv_dtype,
        "--rule": options.rules or None,
        "--group and --sym": options.group or None,
        "--page-size": options.page_size,
    }
    if idle := [flag for flag, value in given.items() if value is not None]:
        raise UserError(f"--pipeline says it all: leave out {', '.join(idle)}")


def _check_printed(asked: Sequence[str], names: Sequence[str]) -> None:
    known = ("all", "trace", *names)
    for name in asked:
        if name not in known:
            raise UserError(f"--print-ir-after {name!r}: what runs is {', '.join(known[1:])}; or say all")


def _limits(options: CompileOptions, checkpoint: Checkpoint, vocab: int, page: int) -> Limits:
    """Sizes from the flags; UserError names the flag that does not fit."""
    longest = checkpoint.config.max_positions
    length = options.max_model_len or min(longest, DEFAULT_MODEL_LEN)
    if not 2 <= length <= longest:
        raise UserError(f"--max-model-len {length} is not between 2 and {longest}, the model's own limit")
    kv_tokens = options.kv_tokens or max(length, min(DEFAULT_KV_TOKENS, length * options.max_num_seqs))
    if page > LARGEST_PAGE:
        raise UserError(f"insert-paged-kv{{page={page}}} of the pipeline is not between 1 and {LARGEST_PAGE}")
    if kv_tokens < page:
        raise UserError(f"--kv-tokens {kv_tokens} does not hold one page of {page} tokens")
    if not 1 <= options.max_num_seqs <= 1024:
        raise UserError(f"--max-num-seqs {options.max_num_seqs} is not between 1 and 1024")
    if not options.max_num_seqs <= options.max_num_batched_tokens <= 65536:
        raise UserError(
            f"--max-num-batched-tokens {options.max_num_batched_tokens} is not between --max-num-seqs "
            f"{options.max_num_seqs} and 65536"
        )
    return Limits(
        max_num_seqs=options.max_num_seqs,
        max_model_len=length,
        page_size=page,
        num_pages=math.ceil(kv_tokens / page),
        vocab_size=vocab,
        token_budget=options.max_num_batched_tokens,
        score_budget=min(128, options.max_num_batched_tokens),
        eos_ids=checkpoint.generation.eos_ids,
    )
