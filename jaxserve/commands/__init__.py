"""The commands of the command line, one file each. A command imports what it needs when it runs: serving loads no
compiler, and `--help` loads nothing."""

import argparse
import dataclasses
from collections.abc import Callable

from jaxserve.commands import bench, compile, distill, evaluate, inspect, passes, plan, serve


@dataclasses.dataclass(frozen=True)
class Command:
    """`run` returns the exit code."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = (
    Command("compile", "Compile a model into an artifact.", compile.add_arguments, compile.run),
    Command("serve", "Serve an artifact behind an OpenAI-compatible API.", serve.add_arguments, serve.run),
    Command("inspect", "Show what an artifact holds.", inspect.add_arguments, inspect.run),
    Command("eval", "Perplexity of an artifact on a text.", evaluate.add_arguments, evaluate.run),
    Command("bench", "Tokens per second and host time of an artifact.", bench.add_arguments, bench.run),
    Command("plan", "What a model needs on a GPU, and how fast it could be there.", plan.add_arguments, plan.run),
    Command("distill", "Train a draft for speculative decoding.", distill.add_arguments, distill.run),
    Command("passes", "List the passes and recipes.", passes.add_arguments, passes.run),
)
