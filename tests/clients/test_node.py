"""The openai package of npm, where node and the package are installed (npm install here)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.process import ServerProcess

_HERE = Path(__file__).parent
_SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({baseURL: process.env.URL + "/v1", apiKey: "unused"});
const model = process.env.MODEL;
const messages = [{role: "user", content: "Where is the cairn?"}];
const options = {model, messages, max_completion_tokens: 12, temperature: 0};
const whole = await client.chat.completions.create(options);
let said = "";
for await (const part of await client.chat.completions.create({...options, stream: true})) {
  said += part.choices[0]?.delta?.content ?? "";
}
if (said !== whole.choices[0].message.content) throw new Error("the stream differs");
const asked = {model, input: "Where is the cairn?", max_output_tokens: 12, temperature: 0};
const response = await client.responses.create(asked);
let text = "";
for await (const event of await client.responses.create({...asked, stream: true})) {
  if (event.type === "response.output_text.delta") text += event.delta;
}
if (text !== response.output_text || text !== said) throw new Error("the response differs");
const found = await client.embeddings.create({model, input: ["one", "two"]});
if (found.data.length !== 2) throw new Error("an embedding is missing");
"""


def test_the_npm_package(server: ServerProcess, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (_HERE / "node_modules" / "openai").exists():
        pytest.skip("needs node, and npm install in tests/clients")
    script = _HERE / "node_modules" / "client.mjs"
    script.write_text(_SCRIPT)
    environment = {**os.environ, "URL": server.url, "MODEL": server.model}
    done = subprocess.run(
        [node, str(script)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
