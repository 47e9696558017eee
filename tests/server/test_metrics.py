"""What Prometheus is told, the dashboard that shows it, and the load generator."""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cairn.engine.request import Request
from cairn.engine.sampling_params import SamplingParams
from cairn.memory.geometry import PageGeometry
from cairn.server.metrics import Metrics
from cairn.server.page_reads import PageReads
from cairn.server.wire import Stats
from cairn.sparsity.config import ALL_ROWS, SparseConfig
from cairn.sparsity.policy import PolicyShape
from cairn.sparsity.registry import make_policy
from tests.server.process import ServerProcess

ROOT = Path(__file__).parents[2]


def read(server: ServerProcess) -> dict[str, float]:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        sample.name + "".join(f"|{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_metrics_count_what_happened(server: ServerProcess) -> None:
    server.wait_until_idle()
    before = read(server)
    body = {"prompt": "m" * 200, "max_tokens": 10, "ignore_eos": True}
    for _ in range(2):
        assert server.post("/v1/completions", json=body).status_code == 200
    steps = before["cairn_engine_steps_total"]
    while read(server)["cairn_engine_steps_total"] < steps + 20:
        pass  # the engine reports four times a second
    server.wait_until_idle()
    after = read(server)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["cairn_generated_tokens_total"] == 20
    assert grown["cairn_prompt_tokens_total"] == 400
    assert grown["cairn_choices_total|length"] == 2
    assert grown["cairn_time_to_first_token_seconds_count"] == 2
    assert grown["cairn_time_between_tokens_seconds_count"] == 18
    assert grown["cairn_answer_seconds_count"] == 2
    assert grown["cairn_http_requests_total|/v1/completions|200"] == 2
    assert grown["cairn_prefix_lookup_tokens_total"] >= 400
    assert grown["cairn_prefix_hit_tokens_total"] >= 190
    # Rows at 200 and more have 13 pages of 16 behind them: 2 or 3 in the window, 4 selected.
    assert 0.4 < grown["cairn_read_pages_total"] / grown["cairn_held_pages_total"] < 0.6
    parts = ("scheduler", "model", "messages", "text")
    assert all(grown[f"cairn_step_seconds_total|{part}"] > 0 for part in parts)
    gaps = [value for name, value in grown.items() if "between_tokens_seconds_bucket" in name]
    assert gaps == sorted(gaps) and gaps[-1] == 18  # cumulative, the last of them all
    assert grown["cairn_time_between_tokens_seconds_sum"] > 0
    states = [after[f"cairn_pages|full|{state}"] for state in ("free", "cached", "owned")]
    assert states[2] == 0 and states[1] > 0
    compiled = [after[f"cairn_kernel_compilations_total|{phase}"] for phase in ("start", "serving")]
    assert compiled == [0, 0]  # on a CPU
    assert after["cairn_ready"] == 1
    assert after["cairn_running_requests"] == after["cairn_waiting_requests"] == 0


def test_compilations_are_told_by_phase_and_go_on_across_engines() -> None:
    zeros: dict[str, Any] = {name: 0 for name in Stats.__struct_fields__ if name != "tier"}
    first, second = (
        Stats(**{**zeros, "pages": [], "start_compilations": start, "serving_compilations": late})
        for start, late in ((40, 1), (38, 2))
    )
    metrics = Metrics()
    metrics.engine_lost(first)
    metrics.stats = second
    text = metrics.write().decode()
    assert 'cairn_kernel_compilations_total{phase="start"} 78.0' in text
    assert 'cairn_kernel_compilations_total{phase="serving"} 3.0' in text


def test_pages_read_are_those_of_each_token() -> None:
    sparse = SparseConfig(
        policy=make_policy("quest", PolicyShape(4, 2, 8, 1.0)),
        layers=(0,),
        topk=2,
        window=24,
        strategy="softmax_head",
        fusion="lse",
        dense_below=40,
        dense_prompt_below=ALL_ROWS,
    )
    for tokens_per_page in (15, 16):
        geometry = PageGeometry(16, tokens_per_page)
        requests = [
            Request(str(n), array("q", [0] * n), SamplingParams(), 0, 999) for n in range(2, 200)
        ]
        for request in requests:
            request.prompt_len = 60  # the rest is generated
        reads = PageReads(sparse, geometry)
        reads.count([], [])  # a step in which nothing was sampled
        reads.count(requests, [1] * len(requests))
        read = held = 0
        for request in requests:
            known = len(request.token_ids)
            row = geometry.rows(known - 2)
            window = 0 if known - 2 < 60 else sparse.window_start(row, 16)
            held += row // 16 + 1
            read += row // 16 + 1 - window + min(2, window)
            assert reads.of_token({}, known - 1, request).window_page == window
        assert (reads.read, reads.held) == (read, held)
        requests[-1].dense = True
        assert reads.of_token({}, 150, requests[-1]).window_page == 0


def test_the_dashboard_asks_for_what_there_is(server: ServerProcess) -> None:
    known = set(re.findall(r"^(cairn_\w+)", server.get("/metrics").text, re.MULTILINE))
    known |= {name.removesuffix("_total") for name in known}
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = set()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            asked |= set(re.findall(r"cairn_\w+", target["expr"]))
    assert len(asked) > 12
    assert asked <= known, asked - known


def test_the_host_tier_is_told_too(model_folder: Path, tmp_path: Path) -> None:
    flags = ("--enable-hisparse", "--page-size=16", "--hsa-topk=2", "--hsa-window=16")
    sizes = ("--kv-cache-gib=0.001", '--hisparse-config={"host_gib": 0.01}')
    with ServerProcess(model_folder, tmp_path / "log", *flags, *sizes) as server:
        body = {"prompt": "m" * 1500, "max_tokens": 100, "ignore_eos": True}
        assert server.post("/v1/completions", json=body).status_code == 200
        stats = server.wait_until_idle()
        found = read(server)
        tier = stats["tier"]
        places = {"resident": "resident", "hot": "hits", "host": "misses"}
        for place, name in places.items():
            assert found[f"cairn_tier_reads_total|{place}"] == tier[name] > 0
        assert found["cairn_tier_bytes_total|out"] == tier["bytes_out"] > 0
        assert found["cairn_tier_stall_seconds_total"] > 0
        states = {name: found[f"cairn_tier_pages|{name}"] for name in tier["pages"]}
        assert states["host_only"] > 0 and states["backing"] == 0
        assert sum(states.values()) == stats["pages"][0][1]
        assert server.get("/stats").json()["engine"]["notes"]
