"""Who may import whom, and the other rules that a reader of the source can count on."""

import ast
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINKED = ("models", "passes", "pallas_kernels", "serving")
MAX_LINES = 500

BASE = {"errors", "targets", "_compat"}
STORED = {"manifest", "artifact", "executables", "weights_io"}
# The layers of jaxserve, and what each may import beside itself. Every other module (cli, compile, ...) is at the top:
# it may import anything, and no layer imports it.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "heap": set(),
    "npz": {"errors"},
    "_compat": set(),
    "targets": {"errors"},
    "manifest": {"errors"},
    "artifact": {"errors", "targets", "manifest"},
    "weights_io": {"errors", "targets", "manifest", "artifact"},
    "executables": {"errors", "heap", "targets", "manifest", "artifact", "pallas_kernels"},  # registers custom calls
    "text": {"errors", "targets"},
    "pallas_kernels": BASE,
    "models": BASE | {"npz", "pallas_kernels", "text"},
    "passes": BASE | {"pallas_kernels"},
    "serving": BASE | STORED | {"heap", "npz", "pallas_kernels", "text"},
}
WITHOUT_JAX = (
    "serving.request",
    "serving.blocks",
    "serving.plan",
    "serving.scheduler",
    "serving.speculation",
    "serving.ngram",
    "serving.ngram_table",
    "serving.draft",
    "serving.head",
    "serving.rehearsal",
    "npz",
)
UNSTABLE = ("jax.extend", "jax.interpreters", "jax._src")


def sources() -> list[tuple[str, pathlib.Path]]:
    """Every module of the import package with its file; `jaxserve` itself is called ""."""
    found = []
    for folder in ("jaxserve", *LINKED):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[1:] if folder == "jaxserve" else parts
            if folder != "jaxserve" or not parts or parts[0] not in LINKED:
                found.append((".".join(part for part in parts if part != "__init__"), path))
    return found


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports, `from a import b` as "a.b", and JAX's unstable modules that it uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield "." * node.level + f"{node.module or ''}.{alias.name}".lstrip("."), node.lineno
        elif isinstance(node, ast.Attribute) and (name := ast.unparse(node)) in UNSTABLE:
            yield name, node.lineno


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def violations(module: str, text: str) -> list[str]:
    """Rules that `text`, as the source of `module` (without "jaxserve."), breaks."""
    found = []
    layer = module.partition(".")[0]
    allowed = ALLOWED[layer] | {layer} if layer in ALLOWED else None
    for name, line in imported(ast.parse(text)):
        if name.startswith("."):
            found.append(f"line {line}: relative import {name}; say from jaxserve...")
        if name == "__future__.annotations":
            found.append(f"line {line}: jaxtyping annotations go unchecked with from __future__ import annotations")
        if name.partition(".")[0] in (*LINKED, "text"):
            found.append(f"line {line}: import {name}; say from jaxserve.{name}")
        if module != "_compat" and any(under(name, unstable) for unstable in UNSTABLE):
            found.append(f"line {line}: {name}; only jaxserve/_compat.py touches JAX's unstable modules")
        if module in WITHOUT_JAX and name.partition(".")[0] in ("jax", "jaxlib", "flax", "orbax", "jaxtyping"):
            found.append(f"line {line}: {name}; {module} is plain Python")
        if under(name, "jaxserve"):
            target = name.removeprefix("jaxserve").lstrip(".")
            target_layer = target.partition(".")[0]
            if allowed is not None and target_layer not in allowed | {"", "__version__"}:
                found.append(f"line {line}: {layer or 'jaxserve'} must not import jaxserve.{target_layer}")
            if module in WITHOUT_JAX and target_layer != "errors" and not any(under(target, m) for m in WITHOUT_JAX):
                found.append(f"line {line}: {name}; {module} imports only its like and jaxserve.errors")
    return found


@pytest.mark.parametrize(("module", "path"), [pytest.param(m, p, id=m or "jaxserve") for m, p in sources()])
def test_module_keeps_the_rules(module, path):
    text = path.read_text()
    assert violations(module, text) == []
    assert len(text.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.name)
def test_tests_keep_the_rules(path):
    names = [name for name, _ in imported(ast.parse(path.read_text()))]
    assert "__future__.annotations" not in names
    assert [name for name in names if name.partition(".")[0] in LINKED] == []
    assert [name for name in names if any(under(name, unstable) for unstable in UNSTABLE)] == []
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("serving.engine", "import jaxserve.models"),
        ("serving.engine", "from jaxserve.passes.graph import Graph"),
        ("serving.engine", "from jaxserve import passes"),
        ("serving.engine", "def late():\n    from jaxserve import models"),
        ("serving.engine", "from ..models import llama"),
        ("serving.engine", "from jaxserve.cli import main"),
        ("serving.blocks", "import jax.numpy as jnp"),
        ("serving.blocks", "from jaxserve.serving.runner import Runner"),
        ("serving.blocks", "from jaxserve.artifact import Artifact"),
        ("passes.graph", "import jaxserve.models"),
        ("passes.graph", "from passes import match"),
        ("passes.graph", "import jax.extend.core"),
        ("passes.graph", "from jax.interpreters import mlir"),
        ("passes.graph", "import jax\nx = jax._src.core.Var"),
        ("passes.graph", "from jax import extend"),
        ("passes.graph", "from __future__ import annotations"),
        ("models.llama", "from jaxserve.serving import request"),
        ("models.llama", "from jaxserve.passes import trace"),
        ("pallas_kernels.rope.op", "from jaxserve.text import load_tokenizer"),
        ("artifact", "from jaxserve.executables import serialize"),
        ("errors", "import jaxserve.targets"),
        ("models.llama", "from jaxserve import newcomer"),
        ("cli", "import serving"),
    ],
)
def test_a_violation_is_found(module, text):
    assert len(violations(module, text)) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("serving.engine", "from jaxserve.serving.blocks import BlockPool\nfrom jaxserve.artifact import Artifact"),
        ("serving.blocks", "import numpy as np\nfrom jaxserve.serving.request import Limits"),
        ("passes.graph", "from jaxserve import _compat\nfrom jaxserve.pallas_kernels import OPS\nimport jax"),
        ("_compat", "from jax.extend import core\nfrom jax.interpreters import mlir"),
        ("newcomer", "from jaxserve import cli, serving"),
        ("cli", "def run():\n    from jaxserve import compile\n    from jaxserve.models import resolve"),
        ("text.templates", "from jaxserve.errors import UserError\nfrom jaxserve.text import base"),
    ],
)
def test_what_is_allowed_passes(module, text):
    assert violations(module, text) == []


@pytest.mark.parametrize("name", LINKED)
def test_folders_are_linked_into_the_package(name):
    link = ROOT / "jaxserve" / name
    assert os.readlink(link) == f"../{name}"
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("module", ["errors", "targets", "manifest", "artifact", *WITHOUT_JAX])
def test_jax_is_not_loaded(module):
    code = f"import sys, jaxserve.{module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
