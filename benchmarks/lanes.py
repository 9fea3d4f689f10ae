"""What each transport carries between two processes of this host, by ``disagg-kv doctor --between``, with the machine.

python -m benchmarks.lanes --json benchmarks/results/cpu_lanes.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import attrs

from bench.machine import Machine

DOCTOR = (sys.executable, "-c", "from disagg_kv.cli.main import main; main()", "doctor", "--between", "--json")


def main() -> None:
    """Run the command and write its document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    load, began = os.getloadavg()[0], time.monotonic()
    done = subprocess.run([*DOCTOR, "--device", given.device], stdout=subprocess.PIPE, text=True, check=True)
    found = {"seconds": time.monotonic() - began, "load_before": load, **json.loads(done.stdout)}
    for side in ("from", "to"):
        for name in ("host", "where"):
            del found[side][name]  # the name of a machine is no result
    given.json.write_text(json.dumps({"machine": attrs.asdict(Machine.here()), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
