from harness.tell.short.words import ends, levels, names, ratio, sentence


def test_figures_that_read_alike_are_one_level_least_first() -> None:
    found = levels({"a": 2.0, "b": 1.0, "c": 1.001}, lambda value: f"{value:.1f}")
    assert found == [(["b", "c"], 1.0), (["a"], 2.0)]


def test_of_many_levels_the_first_and_the_last_are_kept() -> None:
    found = [([label], 1.0) for label in "abcde"]
    assert ends(found, 3) == [found[0], found[1], found[4]]
    assert ends(found, 5) == found


def test_many_names_are_counted() -> None:
    assert names(["a", "b", "c", "d"]) == "a, b, c and d"
    assert names(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_a_backend_through_accelerate_is_not_named_next_to_the_same_one_without() -> None:
    assert names(["zero1", "accelerate-zero1", "accelerate-ddp"]) == "zero1 and accelerate-ddp"


def test_clauses_make_one_sentence() -> None:
    assert sentence("ddp is fast", "", "others are not") == "Ddp is fast; others are not."
    assert sentence("") == ""


def test_a_ratio_has_three_digits() -> None:
    assert (ratio(3.0, 2.0), ratio(2.0, 2.0), ratio(1.0, 3.0)) == ("1.5 x", "1 x", "0.333 x")
