"""The text of a job and how it becomes samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from harness.spec.section import Section


class DataSection(Section):
    """The text, how it becomes tokens, and how tokens become samples."""

    source: Literal["prose", "text", "jsonl", "squad", "datasets"] = Field(
        "prose",
        description=(
            "prose: the English help texts that every Python carries; text: a plain text file; jsonl: "
            "one JSON object a line; squad: a SQuAD v1.1 JSON file; datasets: anything that "
            "`datasets.load_dataset` or `load_from_disk` opens"
        ),
    )
    path: str | None = Field(
        None, description="file or folder; for `datasets` also a hub name; `prose` takes none"
    )
    configuration: str | None = Field(None, description="configuration name for `datasets`")
    split: str = Field("train", description="split for `datasets`")
    text_field: str = Field("text", description="field that holds the text (jsonl, datasets)")
    prompt_field: str | None = Field(
        None, description="field put before the text; its tokens are not trained on (jsonl, datasets)"
    )
    tokenizer: str = Field("bytes", description="'bytes' or a Hugging Face tokenizer name or folder")
    sequence_length: PositiveInt = Field(128, lt=2**31, description="tokens per sample")
    packed: bool | None = Field(
        None,
        description=(
            "true: one stream of tokens cut into samples; false: one sample per document, cut or "
            "padded. Default: true for prose and text, false otherwise"
        ),
    )
    shuffle: bool = Field(True, description="permute samples in each epoch, from the seed")
    limit: PositiveInt | None = Field(None, description="use at most so many samples")

    @model_validator(mode="after")
    def _path_fits_source(self) -> DataSection:
        if self.source == "prose" and self.path is not None:
            raise ValueError(
                "`path` would be ignored with source 'prose'; set source to text, jsonl, squad or datasets"
            )
        if self.source != "prose" and self.path is None:
            raise ValueError(f"source '{self.source}' needs a `path`")
        if self.prompt_field is not None and (self.source not in ("jsonl", "datasets") or self.is_packed):
            raise ValueError("`prompt_field` needs source jsonl or datasets and `packed: false`")
        if self.source == "squad" and self.packed:
            raise ValueError("source 'squad' is one sample per question; leave `packed` out")
        if self.sequence_length < 2:
            raise ValueError("`sequence_length` must be at least 2: a token is predicted from another")
        return self

    @property
    def is_packed(self) -> bool:
        return self.source in ("prose", "text") if self.packed is None else self.packed
