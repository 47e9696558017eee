"""How fast an engine on the CPU is alone and beside other busy processes, by how its threads wait.

One process for each setting of the environment, with the model loaded; `cairn` is the one that
Cairn chooses. They take turns, alone and then beside one busy loop per core, so that all meet the
same machine. Prints the median of all rounds and their range.

python benchmarks/beside_busy.py --setting GOMP_SPINCOUNT=300000 --setting OMP_WAIT_POLICY=passive
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from cairn import LLM


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--prompt", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--output", type=int, default=48, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--busy", type=int, default=os.cpu_count(), metavar="LOOPS")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)


def work(arguments: argparse.Namespace) -> None:
    """Print one line of results for every line on standard input."""
    with LLM(
        arguments.model,
        device="cpu",
        load_format=arguments.load_format,
        threads=arguments.threads,
        disable_radix_cache=True,
        max_running_requests=1,
    ) as llm:
        prompt = [(7 * i) % 1000 + 3 for i in range(arguments.prompt)]
        llm.generate(prompt[:32], max_tokens=8, ignore_eos=True)
        print("ready", flush=True)
        for _ in sys.stdin:
            begin, spent = time.perf_counter(), time.process_time()
            llm.generate(prompt, max_tokens=1, ignore_eos=True)
            middle, slept = time.perf_counter(), sleeps()
            llm.generate(prompt[:32], max_tokens=arguments.output, ignore_eos=True)
            end, after = time.perf_counter(), time.process_time()
            found = {
                "tok/s": arguments.output / (end - middle),
                "prompt, s": middle - begin,
                "CPU, s": after - spent,
                "sleeps/token": (sleeps() - slept) / arguments.output,
            }
            print(json.dumps(found), flush=True)


def sleeps() -> int:
    """How often a thread of this process has gone to sleep."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def compare(arguments: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        workers = {}
        for setting in ("cairn", *arguments.setting):
            name, assigned, value = setting.partition("=")
            worker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **({name: value} if assigned else {})},
            )
            workers[setting] = stack.enter_context(worker)
            answer(worker)
        for _ in range(arguments.rounds):
            for state, loops in (("alone", 0), ("beside", arguments.busy)):
                for setting, worker in workers.items():
                    with busy(loops):
                        assert worker.stdin is not None
                        print("go", file=worker.stdin, flush=True)
                        row = json.loads(answer(worker))
                    print(f"{setting} {state}: {row}", file=sys.stderr, flush=True)
                    found.setdefault((setting, state), []).append(row)
    for (setting, state), rows in found.items():
        columns = {field: [row[field] for row in rows] for field in rows[0]}
        shown = (
            f"{field} {statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"
            for field, values in columns.items()
        )
        print(f"{setting:24} {state:6}  {'  '.join(shown)}")


def answer(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise SystemExit("a process that measures has ended; see above")
    return line


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
