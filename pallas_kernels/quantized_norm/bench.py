"""Times quantized_norm: `python -m jaxserve.pallas_kernels.quantized_norm.bench --help`."""

from jaxserve.pallas_kernels import _bench
from jaxserve.pallas_kernels.quantized_norm.op import OP
from jaxserve.pallas_kernels.quantized_norm.shapes import cases


def main() -> None:
    """Command line: a JSON line for every shape."""
    _bench.main(OP, cases)


if __name__ == "__main__":
    main()
