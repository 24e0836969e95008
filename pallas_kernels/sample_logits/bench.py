"""Times sample_logits: `python -m jaxserve.pallas_kernels.sample_logits.bench --help`."""

from jaxserve.pallas_kernels import _bench
from jaxserve.pallas_kernels.sample_logits.op import OP
from jaxserve.pallas_kernels.sample_logits.shapes import cases


def main() -> None:
    """Command line: a JSON line for every shape."""
    _bench.main(OP, cases)


if __name__ == "__main__":
    main()
