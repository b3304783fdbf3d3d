"""Run the blocks of docs/your-model.md, with its section on Flax or the one on Equinox."""

import json
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "your-model.md"


def main(library: str) -> None:
    sections = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    names = {"__name__": "your_model"}
    for title in ("The configuration", library, "Compare, sample, train"):
        for block in re.findall(r"```python\n(.*?)```", sections[title], re.DOTALL):
            exec(compile(block, f"{PAGE.name}: {title}", "exec"), names)
    print(json.dumps(str(names["verdict"])))


if __name__ == "__main__":
    main(sys.argv[1])
