"""Reads a model's config.json strictly: a field that changes the math is honoured or refused.

An architecture takes the fields it honours. What is left over must be known to have no effect on
the forward pass, or be neutral (null, false, empty); anything else is an error that names it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cairn.errors import ConfigError
from cairn.models.json_file import read_object

T = TypeVar("T")

_MOST: Mapping[type, float] = {int: 2**31 - 1, float: 1e18}  # of any field

# Bookkeeping, training and generation defaults: never part of the forward pass.
_NO_EFFECT = frozenset(
    """
    architectures auto_map model_type transformers_version torch_dtype dtype use_cache name_or_path
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id
    initializer_range initializer_factor init_std attention_dropout hidden_dropout dropout
    attention_probs_dropout_prob embd_pdrop resid_pdrop classifier_dropout pretraining_tp
    chunk_size_feed_forward is_decoder is_encoder_decoder id2label label2id num_labels
    problem_type finetuning_task task_specific_params tokenizer_class return_dict
    return_dict_in_generate output_attentions output_hidden_states output_scores torchscript
    use_bfloat16 prefix pruned_heads tf_legacy_loss max_length min_length do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p min_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    max_new_tokens license library_name unsloth_version unsloth_fixed model_name
    is_llama_config transformers.js_config ep_size seq_aux aux_loss_alpha router_aux_loss_coef
    output_router_logits
    """.split()
)


def shown(value: object) -> str:
    """A value in an error, cut where it is long or deep."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    return short.repr(value)


class ConfigReader:
    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        ignored: Collection[str] = (),
        *,
        is_preset: bool = False,
    ) -> None:
        self.source = source
        self._values = dict(values)
        self._taken: set[str] = set()
        self._ignored = frozenset(ignored)
        self.is_preset = is_preset

    @classmethod
    def from_folder(cls, folder: Path, ignored: Collection[str] = ()) -> ConfigReader:
        path = folder / "config.json"
        return cls(read_object(path, ConfigError), str(path), ignored)

    @property
    def architecture(self) -> str:
        names = self._values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise ConfigError(f"{self.source}: architectures must be a list with one name")
        return names[0]

    def take(self, name: str, kind: type[T], default: T | None = None) -> T:
        """A field of the given type; null counts as absent, absent without default is an error."""
        value = self.take_optional(name, kind)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self.source}: {name} is missing")
        return default

    def take_optional(self, name: str, kind: type[T]) -> T | None:
        self._taken.add(name)
        value = self._values.get(name)
        if value is None:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and kind in _MOST and not -_MOST[kind] <= value <= _MOST[kind]:
            raise self.out_of_range(name, value, -_MOST[kind], _MOST[kind])
        if kind is float and number:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and not number):
            raise ConfigError(
                f"{self.source}: {name} is {shown(value)}; a value of type {kind.__name__} is "
                "expected"
            )
        return value

    def take_positive(self, name: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        value = self.take(name, int, default)
        if not 1 <= value <= most:
            raise self.out_of_range(name, value, 1, most)
        return value

    def out_of_range(self, name: str, value: object, low: float, high: float) -> ConfigError:
        return ConfigError(
            f"{self.source}: {name} is {shown(value)}; it must be from {low} to {high}"
        )

    def values(self) -> dict[str, Any]:
        """All fields as they stand."""
        return dict(self._values)

    def has(self, name: str) -> bool:
        """Whether the field is there, null included."""
        return name in self._values

    def peek(self, name: str) -> Any:
        """A field's raw value, without taking it."""
        return self._values.get(name)

    def require(self, name: str, allowed: Collection[object], default: object) -> None:
        """A field that is only supported with certain values."""
        self._taken.add(name)
        value = self._values.get(name)
        value = default if value is None else value
        if value not in allowed:
            choices = ", ".join(repr(choice) for choice in allowed)
            raise self.unsupported(name, value, f"supported: {choices}")

    def unsupported(self, name: str, value: object, remedy: str) -> ConfigError:
        return ConfigError(
            f"{self.source}: {name} is {shown(value)}, which is not supported; {remedy}"
        )

    def finish(self) -> None:
        """Refuse fields that nobody took."""
        for name, value in self._values.items():
            if name in self._taken or name in _NO_EFFECT or name in self._ignored:
                continue
            if name.startswith("_") or not value:
                continue
            raise self.unsupported(
                name,
                value,
                "it may change the model's output. If it does not, pass "
                f"ignore_config_fields={name!r}",
            )
