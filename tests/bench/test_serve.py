"""`cairn bench serve`: servers under load."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cairn.bench.client_speed import client_speed
from cairn.bench.http_stream import HttpError, Reply
from cairn.bench.load import draw_requests, due_times, parse_load, redraw
from cairn.bench.spawned import Spawned, spawn
from cairn.bench.workloads import seeded
from cairn.cli.main import main
from tests.patience import PATIENCE, tries, wait_for_end


@pytest.mark.parametrize(
    ("spec", "count", "lengths", "outputs"),
    [
        ("64x1024-6144:100-300", 64, (1024, 6144), (100, 300)),
        ("16x30000:256", 16, (30_000, 30_000), (256, 256)),
        ("7:2", 1, (7, 7), (2, 2)),
        ("20,100,500:2+concurrency=1", 3, (20, 500), (2, 2)),
        ("8x100:5+prefix=50+rate=2.5", 8, (150, 150), (5, 5)),
    ],
)
def test_workloads_have_the_lengths_they_name(
    spec: str, count: int, lengths: tuple[int, int], outputs: tuple[int, int]
) -> None:
    load = parse_load(spec)
    (asked,) = cold = draw_requests(load, 0, 1000)
    (again,) = redraw(load, cold, 1, 1000)
    assert draw_requests(load, 0, 1000) == cold  # for every server
    assert len(asked) == count
    for requests in (asked, again):
        found = [len(one.prompt) for one in requests]
        assert lengths[0] <= min(found) and max(found) <= lengths[1]
        assert all(outputs[0] <= one.output_len <= outputs[1] for one in requests)
        assert all(0 <= token < 1000 for one in requests for token in one.prompt)
        (part,) = load.parts
        prefixes = {tuple(one.prompt[: part.prefix]) for one in requests}
        assert len(prefixes) == 1
    shapes = [[(len(one.prompt), one.output_len) for one in some] for some in (asked, again)]
    assert shapes[0] == shapes[1]
    assert all(a.prompt[:5] != b.prompt[:5] for a, b in zip(asked, again, strict=True))


def test_workloads_can_run_at_once_or_at_a_rate() -> None:
    load = parse_load(" 4x10:2   3x7:1+rate=100+prefix=2 ")
    assert load.spec == "4x10:2 3x7:1+rate=100+prefix=2"
    assert [[len(one.prompt) for one in part] for part in draw_requests(load, 0, 9)] == [
        [10] * 4,
        [9] * 3,
    ]
    at_once, paced = (due_times(part, 0) for part in load.parts)
    assert at_once == [0.0] * 4
    assert sorted(paced) == paced and paced[0] > 0 and paced[-1] < 1


def test_seeded_requests_can_be_served() -> None:
    (asked,) = draw_requests(parse_load("256x100-1024:100-1024"), 0, 10_001)
    published = seeded(256, 151_936)
    assert [one.prompt for one in asked] == published.prompts
    assert [one.output_len for one in asked] == published.output_lens


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "it is empty"),
        ("64", "'64' is not of the form COUNTxIN:OUT"),
        ("0x5:1", "COUNT is '0'; it must be a whole number from 1"),
        ("x5:1", "COUNT is ''"),
        ("3x:1", "IN is ''"),
        ("3x9-4:1", "IN is '9-4'; write the lower end first"),
        ("3x9:-1", "OUT is ''"),
        ("3x9:1.5", "OUT is '1.5'; it must be a whole number"),
        ("3x9,10:1", "IN is a list with one request for each length; remove COUNT"),
        ("3x9:1+prefix=", "prefix is ''"),
        ("3x9:1+rate=0", "rate is '0'; it must be a number above 0"),
        ("3x9:1+rate=1+concurrency=2", "concurrency and rate exclude each other; give one"),
        ("3x9:1+rate=1+rate=2", "rate is given twice"),
        ("3x9:1+burst=2", "'burst' is no option; choose among prefix, concurrency, rate"),
    ],
)
def test_bad_specs_are_named(spec: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--workload", spec, "--url", "http://127.0.0.1:9/v1"]) == 2
    error = capsys.readouterr().err
    assert message in error and "write it like 64x1024-6144:100-300" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "1:1"], "there is no server; add --spawn FLAGS"),
        (["--spawn", "x="], "there is no workload; add one like --workload 64x1024-6144:100-300"),
        (["--workload", "1:1", "--url", "nowhere"], "it must be like http://127.0.0.1:8000/v1"),
        (["--workload", "1:1", "--spawn", "a=--model 'x"], "close every quote"),
        (["--workload", "1:1", "--spawn", "a=--tp 1", "--spawn", "a=--tp 2"], "called 'a'"),
        (
            ["--workload", "1:1", "--spawn", "--model hils-345m-hd128 --load-format dummy"],
            "preset hils-345m-hd128 cannot be given a tokenizer",
        ),
        (["--workload", "1:1", "--spawn", "a=", "--json", "/nowhere/x"], "there is no such folder"),
        (["--client-speed", "--workload", "1:1"], "give it alone"),
    ],
)
def test_bad_loads_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_replies_are_taken_apart_with_the_moments_of_their_bytes() -> None:
    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    first = chunk(b'data: {"a": 1}\n\ndata: {"a"')
    rest = chunk(b": 2}\r\n\r\n") + chunk(b'data: {"a": 3}\n\ndata: [DONE]\n\n')
    raw = head + first + rest + b"0\r\n\r\n"
    one, two, three = (raw.index(mark) + len(mark) for mark in (b"1}\n", b"2}\r\n", b"3}\n"))
    for cut in range(1, len(raw)):
        reply = Reply([raw[:cut], raw[cut:]], [1.0, 2.0])
        expected = [(1.0 if end <= cut else 2.0) for end in (one, two, three)]
        found = list(reply.events())
        assert [moment for moment, _ in found] == expected
        assert [event["a"] for _, event in found] == [1, 2, 3]
        if cut < len(raw) - 4:
            with pytest.raises(HttpError, match=r"ends too early|without an answer"):
                list(Reply([raw[:cut]], [1.0]).events())
    refused = Reply([b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone"], [1.0])
    with pytest.raises(HttpError, match="404 none"):
        refused.body()


def test_the_client_measures_itself() -> None:
    found = client_speed(streams=8, events=50)
    assert found["events"] == 400 and 8 <= found["reads"] <= 8 + 400 + 8
    assert found["events_per_second"] > 0 and found["events_per_cpu_second"] > 0


def test_a_server_is_started_measured_twice_and_stopped(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    workloads = ["6x10-30:5-9", "20,100:2+concurrency=1 4x30:6+prefix=128", "3x8:4+rate=200"]
    arguments = [item for spec in workloads for item in ("--workload", spec)]
    flags = f"tiny=--model {folder} --device cpu --threads 1 --page-size 64"
    servers = [
        "--spawn",
        flags,
        "--spawn",
        "bad=--model /nowhere",
        "--url",
        "http://127.0.0.1:9/v1",
    ]
    more = ["--vocab-size", "256", "--json", str(output)]
    assert main(["bench", "serve", *arguments, *servers, *more]) == 1  # of the last two
    out, err = capfd.readouterr()
    record = json.loads(output.read_text())
    passes = record.pop("requests")
    assert json.loads(out.splitlines()[-1]) == record
    good, bad, silent = record["results"]
    first = good["workloads"][0]
    assert f"tiny, cold, {workloads[0]}: {first['seconds']:.2f} s, " in err
    assert good["server"] == "tiny" and good["model"] == folder.name and good["error"] is None
    assert good["seconds_to_ready"] > 0
    assert [(one["workload"], one["pass"]) for one in good["workloads"]] == [
        (spec, name) for name in ("cold", "warm") for spec in workloads
    ]
    for one in good["workloads"]:
        assert one["failed"] == 0 and one["seconds"] > 0 and one["output_tokens_per_second"] > 0
        assert 0 < one["first_token_ms_p50"] <= one["first_token_ms_p99"] < 1e3 * one["seconds"]
        if one["largest_gap_ms"] is not None:  # on a busy machine all tokens may arrive at once
            assert one["between_tokens_ms_p50"] <= one["largest_gap_ms"] < 1e3 * one["seconds"]
        # Nothing is cached but the prefix that requests of a part share, all but the first.
        shared = 3 * 128 if "prefix" in one["workload"] else 0
        assert one["cached_tokens"] == shared
    assert [[len(some) for some in passes[0][name]] for name in ("cold", "warm")] == [[6, 6, 3]] * 2
    alone = [one for one in passes[0]["warm"][1] if one["part"] == 0]
    assert [one["prompt_tokens"] for one in alone] == [20, 100]
    assert alone[1]["begin"] >= alone[0]["begin"] + alone[0]["total"]
    assert alone[0]["output_tokens"] == 2
    # Events of random bytes may be fewer than tokens, but each has its moment.
    assert all(len(one["gaps"]) < one["output_tokens"] for one in passes[0]["cold"][0])
    assert "tiny, cold" in out and "first token of 100 in, ms" in out
    # The other two have nothing to show but why.
    assert bad["error"] == "it ended with exit code 2 before it was ready"
    assert "model '/nowhere' is no folder" in err
    assert "does not answer with a list of models" in silent["error"]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    assert not any(str(folder).encode() in command for command in commands)


def test_a_server_that_dies_is_reported_with_its_output(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    bench = subprocess.Popen(
        [
            *(sys.executable, "-m", "cairn.cli.main", "bench", "serve", "--vocab-size=256"),
            *("--workload=1x10:1", "--workload=2x10:4000", f"--json={output}"),
            f"--spawn=tiny=--model {folder} --device cpu --threads 1",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with bench:
        assert bench.stderr is not None
        lines = []
        for line in bench.stderr:
            lines.append(line)
            if "tiny, cold, 1x10:1: " in line:
                pid = bench.pid
                (server,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                os.kill(int(server), signal.SIGKILL)
        assert bench.wait() == 1, lines
    printed = "".join(lines)
    assert "tiny failed: it ended with exit code -9; it printed:" in printed
    assert "Cairn serves" in printed.partition("it printed:")[2]
    (result,) = json.loads(output.read_text())["results"]
    first, second = result["workloads"]  # and no warm ones
    assert first["failed"] == 0 and second["failed"] == 2 and second["first_error"]


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def wait_for_streams(folder: Path) -> None:
    """Until a server that prints to a file in this folder answers requests."""
    (log,) = folder.glob("cairn-bench-*/output.txt")
    address = re.search(r"API: (http://[^/]+)", log.read_text())
    assert address is not None
    for _ in tries():
        stats = httpx.get(f"{address[1]}/stats", timeout=PATIENCE).json()["stats"]
        if stats is not None and stats["running"]:
            return
    raise AssertionError("no request was sent")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize("moment", ["starting tiny", "tiny is ready"])
def test_a_signal_to_the_benchmark_alone_stops_its_server(
    folder: Path, tmp_path: Path, moment: str, number: signal.Signals, code: int
) -> None:
    bench = subprocess.Popen(
        [
            *(sys.executable, "-m", "cairn.cli.main", "bench", "serve", "--vocab-size=256"),
            "--workload=1000x10:4000+concurrency=2",
            f"--spawn=tiny=--model {folder} --device cpu --threads 1",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with bench:
        assert bench.stderr is not None and bench.stdout is not None
        assert any(moment in line for line in bench.stderr)
        (server,) = children(bench.pid)
        processes = [server]
        if "ready" in moment:
            wait_for_streams(tmp_path)
            processes += children(server)
            assert len(processes) > 1
        bench.send_signal(number)
        assert bench.wait(PATIENCE) == code
        assert "Traceback" not in bench.stderr.read()
        assert bench.stdout.read() == ""  # no results
    for pid in processes:
        wait_for_end(pid)
    assert not list(tmp_path.glob("cairn-bench-*"))


def test_the_exit_code_of_a_stopped_server_is_known(folder: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with spawn([f"--model={folder}", "--device=cpu", "--threads=1"]) as server:
        server.wait_until_ready()
        assert server.stop() == 0
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def test_a_killed_process_has_no_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.bench.spawned._STOP_SECONDS", 0)
    process = subprocess.Popen(["sleep", "600"])
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # SIGTERM waits from now on
    assert Spawned(process, tmp_path / "output.txt").stop() is None
    assert process.returncode == -signal.SIGKILL
