"""The table of versions: its ranges at their borders, and what follows from it."""

from pathlib import Path

import pytest

from harness.backends import registry
from harness.backends.libraries import facts as library_facts
from harness.backends.libraries.facts import FACTS, LibraryFact, fact, not_run, unsupported
from harness.judge.comparison import Comparison
from harness.judge.wording import entries
from harness.record import Record
from tests.records import make_record

PAGE = Path(__file__).resolve().parents[2] / "docs" / "versions.md"
BEGIN, END = "<!-- facts -->\n\n", "\n<!-- end of facts -->"
NOT_RUN = "no option asks for it; a DeepSpeed file that does is refused"


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("zero-clips-by-default", ["0.19.3", "0.19.8"], ["0.19.2"]),
        ("zero2-loses-micro-steps", ["0.17.6", "0.18.2"], ["0.17.5", "0.18.3"]),
        ("zero0-bf16-scales-gradients", ["0.17.6", "0.18.5"], ["0.17.5", "0.18.6"]),
        ("trainer-without-label-shift", ["5.9.0"], ["5.10.1"]),
    ],
)
def test_a_fact_is_true_of_its_versions_alone(name: str, inside: list[str], outside: list[str]) -> None:
    assert all(fact(name).includes(version) for version in inside)
    assert not any(fact(name).includes(version) for version in [*outside, "unknown"])


def test_texts_name_the_first_version_of_the_table() -> None:
    first = fact("zero-clips-by-default").first
    assert first == "0.19.3"
    assert f"DeepSpeed {first} and later clip" in entries()["clipping-differs"]["cause"]


@pytest.mark.parametrize(
    "label",
    ["zero3:qwz=true", "zero3:qgz=true", "zero3:mics=2", "zero3:deepcompile=true",
     "zero3:offload=superoffload", "zero2:offload=zenflow"],
)  # fmt: skip
def test_what_is_not_run_is_refused_with_its_reason(label: str) -> None:
    with pytest.raises(registry.UnknownBackend) as refused:
        registry.canonical_label(label)
    (named,) = [entry for entry in not_run() if entry.id.lower() in label]
    assert f"{named.id} is not run: {named.what} ({named.source})" in str(refused.value)


def of_version(version: str, accumulation_steps: int, label: str = "zero2") -> Record:
    backend, world = {"versions": {"deepspeed": version}}, {"accumulation_steps": accumulation_steps}
    return make_record(label=label, backend=backend, world=world)


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (of_version("0.18.2", 4), True), (of_version("0.18.3", 4), False), (of_version("0.18.2", 1), False),
        (of_version("0.18.2", 4, "zero3"), False), (of_version("0.18.2", 4, "ddp"), False),
        (of_version("unknown", 4), False),
    ],
    ids=["faulty", "mended", "one micro-step", "another stage", "another library", "no version"],
)  # fmt: skip
def test_a_run_under_a_faulty_version_is_named(record: Record, found: bool) -> None:
    findings = [f for f in Comparison([make_record(), record]).findings if f.id == "faulty-version"]
    assert bool(findings) is found
    if found:
        assert "deepspeed 0.18.2 stage 2 computes wrong gradients" in findings[0].message
        assert "(versions >=0.17.6,<0.18.3)" in findings[0].message


def test_what_a_version_cannot_do_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_facts, "installed_version", lambda _: "5.9.0")
    (reason,) = unsupported(("torch", "accelerate", "transformers"))
    assert reason.startswith("transformers 5.9.0 cannot: ")
    assert unsupported(("torch", "deepspeed")) == []


def test_every_fact_has_a_source() -> None:
    assert all(entry.source and entry.handled for entry in FACTS)
    assert len({entry.id for entry in FACTS}) == len(FACTS)


def table() -> str:
    """The table of facts in `docs/versions.md`, which says once what an empty cell of the harness means."""
    said_once = {"states": LibraryFact.handled, "traffic": LibraryFact.handled, "not run": NOT_RUN}
    head = "| library | versions | effect | what | costs, times | what the harness does | source |"
    lines = [head, "|" + " --- |" * 7]
    lines += [
        f"| {entry.library} | `{entry.versions}` | {entry.effect} "
        f"| {f'{entry.id}: ' if entry.effect == 'not run' else ''}{entry.what} | {entry.cost} "
        f"| {'' if entry.handled == said_once.get(entry.effect) else entry.handled} | {entry.source} |"
        for entry in FACTS
    ]
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table(update_golden: bool) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    wanted = before + BEGIN + table() + END + after
    if update_golden:
        PAGE.write_text(wanted, encoding="utf-8")
    assert text == wanted
