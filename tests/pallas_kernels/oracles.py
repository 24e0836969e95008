"""The ops again, in float64 numpy and plain loops, sharing nothing with the code under test."""

import itertools
import math

import ml_dtypes
import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def gated_activation(x: np.ndarray, activation: str) -> np.ndarray:
    gate, factor = np.split(x, 2, axis=-1)
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * factor
    return gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * factor


def rope(x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, interleaved: bool) -> np.ndarray:
    out = x.copy()
    half = len(inv_freq)
    for t, position in enumerate(positions):
        for i, frequency in enumerate(inv_freq):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            angle = float(np.float32(position) * np.float32(frequency))
            turned = (x[t, :, a] + 1j * x[t, :, b]) * complex(math.cos(angle), math.sin(angle))
            out[t, :, a], out[t, :, b] = turned.real, turned.imag
    return out


def one_query(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, softcap: float | None) -> np.ndarray:
    """q [N,H] over the keys k [J,K,H] and values v that it can see."""
    out = np.zeros_like(q)
    group = q.shape[0] // k.shape[1]
    for n in range(q.shape[0]):
        scores = scale * (k[:, n // group] @ q[n])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[n] = weights @ v[:, n // group] / weights.sum()
    return out


def attention(q, k, v, positions, segments, scale, window=None, softcap=None) -> np.ndarray:
    out = np.zeros_like(q)
    for i in range(len(q)):
        seen = [
            j
            for j in range(len(k))
            if segments[j] == segments[i] and 0 <= positions[i] - positions[j] < (window or math.inf)
        ]
        out[i] = one_query(q[i], k[seen], v[seen], scale, softcap)
    return out


def ragged_attention(q, keys, values, query_starts, scale, window=None, softcap=None) -> np.ndarray:
    """keys[s], values[s] are the whole context [J,K,H] of row s; tokens past the rows give 0."""
    out = np.zeros_like(q)
    for s, (start, stop) in enumerate(itertools.pairwise(query_starts)):
        for t in range(start, stop):
            position = len(keys[s]) - (stop - t)
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(first, position + 1)
            out[t] = one_query(q[t], keys[s][seen], values[s][seen], scale, softcap)
    return out


def dequantize(codes, fields, offset: str, group: int) -> np.ndarray:
    out = np.zeros(codes.shape)
    for o in range(codes.shape[0]):
        for k in range(codes.shape[1]):
            scale = float(fields["scale"][o, k // group])
            code = float(codes[o, k])
            if offset == "zero":
                code -= float(fields["zero"][o, k // group])
            w = scale * code + (float(fields["minimum"][o, k // group]) if offset == "minimum" else 0.0)
            if "channel" in fields:
                w *= float(fields["channel"][o, 0])
            out[o, fields["order"][k] if "order" in fields else k] = w
    return out


def quantize_activation(x: np.ndarray, form: str, static: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of activations x [..., I] in int8 or e4m3, as float64."""
    codes, scales = np.zeros(x.shape), np.zeros((*x.shape[:-1], 1))
    smallest, largest = (-448, 448) if form == "e4m3" else (-128, 127)
    for row in np.ndindex(*x.shape[:-1]):
        scales[row] = np.float32(static or np.abs(x[row]).max() / largest)
        for i, number in enumerate(x[row]):
            steps = min(max(number / (scales[row][0] or 1.0), smallest), largest)
            codes[(*row, i)] = (
                float(np.float32(steps).astype(ml_dtypes.float8_e4m3fn)) if form == "e4m3" else round(steps)
            )
    return codes, scales


def quantize_kv(x: np.ndarray, form: str) -> tuple[np.ndarray, ...]:
    """Keys or values [T,K,H] as a cache in int8, int4 or fp8 holds them."""
    largest = {"int8": 255, "int4": 15, "fp8": 448}[form]
    codes = np.zeros((*x.shape[:-1], x.shape[-1] // (2 if form == "int4" else 1)), np.uint8)
    scale, minimum = np.zeros(x.shape[:-1], np.float16), np.zeros(x.shape[:-1], np.float16)
    for t, head in np.ndindex(*x.shape[:-1]):
        row = x[t, head]
        low, high = (0.0, np.abs(row).max()) if form == "fp8" else (row.min(), row.max())
        scale[t, head], minimum[t, head] = (high - low) / largest, low
        steps = (row - float(minimum[t, head])) / (float(scale[t, head]) or 1.0)
        if form == "fp8":
            codes[t, head] = np.clip(steps, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        else:
            whole = np.clip(np.rint(steps), 0, largest).astype(np.uint8)
            codes[t, head] = whole if form == "int8" else whole[::2] + 16 * whole[1::2]
    return (codes, scale) if form == "fp8" else (codes, scale, minimum)


def dequantize_kv(arrays: tuple[np.ndarray, ...], form: str) -> np.ndarray:
    """What such arrays stand for."""
    codes, scale, *minimum = arrays
    if form == "int4":
        codes = np.stack([codes % 16, codes // 16], axis=-1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    if form == "fp8":
        codes = codes.view(ml_dtypes.float8_e4m3fn)
    wide = codes.astype(np.float64) * scale[..., None].astype(np.float64)
    return wide + minimum[0][..., None].astype(np.float64) if minimum else wide


def kept_tokens(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """Allowed set of one row by sorting, in float64; and the mass above each token, to tell what is on the border."""
    logits = logits.astype(np.float64)
    kept = logits >= np.sort(logits)[::-1][(top_k or len(logits)) - 1]
    weights = np.where(kept, np.exp((logits - logits.max()) / temperature), 0)
    probs = weights / weights.sum()
    order = np.argsort(-logits, kind="stable")
    before = np.concatenate([[0], np.cumsum(probs[order])[:-1]])
    above = np.empty_like(probs)
    for i, token in enumerate(order):  # tied tokens all have the mass above the first of them
        tied = i and logits[token] == logits[order[i - 1]]
        above[token] = above[order[i - 1]] if tied else before[i]
    if top_p < 1:
        kept &= above < top_p
    return kept & (probs >= min_p * probs.max() * (1 - 1e-6)), above


def sample_logits(
    logits: np.ndarray, words: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> int:
    """The token of one row; words: its key folded by its position."""
    logits = logits.astype(np.float64)
    if temperature == 0 or top_k == 1:
        return int(logits.argmax())
    temperature = max(temperature, 1e-20)
    kept, _ = kept_tokens(logits, temperature, min(top_k, len(logits)), top_p, min_p)
    ids = np.arange(len(logits), dtype=np.uint32)
    u = ((_mix_bits(_mix_bits(words[0] + ids) ^ words[1]) >> 9) + 0.5) / 2**23
    return int(np.where(kept, np.exp((logits - logits.max()) / temperature) / -np.log(u), -1).argmax())


def _mix_bits(x: np.ndarray) -> np.ndarray:
    """Wellons' lowbias32."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(15))
