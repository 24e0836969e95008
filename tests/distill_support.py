"""What tests of distillation train on."""

import pathlib


def write_stories(file: pathlib.Path) -> pathlib.Path:
    """Small stories, alike enough that seconds of training show."""
    names = ("Tom", "Lily", "the dog", "a bird")
    lines = [f"Once upon a time, {a} saw {b}. {a} was happy. They went to the park.\n" for a in names for b in names]
    file.write_text("".join(lines) * 2)
    return file
