"""Tables of time, overlap and energy."""

from typing import Any

from harness.job.experiment import Price
from harness.judge.comparison import Comparison
from harness.record import ArtifactPart, EnergyPart, EvaluationPart, OverlapPart, Record, WaitPart
from harness.tell.document import Items, Paragraph, Section, Table
from harness.tell.sections.time import energy_section, overlap_section, time_section
from tests.harness.judge.findings.test_timing import billion, ranks, run
from tests.harness.tell.cells import blocks_in, lines_of, with_world
from tests.pipelines import make_pipeline
from tests.records import changed, make_ranks, make_record


def line(section: Section | None, key: str, number: int = 0) -> dict[str, str]:
    """A line of a table by column, as text."""
    (table,) = [block for block in blocks_in(section, Table) if block.key == key]
    return lines_of(table)[number]


def test_times_are_of_the_timed_steps() -> None:
    parts = ranks(step_seconds=[9.0] * 4 + [0.4] * 8)
    found = line(time_section(Comparison([run(ranks=parts)])), "time")
    assert found == {
        "backend": "ddp", "world_size": "2", "median_step_seconds": "500",
        "rank_spread_seconds": "100.0", "data_seconds": "10.0", "forward_seconds": "100",
        "backward_seconds": "300", "update_seconds": "50.0", "first_steady_step": "0",
        "first_timed_step": "4",
    }  # fmt: skip


def test_what_a_pipeline_waits_has_a_column_that_others_lack() -> None:
    found = line(time_section(Comparison([make_pipeline()])), "time")
    assert (found["forward_seconds"], found["waiting_seconds"]) == ("1,000", "1,000")
    assert "waiting_seconds" not in line(time_section(Comparison([run()])), "time")


def test_utilisation_is_model_flops_over_the_sheet_of_all_devices_or_the_measured_peak_of_cpus() -> None:
    # 1024 tokens of 6e9 FLOPs each and 12 x 128 for attention, in 0.2 s, on two of 19.5 TFLOP/s.
    plain, flops = billion(0.2), 1024 * (6e9 + 12 * 128) / 0.2
    again = changed(plain, model={"activation_checkpointing": True})
    cpu = billion(0.2, device_name="cpu", matmul_flops_per_second={"float32": 40e12})
    found, recomputed, of_cpu = (
        line(time_section(Comparison([r])), "utilisation") for r in (plain, again, cpu)
    )
    assert (found["model_flops_per_second"], found["peak_flops_per_second"]) == ("30.7", "39.0")
    assert found["model_utilisation"] == f"{flops / 39e12 * 100:.1f} %"
    assert "A100" in found["peak_source"]
    measured = {"model_utilisation_of_measured", "hardware_utilisation_of_measured"}
    assert not measured & set(found)
    assert not {"model_utilisation", "peak_source"} & set(of_cpu)
    assert {of_cpu[name] for name in measured} == {f"{flops / 80e12 * 100:.1f} %"}
    # Recomputation raises hardware utilisation only.
    assert found["model_utilisation"] == recomputed["model_utilisation"]
    assert found["hardware_flops_per_second"] == found["model_flops_per_second"]
    assert float(recomputed["hardware_flops_per_second"]) > float(found["hardware_flops_per_second"])


def test_the_cost_of_each_probe_is_that_of_the_rank_where_it_took_most() -> None:
    parts = [part.model_copy(update={"probe_seconds": {"counter": 0.001}}) for part in ranks()]
    parts[1] = parts[1].model_copy(update={"probe_seconds": {"counter": 0.002, "tracer": 0.3}})
    found = line(time_section(Comparison([run(ranks=parts)])), "probe_cost")
    assert (found["counter_seconds"], found["tracer_seconds"]) == ("2.00", "300")
    assert found["probed_extra_seconds"] == "0"


def evaluated(*seconds: float) -> Record:
    parts = [
        EvaluationPart(step=12 - number, loss=5.0, target_tokens=254, samples=6, seconds=value)
        for number, value in enumerate(reversed(seconds))
    ]
    return run(eval=parts)


def test_evaluation_has_its_samples_per_second() -> None:
    section = time_section(Comparison([evaluated(0.5, 0.75), evaluated(0.5, 1.0)]))
    assert line(section, "evaluation") == {
        "backend": "ddp", "world_size": "2", "evaluations": "4", "samples": "6", "evaluation_seconds": "625",
        "evaluation_samples_per_second": "9.47",
    }  # fmt: skip


