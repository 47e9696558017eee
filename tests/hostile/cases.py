"""Loads changed model files, one after the other, in a process with limits.

    python -m tests.hostile.cases FOLDER FIRST COUNT KIND...

A file must load or be refused with a CairnError, in 5 seconds of CPU time and with 1 GiB of memory.
Prints the number of each case before it, and at the end a JSON object: outcomes by kind, and the
tracebacks of other errors.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from cairn import LLM
from cairn.errors import CairnError
from cairn.text.tokenizer import ChatTemplate
from tests.helpers import (
    GOLDENS,
    TINY_HILS,
    TINY_LLAMA,
    TINY_OLMO3,
    byte_tokenizer,
    write_model,
)
from tests.hostile.mutate import change_bytes, change_json, change_template
from tests.models.test_gguf import write_gguf

SECONDS, MEMORY = 5, 2**30
_MOST_FAILURES = 20

_ROPES: list[dict[str, Any]] = [
    {},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                      "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2.0, "mscale": 1.0,
                         "mscale_all_dim": 0.5, "beta_fast": 32, "beta_slow": 1}},
]  # fmt: skip
_GOLDENS = """
    hf_qwen3_moe_norm hf_deepseek_v2_groups hf_deepseek_v3_yarn_groups hf_deepseek_v32_yarn_groups
    hf_glm_moe_dsa_shared_index
