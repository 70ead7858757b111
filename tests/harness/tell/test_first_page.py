"""What the table of the first page answers, and when it claims nothing."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from harness.job.experiment import Price, ReportFocus, read_price
from harness.judge.comparison import Comparison
from harness.record import ErrorPart, ObservationPart, Record
from harness.record.workload import known_strategy
from harness.tell.document import Document, Heading, Line, Picture, Table
from harness.tell.first_page import (
    ANSWERS,
    FIGURES,
    MOST_PICTURES,
    MOST_ROWS,
    MOST_WARNINGS,
    MOST_WORDS,
    MOST_WORDS_CHECK,
    MOST_WORDS_FINDING,
    PICTURES,
    VERIFY,
    amounts,
    answers_table,
    check_section,
    completed,
    fastest,
    least_memory,
    least_traffic,
    one_process,
    picture_heading,
    same_training,
    scaled,
    summary_cells,
    summary_section,
    title,
    title_text,
    words_of,
)
from harness.tell.sections.results import KEY as SURPRISES
from tests.harness.tell.cells import (
    blocks_in,
    growing,
    lines_of,
    markdown_of,
    of_size,
    page_of,
    repeats,
    stage_of,
    with_world,
)
from tests.records import (
    LOSSES,
    NORMS,
    changed,
    make_communication,
    make_model,
    make_record,
    make_steps,
    make_weights,
    published,
    published_comparison,
)
from tests.representatives import cheap, first
from tests.volumes import moving

FEW = [make_record(), *repeats("ddp", 0.5), *repeats("fsdp", 0.6)]
WRONG = make_record(
    label="zero1", steps=make_steps(norms=[2 * norm for norm in NORMS]), final_weights=make_weights("c" * 64)
)
PLANTED_WRONG = make_record(label="planted-wrong-beta2", steps=WRONG.steps, final_weights=WRONG.final_weights)
PICTURES_ONLY = make_record(label="ddp", steps=make_steps(changes={step: {"tokens": 8} for step in range(4)}))
"""A classifier, whose samples count as a token each."""
NEAR = make_steps([loss + 1e-5 for loss in LOSSES])
FAILED = make_record(label="ddp", status="failed", steps=[], ranks=[], comm=[], windows=None)
OF_OTHER_JOB = make_record(label="fsdp", initial_weights=make_weights("d" * 64))
LOST = make_record(
    label="ddp", status="oom", steps=[], ranks=[],
    error=ErrorPart(kind="OutOfMemoryError", message="no memory", rank=0),
)  # fmt: skip


def page(question: ReportFocus, *records: Record) -> dict[str, str]:
    """Answers by question, the first of those that are asked several times."""
    table = answers_table(Comparison(records), question, {SURPRISES: "Differences: all"})
    return {row[0]: row[1] for row in reversed(table.rows)} | {row[0]: row[1] for row in table.rows[:1]}


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([make_record(), make_record(label="ddp")], "yes: 1 of 1 agree (bit for bit, steps: 4)"),
        (
            [make_record(), make_record(label="ddp"), make_record(label="fsdp", steps=NEAR)],
            "yes, by an assumed limit: 2 of 2 agree (largest difference of a loss 1.0e-05 nats per token, "
            "limit 6.6e-05: 100 roundings of fp32, steps: 4)",
        ),
        (
            [
                make_record(), make_record(label="single:micro_batch_size=1", steps=NEAR),
                make_record(label="ddp", steps=NEAR),
            ],
            "yes: 1 of 1 agree (largest difference of a loss 1.0e-05 nats per token, limit 1.0e-04, "
            "steps: 4)",
        ),
        (
            [make_record(), make_record(label="ddp"), WRONG],
            "no: 1 of 2 agree (bit for bit, steps: 4); diverged: zero1 on 2 ranks (gradient norm 100 %)",
        ),
        ([make_record(), WRONG], "no; diverged: zero1 on 2 ranks (gradient norm 100 %)"),
        (
            [make_record(), make_record(label="ddp"), PLANTED_WRONG],
            "yes: 1 of 1 agree (bit for bit, steps: 4); diverged, faulty on purpose: planted-wrong-beta2 on "
            "2 ranks (gradient norm 100 %)",
        ),
        ([make_record(label="ddp")], "not judged: no reference"),
        (
            [make_record(status="unsupported", reasons=["cannot fit: 131 GB"]), make_record(label="ddp")],
            "not judged: no reference: single on 1 rank: cannot fit: 131 GB",
        ),
        ([make_record()], ""),
    ],
)  # fmt: skip
def test_agreement_has_its_extent_and_no_reference_claims_none(records: list[Record], text: str) -> None:
    assert same_training(Comparison(records)) == text


@pytest.mark.parametrize(("moved", "is_test"), [(1.0, True), (1e-3, False)])
def test_final_weights_prove_nothing_where_rounding_moves_them_as_far_as_training(
    moved: float, is_test: bool
) -> None:
    """Weights of norm 10 in bf16: three roundings are 0.12 of a distance of 1, and 120 of one of 1e-3."""
    first, last = [10.0, *[0.0] * 8], [10.0, *[moved] * 8]

    def run(label: str, digest: str, weights: list[float], loss: float) -> Record:
        return make_record(
            label=label, training={"precision": "bf16"}, steps=make_steps([at + loss for at in LOSSES]),
            initial_weights=make_weights(sketch={"weight": first}),
            final_weights=make_weights(digest * 64, sketch={"weight": weights}),
        )  # fmt: skip

    runs = [run("single", "b", last, 0.0), run("ddp", "c", first if not is_test else last, 1e-3)]
    text = same_training(Comparison(runs))
    assert ": 3 roundings of bf16" in text
    assert text.startswith("not decided") is not is_test
    assert (
        "rounding alone may move the final weights 117 times as far as training did" in text
    ) is not is_test


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([make_record(), LOST], "1 of 2 cells, the reference included; out of memory: ddp on 2 ranks"),
        ([make_record(), make_record(label="ddp")], "2 of 2 cells, the reference included"),
        ([FAILED], "0 of 1 cells; failed: ddp on 2 ranks"),
        (
            [make_record(), make_record(label="planted-wrong-beta2")],
            "2 of 2 cells, the reference included; faulty on purpose: planted-wrong-beta2",
        ),
        (
            [make_record(), make_record(label="ddp"), OF_OTHER_JOB],
            "2 of 2 cells, the reference included; another job, not compared: fsdp on 2 ranks",
        ),
    ],
)
def test_how_cells_ended_and_which_are_not_compared(records: list[Record], text: str) -> None:
    assert completed(Comparison(records)) == text


def test_a_byte_too_many_is_not_as_calculated() -> None:
    """On published runs of two ranks, where a ring sends what is paid in: 16 bytes more in every step."""
    records = [*published("default")]
    alone, ddp, zero2 = (
        next(r for r in records if r.backend.label == label) for label in ("single", "ddp", "zero2")
    )
    assert amounts(Comparison([alone, ddp, zero2])) == "states 2 of 2; bytes 2 of 2"
    probed = ddp.windows.probed if ddp.windows else 0
    comm = [
        row.model_copy(update={"payload_bytes": row.payload_bytes + 16 * probed * (row.phase == "backward")})
        for row in ddp.comm
    ]
    text = amounts(Comparison([alone, ddp.model_copy(update={"comm": comm})]))
    assert text == "states 1 of 1; bytes 0 of 1; other bytes: ddp on 2 ranks (+16 bytes)"
    assert amounts(Comparison([make_record(label="ddp")])) == "no closed form: ddp on 2 ranks"


def test_norms_of_what_claims_a_strategy_are_set_aside() -> None:
    ddp = next(r for r in published("default") if r.backend.label == "ddp" and r.repeat == 0)
    claimed = {"name": "observed-ddp", "label": "observed-ddp", "claim": known_strategy(ddp)}
    comm = [
        row.model_copy(update={"payload_bytes": row.payload_bytes + 16 * (row.phase == "backward")})
        for row in ddp.comm
    ]
    text = amounts(Comparison([changed(ddp, backend=claimed, comm=comm)]))
    assert "bytes 1 of 1; apart from norms and flags: observed-ddp on 2 ranks (+" in text


@pytest.mark.parametrize(
    ("device", "records", "text"),
    [
        (
            "cpu",
            [
                of_size("ddp", 8_000_000, states=16_000_000), of_size("fsdp", 2_000_000, states=4_000_000),
                of_size("zero3", 1_000_000, states=8_000_000),
            ],
            "fsdp: states 4.00 MB (ddp 16.0); zero3: lowest peak 1.00 MB (ddp 8.00)",
        ),
        ("cuda", [of_size("ddp", 8_000_000), of_size("zero3", 1_000_000)], "zero3: peak 1.00 MB (ddp 8.00)"),
        (
            "cpu",
            [of_size("ddp", 2_000_000), of_size("fsdp", 2_000_000)],
            "all cells: states 0.016 MB; all cells: lowest peak 2.00 MB",
        ),
        ("cpu", [make_record(label="ddp", ranks=[])], "not measured"),
    ],
)  # fmt: skip
def test_least_memory_is_of_states_on_cpu_ranks_and_of_peaks_on_gpus(
    device: str, records: list[Record], text: str
) -> None:
    runs = [with_world(record, device=device) for record in (make_record(), *records)]
    assert least_memory(stage_of(*runs)) == text


def test_least_traffic_names_all_that_send_as_little() -> None:
    cells = [
        of_size("ddp", 1), of_size("fsdp", 1, sent=6_000_000), of_size("fsdp-grad-op", 1, sent=4_000_001),
    ]  # fmt: skip
    assert least_traffic(stage_of(make_record(), *cells)) == "ddp, fsdp-grad-op: 4.00 MB a step"
    less = of_size("zero3", 1, sent=2_000_000)
    assert least_traffic(stage_of(make_record(), *cells, less)) == "zero3: 2.00 MB a step (ddp 4.00)"
    assert least_traffic(stage_of(make_record(label="ddp", world_size=1))) == ""
    apart = with_world(of_size("zero3", 2, sent=2_000_000), micro_batch_size=1)
    assert least_traffic(stage_of(cells[0], apart)).startswith("not compared: ")


SLOW = repeats("zero3", *[1.0, 1.1] * 3)
DDP = repeats("ddp", *[0.5, 0.51] * 3)
ROUGH = "; rough: timed steps per run: 2"


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([*DDP, *SLOW], f"ddp (2,028 tokens/s); slowest: zero3 0.48 of ddp's speed{ROUGH}"),
        (
            [*DDP, *repeats("fsdp", *[0.505, 0.515] * 3), *SLOW],
            "ddp (2,028 tokens/s); equal within 5 %: fsdp; "
            f"slowest: zero3 0.48 of ddp's speed{ROUGH}",
        ),
        (
            [*DDP, *repeats("fsdp", *[0.4, 0.8] * 3), *SLOW],
            f"ddp (2,028 tokens/s); undecided: fsdp; slowest: zero3 0.48 of ddp's speed{ROUGH}",
        ),
        (
            [*repeats("ddp", 0.5), *repeats("fsdp", 0.9), *repeats("zero3", 1.0)],
            f"not ranked: 1 round; give --repeats 6; 1,024 to 2,048 tokens/s{ROUGH}",
        ),
        ([make_record(label="ddp")], f"ddp (the only one timed): 2,048 tokens/s{ROUGH}"),
        ([make_record()], f"single (the only one timed): 2,048 tokens/s{ROUGH}"),
        ([PICTURES_ONLY], f"ddp (the only one timed): 16.0 samples/s{ROUGH}"),
        ([make_record(), WRONG], "not compared: nothing that trains the same model was timed"),
        (
            [*FEW[:2], with_world(make_record(label="fsdp"), micro_batch_size=1)],
            f"not compared: no two cells ran under the same conditions{ROUGH}",
        ),
        (
            [make_record(label=label, world_size=16) for label in ("ddp", "fsdp")],
            "not ranked: 1 round; give --repeats 6; 2,048 to 2,048 tokens/s; ranks share cores, so speeds "
            f"say little{ROUGH}",
        ),
    ],
)  # fmt: skip
def test_the_fastest_is_named_where_the_rounds_show_it(records: list[Record], text: str) -> None:
    assert fastest(stage_of(*records)) == text


def test_a_price_says_what_each_strategy_costs_on_gpus_and_is_part_of_the_plan_of_cpu_ranks() -> None:
    def priced(label: str, seconds: float, device: str, price: str | None = "2 USD") -> Record:
        one = make_record(label=label, steps=make_steps(seconds=seconds))
        one = one.model_copy(update={"price_per_gpu_hour": price and Price.model_validate(read_price(price))})
        return with_world(one, device=device)

    on_gpus = [priced("fsdp", 0.9, "cuda"), priced("ddp", 0.5, "cuda")]
    cells = "ddp 271 GPU-hours, 543 USD; fsdp 488 GPU-hours, 977 USD"
    assert page("all", *on_gpus)["Price"] == f"per 1e9 tokens, by median speed: {cells}"
    assert "Price" not in page("all", priced("ddp", 0.5, "cuda", None))
    assert "Price" not in page("memory", *on_gpus)
    one = priced("ddp", 0.5, "cpu").model_copy(update={"command": ["harness", "compare", "--model", "gpt2"]})
    here = page("all", one)
    assert here["Price"] == "n/a: CPU ranks use no GPU-hours"
    plan = "--model gpt2 --set 'compare.price_per_gpu_hour=2 USD' --gpu H100-80 --gpus 8"
    assert here["On GPUs"].endswith(plan)


def test_the_plan_for_gpus_is_of_the_job_that_the_answers_compare() -> None:
    def of(job: str, model: str, *labels: str) -> list[Record]:
        own = {"command": ["harness", "compare", "--model", model], "job_id": job * 12}
        records = [make_record(), *(make_record(label=label) for label in labels)]
        return [record.model_copy(update=own) for record in records]

    here = page("all", *of("a", "gpt2", "ddp"), *of("b", "opt-1.3b", "ddp", "zero3", "fsdp"))
    assert here["Job"].startswith("b" * 12)
    assert "--model opt-1.3b" in here["On GPUs"]


@pytest.mark.parametrize(("options", "has_fix"), [(["--lr", "1"], False), ([], True)])
def test_a_fix_is_not_given_for_what_options_of_two_commands_explain(
    options: list[str], has_fix: bool
) -> None:
    def script(base: str, options: list[str], rate: float) -> Record:
        seen = ObservationPart(command=["python", "train.py", *options], frameworks=[], base=base)
        steps = make_steps(changes={key: {"learning_rate": rate} for key in range(4)})
        return make_record(label=f"observed-{base}", world_size=2, observation=seen, steps=steps)

    assert ("What to change" in page("all", script("ddp", [], 1e-3), script("zero1", options, 1))) == has_fix


def test_the_speed_of_one_process_stands_next_to_that_of_several() -> None:
    alone = make_record(steps=make_steps(seconds=0.25))
    cells = [*repeats("ddp", 0.5), *repeats("fsdp", 0.9)]
    session = "; measured in one session, other days differ"
    assert one_process(stage_of(alone, *cells)) == f"4,096 tokens/s{session}"
    text = one_process(stage_of(with_world(alone, threads_per_rank=2), *cells))
    assert text == f"4,096 tokens/s; its 2 threads have the cores of 2 ranks with 1 each{session}"
    assert one_process(stage_of(alone, *repeats("ddp", 0.5))) == ""


SLOWING = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0)
"""Of a machine, over rounds."""


def curves(**seconds: Sequence[float]) -> list[Record]:
    """Of each backend seven runs on one and two ranks."""
    return [
        record
        for label, of_sizes in seconds.items()
        for size, each in enumerate(of_sizes, 1)
        for record in repeats(label, *(each * slow for slow in SLOWING), world_size=size)
    ]


@pytest.mark.parametrize(
    ("kind", "records", "text"),
    [
        (
            "strong",
            [*repeats("ddp", 0.8, world_size=1), *repeats("ddp", 0.5, world_size=2)],
            "speed-up: ddp 1.60 for 1.25 x the cost in rank-hours (efficiency 80 %); "
            "not tested: 1 round; give --repeats 6",
        ),
        (
            "weak",
            [growing("ddp", 1, 0.5), growing("ddp", 2, 0.8)],
            "efficiency: ddp 62 %; not tested: 1 round; give --repeats 6",
        ),
        ("strong", [growing("ddp", 1, 0.5), growing("ddp", 2, 0.8)], None),
        ("weak", FEW, None),
        (
            "strong",
            curves(ddp=(0.8, 0.5), zero2=(0.8, 0.8), fsdp=(0.8, 1.0)),
            "speed-up: most ddp 1.60 (1.60 to 1.60) for 1.25 x the cost in rank-hours (efficiency 80 %), "
            "least fsdp 0.80 (0.80 to 0.80) for 2.50 x the cost in rank-hours (efficiency 40 %); "
            "faster: ddp; equal within 5 %: zero2; slower: fsdp",
        ),
        (
            "strong",
            [
                *repeats("ddp", *[0.8] * 7, world_size=1),
                *repeats("ddp", 0.4, 1.6, 0.5, 1.2, 0.6, 1.0, 0.8, world_size=2),
            ],
            "speed-up: ddp 1.02 (0.63 to 1.63) for 1.97 x the cost in rank-hours (efficiency 51 %); "
            "undecided: ddp",
        ),
    ],
)
def test_scaling_is_that_at_the_most_ranks(kind: str, records: list[Record], text: str | None) -> None:
    found = scaled(Comparison(records), kind)
    assert found == ("" if text is None else f"2 ranks against 1, {text}")


def test_scaling_over_several_sizes_says_how_many_ranks_pay() -> None:
    sizes = {1: 0.8, 2: 0.5, 4: 0.4, 8: 0.5}
    records = [one for size, each in sizes.items() for one in repeats("ddp", each, world_size=size)]
    assert (
        "; ddp by ranks, speed-up at efficiency: 1: 1.00 at 100 %, 2: 1.60 at 80 %, 4: 2.00 at 50 %, "
        "8: 1.60 at 20 %; "
    ) in scaled(Comparison(records), "strong")


def test_each_report_opens_with_the_answer_to_its_question_and_answers_no_other() -> None:
    first: dict[ReportFocus, str] = {"speed": "fastest", "memory": "memory", "all": "same", "parity": "same"}
    for question, name in first.items():
        table = answers_table(Comparison(FEW), question, {})
        assert table.rows[0][0] == ANSWERS[name]["question"]
    unasked: tuple[ReportFocus, ...] = ("memory", "parity")
    for question in unasked:
        text = str(page(question, *FEW))
        assert not any(words in text for words in ("tokens/s", "Fastest", " ms", "traffic")), question


UNCLIPPED = make_record(label="ddp", effective={"gradient_clipping": None})


@pytest.mark.parametrize(
    ("records", "begin", "end"),
    [
        ([UNCLIPPED, WRONG], "zero1 on 2 ranks: all gradients x 2", "; cause: Gradients are summed"),
        ([make_record(label="ddp", steps=make_steps(norms=[1.3 * norm for norm in NORMS]))],
         "ddp on 2 ranks: the first gradient norm is 1.3 times", "; possible causes: Gradients of a rank"),
        ([make_record(label="ddp", steps=make_steps([*LOSSES[:2], *(loss + 0.1 for loss in LOSSES[2:])]))],
         "ddp on 2 ranks: losses first differ at step 2", "; possible causes: Clipping, optimizer"),
        ([UNCLIPPED], "", ""),
    ],
)  # fmt: skip
def test_the_cause_is_of_a_run_that_left_the_reference(records: list[Record], begin: str, end: str) -> None:
    text = page("parity", make_record(), *records).get("Cause of the difference", "")
    assert (text.startswith(begin), end in text, bool(text)) == (True, True, bool(begin))


def test_a_report_says_what_did_not_run_or_was_not_judged() -> None:
    assert page("scaling", *FEW)["Strong scaling"].startswith("not measured: ")
    assert (
        page("all", make_record(label="ddp"))["Warnings"] == "none; no run could be compared with a reference"
    )
    assert page("all", make_record(), make_record(label="ddp"))["Warnings"] == "none"
    other = {"job_id": "b" * 12, "training": {"seed": 2}}
    pairs = [(make_record(**own), make_record(label="ddp", **own)) for own in ({}, other)]
    jobs = page("all", *(record for pair in pairs for record in pair))
    assert jobs["Job"] == "0123456789ab, one of 2; the results show all"
    assert "Job" not in page("all", *pairs[0])


def test_each_kind_of_finding_has_one_short_row_and_tells_how_many_others_there_are() -> None:
    worse = [
        make_record(
            label=label, steps=make_steps([loss + size for loss in LOSSES]),
            final_weights=make_weights("c" * 64),
        )
        for size, label in enumerate(("zero0", "zero1", "ddp"), start=1)
    ]  # fmt: skip
    rows = answers_table(Comparison([make_record(), *worse]), "all", {}).rows
    found = [(row[0], row[1]) for row in rows if row[0].startswith("Warning: ")]
    assert 0 < len(found) == len({name for name, _ in found}) <= MOST_WARNINGS
    assert any(text.endswith("(alike: 2 more)") for _, text in found)
    assert all(len(text.split()) <= MOST_WORDS_FINDING + 4 for _, text in found)


def test_differences_from_the_textbook_are_those_of_the_question_and_the_rest_is_counted() -> None:
    name = ANSWERS["surprises"]["question"]
    assert page("speed", moving("zero1"))[name].startswith("zero1 on 2 ranks: 1.5 x the textbook's bytes")
    assert name not in page("memory", moving("zero1"))
    assert name not in page("all", moving("ddp"))
    records = [moving(label, accumulation_steps=3) for label in ("zero1", "zero3", "fsdp", "fsdp-hybrid")]
    table = answers_table(Comparison(records), "all", {SURPRISES: "Differences: all"})
    evidence = [row[2].text for row in table.rows if row[0] == name]
    assert evidence[:2] == ["Differences", "Differences"]
    assert evidence[2].endswith(" more")


def test_what_to_use_by_traffic_says_what_is_faster_here() -> None:
    told = page("all", *published("shaped-links/200mbit"))["Use, by memory of a rank"]
    assert told.startswith("ddp from ")
    assert told.endswith("; faster here than ddp: fsdp-hybrid")
    assert "faster here" not in page("all", *published("default"))["Use, by memory of a rank"]
    alone = page("all", make_record(label="ddp"), make_record(label="fsdp"))["Use, by memory of a rank"]
    assert alone.endswith("no other needs over 1 % less")


def test_figures_of_one_number_of_ranks_are_said_to_be_so() -> None:
    ranks = page("memory", *published("full-matrix"))["Ranks"]
    assert ranks == "figures of strategies are those on 2; the results have 1, 2, 4"
    assert "Ranks" not in page("all", *published("default"))


def test_a_question_of_memory_is_answered_for_the_ranks_of_a_node_too() -> None:
    told = page("memory", *published("bloom-560m"))
    assert told["On 8 ranks"].startswith("calculated: zero3 1,746 MB; fsdp 2,591 MB; ")
    assert told["On 8 ranks"].endswith("; ddp 5,592 MB (memory without activations)")
    assert told["Use, by memory of a rank"].startswith(
        "ddp from 5,592 MB (memory without activations); below "
    )
    assert "On 8 ranks" not in page("all", *published("default"))
    more = [with_world(record, world_size=8) for record in published("bloom-560m")]
    assert "On 8 ranks" not in page("memory", *more)
    heading = picture_heading(Comparison(published("bloom-560m")))
    assert heading == "BloomForCausalLM with 559 M parameters on 2 CPU ranks, global batch 8"


def test_what_carries_over_to_gpus_is_said_of_cpu_ranks_alone() -> None:
    here = make_record(label="ddp")
    assert page("all", here)["On GPUs"].startswith(
        "untested; on as many GPUs states, bytes and parity should be the same,"
    )
    assert "On GPUs" not in page("all", with_world(here, device="cuda", collectives="nccl"))
    # The job's own words, else another job is planned; how it is measured is no part of a plan.
    for command, words in {
        "compare --config a.yaml": "--config a.yaml ",
        "run --model gpt2 --set adapter.kind=lora --set measure.trace=true": (
            "--model gpt2 --set adapter.kind=lora "
        ),
        "compare --config a.yaml --set training.steps=3 --set training.precision=bf16 --runs r": (
            "--config a.yaml --set training.precision=bf16 "
        ),
        "compare --nproc 2": "",
        "compare --backends ddp -- train.py": None,
        "observe -- torchrun train.py": None,
    }.items():
        told = page("all", here.model_copy(update={"command": ["harness", *command.split()]}))["On GPUs"]
        plan = "will differ" if words is None else f"predict: harness estimate {words}--gpu H100-80 --gpus 8"
        assert told.endswith(plan), command


JOB = "model with 0.001 M parameters on 2 CPU ranks: "
LABELS = ("single", "ddp", "zero1", "zero1:default_clipping=True")
OPTIONS = [make_record(label=label, world_size=1 + (label != "single")) for label in LABELS]


@pytest.mark.parametrize(
    ("question", "records", "mark"),
    [
        ("all", [make_record(), make_record(label="ddp")], ""),
        ("speed", FEW, ""),
        ("parity", OPTIONS, " (varied: default_clipping)"),
        (
            "speed",
            [*OPTIONS[:2], *(make_record(label=f"zero3:{option}=1") for option in ("a", "b", "c"))],
            " (varied: a and 2 more)",
        ),
        (
            "parity",
            [*OPTIONS, *(make_record(label=of) for of in ("zero0", "zero2", "zero3", "fsdp", "fsdp1"))],
            "",
        ),
        (
            "all",
            [
                *FEW[:2],
                *(make_record(label=f"zero3:{o}", status="unsupported") for o in ("buffer_count=1", "hpz=8")),
            ],
            "",
        ),
        (
            "all",
            [make_record(), make_record(label="planted-wrong-beta2")],
            " (faulty on purpose: planted-wrong-beta2)",
        ),
        ("all", [*FEW, make_record(label="planted-wrong-beta2")], ""),
    ],
)
def test_the_title_names_job_question_and_what_is_varied(
    question: ReportFocus, records: list[Record], mark: str
) -> None:
    assert title(Comparison(records), question) == JOB + title_text(question) + mark
    one_job = [r for size in (1, 2) for r in repeats("ddp", 0.5, world_size=size)]
    jobs = [growing("ddp", size, 0.5) for size in (1, 2)]
    for kind, of in (("strong", one_job), ("weak", jobs), ("scaling", [make_record(label="ddp")])):
        assert title(Comparison(of), "scaling").endswith(title_text(kind))


def test_the_title_names_architecture_nodes_and_devices() -> None:
    run = make_record(label="ddp", world_size=4).model_copy(update={"model": make_model()})
    text = title(Comparison([with_world(run, device="cuda", nodes=2, ranks_per_node=2)]), "all")
    assert text.startswith("LlamaForCausalLM with 0.001 M parameters on 4 GPU ranks of 2 nodes: ")
    adapted = title(Comparison([changed(run, job={"adapter": {"kind": "lora", "rank": 4}})]), "all")
    assert adapted.startswith("LlamaForCausalLM with 0.001 M parameters (LoRA of rank 4) on 4 CPU ranks: ")


def test_the_first_short_command_stands_above_the_one_that_verifies_and_others_are_counted() -> None:
    def shown(*commands: str) -> tuple[list[str], str]:
        runs = [
            make_record(run_id=f"run-{n}", repeat=n, command=command.split())
            for n, command in enumerate(commands)
        ]
        code, again, _ = check_section(Comparison(runs)).blocks
        return code.text.splitlines(), again.text  # type: ignore[union-attr]

    compare = "harness compare --backends ddp"
    assert shown(compare, compare) == ([compare, VERIFY], "Commit, versions, configuration:")
    lines, again = shown("harness compare", "harness compare --resume")
    assert (lines, "(commands: 1 more)" in again) == (["harness compare", VERIFY], True)
    assert shown("harness compare" + " --set a=b" * MOST_WORDS_CHECK)[0] == [VERIFY]


QUESTIONS: tuple[ReportFocus, ...] = ("all", "speed", "memory", "footprint", "parity", "scaling")
ASKED = [("full_matrix", "all"), ("many", "all"), ("many", "speed"), ("many", "parity")]


def own_pictures(of: Document) -> list[str]:
    return [block.key for section in of.sections for block in section.blocks if isinstance(block, Picture)]


@pytest.fixture(scope="module")
def full_matrix() -> Comparison:
    return published_comparison("full-matrix")


@pytest.fixture(scope="module")
def many() -> Comparison:
    """200 cells with long names on four numbers of ranks; some ran out of memory, some diverged."""
    records = [make_record()]
    for number in range(50):
        label = f"zero3:offload=cpu,reduce_bucket_size={1000 + number}"
        changes: dict[str, Any] = {"steps": make_steps(seconds=0.5 + number / 100)}
        if number % 7 == 0:
            doubled = make_steps(norms=[2 * norm for norm in NORMS])
            changes = {"steps": doubled, "final_weights": make_weights("c" * 64)}
        elif number % 11 == 0:
            changes = {"status": "oom", "steps": []}
        for size in (1, 2, 4, 8):
            comm = make_communication(size, payload_bytes=4000 * (number + 1)) if size > 1 else []
            run = make_record(
                label=label, world_size=size, run_id=f"{number}-{size}", comm=comm, **changes
            )  # fmt: skip
            records.append(run)
    return Comparison(records)


@pytest.mark.parametrize(
    ("of", "question"),
    [
        *cheap([("many", "all")], ASKED),
        *first([], [case for case in product(("full_matrix", "many"), QUESTIONS) if case not in ASKED]),
    ],
)
def test_whatever_the_number_of_cells_the_report_is_short(
    of: str, question: ReportFocus, request: pytest.FixtureRequest
) -> None:
    made = page_of(request.getfixturevalue(of), question)
    assert words_of(made) <= MOST_WORDS
    assert len(own_pictures(made)) <= MOST_PICTURES
    assert set(PICTURES) == set(QUESTIONS)
    assert all(len(makers) <= MOST_PICTURES for makers in PICTURES.values())


def test_every_line_refers_to_details_that_exist() -> None:
    made = page_of(FEW, "all")
    assert made.details is not None
    links = {link.partition(")")[0] for link in markdown_of(made)[0].split("report.details.md#")[1:]}
    assert links
    assert links <= {section.key for section in made.details.sections}


def test_weak_scaling_has_no_section_on_strong_scaling_and_no_alarm_about_jobs() -> None:
    records = [growing(label, size, 0.5) for label in ("ddp", "fsdp") for size in (1, 2)]
    made = page_of(records, "scaling")
    keys = {picture.key for picture in made.pictures()}
    assert "weak-scaling" in keys
    assert "strong-scaling" not in keys
    text = "".join(markdown_of(made))
    assert "trong scaling" not in text
    assert "several-jobs" not in text


MOST_COLUMNS = 8


def tables(question: ReportFocus, *records: Record) -> list[Table]:
    return blocks_in(summary_section(Comparison(records), question), Table)


def headings(*records: Record) -> list[str]:
    return [block.text for block in blocks_in(summary_section(Comparison(records), "all"), Heading)]


def note(*records: Record) -> str:
    return blocks_in(summary_section(Comparison(records), "all"), Line)[-1].text


def shown(table: Table) -> dict[str, dict[str, str]]:
    """Text by backend and column."""
    return {line["backend"]: line for line in lines_of(table)}


def sent_ratios(*records: Record) -> list[dict[str, str]]:
    """What cells of each table send, related to DDP."""
    return [
        {name: row["sent_bytes_per_step_of_ddp"] for name, row in shown(table).items()}
        for table in tables("footprint", make_record(), *records)
    ]


def test_no_question_has_more_than_eight_columns() -> None:
    for question in FIGURES:
        for table in tables(question, make_record(), *repeats("ddp", 0.5), *repeats("fsdp", 0.6)):
            assert len(table.for_people().columns) <= MOST_COLUMNS, question


def test_ratios_are_to_ddp_on_the_same_ranks_and_from_ten_on_multiples() -> None:
    records = [
        make_record(label=label, world_size=size, comm=make_communication(size, payload_bytes=sent))
        for size, base in ((2, 1000), (4, 8000))
        for label, sent in (("ddp", base), ("fsdp", base * 3 // 2))
    ]
    assert sent_ratios(*records) == [{"ddp": "100 %", "fsdp": "150 %"}] * 2
    more = [
        make_record(label=label, comm=make_communication(2, payload_bytes=sent))
        for label, sent in (("ddp", 1000), ("fsdp", 9900), ("zero3", 52_900))
    ]
    assert sent_ratios(*more) == [{"ddp": "100 %", "fsdp": "990 %", "zero3": "53 x"}]
    # The reference is no row next to others; without DDP there are no ratios.
    (table,) = tables("footprint", make_record(), *more[1:])
    assert set(shown(table)) == {"fsdp", "zero3"}
    assert not any(column.key.endswith("_of_ddp") for column in table.columns)
    assert [list(shown(one)) for one in tables("all", make_record())] == [["single"]]


def test_of_both_kinds_of_kernels_the_cells_that_are_timed_are_shown_next_to_their_base() -> None:
    """The others show their parity, which the details name."""
    records = [
        make_record(
            label=label, run_id=f"{label}-{asked}", training={"deterministic": asked},
            comm=make_communication(2, payload_bytes=sent),
        )
        for label, sent in (("ddp", 1000), ("fsdp", 1500))
        for asked in (True, False)
    ]  # fmt: skip
    assert sent_ratios(*records) == [
        {"ddp (not deterministic)": "100 %", "fsdp (not deterministic)": "150 %"}
    ]
    assert "Cells not shown: 2." in note(make_record(), *records)


def test_a_speed_has_the_interval_of_its_ratio_and_a_mark_where_it_is_open() -> None:
    (table,) = tables(
        "speed",
        *repeats("ddp", 0.5, 0.5, 0.51, 0.52, 0.52, 0.53),
        *repeats("fsdp", 0.505, 0.505, 0.515, 0.525, 0.525, 0.53),
        *repeats("zero2", 0.505, 0.605, 0.315, 0.525, 0.325, 0.93),
        *repeats("zero3", 1.0, 1.01, 1.02, 1.03, 1.04, 1.05),
        *repeats("zero1", 0.7),
    )
    assert [column.title for column in table.columns][2] == "speed / ddp"
    assert {name: row["speed_ratio"] for name, row in shown(table).items()} == {
        "ddp": "1", "fsdp": "0.99 (0.99 to 1.00)", "zero2": "~0.99 (0.57 to 1.62)",
        "zero3": "0.50 (0.50 to 0.50)", "zero1": "~0.71",
    }  # fmt: skip
    assert table.written(str, "**{}**")[3][2] == "**0.50 (0.50 to 0.50)**"


def test_cells_that_did_other_work_have_no_speed_and_their_parity_is_told() -> None:
    failed = make_record(label="zero2", status="failed", steps=[], ranks=[], comm=[], windows=None)
    (table,) = tables("speed", make_record(), make_record(label="ddp"), WRONG, failed)
    rows = shown(table)
    assert (rows["zero1"]["speed_ratio"], rows["zero1"]["parity"]) == ("n/a", "diverged")
    assert (rows["zero2"]["tokens_per_second"], rows["zero2"]["parity"]) == ("n/a", "failed")


def test_jobs_that_ran_on_as_many_ranks_have_a_table_each() -> None:
    other = [make_record(label=label, job_id="b" * 12) for label in ("single", "ddp")]
    records = [make_record(), make_record(label="ddp"), *other]
    assert headings(*records) == ["2 ranks, job 0123456789ab", "2 ranks, job bbbbbbbbbbbb"]
    assert headings(*records[:2]) == []


def test_of_too_many_cells_those_that_tell_most_are_shown() -> None:
    many = [make_record(label=f"zero1:n={n}") for n in range(MOST_ROWS + 5)]
    doubled = make_steps(norms=[norm * 2 for norm in NORMS])
    wrong = make_record(label="zero3", steps=doubled, final_weights=make_weights("c" * 64))
    records = [make_record(), *many, make_record(label="ddp"), wrong]
    found = [group.label for group in summary_cells(Comparison(records), 6)]
    assert len(found) == 6
    assert {"ddp", "zero3"} <= set(found)
    assert f"Cells not shown: {len(many) + 2 - MOST_ROWS}." in note(*records)


def test_of_too_many_cells_those_through_accelerate_with_the_same_figures_are_left_out() -> None:
    labels = ("ddp", "accelerate-ddp", "zero1", "accelerate-zero1")
    records = [make_record(), *(make_record(label=label) for label in labels)]
    comparison = Comparison(records)
    assert [group.label for group in summary_cells(comparison, 3)] == ["ddp", "zero1"]
    assert len(summary_cells(comparison, 4)) == 4
    more = make_record(label="accelerate-zero1", comm=make_communication(2, payload_bytes=90_000))
    found = summary_cells(Comparison([*records[:-1], more]), 3)
    assert [group.label for group in found] == ["ddp", "zero1", "accelerate-zero1"]
