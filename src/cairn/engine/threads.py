"""`threads=auto`: measures with how many threads the model's products are fastest, once, at start.

The most threads are not always the fastest. Threads that share a core (hyper-threading) compete for
its units, and beside other busy processes each product waits for the thread that runs last.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import median

import torch

from cairn.errors import ConfigError
from cairn.models.interface import LanguageModel
from cairn.models.layers import Linear

_MATRICES, _ROUNDS = 48, 9
_GAIN = 0.95  # more threads must take at most this share of the time that fewer take


def check_auto(device: torch.device) -> None:
    if device.type != "cpu":
        raise ConfigError(
            "threads is 'auto', which measures products on a CPU, and the device is "
            f"{device.type}; give a number, or leave it out"
        )


def choose_threads(model: LanguageModel) -> str:
    """Set the number of threads for one row at a time. Returns a note about the choice."""
    most = torch.get_num_threads()
    counts = sorted({max(1, most >> shift) for shift in range(most.bit_length())})
    linears = (module for _, module in model.named_modules() if isinstance(module, Linear))
    matrices = list(islice(linears, _MATRICES))
    if not matrices:
        return f"threads: {most}, not measured; auto measures models of Cairn's own"
    rows = [matrix.weight.new_ones(1, matrix.in_features) for matrix in matrices]
    times: dict[int, list[float]] = {count: [] for count in counts}
    with torch.inference_mode():
        for _ in range(_ROUNDS):  # in turn: all meet the same state of the machine
            for count in counts:
                torch.set_num_threads(count)
                begin = time.perf_counter()
                for matrix, row in zip(matrices, rows, strict=True):
                    matrix(row)
                times[count].append(time.perf_counter() - begin)
    chosen = fastest(times)
    torch.set_num_threads(chosen)
    measured = ", ".join(f"{count}: {1e3 * median(times[count]):.2f} ms" for count in counts)
    return f"threads: {chosen} of {most}; {len(matrices)} products take {measured}"


def fastest(times: Mapping[int, Sequence[float]]) -> int:
    """The number of threads with the least median time; of about equal ones the smallest."""
    best, *others = sorted(times)
    for count in others:
        if median(times[count]) < _GAIN * median(times[best]):
            best = count
    return best
