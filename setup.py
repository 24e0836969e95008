"""Builds the native kernels. Everything else about the package stands in pyproject.toml."""

import pathlib

import jax
from setuptools import Extension, setup

SOURCES = sorted(str(path) for path in pathlib.Path("pallas_kernels").glob("*/*.cc"))

setup(
    ext_modules=[
        Extension(
            "jaxserve.pallas_kernels._native.kernels",
            SOURCES,
            depends=sorted(str(path) for path in pathlib.Path("pallas_kernels").glob("*/*.[hi]*")),
            # -isystem: XLA's headers warn under -Wall, and so do the intrinsics of GCC 12.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-DNDEBUG",
                "-Wno-psabi",
                "-Wno-maybe-uninitialized",
                "-isystem",
                jax.ffi.include_dir(),
            ],
            optional=True,  # without a C++ compiler the XLA references run
        )
    ]
)
