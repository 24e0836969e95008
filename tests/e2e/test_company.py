"""A request's tokens do not depend on its company: every recipe on native kernels, alone and among hundreds.

Together they hit prefixes of each other, are cut into chunks by what is running, and are preempted, because the pool is
small; alone they meet an empty cache.
"""

import pathlib
import random

import pytest

from jaxserve.calibration import CalibrationOptions
from jaxserve.pallas_kernels._native.library import is_available
from jaxserve.passes.recipes import RECIPES
from tests.e2e.support import Ask, ask, ask_one, compile_artifact, greedy, load, settle

REQUESTS = 150
QUICK = ("w4a16",)
LIMITS = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 256, "kv_tokens": 320}


def requests(story: list[int]) -> list[Ask]:
    """Prompts that share beginnings of a few texts, for a few tokens each."""
    rng = random.Random(0)
    texts = [[1, *story[start:]] for start in (1, 2, 5, 9)]
    asked = []
    for _ in range(REQUESTS):
        prompt = rng.choice(texts)[: rng.randrange(2, 120)]
        asked.append(Ask(prompt, greedy(rng.randrange(1, 60 if rng.random() < 0.2 else 12))))
    return asked


@pytest.mark.skipif(not is_available(), reason="the native kernels are not built")
@pytest.mark.parametrize(
    "recipe",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name not in (*QUICK, "native"))],
)
def test_nobody_changes_anybodys_tokens(
    recipe: str, artifacts: pathlib.Path, stories_model: pathlib.Path, story: list[int]
):
    calibrated = RECIPES[recipe].folds or RECIPES[recipe].method
    calibration = CalibrationOptions(sequences=4, length=64) if calibrated else None
    folder = artifacts / f"company-{recipe}"
    session = load(compile_artifact(folder, stories_model, recipe, calibration=calibration, **LIMITS))
    asked = requests(story)
    with session.running(prefix_caching=False) as engine:
        alone = [ask_one(engine, each.prompt, each.params).ids for each in asked]
    with session.running() as engine:
        together = [results[0].ids for results in ask(engine, *asked)]
        settle(engine)
        stats = engine.stats()
    session.runner.close()
    assert stats["preemptions"] > 0 and stats["prefix_hits"] > 0
    assert together == alone
