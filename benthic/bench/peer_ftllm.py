"""Run by the interpreter of the peer's own environment: ftllm on a checkpoint, one thread, one JSON line at the end.

python peer_ftllm.py FOLDER PROMPT_TOKENS NEW_TOKENS REPEATS SEED
"""

import json
import random
import sys
from statistics import median
from time import perf_counter

from ftllm import llm  # pyright: ignore[reportMissingImports]


def main() -> None:
    folder = sys.argv[1]
    prompt, tokens, repeats, seed = (int(word) for word in sys.argv[2:])
    llm.set_cpu_threads(1)
    llm.set_device_map("cpu")
    llm.set_device_map("cpu", True)
    model = llm.model(folder, dtype="bfloat16")
    draw = random.Random(seed)

    def once(length: int, new: int) -> tuple[float, float]:
        """Prompt tokens a second to the first token, and tokens a second after it."""
        ids = [draw.randrange(64, 4000) for _ in range(length)]
        started = perf_counter()
        times = [perf_counter() - started for _ in model.stream_response_raw(ids, max_length=new, do_sample=False)]
        if len(times) < 2:  # it ended at once, with an end token
            return length / times[0], 0.0
        return length / times[0], (len(times) - 1) / (times[-1] - times[0])

    once(8, 4)
    runs = [once(prompt, tokens) for _ in range(repeats)]
    decode = [rate for _, rate in runs if rate]
    found = {"peer": "ftllm", "prefill": median(rate for rate, _ in runs), "decode": median(decode or [0.0])}
    print(json.dumps(found), flush=True)


main()
