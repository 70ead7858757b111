"""Tokenizers: raw bytes, or any Hugging Face tokenizer by name or folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from harness.errors import JobError


class Tokenizer(ABC):
    """Text to token ids, with one id that ends a document and pads a batch."""

    vocabulary_size: int
    end_of_text: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added."""


class ByteTokenizer(Tokenizer):
    """The 256 byte values of UTF-8 and one end-of-text id."""

    vocabulary_size = 257
    end_of_text = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))


class HuggingFaceTokenizer(Tokenizer):
    """`AutoTokenizer`; code from the hub is never executed."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, TypeError, KeyError) as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise JobError(
                f"data.tokenizer '{name}' cannot be loaded: {first_line} "
                "Give 'bytes', a local tokenizer folder, or a hub name this machine can reach"
            ) from error
        self.vocabulary_size = len(self._tokenizer)
        end = self._tokenizer.eos_token_id
        self.end_of_text = end if end is not None else (self._tokenizer.pad_token_id or 0)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names. Raises JobError if it cannot be had."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)
