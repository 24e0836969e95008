"""Targets: this machine's CPU, known hardware, and what makes two machines the same."""

import os
import subprocess
import sys

import pytest

from jaxserve.errors import UserError
from jaxserve.targets import GPUS, cpu_target, find_target

X86 = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 106
model name\t: Some Xeon
flags\t\t: fpu sse4_2 avx2 avx512f avx512_vnni fma constant_tsc

processor\t: 1
vendor_id\t: Other
"""
ARM = """processor\t: 0
Features\t: fp asimd sve i8mm
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd40
"""


def test_this_machine():
    target = find_target("cpu")
    assert target == cpu_target()
    assert target.platform == "cpu"
    assert target.cores == len(os.sched_getaffinity(0))
    assert target.memory_bytes > 1 << 28


def test_x86_features_are_those_of_the_first_processor():
    target = cpu_target(X86)
    assert target.features == ("avx2", "avx512_vnni", "avx512f", "fma", "sse4_2")
    assert target.device_kind.endswith("GenuineIntel family 6 model 106")


def test_arm_features():
    target = cpu_target(ARM)
    assert target.features == ("asimd", "i8mm", "sve")
    assert target.device_kind.endswith("0x41 family 8 model 0xd40")


def test_fingerprint_changes_with_instruction_sets_and_model_alone():
    same = X86.replace("constant_tsc", "nonstop_tsc").replace("Some Xeon", "Some Xeon at another clock")
    assert cpu_target(same).fingerprint() == cpu_target(X86).fingerprint()
    assert cpu_target(X86.replace("avx512_vnni ", "")).fingerprint() != cpu_target(X86).fingerprint()
    assert cpu_target(X86.replace("106", "143")).fingerprint() != cpu_target(X86).fingerprint()


def test_known_gpu():
    target = find_target("h100-sxm")
    assert (target.platform, target.cores, target.features) == ("cuda", 132, ("sm_90a",))
    assert target == find_target("h100-sxm") != find_target("h100-pcie")
    assert len({hash(gpu) for gpu in GPUS.values()}) == len(GPUS)


def test_target_config_is_the_text_that_compiled_for_an_absent_h100(shared):
    known = (shared / "targets" / "h100_sxm.txtpb").read_text()
    assert GPUS["h100-sxm"].target_config() == known


def test_unknown_target_lists_the_known():
    with pytest.raises(
        UserError, match="unknown target 'tpu'; known targets: cpu, h100-sxm, h100-pcie, h200, b200, a100"
    ):
        find_target("tpu")


def test_targets_need_no_jax():
    code = "import sys, jaxserve.targets; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
