"""Runs in the environment of .ci/ray-env: a dataset through engines on two workers.

Prints one JSON object: which rows equal what one engine alone generates, and the errors of those that are wrong.
"""

import json
import math
import tempfile
from pathlib import Path

from tests.ray.client import CASES, MAX_TOKENS, expected_tokens
from tests.ray.cluster import FEW, KNOBS, cluster
from tests.server.tiny_folder import write_tiny_folder


def main() -> dict:
    import ray

    from quire import SamplingParams
    from quire.integrations.ray import QuireProcessor

    with tempfile.TemporaryDirectory() as temporary, cluster():
        folder = write_tiny_folder(Path(temporary) / "tiny")
        expected = expected_tokens(folder)
        rows = [
            {"id": i, "prompt": prompt, "sampling_params": {"seed": seed}} for i, (prompt, seed) in enumerate(CASES)
        ]
        rows.insert(5, {"id": 100, "prompt": "x" * 5000, "sampling_params": {"seed": 0}})
        rows.insert(9, {"id": 101, "prompt": "what", "sampling_params": {"seed": -1}})
        ds = ray.data.from_items(rows, override_num_blocks=4).map_batches(
            QuireProcessor,
            fn_constructor_kwargs={"model": str(folder), "params": SamplingParams(max_tokens=MAX_TOKENS, logprobs=0)}
            | KNOBS,
            concurrency=2,
            batch_size=8,
            **FEW,
        )
        done = {row["id"]: row for row in ds.take_all()}
        return {
            "rows": len(done),
            "equal": sum(list(done[i]["generated_token_ids"]) == tokens for i, tokens in enumerate(expected)),
            "scored": sum(
                len(done[i]["logprobs"]) == len(tokens) and all(map(math.isfinite, done[i]["logprobs"]))
                for i, tokens in enumerate(expected)
            ),
            "errors": {i: row["error"] for i, row in done.items() if row["error"] is not None},
        }


if __name__ == "__main__":
    print(json.dumps(main()))
