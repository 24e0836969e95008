"""`jaxserve serve` in a process of its own that writes down, when it ends, what it imported and compiled.

python -m tests.e2e.serve_process REPORT ARTIFACT [flags of serve]
"""

import json
import pathlib
import sys

from jaxserve.cli import main
from jaxserve.serving.runner import CompileCounter

if __name__ == "__main__":
    report, *arguments = sys.argv[1:]
    counter = CompileCounter()
    code = main(["serve", *arguments])
    pathlib.Path(report).write_text(json.dumps({"modules": sorted(sys.modules), "compilations": counter.count}))
    sys.exit(code)
