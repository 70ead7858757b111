"""Tokenizers: raw bytes, or any Hugging Face tokenizer by name or folder, and whether the hub answers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import Any

from harness.errors import JobError
from harness.job.job import Job
from harness.rank.factories import one_at_a_time, why_refused

SECONDS = 5.0
"""For an answer. Compute nodes often drop what would leave the cluster, which shows as silence."""


def settle_hub(name: str) -> None:
    """Have Hugging Face's libraries read their cache at once where the hub does not answer.

    They would try each file six times over 23 seconds, in every process. A local folder asks nobody.
    """
    if not Path(name).exists() and not _answers():
        import huggingface_hub.constants

        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        huggingface_hub.constants.HF_HUB_OFFLINE = True


@cache
def _answers() -> bool:
    import huggingface_hub.constants
    from huggingface_hub import get_session

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(huggingface_hub.constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # of the library's HTTP client, which it replaced once
        return False
    return True


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip


class Tokenizer(ABC):
    """Text to token ids, with one id that ends a document and pads a batch."""

    vocabulary_size: int
    end_of_text: int
    padding: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added."""

    @abstractmethod
    def encode_input(self, text: str, second: str | None, length: int) -> dict[str, list[int]]:
        """Arguments of a model that reads a text, or a pair of texts, as a whole: at most `length` ids each.

        With the marks that the model was trained with; `input_ids` and what else the tokenizer gives.
        """

    @abstractmethod
    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, special ones left out."""


class ByteTokenizer(Tokenizer):
    """The 256 byte values of UTF-8 and one end-of-text id."""

    vocabulary_size = 257
    end_of_text = padding = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_input(self, text: str, second: str | None, length: int) -> dict[str, list[int]]:
        ids = [*self.encode(text)[: length - 1], self.end_of_text]
        if second is not None:
            ids = [*(ids + self.encode(second))[: length - 1], self.end_of_text]
        return {"input_ids": ids}

    def decode(self, tokens: list[int]) -> str:
        return bytes(t for t in tokens if t < self.end_of_text).decode("utf-8", errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """`AutoTokenizer`; `runs_code`: whether code that it brings may run."""

    def __init__(
        self, name: str, revision: str | None = None, *, of_model: bool = False, runs_code: bool = False
    ) -> None:
        from transformers import AutoTokenizer

        settle_hub(name)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                name, revision=revision, trust_remote_code=runs_code
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            refused = why_refused(name, error, setting="model.name" if of_model else "data.tokenizer")
            if refused is not None:
                raise JobError(refused) from error
            if of_model:
                raise JobError(
                    f"model.name '{name}' cannot be loaded with its tokenizer: {first_line} Give a local "
                    "folder, a hub name this machine can reach, or another data.tokenizer"
                ) from error
            raise JobError(
                f"data.tokenizer '{name}' cannot be loaded: {first_line} "
                "Give 'bytes', a local tokenizer folder, or a hub name this machine can reach"
            ) from error
        self.vocabulary_size = len(self._tokenizer)
        end = self._tokenizer.eos_token_id
        self.end_of_text = end if end is not None else (self._tokenizer.pad_token_id or 0)
        pad = self._tokenizer.pad_token_id
        self.padding = self.end_of_text if pad is None else pad

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_input(self, text: str, second: str | None, length: int) -> dict[str, list[int]]:
        encoded = self._tokenizer(text, second, truncation=True, max_length=length)
        return {name: list(ids) for name, ids in encoded.items() if name != "attention_mask"}

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def tokenizer_of(job: Job) -> Tokenizer:
    """The tokenizer of a job. Raises JobError, also for a model by name that comes without one."""
    name = job.data.tokenizer
    if name != job.model.name:
        return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in TOKENIZER_FILES):
        raise JobError(
            f"model.name '{name}' is a folder without a tokenizer ({', '.join(TOKENIZER_FILES)}): save the "
            "model's own there, name one with data.tokenizer, or set data.tokenizer to bytes to feed it "
            "raw bytes"
        )
    with one_at_a_time(job):
        return HuggingFaceTokenizer(
            name, job.model.revision, of_model=True, runs_code=job.model.trust_remote_code
        )
