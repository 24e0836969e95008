"""`jaxserve distill --ngrams`: the cheapest draft, a count of what its target says after its last few tokens."""

import collections
import dataclasses
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.distill_rows import Rows, Source, make_rows
from jaxserve.errors import UserError
from jaxserve.models.resolve import resolve
from jaxserve.reporting import Reporter
from jaxserve.serving.ngram_table import NGRAMS, TAILS, NgramTable


def count_ngrams(source: Source, report: Reporter) -> dict[str, Any]:
    """Writes a folder with the table and the tokenizer, whole or not at all, for `serve --speculate`.

    Returns a summary: entries, bytes of the file, tokens counted, seconds; and by kind of prompt, over the rows held
    out, at which share of tokens the table has something to say, and how much of it is right. UserError for what the
    user can put right.
    """
    start = time.perf_counter()
    checkpoint = resolve(source.model)
    folder = Path(os.path.realpath(source.output))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"-o {source.output} exists and is not an empty folder; name another one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"-o {source.output}: {error.strerror}; name another folder") from None
    length = min(source.answer_tokens + max(TAILS), checkpoint.config.max_positions)  # an answer and what is before it
    rows = make_rows(dataclasses.replace(source, length=max(2, length)), checkpoint, report)
    texts = _texts(rows, ~rows.held_out())
    table = NgramTable.count(texts)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        part = Path(scratch) / folder.name
        part.mkdir()
        checkpoint.write_tokenizer(part)
        table.save(part / NGRAMS)
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    return {
        "draft": str(source.output),
        "entries": len(table),
        "bytes": (folder / NGRAMS).stat().st_size,
        "tokens": sum(len(places) for _, places in texts),
        "acceptance": _acceptance(table, rows),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _texts(rows: Rows, chosen: np.ndarray) -> list[tuple[list[int], list[int]]]:
    """Of the chosen rows, their ids and the places of the tokens that the target said."""
    last = rows.ids.shape[1] - 1  # what comes after it is not in the row
    return [
        (rows.ids[row].tolist(), (np.flatnonzero(rows.wanted[row, :last]) + 1).tolist()) for row in chosen.nonzero()[0]
    ]


def _acceptance(table: NgramTable, rows: Rows) -> dict[str, dict[str, float]]:
    """By kind and in all: `known`, the share of tokens that the table foresees, and `right`, how many of these come."""
    tallies: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    kinds = np.array(rows.kinds)[rows.held_out()].tolist()
    for kind, (ids, places) in zip(kinds, _texts(rows, rows.held_out()), strict=True):
        said = [(table.after(ids[:place]), ids[place]) for place in places]
        for tally in (tallies[kind], tallies["all"]):
            tally[0] += len(said)
            tally[1] += sum(one is not None for one, _ in said)
            tally[2] += sum(one is not None and one.token == token for one, token in said)
    return {
        kind: {"known": known / max(1, of), "right": right / max(1, known)}
        for kind, (of, known, right) in sorted(tallies.items())
    }