""".split()
_CONFIGS: list[dict[str, Any]] = [
    *({**TINY_LLAMA, **rope} for rope in _ROPES),
    {**TINY_LLAMA, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
     "sliding_window": 16, "max_window_layers": 1, "tie_word_embeddings": True},
    {**TINY_LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 8, "attention_bias": True},
    TINY_OLMO3,
    TINY_HILS,
    *(json.loads((GOLDENS / name / "config.json").read_text()) for name in _GOLDENS),
]  # fmt: skip

_TEMPLATES = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{%- macro kind(p) -%}{%- if p.type == 'array' -%}{{ kind(p['items']) + '[]' }}{%- else -%}"
    "{{ p.type | default('any') | upper }}{%- endif -%}{%- endmacro -%}"
    "{%- set ns = namespace(text='', seen=[]) -%}{%- for m in messages -%}"
    "{%- set ns.text = ns.text ~ m.role -%}{%- set ns.seen = ns.seen + [m] -%}{%- endfor -%}"
    "{{ ns.text }}{{ ns.seen | length }}{{ kind({'type': 'array', 'items': {'type': 'string'}}) }}"
    "{{ messages | tojson(indent=2) }}{{ strftime_now('%Y') | length }}",
    "{% set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in loop_messages if m.role != 'tool' %}{{ loop.index0 }}{{ '%s: %s' % (m.role, 1) }}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n').replace('a', 'bb') }}{% endfor %}"
    "{{ messages | map(attribute='role') | unique | sort | join(', ') | indent(2) }}",
]
_PIECES = """
{% for i in range(100000) %}{{ i }}{% endfor %}
{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}
{% for i in range(99999) recursive %}{{ loop([i, i]) }}{% endfor %}
{% for i in range(99999) if i % 7 == 9 %}{% endfor %}
{% set x = 'a' * 1000000000 %}
{% set x = ('a' * 1000000).replace('a', 'b' * 1000000) %}
{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}
{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}
{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}
{% set n = namespace(x=1) %}{% for i in 'abcdefgh' %}{% set n.x = [n.x] * 99 %}{% endfor %}{{ n.x }}
{% set x = [1, [2] * 99999] %}{% for i in range(60) %}{% set x = [x == [x], x] %}{% endfor %}
{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}
{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(3) }}
{% macro g(n) %}{% if n %}{{ g(n - 1) ~ g(n - 1) }}{% endif %}{% endmacro %}{{ g(40) }}
{% block a %}{{ self.a() }}{% endblock %}
{% filter upper %}{{ messages }}{% endfilter %}
{% set x %}{% for i in range(99999) %}{{ messages | tojson }}{% endfor %}{% endset %}
{{ messages.__class__.__mro__ }}
{{ [messages] * 100000 | tojson }}
{{ '%9999999d' % 3 }}
{{ '{:9999999}'.format(3) }}
{{ ('%s' * 99999) % (['a' * 99999] * 99999) }}
{{ ('a' * 99999).join(['b' * 99999] * 99999) }}
{{ (['b' * 99999] * 99999) | join('a' * 99999) }}
{{ range(100000) | list | map('string') | map('list') | list | tojson }}
{{ ('ab' * 500000) | list | sort | unique | batch(3) | list }}
{{ ('ab' * 500000).split('a') | map('upper') | join }}
{{ 'a' | indent(999999999) }}{{ [1] | batch(999999999, 0) | list }}
{{ 9 ** 9 ** 9 ** 9 }}{{ 1.5 | round(999999999, 'ceil') }}
{{ {'a': messages} | items | list | string }}
{{ dict(a=messages, b=messages) | tojson(indent=99) }}
{{ 'a'.ljust(999999999) }}
{% include 'x' %}
{% break %}
""".splitlines()


class Cases:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models = [write_model(folder / f"m{i}", config) for i, config in enumerate(_CONFIGS)]
        for index, model in enumerate(self._models):
            self._add_text(model, _tokenizers()[index % len(_tokenizers())])
        self._sharded = _shard(self._models[0], folder / "sharded")
        kinds = (("gpt2", 0), ("llama", 0), ("gpt2", 8))
        self._ggufs = [_ggufs(folder / f"g{i}", *kind) for i, kind in enumerate(kinds)]

    def _add_text(self, model: Path, fast: FastTokenizer) -> None:
        fast.save(str(model / "tokenizer.json"))
        config = {
            "chat_template": _TEMPLATES[0],
            "eos_token": {"content": "</s>"},
            "pad_token": "x",
        }
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        values = {"eos_token_id": [2, 3], "temperature": 0.5, "top_k": 20, "do_sample": True}
        (model / "generation_config.json").write_text(json.dumps(values))

    # -- one case of each kind ----------------------------------------------------------------

    def gguf(self, draw: random.Random) -> None:
        files = sorted(self._copy(draw.choice(self._ggufs)).iterdir())
        changed = draw.choice(files)
        raw = changed.read_bytes()
        # The header is a tenth of the file, and what can go wrong is there.
        changed.write_bytes(change_bytes(raw, draw, len(raw) // draw.choice([1, 8, 8, 30])))
        _use(files[0])

    def safetensors(self, draw: random.Random) -> None:
        model = self._copy(self._sharded if draw.random() < 0.6 else draw.choice(self._models))
        path = draw.choice(sorted(model.glob("*.safetensors*")))
        raw = path.read_bytes()
        if path.suffix == ".json":
            path.write_bytes(change_json(raw, draw))
        elif draw.random() < 0.5:
            length = int.from_bytes(raw[:8], "little")
            header = change_json(raw[8 : 8 + length], draw)
            path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
        else:
            path.write_bytes(change_bytes(raw, draw, draw.choice([16, 200, 4000, len(raw)])))
        _use(model)

    def config(self, draw: random.Random) -> None:
        model = self._copy(draw.choice(self._models))
        path = model / draw.choice(["config.json"] * 4 + ["generation_config.json"])
        path.write_bytes(change_json(path.read_bytes(), draw))
        _use(model)

    def tokenizer(self, draw: random.Random) -> None:
        model = self._copy(draw.choice(self._models))
        path = model / draw.choice(["tokenizer.json"] * 4 + ["tokenizer_config.json"])
        path.write_bytes(change_json(path.read_bytes(), draw))
        _use(model)

    def template(self, draw: random.Random) -> None:
        source = change_template(draw.choice(_TEMPLATES), draw, _PIECES)
        _render(ChatTemplate(source, {"eos_token": "</s>"}))

    def _copy(self, model: Path) -> Path:
        target = self._folder / "case"
        shutil.rmtree(target, ignore_errors=True)
        return Path(shutil.copytree(model, target))


def _use(path: Path) -> None:
    """Load the model, and use what came with it."""
    with LLM(path, device="cpu", page_size=16, kv_cache_gib=0.002, max_running_requests=2) as llm:
        llm.generate([1, 2, 3], max_tokens=2, min_tokens=1)
        if llm.tokenizer is not None:
            text = "Hello <s> 123 \u00e9\n"
            llm.tokenizer.decode(llm.tokenizer.encode(text))
            if llm.tokenizer.template is not None:
                _render(llm.tokenizer.template)


def _render(template: ChatTemplate) -> None:
    roles = ("system", "user", "assistant", "user")
    template.render([{"role": role, "content": f"I say\n{role}."} for role in roles], tools=[])


# -- files to change --------------------------------------------------------------------------


def _tokenizers() -> list[FastTokenizer]:
    words = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", "Hello", "12", "3"])}
    word_level = FastTokenizer(models.WordLevel(words, unk_token="<unk>"))
    word_level.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    word_level.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    word_level.add_special_tokens(["<s>", "</s>"])
    scores = [("<unk>", 0.0), ("a", -1.0), ("\u2581", -2.0), ("H", -3.0), ("llo", -3.5)]
    unigram = FastTokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    return [byte_tokenizer(), word_level, unigram]


def _shard(model: Path, target: Path) -> Path:
    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    files = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return target


def _ggufs(folder: Path, kind: str, per_file: int) -> Path:
    """A folder with a GGUF file, or with several of so many tensors each."""
    folder.mkdir()
    config = {**TINY_LLAMA, "intermediate_size": 64}
    source = write_model(folder.with_suffix(".source"), config)
    pieces = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab"]
    tokens = [*pieces, *(f"<0x{byte:02X}>" for byte in range(54))]
    if kind == "gpt2":
        tokens = sorted(byte_tokenizer().get_vocab())[:61]
    metadata = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 58,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": _TEMPLATES[0],
    }
    path = folder / "model.gguf"
    if kind == "gpt2":
        metadata |= {"tokenizer.ggml.pre": "smollm", "tokenizer.ggml.merges": ["a b"]}
        write_gguf(path, source, metadata, config=config, per_file=per_file)
    else:
        metadata["tokenizer.ggml.scores"] = [float(-index) for index in range(61)]
        kinds = {"attn_q": "Q4_0", "ffn_up": "Q5_1", "token_embd": "F16"}, "Q8_0"
        freqs = {"rope_freqs.weight": np.ones(4, np.float32)}
        write_gguf(path, source, metadata, config=config, kinds=kinds, more=freqs)
    return folder


# -- the process ------------------------------------------------------------------------------


def run(folder: Path, first: int, count: int, kinds: list[str]) -> dict[str, Any]:
    cases = Cases(folder)
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    failures: list[str] = []
    for kind in kinds:  # once each before the limits are set: imports take time and memory
        _outcome(getattr(cases, kind), random.Random(kind))
    _limit_memory()
    for kind in kinds:
        for number in range(first, first + count):
            print(kind, number, flush=True)
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)  # which ends this process
            outcome, trace = _outcome(getattr(cases, kind), random.Random(f"{kind} {number}"))
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            outcomes[kind][outcome] += 1
            if trace is not None and len(failures) < _MOST_FAILURES:
                failures.append(f"{kind} {number}\n{trace}")
    return {"outcomes": outcomes, "failures": failures}


def _outcome(case: Callable[[random.Random], None], draw: random.Random) -> tuple[str, str | None]:
    """ "loaded", or the name of the error; and the traceback of an error that is not Cairn's."""
    try:
        case(draw)
    except CairnError as error:
        return type(error).__name__, None
    except BaseException as error:
        return type(error).__name__, "".join(traceback.format_exception(error)[-8:])
    return "loaded", None


def _limit_memory() -> None:
    status = Path("/proc/self/statm")
    if status.exists():
        mapped = int(status.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
