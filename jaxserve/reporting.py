"""What long work tells people while it runs: one line a stage, a bar for the long ones, on standard error."""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxserve.passes.match import NoMatch
from jaxserve.passes.pipeline import Stage


class StageProgress:
    """One running stage; `done` says what came out of it."""

    def __init__(self, progress: Progress, task: TaskID):
        self._progress, self._task = progress, task
        self.result = ""

    def advance(self, what: str = "") -> None:
        self._progress.update(self._task, advance=1, detail=escape(what))

    def each[T](self, items: Iterable[T]) -> Iterator[T]:
        for item in items:
            yield item
            self.advance(str(item[0]) if isinstance(item, tuple) else "")

    def done(self, result: str) -> None:
        self.result = result


class Reporter:
    """Writes to standard error, so that standard output stays free for `--json` and printed IR."""

    def __init__(self, quiet: bool = False):
        self._console = Console(stderr=True, quiet=quiet, highlight=False)

    @contextlib.contextmanager
    def stage(self, name: str, what: str, total: int | None = None) -> Iterator[StageProgress]:
        """Shows `name` while the block runs, then one line with what it gave and how long it took."""
        start = time.perf_counter()
        columns = [TextColumn("{task.description}"), TimeElapsedColumn()]
        if total is not None:
            columns[1:1] = [BarColumn(), MofNCompleteColumn()]
        columns.append(TextColumn("[dim]{task.fields[detail]}"))
        hidden = not self._console.is_terminal  # a log gets the result lines only
        with Progress(*columns, console=self._console, transient=True, disable=hidden) as progress:
            task = progress.add_task(f"[bold]{name:<9}[/] {escape(what)}", total=total, detail="")
            running = StageProgress(progress, task)
            yield running
        self._console.print(
            f"[bold]{name:<9}[/] {escape(running.result or what)} [dim]({time.perf_counter() - start:.1f} s)[/]",
            soft_wrap=True,
        )

    def note(self, text: str) -> None:
        self._console.print(f"          [dim]{escape(text)}[/]", soft_wrap=True)

    def ran_pass(self, stage: Stage, explain: bool) -> None:
        """One line a pass, and what somebody asked for that is not there; with `explain` also what matched and what did
        not, and why."""
        result, refused = stage.result, len(stage.result.report) - stage.result.matches
        self._console.print(
            f"[bold]pass[/]      {stage.step.name:<20} {result.matches:>4} matches, {refused} refused "
            f"[dim]({stage.seconds:.2f} s)[/]"
        )
        for entry in result.report:
            if explain or (isinstance(entry, NoMatch) and entry.asked):
                colour = "green" if entry else "yellow"
                self._console.print(f"            [{colour}]{escape(str(entry))}[/]", soft_wrap=True)

    def ir(self, name: str, text: str) -> None:
        """The IR after a pass, on standard output."""
        sys.stdout.write(f"// after {name}\n{text}\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table on standard output: text to the left, numbers to four digits and to the right."""
    console, table = Console(highlight=False), Table(box=None, pad_edge=False)
    if not console.is_terminal:
        console.width = 200  # in a file nothing need be folded
    for index, column in enumerate(columns):
        numeric = any(isinstance(row[index], float | int) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else "" if cell is None else f"{cell:.5g}" for cell in row))
    console.print(f"[bold]{escape(title)}[/]", soft_wrap=True)
    console.print(table)
