"""Seeds of random histories: new ones for each commit, and each night, that a failure prints to be repeated."""

import subprocess
import time
from pathlib import Path


def default_seed() -> int:
    """A number of the commit that is tested; of the day where there is no repository."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return int(done.stdout[:8], 16) if done.returncode == 0 else int(time.strftime("%Y%m%d", time.gmtime()))
