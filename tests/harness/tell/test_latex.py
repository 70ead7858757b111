from harness.tell.document import Column, Document, Section, Table
from harness.tell.writers.latex import LONGEST_ON_A_PAGE, render_latex


def written(rows: list[list[str]]) -> str:
    columns = [Column("name", "name", align="left"), Column("text", "text", align="left")]
    table = Table(key="table", columns=columns, rows=rows)
    return render_latex(Document("Title", [Section("part", "Part", [table])]), {}, "manifest")


def test_a_long_cell_breaks_its_lines_and_loses_nothing() -> None:
    backends = ", ".join(f"backend{number}" for number in range(30))
    text = written([["a", backends], ["b", "short"]])
    assert r"{l>{\raggedright\arraybackslash}p{8cm}}" in text
    assert backends in text
    assert "p{8cm}" not in written([["a", "short"]])


def test_a_table_is_cut_by_its_lines_not_its_rows() -> None:
    tall = " ".join(["word"] * 80)  # 400 characters, ten lines
    rows = [[str(number), tall] for number in range(10)]
    assert written(rows).count(r"\begin{tabular}") == 3
    assert written([["a", "short"]] * LONGEST_ON_A_PAGE).count(r"\begin{tabular}") == 1


def test_a_word_that_nothing_breaks_is_shortened() -> None:
    assert "x" * 61 not in written([["a", "x" * 300]])
