"""jaxserve inspect."""

import argparse
import pathlib


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=pathlib.Path, help="folder that jaxserve compile wrote")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from jaxserve import manifest as manifests
    from jaxserve.artifact import open_artifact

    manifest = open_artifact(options.artifact).manifest
    if options.json:
        print(manifests.to_json(manifest), end="")
        return 0
    limits, before, after = manifest.limits, manifest.sizes.checkpoint_bytes, manifest.sizes.weight_bytes
    kv_bytes = sum(group.bytes_per_token for group in manifest.cache_groups) * limits.kv_tokens
    kv_format = "".join(f" in {name}" for name in {group.format for group in manifest.cache_groups} if name)
    facts = {
        "model": f"{manifest.model.name} ({manifest.model.family}), from {manifest.model.origin}",
        "recipe": f"{manifest.recipe}, activations {manifest.activations}, target {manifest.target}",
        "pipeline": manifest.pass_spec,
        "weights": f"{before / 1e6:.1f} MB in the checkpoint, {after / 1e6:.1f} MB in memory",
        "KV cache": f"{limits.kv_tokens} tokens{kv_format}, pages of {limits.page_size}, {kv_bytes / 1e6:.1f} MB",
        "limits": f"{limits.max_num_seqs} sequences of up to {limits.max_model_len} tokens",
        "look-ahead": "a head in the steps, for --speculate head" if limits.look_ahead else "none",
        "end tokens": ", ".join(map(str, manifest.generation.get("eos_ids", []))) or "none",
        "made with": _kernels(manifest),
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
        "schema": manifest.schema,
    }
    console = Console(highlight=False)
    for name, fact in facts.items():
        console.print(f"[bold]{name:<11}[/]{fact}", markup=True, soft_wrap=True)
    console.print(
        _passes_table(Table("pass", "matches", "refused, and why", box=None, pad_edge=False), manifest.passes)
    )
    table = Table("program", "tokens", "sequences", "file", box=None, pad_edge=False)
    for program in manifest.programs:
        table.add_row(program.name, str(program.tokens or ""), str(program.seqs or ""), program.export)
    console.print(table)
    return 0


def _passes_table(table, passes):
    for entry in passes:
        reasons = "; ".join(f"{count}x {reason}" for reason, count in entry.refused.items())
        table.add_row(entry.name, str(entry.matches), reasons)
    return table


def _kernels(manifest) -> str:
    """The kernels in the executables that the artifact holds: another machine may compile its own."""
    made = {cached.key.get("kernels", "") for program in manifest.programs for cached in program.executables}
    return "; ".join(sorted(filter(None, made))) or "XLA's reference ops"
