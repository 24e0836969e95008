"""Axis letters of parameters by path, which later decide how they are sharded."""

import re

# N query heads, K KV heads, H head dim, D width, F mlp width, V vocab; NH is N*H on one axis.
_LETTERS = (
    (r"(embed_tokens/embedding|lm_head/kernel)$", "V D"),
    (r"q_proj/kernel$", "NH D"),
    (r"[kv]_proj/kernel$", "KH D"),
    (r"o_proj/kernel$", "D NH"),
    (r"(gate|up)_proj/kernel$", "F D"),
    (r"down_proj/kernel$", "D F"),
    (r"q_proj/bias$", "NH"),
    (r"[kv]_proj/bias$", "KH"),
    (r"(gate|up)_proj/bias$", "F"),
    (r"[qk]_norm/scale$", "H"),
    (r"(scale|bias)$", "D"),
)


def param_axes(path: str) -> str:
    """One word an axis of the parameter at `path`, separated by spaces; empty for a path that no family has."""
    return next((letters for pattern, letters in _LETTERS if re.search(pattern, path)), "")
