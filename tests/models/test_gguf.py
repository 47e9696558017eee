from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cairn import LLM
from cairn.errors import ConfigError, LoadError
from cairn.models.blocks import dense
from cairn.models.gguf_file import GGUFFile
from cairn.models.layers import Linear
from cairn.text.gguf_tokenizer import tokenizer_from_gguf
from tests.helpers import TINY_LLAMA, byte_tokenizer, tokens_of, write_model

HEADS, KV_HEADS = TINY_LLAMA["num_attention_heads"], TINY_LLAMA["num_key_value_heads"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permute(matrix: np.ndarray, heads: int) -> np.ndarray:
    """What converters do to Llama's queries and keys."""
    shape = matrix.shape
    return matrix.reshape(heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(
    path: Path,
    folder: Path,
    metadata: dict[str, Any] | None = None,
    skip: str = "",
    config: dict[str, Any] = TINY_LLAMA,
    kinds: tuple[dict[str, str], str] = ({}, "F32"),
    more: dict[str, np.ndarray] | None = None,
    per_file: int = 0,
) -> Path:
    """`kinds` are the types of matrices by their names in the file, and that of the others. With
    `per_file` the tensors are split over several files."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=per_file)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(TINY_LLAMA["max_position_embeddings"])
    writer.add_rope_freq_base(TINY_LLAMA["rope_theta"])
    writer.add_layer_norm_rms_eps(TINY_LLAMA["rms_norm_eps"])
    for key, value in (metadata or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if ".q_proj" in name:
            values = permute(values, HEADS)
        if ".k_proj" in name:
            values = permute(values, KV_HEADS)
        target = gguf_name(name)
        if target == skip:
            continue
        special, usual = kinds
        kind = special.get(target.split(".")[-2], usual) if values.ndim == 2 else "F32"
        quantization = gguf.GGMLQuantizationType[kind]
        data = gguf.quantize(np.ascontiguousarray(values), quantization)
        writer.add_tensor(target, data, raw_dtype=quantization)
    for target, values in (more or {}).items():
        writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf-source"), TINY_LLAMA)


def test_a_gguf_file_is_the_same_model_as_its_safetensors(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", folder, {"tokenizer.ggml.eos_token_id": 9})
    ids = tokens_of(40)
    with LLM(folder, device="cpu") as llm:
        expected = llm.logprobs(ids)
    with LLM(path, device="cpu") as llm:
        assert torch.equal(llm.logprobs(ids), expected)
        assert llm.engine.eos_token_ids == {9}
        assert llm.tokenizer is None


@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_0", "Q2_K", "Q3_K", "IQ4_XS", "IQ3_S"]
)
def test_every_listed_type_is_dequantised_and_others_are_refused(kind: str, tmp_path: Path) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    columns = 2 * max(block, 256)
    draw = np.random.default_rng(0)
    try:
        data = gguf.quantize(draw.standard_normal((4, columns)).astype(np.float32), quantization)
    except NotImplementedError:
        # The library only reads this type: small bytes are small finite numbers.
        data = draw.integers(0, 60, (4, columns // block * size), dtype=np.uint8)
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    if kind == "IQ3_S":
        with pytest.raises(LoadError, match=r"blk.0.ffn_up.weight of shape .* has type IQ3_S"):
            list(file.tensors())
        return
    ((_, name, tensor),) = file.tensors()
    assert name == "model.layers.0.mlp.up_proj.weight"
    expected = gguf.dequantize(data, quantization).reshape(4, columns)
    assert torch.equal(dense(tensor), torch.from_numpy(expected.astype(np.float32)))


def test_a_truncated_file_names_the_file_and_the_tensor(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "cut.gguf", folder)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(LoadError, match=r"cut.gguf is truncated: tensor \S+ ends at byte \d+"):
        LLM(path)


@pytest.mark.parametrize("junk", [b"", b"GGUF", b"not a model at all", b"GGUF" + b"\xff" * 64])
def test_a_file_that_is_no_gguf_is_named(junk: bytes, tmp_path: Path) -> None:
    path = tmp_path / "junk.gguf"
    path.write_bytes(junk)
    with pytest.raises(LoadError, match=r"junk\.gguf"):
        LLM(path)


def entry(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], offset: int = 0, kind: int = 0) -> bytes:
    form = f"<I{len(shape)}QIQ"
    head = struct.pack("<Q", len(name)) + name.encode()
    return head + struct.pack(form, len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("fields", "tensors", "named"),
    [
        ([entry("a", 9, struct.pack("<IQ", 4, 2**40))], [], "1099511627776 values in field a"),
        ([entry("a", 9, struct.pack("<IQ", 4, 2**20))], [], "ends at .*, beyond the file"),
        ([entry("a", 9, struct.pack("<IQ", 9, 3))], [], "array of type 9"),
        ([entry("a", 8, struct.pack("<Q", 2**63))], [], "beyond the file"),
        ([entry("a", 13, b"")], [], "field a has the unknown type 13"),
        ([entry("a", 7, b"1"), entry("a", 7, b"1")], [], "field a is there twice"),
        ([entry("general.alignment", 4, struct.pack("<I", 3))], [], "must be a power of two"),
        ([], [tensor("t", (2**40, 2**40))], "tensor t ends at byte"),
        ([], [tensor("t", ())], "0 dimensions"),
        ([], [tensor("t", (0, 2**60))], "without any value"),
        ([], [tensor("t", (5,), kind=2)], "blocks of Q4_0 have 32"),
        ([], [tensor("t", (2,), kind=99)], "unknown type 99"),
        ([], [tensor("t", (8,)), tensor("u", (8,))], "tensors overlap"),
        ([], [tensor("t", (1,)), tensor("t", (1,))], "tensor t is there twice"),
    ],
)
def test_a_hostile_header_is_refused_before_anything_is_allocated(
    fields: list[bytes], tensors: list[bytes], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    content = head + b"".join(fields + tensors)
    path.write_bytes(content + bytes(-len(content) % 32 + 32))
    with pytest.raises(LoadError, match=rf"bad\.gguf.*{named}"):
        GGUFFile(path)


def test_a_missing_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", folder, skip="blk.1.attn_k.weight")
    with pytest.raises(LoadError, match=r"model.layers.1.self_attn.k_proj.weight is missing"):
        LLM(path, device="cpu")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"general.architecture is 'mamba'; supported in GGUF"):
        LLM(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"is a file but no .gguf"):
        LLM(tmp_path / "model.bin")


def test_byte_level_tokenizer_and_template_come_from_the_file(folder: Path, tmp_path: Path) -> None:
    vocab = byte_tokenizer().get_vocab()
    tokens = [*sorted(vocab, key=lambda t: vocab[t]), "he", "hello", "<end>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 258 + [3],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}<end>",
    }
    path = write_gguf(tmp_path / "tok.gguf", folder, metadata)
    tokenizer = tokenizer_from_gguf(GGUFFile(path).metadata, path)
    assert tokenizer is not None
    ids = tokenizer.encode("he<end>12")
    assert ids[:2] == [256, 258]
    assert tokenizer.decode(ids) == "he12"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}]) == [256, 258]


def test_sentencepiece_tokenizer_merges_by_score_and_falls_back_to_bytes() -> None:
    pieces = ["<unk>", "<s>", "▁", "a", "b", "ab", "▁ab", "c"]
    tokens = [*pieces, *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 5 + [-1.0, -2.0, 0.0] + [0.0] * 256,
        "tokenizer.ggml.token_type": [2, 3] + [1] * 6 + [6] * 256,
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = tokenizer_from_gguf(metadata, Path("x.gguf"))
    assert tokenizer is not None
    assert tokenizer.encode("ab c") == [1, 6, 2, 7]
    assert tokenizer.decode(tokenizer.encode("ab cé")) == "ab cé"


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "klingon"},
            "tokenizer.ggml.pre is 'klingon'",
        ),
    ],
)
def test_unknown_tokenizers_are_named(metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        tokenizer_from_gguf(metadata, Path("x.gguf"))


WIDE = {
    **TINY_LLAMA,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": HEADS,
    "head_dim": 128 // HEADS,
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with matrices of three types."""
    folder = write_model(tmp_path_factory.mktemp("gguf-wide"), WIDE)
    kinds = {"token_embd": "Q8_0", "attn_v": "Q8_0", "ffn_down": "Q5_0"}
    return write_gguf(folder / "q.gguf", folder, config=WIDE, kinds=(kinds, "Q4_1"))


def test_matrices_stay_quantised_and_give_the_dequantised_answer(quantized: Path) -> None:
    ids = tokens_of(40)
    with LLM(quantized, device="cpu", quantization="none") as llm:
        expected = llm.logprobs(ids)
    for choice in ("auto", "keep"):
        with LLM(quantized, device="cpu", quantization=choice) as llm:
            assert "weights: Q4_1, Q5_0, Q8_0 as in the file" in llm.engine.notes
            result = llm.logprobs(ids)
            assert not torch.equal(result, expected)
            torch.testing.assert_close(result, expected, rtol=0, atol=2e-3)


def test_without_a_compiler_auto_dequantises_and_keep_computes_in_torch(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokens_of(40)
    prompts = [tokens_of(n) for n in (1, 30, 5, 17)]
    with LLM(quantized, device="cpu", quantization="keep") as llm:
        expected = llm.logprobs(ids)
        answers = [result.token_ids for result in llm.generate(prompts, max_tokens=40)]
        one_by_one = [llm.generate(prompt, max_tokens=40).token_ids for prompt in prompts]
        assert answers == one_by_one
    monkeypatch.setenv("CXX", "no-such-compiler")
    with LLM(quantized, device="cpu") as llm:
        assert (
            "in float32, multiplied by torch, because there is no C++ compiler"
            in llm.engine.notes[0]
        )
    with LLM(quantized, device="cpu", quantization="keep") as llm:
        assert llm.engine.notes[0].startswith("products run in torch, slowly: there is no C++")
        assert [r.token_ids for r in llm.generate(prompts, max_tokens=40)] == answers
        torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=1e-3)


def test_matrices_of_16_bits_stay_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "wide", WIDE)
    kinds = ({"token_embd": "F16", "attn_v": "F16"}, "BF16")
    path = write_gguf(tmp_path / "halves.gguf", folder, config=WIDE, kinds=kinds)
    ids = tokens_of(40)
    with LLM(path, device="cpu", quantization="none") as llm:
        assert not any("weights" in note for note in llm.engine.notes)
        expected = llm.logprobs(ids)
    with LLM(path, device="cpu") as llm:
        assert "weights: BF16, F16 as in the file" in llm.engine.notes
        found = llm.logprobs(ids)
        matrices = [
            m for _, m in llm.engine.runner.stepper.model.named_modules() if isinstance(m, Linear)
        ]
        assert matrices and all(m.weight.numel() == 0 for m in matrices)
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    monkeypatch.setenv("CXX", "no-such-compiler")
    for choice, note in (("auto", "BF16, F16 in float32, mult"), ("keep", "products run in torch")):
        with LLM(path, device="cpu", quantization=choice) as llm:
            assert note in llm.engine.notes[0]
            torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=1e-4)


