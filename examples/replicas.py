"""N copies of `cairn serve` behind a cache-aware router, on one machine.

    pip install -e '.[server,grammar,router]'      # or, for smg: pip install smg
    python examples/replicas.py --model smollm2
    python examples/replicas.py --router smg --replicas 4 --gpus --model Qwen/Qwen3-0.6B

What is not an option of this script goes to `cairn serve`. Ctrl-C stops everything.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

ROUTERS = {
    "sglang": ("sglang_router.launch_router",),
    "smg": ("smg", "launch"),
}
# A dead replica is out after two failed checks, a second apart, and a request is tried again for
# five. sglang-router's breaker stays off: it takes refused requests (400) for failures.
FAILOVER = (
    "--disable-circuit-breaker",
    "--health-check-interval-secs=1",
    "--health-failure-threshold=2",
    "--health-success-threshold=1",
    "--retry-max-retries=8",
    "--retry-initial-backoff-ms=100",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--router", choices=ROUTERS, default="sglang")
    parser.add_argument("--port", type=int, default=8000, help="The router's; replicas follow it.")
    parser.add_argument("--gpus", action="store_true", help="A GPU for each replica.")
    options, flags = parser.parse_known_args()

    ports = [options.port + 1 + number for number in range(options.replicas)]
    started: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # then `finally` runs, as after Ctrl-C
    try:
        for number, port in enumerate(ports):
            environment = dict(os.environ)
            if options.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = str(number)
            command = [sys.executable, "-m", "cairn.cli.main", "serve", f"--port={port}", *flags]
            started.append(subprocess.Popen(command, env=environment))
        workers = [f"http://127.0.0.1:{port}" for port in ports]
        for worker, process in zip(workers, started, strict=True):
            wait_for(f"{worker}/health", process)
        router = [
            *(sys.executable, "-m", *ROUTERS[options.router], "--policy=cache_aware"),
            *("--host=127.0.0.1", f"--port={options.port}", *FAILOVER, "--worker-urls", *workers),
            # The port of the router's own metrics: the default is the same for all on a machine.
            f"--prometheus-port={ports[-1] + 1}",
        ]
        started.append(subprocess.Popen(router))
        wait_for(f"http://127.0.0.1:{options.port}/health", started[-1])
        print(f"{options.replicas} replicas at http://127.0.0.1:{options.port}/v1", flush=True)
        return started[-1].wait()
    except KeyboardInterrupt:
        return 0
    finally:
        for process in started:
            process.terminate()  # replicas complete what they have begun
        for process in started:
            process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until it answers 200: a replica is listening before its model is loaded."""
    while True:
        if process.poll() is not None:
            raise SystemExit(f"{url}: its process ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)


if __name__ == "__main__":
    raise SystemExit(main())
