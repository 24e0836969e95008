"""A small manifest and artifact that several test modules build on."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxserve.artifact import ArtifactWriter
from jaxserve.manifest import ArraySpec, CacheGroup, Manifest, ModelInfo, PassRecord, Program, Sizes, StaticLimits

FILES: dict[str, str | bytes] = {
    "graph/000_trace.txt": "graph\n",
    "step/step-t8-s4.export": b"exported",
    "executables/step-t8-s4.bin": b"machine code",
    "weights/part-00000/d/data": b"\x01" * 1000,
    "tokenizer/tokenizer.json": "{}",
}


def sample_manifest(**changes: Any) -> Manifest:
    """A complete manifest; `changes` replace whole fields."""
    manifest = Manifest(
        model=ModelInfo(family="llama", name="tiny", origin="a test", config={"width": 8}),
        recipe="w4a16",
        activations="bf16",
        target="cpu",
        versions={"jaxserve": "0.1.0"},
        limits=StaticLimits(max_num_seqs=4, max_model_len=64, kv_tokens=256, page_size=16, num_pages=16, vocab_size=32),
        pass_spec="canonicalize,quantize-matmul{bits=4}",
        passes=(PassRecord(name="quantize-matmul", matches=7, refused={"feeds a softmax": 1}),),
        params=(ArraySpec(name="norm/scale", shape=(8,), dtype="bfloat16"),),
        caches=(ArraySpec(name="k0", shape=(16, 16, 1, 8), dtype="bfloat16"),),
        cache_groups=(CacheGroup(layers=(0, 1), kind="full", window=None, bytes_per_token=32),),
        programs=(
            Program(
                name="step-t8-s4",
                kind="step",
                export="step/step-t8-s4.export",
                tokens=8,
                seqs=4,
                donate=(1, 2),
                inputs=(ArraySpec(name="tokens", shape=(8,), dtype="int32"),),
            ),
        ),
        generation={"eos_ids": [2]},
        sizes=Sizes(checkpoint_bytes=2000, weight_bytes=1000),
    )
    return dataclasses.replace(manifest, **changes)


def write_sample(directory: pathlib.Path, files: Mapping[str, str | bytes] | None = None) -> Manifest:
    """Write the sample artifact, with `files` (name to content) over or beside its own."""
    with ArtifactWriter(directory) as writer:
        for name, data in (FILES | dict(files or {})).items():
            writer.write(name, data)
        return writer.finish(sample_manifest())
