"""Questions in the form of Spec-Bench (Xia et al. 2024): JSON lines with a `category` and the `turns` of a user."""

import collections
import json
import pathlib
from typing import Any, NamedTuple

from jaxserve.errors import UserError
from jaxserve.text import Tokenizer

MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})


def read_questions(path: pathlib.Path, every: int, flag: str) -> list[tuple[str, str]]:
    """(category, first turn) of each n-th question of a category; the eight categories of MT-bench are one.

    UserError, which names the flag that gave the path, for another file.
    """
    try:
        lines = [json.loads(line) for line in path.read_text().split("\n") if line.strip()]
        found = [(_some(str, q["category"]), _some(str, _some(list, q["turns"])[0])) for q in lines]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"{flag} {path}: not the questions of Spec-Bench ({error!r:.80})") from None
    seen = collections.Counter[str]()
    chosen = []
    for kind, turn in found:
        category = "mt_bench" if kind in MT_BENCH else kind
        if seen[category] % every == 0:
            chosen.append((category, turn))
        seen[category] += 1
    return chosen


def _some[T](kind: type[T], value: Any) -> T:
    if not isinstance(value, kind) or not value:
        raise TypeError(f"{value!r:.20} is no {kind.__name__}, or an empty one")
    return value


def prompt_ids(tokenizer: Tokenizer, turn: str, most: int) -> tuple[int, ...]:
    """The turn in the model's chat template, if it has one; its last `most` tokens."""
    if tokenizer.chat_template is None:
        return tuple(tokenizer.encode_prompt(turn)[-most:])
    text = tokenizer.chat_template.render([{"role": "user", "content": turn}], add_generation_prompt=True)
    return tuple(tokenizer.encode(text, special=True)[-most:])


class Turn(NamedTuple):
    """What a chat template puts before a user's turn, in ids, and the first line of what it puts after it."""

    before: tuple[int, ...]
    after: str


def users_turn(tokenizer: Tokenizer) -> Turn:
    """Where the model's chat template has a user speak. UserError when it does not say.

    Spaces at the end of what is before are left out: a text's tokens begin with them.
    """
    if tokenizer.chat_template is None:
        raise UserError("the model has no chat template, so it cannot be asked what a user would say")
    mark = "user-turn"
    before, found, after = tokenizer.chat_template.render([{"role": "user", "content": mark}]).partition(mark)
    ids = tokenizer.encode(before.rstrip(" "), special=True)
    if not (found and ids):
        raise UserError("the model's chat template does not say where a user's turn begins")
    return Turn(tuple(ids), after.strip().partition("\n")[0])
