"""Answers of the embeddings API."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any

from cairn.server.answer import Choice
from cairn.server.api_error import bad_request
from cairn.server.formats import Format, FormOptions
from cairn.server.schema import EmbeddingsRequest
from cairn.server.token_texts import TokenTexts


class EmbeddingsFormat(Format):
    def __init__(
        self,
        body: EmbeddingsRequest,
        model: str,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[Choice],
        token_texts: TokenTexts,
    ) -> None:
        super().__init__("", model, prompts, choices, token_texts, FormOptions())
        self._body = body

    def whole(self) -> dict[str, Any]:
        found = []
        for choice in self.choices:
            values = array("f", choice.vector)
            wanted = self._body.dimensions
            if wanted is not None and wanted != len(values):
                raise bad_request(
                    "dimensions",
                    f"dimensions is {wanted}; this model's embeddings have {len(values)}",
                )
            vector: object = values.tolist()
            if self._body.encoding_format == "base64":
                vector = base64.b64encode(choice.vector).decode()
            found.append({"object": "embedding", "index": choice.index, "embedding": vector})
        tokens = self.usage()["prompt_tokens"]
        return {
            "object": "list",
            "data": found,
            "model": self.head["model"],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "cairn": {"pooling": self._body.pooling or "mean", "normalized": True},
        }
