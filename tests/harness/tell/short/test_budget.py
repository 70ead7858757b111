from harness.tell.document import Line
from harness.tell.short.words import fitting, shortened


def test_lines_fit_by_number_and_by_words_with_their_references() -> None:
    lines = [Line("three short words", "name", "key")] * 4
    assert len(fitting(lines, most_lines=3, most_words=100, link_words=1)) == 3
    assert len(fitting(lines, most_lines=4, most_words=10, link_words=1)) == 2
    assert len(fitting(lines, most_lines=4, most_words=1, link_words=1)) == 1


def test_what_is_left_out_of_a_text_is_marked() -> None:
    assert shortened("one two, three", 2) == "one two ..."
    assert shortened("one two", 2) == "one two"
