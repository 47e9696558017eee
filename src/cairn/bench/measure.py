"""Runs a workload through Cairn, and through plain transformers as the baseline."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from cairn.bench.workloads import Workload
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import ConfigError
from cairn.llm import LLM, Stream
from cairn.models.source import ModelSource


@dataclass(slots=True)
class Measurement:
    """Seconds and tokens of one engine on one workload."""

    engine: str
    seconds: float = 0.0
    output_tokens: int = 0
    first_token: list[float] = field(default_factory=list)  # per request
    between_tokens: list[float] = field(default_factory=list)  # all gaps of all requests
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def measure_cairn(llm: LLM, workload: Workload) -> Measurement:
    """Times are taken where a user would: when the text arrives."""
    result = Measurement("cairn")
    begin = time.perf_counter()
    if workload.one_by_one:
        for prompt, most in zip(workload.prompts, workload.output_lens, strict=True):
            sent = time.perf_counter()
            _follow([(llm.stream(prompt, _params(workload, most, 0)), sent)], result)
    else:
        streams = [
            (llm.stream(prompt, _params(workload, most, i)), begin)
            for i, (prompt, most) in enumerate(
                zip(workload.prompts, workload.output_lens, strict=True)
            )
        ]
        _follow(streams, result)
    result.seconds = time.perf_counter() - begin
    return result


def _params(workload: Workload, most: int, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=most, temperature=workload.temperature, seed=seed, ignore_eos=True
    )


def _follow(streams: list[tuple[Stream, float]], result: Measurement) -> None:
    """Read all streams to their ends, round by round, one chunk each."""
    last: dict[int, float] = {}
    live = dict(enumerate(streams))
    while live:
        for index, (stream, sent) in list(live.items()):
            chunk = next(stream)
            now = time.perf_counter()
            if index in last:
                result.between_tokens.append(now - last[index])
            else:
                result.first_token.append(now - sent)
            last[index] = now
            if chunk.result is not None:
                usage = chunk.result.usage
                result.output_tokens += usage.completion_tokens
                result.prompt_tokens += usage.prompt_tokens
                result.cached_tokens += usage.cached_tokens
                del live[index]


class TransformersBaseline:
    """The same weights in transformers' own model code, with its own cache and generate."""

    def __init__(self, source: ModelSource, dtype: torch.dtype, device: torch.device) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ConfigError(
                "the baseline needs transformers: pip install 'cairn[bench]', or --no-baseline"
            ) from error
        if source.folder is not None:
            model = transformers.AutoModelForCausalLM.from_pretrained(source.folder, dtype=dtype)
        else:
            name = source.config.architecture.removesuffix("ForCausalLM")
            config = getattr(transformers, f"{name}Config")(**source.config.values())
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            if source.gguf is not None:
                tensors = {name: tensor for _, name, tensor in source.gguf.tensors()}
                missing, unexpected = model.load_state_dict(tensors, strict=False)
                tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
                assert set(missing) <= tied and not unexpected
        self.model: Any = model.eval().to(device)
        self._device = device

    def warm_up(self) -> None:
        ids = torch.tensor([[1, 2, 3]], device=self._device)
        self.model.generate(ids, **self._options(8))

    def measure(self, workload: Workload) -> Measurement:
        result = Measurement("transformers")
        begin = time.perf_counter()
        if workload.one_by_one:
            for prompt, most in zip(workload.prompts, workload.output_lens, strict=True):
                self._stream(prompt, most, result)
        else:
            self._batch(workload, result)
        result.seconds = time.perf_counter() - begin
        return result

    def _stream(self, prompt: list[int], most: int, result: Measurement) -> None:
        """One request through a streamer, as its users do it: generate runs in a thread."""
        from transformers import TextIteratorStreamer

        streamer = TextIteratorStreamer(_Echo(), skip_prompt=True)
        sent = last = time.perf_counter()
        thread = threading.Thread(
            target=self.model.generate,
            args=(torch.tensor([prompt], device=self._device),),
            kwargs={**self._options(most), "streamer": streamer},
        )
        thread.start()
        count = 0
        for piece in streamer:
            if not piece:
                continue
            now = time.perf_counter()
            if count == 0:
                result.first_token.append(now - sent)
            else:
                result.between_tokens.append(now - last)
            last, count = now, count + 1
        thread.join()
        result.output_tokens += most
        result.prompt_tokens += len(prompt)

    def _batch(self, workload: Workload, result: Measurement) -> None:
        """All at once, padded on the left; everybody waits for the longest answer."""
        longest = max(map(len, workload.prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in workload.prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts]
        self.model.generate(
            torch.tensor(ids, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            **self._options(max(workload.output_lens)),
        )
        result.output_tokens += workload.total_output
        result.prompt_tokens += sum(map(len, workload.prompts))

    @staticmethod
    def _options(most: int) -> dict[str, Any]:
        return {
            "max_new_tokens": most,
            "min_new_tokens": most,
            "do_sample": False,
            "pad_token_id": 0,
        }


class _Echo:
    """A tokenizer for the streamer that makes one word of every token, so that none is held."""

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f"{int(token)}\n" for token in ids)