def traced(exposed: float, label: str = "ddp", device: str = "cpu", **details: Any) -> Record:
    part = OverlapPart(
        step=3, seconds=0.5, compute_seconds=0.3, communication_seconds=0.1, exposed_seconds=exposed,
        idle_seconds=0.2 - exposed,
        waits=[WaitPart(name="gloo:all_reduce", phase="backward", seconds=exposed)],
    )  # fmt: skip
    traced = [rank.model_copy(update={"overlap": [part]}) for rank in ranks()]
    return run(label, ranks=traced, world={"device": device}, effective={"details": details})


def overlap(*records: Record) -> list[str]:
    """What is said of cells, the lists that are folded left out."""
    section = overlap_section(Comparison(records))
    return [str(item) for block in section.blocks if isinstance(block, Items) for item in block.items]


def said(record: Record) -> str:
    (item,) = overlap(record)
    return item


def test_cells_of_which_the_same_is_said_stand_together() -> None:
    found = overlap(traced(0.1), traced(0.1, "zero1"), traced(0.05, "zero2"))
    assert [item.split(":")[0] for item in found] == ["ddp and zero1 on 2 ranks", "zero2 on 2 ranks"]


def test_a_trace_without_the_gpu_is_not_available_and_says_why_and_one_rank_waits_for_nobody() -> None:
    changes = {"overlap": [], "overlap_missing": "no kernel was seen"}
    record = traced(0.1)
    record = record.model_copy(update={"ranks": [r.model_copy(update=changes) for r in record.ranks]})
    section = overlap_section(Comparison([record]))
    assert section.blocks == [Items(["ddp on 2 ranks: n/a: no kernel was seen."])]
    assert not overlap(with_world(traced(0.1), world_size=1))


def test_each_rank_has_its_line_and_the_share_that_is_hidden() -> None:
    section = overlap_section(Comparison([traced(0.025)]))
    assert line(section, "overlap", 1) == {
        "backend": "ddp", "world_size": "2", "rank": "1", "seconds": "500", "compute_seconds": "300",
        "communication_seconds": "100", "exposed_seconds": "25.0", "idle_seconds": "175",
        "hidden_share": "75 %",
    }  # fmt: skip
    assert line(section, "longest_waits")["collective"] == "gloo:all_reduce"


def test_words_say_how_much_is_hidden() -> None:
    words = {0.01: "90 % of the communication is hidden: it overlaps with computation.",
             0.05: "50 % of the communication is hidden: overlap works partly.",
             0.1: "0 % of the communication is hidden: ranks wait for it."}  # fmt: skip
    for label in ("ddp", "zero2", "accelerate-zero1"):
        for exposed, text in words.items():
            assert said(traced(exposed, label)) == f"{label} on 2 ranks: {text}"


def test_traces_are_named() -> None:
    record = traced(0.1).model_copy(
        update={"artifacts": [ArtifactPart(kind="trace", rank=0, path="trace-00000.json.gz")]}
    )
    section = overlap_section(Comparison([record]))
    assert Items([f"{record.run_id}/trace-00000.json.gz"]) in blocks_in(section, Items)


USD = Price(amount=2.5, currency="USD")


def record(price: Price | None = None, **energy: object) -> Record:
    part = EnergyPart(seconds=2.0, **energy)  # type: ignore[arg-type]
    ranks, world = make_ranks(2, energy=part), {"device": "cuda"}
    return make_record(label="ddp", ranks=ranks, price_per_gpu_hour=price, world=world)


def parts(one: Record) -> tuple[Table, str]:
    section = energy_section(Comparison([one]))
    (table,), (text,) = blocks_in(section, Table), blocks_in(section, Paragraph)
    return table, text.text


def test_without_timed_steps_energy_or_price_there_is_no_section() -> None:
    assert time_section(Comparison([run(steps=[])])) is None
    assert energy_section(Comparison([record(device_unknown="Not Supported")])) is None


def test_columns_without_a_figure_are_left_out_and_reasons_and_prices_are_told() -> None:
    of_energy, of_price = parts(record(device_joules=800.0)), parts(record(USD))
    assert [[column.key for column in table.columns[2:]] for table, _ in (of_energy, of_price)] == [
        ["device_watts", "kilowatt_hours_per_billion_tokens", "gpu_hours_per_billion_tokens"],
        ["gpu_hours_per_billion_tokens", "cost_per_billion_tokens"],
    ]
    assert of_energy[0].rows[0][2] == 800.0
    priced = record(USD, device_unknown="no counter here")
    assert "n/a: no counter here." in parts(priced)[1]
    assert of_price[0].rows[0][3] == 2.5 * of_price[0].rows[0][2]
    assert "at 2.5 USD per hour of one GPU" in of_price[1]
