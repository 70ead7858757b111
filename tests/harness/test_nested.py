"""Nested documents are walked by their keys."""

from harness.nested import differences, empty_sections, leaves, value_at

DOCUMENT = {"a": {"b": [1, 2], "c": {}}, "d.e": None}


def test_a_list_is_one_value_and_an_empty_mapping_none() -> None:
    assert list(leaves(DOCUMENT)) == [(("a", "b"), [1, 2]), (("d.e",), None)]


def test_sections_that_hold_nothing_are_found_at_any_depth() -> None:
    assert list(empty_sections(DOCUMENT)) == [("a", "c")]


def test_what_only_one_document_has_differs_from_nothing() -> None:
    other = {"a": {"b": [1, 3], "c": {}}, "f": {"g": 1}}
    assert list(differences(DOCUMENT, other)) == [(("a", "b"), [1, 2], [1, 3]), (("f",), None, {"g": 1})]


def test_a_key_with_a_dot_is_one_key() -> None:
    assert value_at({"d.e": 3}, ("d.e",)) == 3
    assert value_at(DOCUMENT, ("a", "b", "c")) is None
