"""Times quantized_take: `python -m jaxserve.pallas_kernels.quantized_take.bench --help`."""

from jaxserve.pallas_kernels import _bench
from jaxserve.pallas_kernels.quantized_take.op import OP
from jaxserve.pallas_kernels.quantized_take.shapes import cases


def main() -> None:
    """Command line: a JSON line for every shape."""
    _bench.main(OP, cases)


if __name__ == "__main__":
    main()
