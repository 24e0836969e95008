"""Weights come back from orbax bit for bit, in the manifest's order, whatever the part size."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.artifact import Artifact
from jaxserve.manifest import ArtifactError
from jaxserve.weights_io import load_weights, save_weights
from tests.artifact_sample import sample_manifest

RNG = np.random.default_rng(0)
ARRAYS = {
    "layers_1/mlp/up/kernel/codes": RNG.integers(0, 256, (6, 4)).astype(np.uint8),
    "layers_1/mlp/up/kernel/scale": RNG.standard_normal((6, 2)).astype(np.float16),
    "layers_0/q/kernel": RNG.standard_normal((8, 8)).astype(ml_dtypes.bfloat16),
    "layers_0/q/bias": RNG.standard_normal(8).astype(np.float32),
    "layers_10/q/codes": RNG.integers(-128, 128, (3, 5)).astype(np.int8),
    "step": np.array(7, np.int32),
}


def artifact_of(tmp_path, arrays, **options) -> Artifact:
    specs = save_weights(tmp_path / "weights", arrays, **options)
    return Artifact(tmp_path, sample_manifest(params=specs))


@pytest.mark.parametrize(("part_bytes", "parts"), [(1 << 30, 1), (100, 2)])
def test_round_trip(tmp_path, part_bytes, parts, caplog):
    with caplog.at_level(logging.WARNING):
        artifact = artifact_of(tmp_path, ARRAYS.items(), part_bytes=part_bytes)
        loaded = load_weights(artifact)
    assert len(list(artifact.weights.iterdir())) == parts
    assert list(loaded) == list(ARRAYS)
    for path, array in ARRAYS.items():
        assert isinstance(loaded[path], jax.Array)
        assert loaded[path].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(loaded[path]), array)
    assert caplog.records == []


def test_a_part_is_all_that_is_held(tmp_path):
    alive = []

    def arrays():
        for index in range(20):
            value = jnp.full((1000,), index, jnp.float32)
            yield f"w{index}", value
            alive.append(len(list((tmp_path / "weights").glob("part-*"))))

    load_weights(artifact_of(tmp_path, arrays(), part_bytes=8000))
    assert alive == [index // 2 for index in range(1, 21)]


def test_no_weights(tmp_path):
    assert load_weights(artifact_of(tmp_path, [])) == {}


def test_an_array_without_elements_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'w' has shape"):
        save_weights(tmp_path / "weights", [("w", np.zeros((0, 4)))])


def test_arrays_that_are_not_contiguous(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    np.testing.assert_array_equal(load_weights(artifact_of(tmp_path, [("w", array)]))["w"], array)


@pytest.mark.parametrize("names", [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a/", "b")])
def test_names_that_clash_are_refused(tmp_path, names):
    with pytest.raises(ValueError, match="weight"):
        save_weights(tmp_path / "weights", [(name, np.zeros(1)) for name in names])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: params[:-1], "step is not in the manifest"),
        (lambda params: (*params, dataclasses.replace(params[0], name="more")), "weight more is missing"),
        (lambda params: (dataclasses.replace(params[0], shape=(4, 6)), *params[1:]), r"uint8\[6, 4\].*uint8\[4, 6\]"),
        (lambda params: (dataclasses.replace(params[0], dtype="int8"), *params[1:]), r"uint8\[6, 4\].*int8\[6, 4\]"),
    ],
)
def test_weights_that_are_not_the_manifests(tmp_path, change, message):
    artifact = artifact_of(tmp_path, ARRAYS.items())
    params = change(artifact.manifest.params)
    with pytest.raises(ArtifactError, match=message):
        load_weights(Artifact(tmp_path, sample_manifest(params=params)))


def test_a_checkpoint_that_orbax_cannot_read(tmp_path):
    artifact = artifact_of(tmp_path, ARRAYS.items())
    (artifact.weights / "part-00000" / "_METADATA").write_bytes(b"\0" * 40)
    with pytest.raises(ArtifactError, match="part-00000 cannot be read") as caught:
        load_weights(artifact)
    assert "\n" not in str(caught.value)
