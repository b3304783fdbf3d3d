"""What a change does to speed: two checkouts of Quire in turn, on the same prompts.

    python bench/versions.py MODEL --before ../before [--rows 1 8 32 64] [--prompt-len 64] [--new-tokens 64]

Both run as peers (see `bench/peers/quire_peer.py`): processes of their own with the same settings. `quire bench
--against` would compare a process that also sends and checks prompts with one that does not. A third process, again of
this checkout, is the control: its ratio would be 1 without noise. With `--new-tokens 1` it measures prompts.

The other checkout needs the native library in its place. Prints medians, and ratios with their quartiles.
"""

import argparse
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from quire.bench.measure import Peer

HERE = Path(__file__).parents[1]


def command(checkout: Path, args: argparse.Namespace) -> str:
    """The command line of a peer that imports a checkout."""
    limits = f"--max-rows {max(args.rows)} --max-len {args.prompt_len + args.new_tokens}"
    program = f"{sys.executable} {HERE}/bench/peers/quire_peer.py"
    return f"env PYTHONPATH={checkout.resolve()}/src {program} {args.model} {limits}"


def main() -> None:
    """Start the peers and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9, help="after one to warm up (9)")
    args = parser.parse_args()
    checkouts = {"before": args.before, "this": HERE, "control": HERE}
    rng = np.random.default_rng(0)
    with ExitStack() as stack:
        peers = {name: stack.enter_context(Peer(command(path, args))) for name, path in checkouts.items()}
        for rows in args.rows:
            speeds: dict[str, list[float]] = {name: [] for name in peers}
            for turn in range(args.repeats + 1):
                prompts = rng.integers(500, 5_000, size=(rows, args.prompt_len)).tolist()
                first = turn % len(peers)
                for name in (*list(peers)[first:], *list(peers)[:first]):
                    seconds = peers[name].generate(prompts, args.new_tokens)
                    if turn:
                        tokens = args.new_tokens if args.new_tokens > 1 else args.prompt_len
                        speeds[name].append(rows * tokens / seconds)
            shown = "  ".join(f"{name} {statistics.median(values):,.1f}" for name, values in speeds.items())
            ratios = "  ".join(f"{name}/before {ratio(speeds[name], speeds['before'])}" for name in ("this", "control"))
            print(f"rows {rows}: tokens/s {shown}  {ratios}", flush=True)


def ratio(ours: list[float], theirs: list[float]) -> str:
    """The ratio of the medians, and the quartiles of the turns' ratios."""
    low, _, high = statistics.quantiles((a / b for a, b in zip(ours, theirs, strict=True)), n=4)
    return f"{statistics.median(ours) / statistics.median(theirs):.3f} ({low:.3f}..{high:.3f})"


if __name__ == "__main__":
    main()
