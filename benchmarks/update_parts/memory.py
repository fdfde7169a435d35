"""The peak memory of one update, in this process of its own: python -m update_parts.memory SPEC.json.

SPEC: `recipe` (a file), `rows` (a file), `copies` of them, `pack_tokens`, and `micro_batch` (null: packed). Prints
`loaded_gb`, the resident memory with both models loaded, and `peak_gb`, by how much the update rises over it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from midflight.recipe import load_recipe

from .measures import peak_increase
from .ours import load_bench, packed_update
from .padded import padded_update
from .rows import copies, load_rows


def main(file: Path) -> None:
    spec = json.loads(file.read_text(encoding="utf-8"))
    bench = load_bench(load_recipe(spec["recipe"]))
    rows = copies(load_rows(Path(spec["rows"])), spec["copies"])

    def run() -> None:
        if spec["micro_batch"] is None:  # copies have other prompts, so other log-probs than were drawn
            packed_update(bench, rows, pack_tokens=spec["pack_tokens"], max_drift=1e9)
        else:
            padded_update(bench, rows, spec["micro_batch"], bench.merged, bench.settings.max_grad_norm)

    loaded, peak = peak_increase(run)
    print(json.dumps({"loaded_gb": loaded, "peak_gb": peak}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
