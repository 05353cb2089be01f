"""Makes layer_plan.json: the plan of the release and of the tiny configuration, from the table of section 1.5 by hand.

    python -m tests.golden.make_layer_plan

Each row: layers, kind, ratio, KV of, index keys of, top-k of, candidates of. Nothing here reads a configuration.
"""

import json
from pathlib import Path

RELEASE = [
    ([0, 1], "window", 0, None, None, None, None),
    ([2], "full", 2, 2, 2, 2, None),
    (range(3, 8), "reuse", 2, 2, None, 2, None),
    ([8], "full", 2, 8, 8, 8, None),
    (range(9, 14), "reuse", 2, 8, None, 8, None),
    ([14], "full", 2, 14, 14, 14, None),
    (range(15, 20), "reuse", 2, 14, None, 14, None),
    ([20], "full", 1, 20, 20, 20, None),
    (range(21, 24), "reuse", 1, 20, None, 20, None),
    ([24], "reindex", 1, 20, 20, 24, 20),
    (range(25, 28), "reuse", 1, 20, None, 24, None),
    ([28], "reindex", 1, 20, 20, 28, 20),
    (range(29, 32), "reuse", 1, 20, None, 28, None),
    ([32], "reindex", 1, 20, 20, 32, 20),
    (range(33, 36), "reuse", 1, 20, None, 32, None),
    ([36], "reindex", 1, 20, 20, 36, 20),
    (range(37, 40), "reuse", 1, 20, None, 36, None),
]
TINY = [
    ([0, 1], "window", 0, None, None, None, None),
    ([2], "full", 2, 2, 2, 2, None),
    ([3], "reuse", 2, 2, None, 2, None),
    ([4], "full", 2, 4, 4, 4, None),
    ([5], "reuse", 2, 4, None, 4, None),
    ([6], "full", 1, 6, 6, 6, None),
    ([7], "reuse", 1, 6, None, 6, None),
    ([8], "reindex", 1, 6, 6, 8, 6),
    ([9], "reuse", 1, 6, None, 8, None),
]
MODELS = {"v41_flash": (RELEASE, 128, {1: 0, 14: 1}, 20), "tiny": (TINY, 64, {1: 0, 4: 1}, 6)}


def make() -> str:
    out = {}
    for name, (table, window, engram, split) in MODELS.items():
        out[name] = [
            {
                "index": layer,
                "kind": kind,
                "ratio": ratio,
                "window": window,
                "kv_from": kv,
                "keys_from": keys,
                "topk_from": topk,
                "candidates_from": candidates,
                "makes_candidates": layer == split,
                "engram": engram.get(layer),
                "decoder": layer >= split,
            }
            for layers, kind, ratio, kv, keys, topk, candidates in table
            for layer in layers
        ]
    parts = [f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]" for name, rows in out.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    Path(__file__).with_name("layer_plan.json").write_text(make())
