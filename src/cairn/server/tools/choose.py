"""Which format of tool calls a model was trained on: its chat template shows it."""

from __future__ import annotations

from cairn.server.tools.deepseek import DeepSeek3, DeepSeek31
from cairn.server.tools.form import ToolForm
from cairn.server.tools.glm import Glm
from cairn.server.tools.hermes import Hermes
from cairn.server.tools.llama3 import Llama3
from cairn.server.tools.mistral import MistralList, MistralNamed
from cairn.server.tools.qwen3_coder import Qwen3Coder

# The first one that fits. Hermes always does.
_FORMS: tuple[type[ToolForm], ...] = (
    *(DeepSeek3, DeepSeek31, MistralNamed, MistralList, Qwen3Coder, Glm, Llama3),
    Hermes,
)


def tool_form(template: str) -> ToolForm:
    return next(form() for form in _FORMS if form.fits(template))
