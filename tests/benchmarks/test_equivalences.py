from benchmarks.equivalences import PAGE, held, page_with_tables, records, same_states, traffic
from harness.judge.quantities import rank_states, volume_differences

RAN = records()


def test_the_page_has_the_tables_of_its_records() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_tables(page, RAN) == page


def test_every_record_moves_and_holds_what_its_closed_form_says() -> None:
    for label, record in RAN.items():
        assert volume_differences(record) == [], label
        for rank in rank_states(record):
            assert rank.expected is not None, label
            assert rank.measured_bytes == rank.expected.model_state_bytes, label


def test_the_hybrids_hold_and_the_second_copies_move_the_same() -> None:
    fsdp1, fsdp2 = RAN["fsdp1-hybrid:shard_size=2"], RAN["fsdp-hybrid:shard_size=2"]
    kept = {key for key, size in traffic(fsdp2).items() if traffic(fsdp1)[key] != size}
    assert kept == {("weights, backward", "0, 1")}  # FSDP1 keeps the root gathered
    assert same_states(held(fsdp1), held(fsdp2))
    hpz, reshard = RAN["zero3:hpz=2"], RAN["fsdp:reshard=2"]
    assert traffic(hpz) == traffic(reshard)
    assert not same_states(held(hpz), held(reshard))
    assert held(hpz)["after_forward", "weights"] == held(reshard)["after_forward", "weights"]
