"""A module is an object with weights and other modules as attributes; this finds them by name.

Not torch's nn.Module: inference needs no gradients, hooks or buffers, and on a CPU their cost per
call is a fair part of a small model's step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


class Module:
    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it, depth first, under dotted names."""
        yield prefix, self
        dot = f"{prefix}." if prefix else ""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield from value.named_modules(f"{dot}{name}")
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, Module):
                        yield from item.named_modules(f"{dot}{name}.{index}")

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, by name. Private attributes are not weights."""
        for module_name, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and not name.startswith("_"):
                    yield f"{module_name}.{name}", value
