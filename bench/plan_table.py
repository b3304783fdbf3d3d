"""The table of docs/accelerators.md: `quire plan` for three models on slices of four chips.

    python bench/plan_table.py              # print it
    python bench/plan_table.py --write      # put it into docs/accelerators.md

Every figure is what `quire plan --no-compile --json -` printed. No accelerator and no compiler is needed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "accelerators.md"
BEGIN, END = "<!-- bench/plan_table.py -->", "<!-- end -->"
SLICES = {
    "Llama-3.1-8B": ("v5e:2x2", "v6e:1x1", "v6e:2x2", "tpu7x:2x2x1", "h100:1"),
    "Qwen3-32B": ("v5e:2x4", "v6e:2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:2"),
    "Llama-3.1-70B": ("v5e:4x4", "v6e:2x4", "v6e:4x4", "tpu7x:2x2x1", "h100:4", "h100:8"),
}
HEADS = (
    "model",
    "slice",
    "weights",
    "pool",
    "temporaries",
    "headroom",
    "sequences of 8,192",
    "decode, tokens/s",
    "limited by",
    "prefill, tokens/s",
    "limited by",
)


def plan(model: str, topology: str) -> dict[str, Any]:
    """What the command prints as JSON."""
    config = ROOT / "bench" / "configs" / f"{model}.json"
    command = [
        sys.executable,
        "-m",
        "quire",
        "plan",
        str(config),
        "--topology",
        topology,
        "--no-compile",
        "--json",
        "-",
    ]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    if out.returncode > 1:
        raise SystemExit(f"{model} on {topology}: {out.stderr}")
    return json.loads(out.stdout.splitlines()[-1])


def row(model: str, topology: str) -> str:
    """One line of the table."""
    found = plan(model, topology)
    if not found["fits"]:
        raise SystemExit(f"{model} does not fit on {topology}; take it out of SLICES")
    sizes = [f"{found[f'{name}_bytes_per_chip'] / 2**30:.2f}" for name in ("weights", "pool", "temp", "headroom")]
    decode = next(entry for entry in found["decode"] if entry["rows"] == found["max_num_seqs"])
    speeds = [f"{found['decode_tokens_per_s']:,.0f}", decode["limit"]]
    speeds += [f"{found['prefill_tokens_per_s']:,.0f}", found["prefill"]["limit"]]
    return f"| {' | '.join([model, topology, *sizes, f'{found["sequences_by_context"]["8192"]:,}', *speeds])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    lines += [row(model, topology) for model, slices in SLICES.items() for topology in slices]
    table = "\n".join(lines)
    if not write:
        print(table)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


if __name__ == "__main__":
    main()
