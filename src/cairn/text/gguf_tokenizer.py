"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from cairn.errors import LoadError
from cairn.text.tokenizer import ChatTemplate, Tokenizer, library_errors

_CONTROL, _USER_DEFINED = 3, 4  # token types
_LONGEST_TOKEN = 1024  # every cut of a token is looked up

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer | None:
    """None if the file has no tokenizer."""
    with library_errors(LoadError, f"{path}: its tokenizer.ggml fields are corrupt"):
        return _build(metadata, path)


def _build(metadata: Mapping[str, Any], path: Path) -> Tokenizer | None:
    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind = get("model")
    if kind is None:
        return None
    tokens: list[str] = get("tokens", [])
    for token in tokens:
        if not isinstance(token, str) or len(token) > _LONGEST_TOKEN:
            raise LoadError(
                f"{path}: tokenizer.ggml.tokens holds {token!r:.100}; tokens are texts of at most "
                f"{_LONGEST_TOKEN} characters"
            )
    if kind == "gpt2":
        fast = _byte_level(get("pre", "default"), tokens, get("merges", []), path)
    elif kind == "llama":
        fast = _sentencepiece(tokens, get("scores", []), get("add_space_prefix", True))
    else:
        raise LoadError(f"{path}: tokenizer.ggml.model is {kind!r}; supported: gpt2, llama")
    for index, token_type in enumerate(get("token_type", [])):
        if token_type in (_CONTROL, _USER_DEFINED):
            special = token_type == _CONTROL
            fast.add_tokens([AddedToken(tokens[index], special=special, normalized=False)])
    special = {
        f"{name}_token": tokens[token_id]
        for name in ("bos", "eos")
        if (token_id := get(f"{name}_token_id")) is not None and token_id >= 0
    }
    adds_bos = kind == "llama" or get("pre") == "llama-bpe"
    if get("add_bos_token", adds_bos) and "bos_token" in special:
        bos = special["bos_token"]
        fast.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, get("bos_token_id"))]
        )
    source = metadata.get("tokenizer.chat_template")
    return Tokenizer(fast, ChatTemplate(source, special) if isinstance(source, str) else None)


def _byte_level(pre: str, tokens: list[str], merges: list[str], path: Path) -> FastTokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    # Llama 3 does not apply merges to words that are tokens.
    whole_words = pre == "llama-bpe"
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words))
    if pre == "qwen2":
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = _pre_tokenizer(pre, path)
    fast.decoder = decoders.ByteLevel()
    return fast


def _pre_tokenizer(name: str, path: Path) -> pre_tokenizers.PreTokenizer:
    """How text is split before merging, by the name in the file."""
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        return gpt2
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    digits = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
    if name in digits:
        split = pre_tokenizers.Split(Regex(_WORDS % digits[name]), "isolated")
        return pre_tokenizers.Sequence([split, bytes_only])
    raise LoadError(
        f"{path}: tokenizer.ggml.pre is {name!r}; supported: default, gpt-2, smollm, "
        f"{', '.join(digits)}"
    )


def _sentencepiece(tokens: list[str], scores: list[float], space_prefix: bool) -> FastTokenizer:
    """The file has no merges: use all pairs of tokens that form a third, best score first."""
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, left, right))
    merges.sort(key=lambda merge: (merge[0], vocab[merge[1]], vocab[merge[2]]))
    model = models.BPE(
        vocab=vocab,
        merges=[(left, right) for _, left, right in merges],
        fuse_unk=True,
        byte_fallback=True,
    )
    fast = FastTokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    ends: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if space_prefix:
        steps.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    fast.normalizer = normalizers.Sequence(steps)
    fast.decoder = decoders.Sequence(ends)
    return fast