def test_other_types_and_ranks_dequantise(quantized: Path) -> None:
    with LLM(quantized, device="cpu", dtype="float64") as llm:
        assert (
            "Q4_1, Q5_0, Q8_0 is dequantised; only CUDA, and a CPU in float32"
            in llm.engine.notes[0]
        )


def test_rope_freqs_divide_the_frequencies_as_llama3_does(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = write_model(tmp_path, {**TINY_LLAMA, "rope_scaling": scaling})
    dim = TINY_LLAMA["hidden_size"] // HEADS
    inverse = 1 / TINY_LLAMA["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    # The formula of Llama 3.1: long wavelengths are stretched, the band between is blended.
    blend = np.clip((64 * inverse / (2 * np.pi) - 1) / 3, 0, 1)
    divisors = (1 / ((1 - blend) / 8 + blend)).astype(np.float32)
    assert len(set(divisors.tolist())) > 1
    path = write_gguf(tmp_path / "l3.gguf", folder, more={"rope_freqs.weight": divisors})
    ids = tokens_of(200)
    with LLM(folder, device="cpu") as llm:
        expected = llm.logprobs(ids)
    with LLM(path, device="cpu") as llm:
        torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=1e-4)
    plain = write_gguf(tmp_path / "plain.gguf", folder)
    with LLM(plain, device="cpu") as llm:
        assert (llm.logprobs(ids) - expected).abs().max() > 0.01
    short = write_gguf(tmp_path / "s.gguf", folder, more={"rope_freqs.weight": divisors[:-1]})
    with pytest.raises(ConfigError, match=r"rope has \d+ divisors; heads of"):
        LLM(short, device="cpu")


def test_a_model_may_be_split_into_files(folder: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", folder)
    write_gguf(tmp_path / "part.gguf", folder, per_file=9)
    parts = sorted(tmp_path.glob("part-*.gguf"))
    assert len(parts) > 2 and parts[0].name.startswith("part-00001-of-0000")
    ids = tokens_of(20)
    with LLM(whole, device="cpu") as llm:
        expected = llm.logprobs(ids)
    with LLM(parts[0], device="cpu") as llm:
        assert torch.equal(llm.logprobs(ids), expected)
    with pytest.raises(LoadError, match=r"is part 1 \(from 0\) of \d; give the first"):
        LLM(parts[1], device="cpu")
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(LoadError, match=r"00002-of-\S+: split.no is 2; its name says 1"):
        LLM(parts[0], device="cpu")
    parts[2].unlink()
    with pytest.raises(LoadError, match=r"split.no is 2|is missing"):
        LLM(parts[0], device="cpu")
