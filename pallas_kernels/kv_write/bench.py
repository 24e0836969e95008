"""Times kv_write, in place: `python -m jaxserve.pallas_kernels.kv_write.bench --help`."""

from jaxserve.pallas_kernels import _bench
from jaxserve.pallas_kernels.kv_write.op import OP
from jaxserve.pallas_kernels.kv_write.shapes import cases


def main() -> None:
    """Command line: a JSON line for every shape."""
    _bench.main(OP, cases, _bench.donating_call)


if __name__ == "__main__":
    main()
