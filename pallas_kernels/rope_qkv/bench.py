"""Times rope_qkv: `python -m jaxserve.pallas_kernels.rope_qkv.bench --help`."""

from jaxserve.pallas_kernels import _bench
from jaxserve.pallas_kernels.rope_qkv.op import OP
from jaxserve.pallas_kernels.rope_qkv.shapes import cases


def main() -> None:
    """Command line: a JSON line for every shape."""
    _bench.main(OP, cases)


if __name__ == "__main__":
    main()
