"""Caches and state are given away to every program and never copied; temporaries do not know the size of the pool."""

import dataclasses
import math
import pathlib
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve import executables
from jaxserve.artifact import open_artifact
from jaxserve.manifest import ArraySpec
from jaxserve.models.resolve import resolve
from jaxserve.passes.pipeline import run_pipeline
from jaxserve.plan import CompileOptions, Plan, make_plan
from jaxserve.programs import export_bucket
from jaxserve.serving.step import Bucket
from tests.e2e.support import Live, ask_one, greedy


def nbytes(specs: Iterable[ArraySpec]) -> int:
    return sum(math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize for spec in specs)


@pytest.mark.parametrize("name", ["stories_artifact", "int8_artifact"])
def test_every_program_takes_over_what_it_is_given(name: str, request: pytest.FixtureRequest):
    artifact = open_artifact(request.getfixturevalue(name))
    manifest = artifact.manifest
    caches, state = nbytes(manifest.caches), nbytes(manifest.state)
    given = {"admit": state, "load-penalties": state, "copy-pages": caches}
    steps = 0
    for program in manifest.programs:
        compiled = executables.deserialize(artifact.read(program.executables[0].file))
        assert compiled.memory_analysis().alias_size_in_bytes == given.get(program.name, caches + state), program.name
        steps += program.tokens > 0
    assert steps == len(manifest.programs) - 3 >= 5


def test_steps_update_caches_where_they_are(stories: Live, story: list[int]):
    def places() -> dict[str, int]:
        runner = stories.session.runner
        return {name: array.unsafe_buffer_pointer() for name, array in (runner.caches | runner.state).items()}

    ask_one(stories.engine, story, greedy(8))  # the very first step may take what was loaded to a place of its own
    before = places()
    ask_one(stories.engine, story, greedy(8))
    assert places() == before


@pytest.fixture(scope="module")
def plans(stories_model: pathlib.Path) -> list[Plan]:
    """The same artifact with a KV pool of N and 2 N pages."""
    checkpoint = resolve(stories_model)
    options = CompileOptions(
        model=str(stories_model), output=None, recipe="f32", max_num_seqs=4, max_num_batched_tokens=32
    )
    sizes = (2048, 4096)
    return [make_plan(dataclasses.replace(options, kv_tokens=size), checkpoint, 512) for size in sizes]


@pytest.mark.parametrize("bucket", [Bucket("step", 4, 4), Bucket("step", 32, 4)], ids=str)
def test_temporaries_do_not_depend_on_the_pool(plans: list[Plan], bucket: Bucket):
    small, large = (analysis(plan, bucket) for plan in plans)
    assert large.alias_size_in_bytes > 1.5 * small.alias_size_in_bytes
    assert large.temp_size_in_bytes == small.temp_size_in_bytes


def analysis(plan: Plan, bucket: Bucket) -> Any:
    graph = run_pipeline(plan.graph(bucket), plan.passes, plan.context(bucket)).graph
    return executables.compile_program(export_bucket(plan, bucket, graph), donate=(1, 2)).memory_analysis()
