"""The data of a job and how it becomes samples."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from harness.job.model import Factory, SettingsSection, arguments_field, factory_field, later_setting

Source = Literal["prose", "text", "jsonl", "json", "csv", "squad", "datasets", "images", "synthetic-images"]
ROWS = ("jsonl", "json", "csv", "datasets")
"""Sources of rows with named fields."""
IMAGES = ("images", "synthetic-images")
WITHOUT_PATH = ("prose", "synthetic-images")
DEFAULT_CLASSES = 10

Targets = Literal["text", "all", "prompt", "text over prompt"]


class DataSection(SettingsSection):
    """The text or images, how text becomes tokens, and how tokens become samples."""

    source: Source = Field(
        "prose",
        description=(
            "prose: the English help texts that every Python carries; text: a plain text file; jsonl: "
            "one JSON object a line; json, csv: a file that `datasets` reads; squad: a SQuAD v1.1 JSON file; "
            "datasets: anything that `datasets.load_dataset` or `load_from_disk` opens; images: a folder "
            "with one folder of pictures per class; synthetic-images: noise around one pattern per class"
        ),
    )
    factory: Factory | None = factory_field("the samples; replaces `source`")
    arguments: dict[str, Any] = arguments_field()
    path: str | None = Field(
        None,
        description="file or folder; for `datasets` also a hub name; prose and synthetic-images take none",
    )
    configuration: str | None = Field(None, description="configuration name for `datasets`")
    split: str = Field("train", description="split for `datasets`")
    text_field: str = Field("text", description="field that holds the text (jsonl, json, csv, datasets)")
    prompt_field: str | None = Field(
        None,
        description="field put before the text; its tokens are not trained on (jsonl, json, csv, datasets). "
        "In task seq2seq the input, with the text as the target; in classification the first of two texts",
    )
    label_field: str = later_setting(
        "label",
        description="field that holds the class, a number or a name (classification of text)",
    )
    tokenizer: str = Field(
        "bytes",
        description="'bytes' or a Hugging Face tokenizer name or folder. Default: the one of "
        "`model.name`; bytes for a model without a name",
    )
    sequence_length: PositiveInt = Field(128, lt=2**31, description="tokens per sample")
    target_length: PositiveInt | None = later_setting(
        None,
        lt=2**31,
        description="tokens per target of task seq2seq; default: sequence_length",
    )
    image_size: PositiveInt = later_setting(
        32,
        le=4096,
        description="pixels of an image's height and width",
    )
    classes: PositiveInt | None = later_setting(
        None,
        description=f"classes of synthetic-images; default: {DEFAULT_CLASSES}",
    )
    packed: bool | None = Field(
        None,
        description=(
            "true: one stream of tokens cut into samples; false: one sample per document, cut or "
            "padded. Default: true for prose and text, false otherwise"
        ),
    )
    document_attention: Literal["across", "within"] = later_setting(
        "across",
        description="in packed samples tokens attend to all documents before them (across), or to their own "
        "only (within), where positions restart and a document's first token is no target",
    )
    shuffle: bool = Field(True, description="permute samples in each epoch, from the seed")
    limit: PositiveInt | None = Field(None, description="use at most this many samples")
    targets: Targets = later_setting(
        "text",
        description="tokens that are trained on where a sample has a prompt: those of the text; all of them; "
        "prompt: of the prompt alone, without a text (for experiments); text over prompt: the text's tokens "
        "as labels of the prompt's last ones, without a text (for experiments)",
    )

    @model_validator(mode="after")
    def _path_fits_source(self) -> DataSection:
        if self.factory is not None:
            if self.path is not None or self.source != "prose":
                raise ValueError("give either `factory` or `source` and `path`, not both")
            return self
        if self.arguments:
            raise ValueError("`arguments` need a `factory`")
        if self.source in WITHOUT_PATH and self.path is not None:
            raise ValueError(
                f"`path` would be ignored with source '{self.source}'; set source to text, jsonl, squad, "
                "datasets or another that reads files"
            )
        if self.source not in WITHOUT_PATH and self.path is None:
            raise ValueError(f"source '{self.source}' needs a `path`")
        if self.classes is not None and self.source != "synthetic-images":
            raise ValueError("`classes` is of source synthetic-images; other data say how many they have")
        return self

    @model_validator(mode="after")
    def _samples_are_possible(self) -> DataSection:
        if self.prompt_field is not None and (self.source not in ROWS or self.is_packed):
            raise ValueError(f"`prompt_field` needs source {', '.join(ROWS)} and `packed: false`")
        if self.targets != "text" and not (self.source == "squad" or self.prompt_field):
            raise ValueError("`targets` needs samples with a prompt: source squad, or a `prompt_field`")
        if self.document_attention == "within" and not self.is_packed:
            raise ValueError("`document_attention` is of packed samples; set `packed: true`")
        if self.source == "squad" and self.packed:
            raise ValueError("source 'squad' is one sample per question; leave `packed` out")
        if self.sequence_length < 2:
            raise ValueError("`sequence_length` must be at least 2: a token is predicted from another")
        return self

    @property
    def is_packed(self) -> bool:
        return self.source in ("prose", "text") if self.packed is None else self.packed

    @property
    def is_tokenized(self) -> bool:
        """Whether samples are text that the tokenizer cuts."""
        return self.factory is None and self.source not in IMAGES
