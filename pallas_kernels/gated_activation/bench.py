"""Times gated_activation: `python -m jaxserve.pallas_kernels.gated_activation.bench --help`."""

from jaxserve.pallas_kernels import _bench
from jaxserve.pallas_kernels.gated_activation.op import OP
from jaxserve.pallas_kernels.gated_activation.shapes import cases


def main() -> None:
    """Command line: a JSON line for every shape."""
    _bench.main(OP, cases)


if __name__ == "__main__":
    main()
