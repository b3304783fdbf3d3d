"""`quire`, with a device that fails when a file says so: `python -m tests.server.faulty serve MODEL ...`.

The file named by FAULT_FILE holds one word and is removed when it has been obeyed: `raise` fails a step before it
reaches the device, `lose` fails inside the program, so that the donated cache is gone, `hang` never comes back.
"""

import os
import sys
import time
from pathlib import Path

import jax

from quire.cli import main
from quire.device.runner import ModelRunner

FAULTS = Path(os.environ["FAULT_FILE"])
run = ModelRunner.run


def faulty_run(self, inputs):
    if FAULTS.exists():
        fault = FAULTS.read_text()
        FAULTS.unlink()
        if fault == "raise":
            raise RuntimeError("injected before dispatch")
        if fault == "lose":
            jax.tree.map(lambda array: array.delete(), self._caches)
            raise RuntimeError("injected inside the program")
        if fault == "hang":
            time.sleep(3600)
    return run(self, inputs)


ModelRunner.run = faulty_run

if __name__ == "__main__":
    sys.exit(main())
