"""Fixtures that every test may use."""

import os
import pathlib
import signal

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A shell that runs the tests in the background has them ignore Ctrl-C, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """Folder of the reference data that is kept beside the checkout; JAXSERVE_SHARED overrides where."""
    root = pathlib.Path(__file__).resolve().parents[1]
    folder = pathlib.Path(os.environ.get("JAXSERVE_SHARED", root.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"reference data not found at {folder}")
    return folder


@pytest.fixture(scope="session")
def sample_gguf() -> pathlib.Path:
    """The sample model's file, from the user's cache or fetched now."""
    from jaxserve.models.sample import fetch_sample

    return fetch_sample("smollm2-135m-instruct")
