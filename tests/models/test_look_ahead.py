"""The look-ahead head: what it computes, and which files it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxserve.errors import UserError
from jaxserve.models.look_ahead import FROZEN, Head, param_specs

M, D, F, V = 6, 8, 10, 40
TOKENS = np.array([0, 3, 4, 17, 30, 39], np.int32)


def make_head() -> Head:
    rng = np.random.default_rng(0)
    shapes = {
        FROZEN: (M, D), "state_norm/scale": (D,), "token_norm/scale": (D,), "mix/kernel": (D, D),
        "gate/kernel": (F, 2 * D), "up/kernel": (F, 2 * D), "down/kernel": (D, F),
    }  # fmt: skip
    return Head({path: rng.normal(size=shape).astype(np.float16) for path, shape in shapes.items()}, TOKENS)


def run(head: Head, *args: jax.Array | np.ndarray) -> np.ndarray:
    params = {path: jnp.asarray(value, jnp.float32) for path, value in head.params.items()}
    return np.asarray(head.module.apply({"params": unflatten_dict(params, sep="/")}, *args))


def in_numpy(head: Head, hidden: np.ndarray, places: list[int], keep: np.ndarray) -> np.ndarray:
    p = {path: value.astype(np.float64) for path, value in head.params.items()}

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean() + 1e-5) * scale

    rows = []
    for h, place, kept in zip(hidden, places, keep, strict=True):
        a = norm(h.astype(np.float64), p["state_norm/scale"])
        e = norm(p[FROZEN][place] if place < M else np.zeros(D), p["token_norm/scale"])
        both = np.concatenate([a, e]) * kept
        gate = p["gate/kernel"] @ both
        inner = gate / (1 + np.exp(-gate)) * (p["up/kernel"] @ both)
        rows.append(p[FROZEN] @ (p["mix/kernel"] @ a + p["down/kernel"] @ inner))
    return np.array(rows)


def test_logits_are_those_of_the_formula():
    head, rng = make_head(), np.random.default_rng(1)
    hidden, places = rng.normal(size=(4, D)).astype(np.float32), [0, 5, M, 2]  # M: a token that it does not know
    ones = np.ones((4, 2 * D), np.float32)
    found = run(head, hidden, np.array(places, np.int32))
    np.testing.assert_allclose(found, in_numpy(head, hidden, places, ones), rtol=1e-5, atol=1e-4)
    keep = (rng.random((4, 2 * D)) < 0.5).astype(np.float32)
    dropped = run(head, hidden, np.array(places, np.int32), keep)
    np.testing.assert_allclose(dropped, in_numpy(head, hidden, places, keep), rtol=1e-5, atol=1e-4)
    assert not np.allclose(dropped, found, atol=0.1)


def test_a_file_gives_the_head_back(tmp_path):
    head = make_head()
    head.save(tmp_path / "head.npz")
    loaded = Head.load(tmp_path / "head.npz", D, V)
    assert loaded.params.keys() == head.params.keys() == param_specs(head.module).keys()
    for path, value in head.params.items():
        np.testing.assert_array_equal(loaded.params[path], value)
        assert loaded.params[path].dtype == np.float32 and value.shape == param_specs(head.module)[path].shape
    np.testing.assert_array_equal(loaded.tokens, TOKENS)
    places = loaded.places(V)
    assert places[TOKENS].tolist() == [*range(M)] and (np.delete(places, TOKENS) == M).all() and places.size == V


def without(path):
    return lambda arrays: arrays.pop(path)


def changed(path, change):
    return lambda arrays: arrays.update({path: change(arrays[path])})


def with_nan(array):
    return np.where(np.arange(array.size).reshape(array.shape) == 3, np.nan, array).astype(array.dtype)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("tokens"), "a damaged look-ahead head, or one of a model with more than 40 tokens"),
        (changed("tokens", lambda x: x[::-1].copy()), "with more than 40 tokens"),
        (changed("tokens", lambda x: np.maximum(x, 3)), "with more than 40 tokens"),  # 3 twice
        (changed("tokens", lambda x: x.astype(np.int64)), "with more than 40 tokens"),
        (changed("tokens", lambda x: x - 1), "with more than 40 tokens"),
        (changed("tokens", lambda x: x + 1), "with more than 40 tokens"),
        (changed("tokens", lambda x: x[:-1]), "whose width is not 8"),
        (without("mix/kernel"), "whose width is not 8"),
        (without("gate/kernel"), "whose width is not 8"),
        (changed("gate/kernel", lambda x: x[0]), "whose width is not 8"),
        (changed("up/kernel", lambda x: x[:-1]), "whose width is not 8"),
        (changed("mix/kernel", lambda x: x.astype(np.float32)), "whose width is not 8"),
        (lambda arrays: arrays.update(more=np.zeros(1, np.float16)), "whose width is not 8"),
        (changed("down/kernel", with_nan), "some of its numbers are not finite"),
        (changed(FROZEN, lambda x: np.where(x == x.max(), np.inf, x).astype(x.dtype)), "are not finite"),
    ],
)  # fmt: skip
def test_damage_is_refused(tmp_path, damage, message):
    make_head().save(tmp_path / "head.npz")
    with np.load(tmp_path / "head.npz") as data:
        arrays = dict(data)
    damage(arrays)
    np.savez(tmp_path / "head.npz", **arrays)
    with pytest.raises(UserError, match=message):
        Head.load(tmp_path / "head.npz", D, V)


def test_other_files_and_other_models_are_refused(tmp_path):
    file = tmp_path / "head.npz"
    with pytest.raises(UserError, match=r"head\.npz: no look-ahead head"):
        Head.load(file, D, V)
    make_head().save(file)
    with pytest.raises(UserError, match="whose width is not 16"):
        Head.load(file, 16, V)
    with pytest.raises(UserError, match="more than 39 tokens"):
        Head.load(file, D, 39)
    whole = file.read_bytes()
    for content in (b"", b"text", whole[:-30], whole[:200], np.zeros(3, np.float16).tobytes()):
        file.write_bytes(content)
        with pytest.raises(UserError, match="no look-ahead head, or a damaged one"):
            Head.load(file, D, V)
    with file.open("wb") as opened:
        np.save(opened, np.zeros(3))  # one array, no archive of them
    with pytest.raises(UserError, match="no look-ahead head, or a damaged one"):
        Head.load(file, D, V)
    np.savez_compressed(file, tokens=TOKENS, more=np.zeros(10_000_000))  # 80 MB in 80 kB
    with pytest.raises(UserError, match="would unpack to 800"):
        Head.load(file, D, V)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    file.write_bytes(flipped)
    with pytest.raises(UserError, match="damaged"):
        Head.load(file, D, V)
