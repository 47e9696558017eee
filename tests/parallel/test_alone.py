"""An engine on one rank has nothing to do with several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import TINY_LLAMA, write_model


@pytest.mark.slow
def test_one_rank_imports_nothing_of_several(tmp_path: Path) -> None:
    folder = write_model(tmp_path, TINY_LLAMA)
    script = (
        "import sys\n"
        "from cairn import LLM\n"
        f"with LLM({str(folder)!r}, device='cpu') as llm:\n"
        "    llm.generate([5, 6], max_tokens=2)\n"
        "print([name for name in sys.modules if 'cairn' in name and 'rank' in name])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ran.stdout == "[]\n"
