"""Run ftllm on a checkpoint folder: one prompt, some greedy tokens, logits of each step.

A process of its own, since the library reads its settings from the environment once and prints as it loads.

Arguments: folder, output .npz, prompt ids as JSON, number of tokens.
"""

import ctypes
import json
import sys
from pathlib import Path

import numpy as np
from ftllm import llm  # pyright: ignore[reportMissingImports]

folder, output, prompt, steps = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
llm.set_cpu_threads(1)  # two make it 40 times slower
llm.set_device_map("cpu")
model = llm.model(folder, dtype="bfloat16")
vocab = json.loads((Path(folder) / "config.json").read_text())["text_config"]["vocab_size"]
num_stops, stops = model.stop_token_ctypes(None)
handle = llm.fastllm_lib.launch_response_llm_model(
    model.model, len(prompt), (ctypes.c_int * len(prompt))(*prompt), steps, 0, False, 1, 1, 1, 1, True, num_stops, stops
)
row = (ctypes.c_float * (vocab * 4))()
tokens: list[int] = []
logits: list[np.ndarray] = []
while (token := llm.fastllm_lib.fetch_response_logits_llm_model(model.model, handle, row)) >= 0:
    tokens.append(token)
    logits.append(np.array(row[:vocab], dtype=np.float32))
np.savez(output, tokens=tokens, logits=np.array(logits))
