from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from cairn import LLM, EngineConfig
from cairn.cli.main import main
from tests.helpers import TINY_LLAMA, byte_tokenizer, write_model
from tests.patience import PATIENCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli-model")
    write_model(path, {**TINY_LLAMA, "vocab_size": 256, "max_position_embeddings": 200_000})
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def test_generate_prints_the_text_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--page-size", "16", "--kv-cache-gib", "0.01"]
    code = main(
        ["generate", "hello", "--model", str(folder), "--max-tokens", "8", "--temperature", "0.5",
         "--seed", "7", "--ignore-eos", *arguments]
    )  # fmt: skip
    assert code == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    with LLM(folder, device="cpu", page_size=16, kv_cache_gib=0.01, seed=7) as llm:
        result = llm.generate("hello", max_tokens=8, temperature=0.5, ignore_eos=True)
    assert printed.out == f"{result.text}\n"


def test_every_option_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = capsys.readouterr().out
    for option in fields(EngineConfig):
        assert "--" + option.name.replace("_", "-") in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--page", "16"], "--page"),
        (["--device", "tpu"], "tpu"),
        (["--max-tokens", "many"], "many"),
    ],
)
def test_unknown_flags_and_values_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(["generate", "hello", *arguments])
    assert exit_code.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line and line.endswith(" --help")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "nowhere"], "'nowhere' is no folder, no .gguf file"),
        (["--model", "MODEL", "--temperature", "-1"], "temperature is -1.0"),
        (["--model", "MODEL", "--top-p", "0"], "top_p is 0.0"),
        (["--model", "MODEL", "--kv-cache-gib", "1e-9"], "holds no page"),
        (["--model", "MODEL", "--kv-cache-gib", "1e6"], "kv_cache_gib is 1e+06 and"),
    ],
)
def test_errors_go_to_stderr_with_code_2(
    folder: Path, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(folder) if a == "MODEL" else a for a in arguments]
    assert main(["generate", "hello", "--device", "cpu", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert named in printed.err
    assert printed.err.startswith("cairn: error: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_no_traceback(folder: Path) -> None:
    command = [sys.executable, "-m", "cairn.cli.main", "generate", "hello", "--model", str(folder)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "--device", "cpu"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "cairn: error: [Errno 28] No space left on device\n"


def test_doctor_tells_versions_devices_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["torch"]
    assert report["devices"][0]["name"] == "cpu"
    assert report["attention_backends"]["torch"] == {"available": True, "reason": None}
    available = {name for name, state in report["features"].items() if state["available"]}
    assert available - {"quantised weights"} == {"hsa", "server", "grammar"}
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "torch" in printed and "response_format, tools" in printed


def test_doctor_tells_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["doctor", "--json"]) == 0
    features = json.loads(capsys.readouterr().out)["features"]
    assert "no C++ compiler" in features["quantised weights"]["reason"]
    state = features["grammar"]
    assert state["reason"] == "llguidance not installed; pip install 'cairn-llm[grammar]'"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "nowhere"], "model 'nowhere' is no folder"),
        (["--model", "MODEL", "--kv-cache-gib", "1e6"], "kv_cache_gib is 1e+06 and"),
    ],
)
def test_serve_tells_once_why_it_cannot_start(
    folder: Path, arguments: list[str], named: str
) -> None:
    arguments = [str(folder) if a == "MODEL" else a for a in arguments]
    command = [sys.executable, "-m", "cairn.cli.main", "serve", "--port", "0", "--device", "cpu"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"cairn: error: {named}")


def test_ctrl_c_is_a_clean_end(folder: Path) -> None:
    command = [sys.executable, "-m", "cairn.cli.main", "generate", "hello", "--model", str(folder)]
    options = ["--device", "cpu", "--max-tokens", "100000", "--ignore-eos"]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(4)  # it is generating
    process.send_signal(signal.SIGINT)
    while process.stdout.read(65536):
        pass
    assert process.wait(PATIENCE) == 130
    assert process.stderr.read().decode() == "cairn: interrupted\n"
    process.stdout.close()
    process.stderr.close()
