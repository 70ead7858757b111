import ast
from pathlib import Path

from harness.backends.libraries.facts import fact
from harness.judge.comparison import Comparison
from harness.judge.effective import SETTINGS
from harness.judge.findings.finders import PAGE, kinds
from harness.judge.findings.groups import ROLES, role_of
from tests.records import LOSSES, NORMS, make_effective, make_record, make_steps, make_weights

BEGIN, END = "<!-- index -->\n", "<!-- end of index -->"
JUDGE = Path(__file__).resolve().parents[4] / "harness" / "judge"


def test_the_page_explains_what_the_modules_find_and_nothing_else() -> None:
    nodes = [node for path in JUDGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    words = {node.value for node in nodes if isinstance(node, ast.Constant)}
    made = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding"]
    ids = {word.value.value for call in made for word in call.keywords
           if word.arg == "id" and isinstance(word.value, ast.Constant)}  # fmt: skip
    assert len(ids) > 40
    words |= {setting.finding for setting in SETTINGS}
    assert ids <= kinds().keys() <= words
    assert PAGE.read_text(encoding="utf-8").count("\n## ") == len(kinds())


def test_the_page_begins_with_an_index_by_role(update_golden: bool) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    held, _, after = rest.partition(END)
    of_role = {
        heading: ", ".join(f"[{kind}](#{kind})" for kind in sorted(kinds()) if role_of(kind) == role)
        for role, heading in ROLES.items()
    }
    index = "".join(f"- **{heading}**: {links}\n" for heading, links in of_role.items())
    if update_golden:
        PAGE.write_text(f"{before}{BEGIN}\n{index}\n{END}{after}", encoding="utf-8")
    else:
        assert held.strip() == index.strip()


def test_the_version_that_clips_is_that_of_the_table() -> None:
    assert f"DeepSpeed {fact('zero-clips-by-default').first} and later" in kinds()["clipping-differs"].cause


def test_every_kind_says_cause_confirmation_and_remedy() -> None:
    for kind in kinds().values():
        assert all((kind.title, kind.cause, kind.confirm, kind.fix)), kind.id
        assert not kind.title.endswith("."), kind.id


def test_agreement_gives_no_finding() -> None:
    assert Comparison([make_record(), make_record(label="ddp")]).findings == []


def test_divergence_is_a_finding_with_its_size() -> None:
    steps = make_steps(LOSSES, [norm * 2 for norm in NORMS])
    other = make_record(label="zero1", steps=steps, final_weights=make_weights("c" * 64))
    found, cause = Comparison([make_record(), other]).findings
    assert (found.id, cause.id) == ("diverged", "gradient-scale")
    assert "summed over 2 ranks" in cause.message
    assert found.backends == ("zero1",)
    assert found.values["max_grad_norm_difference"] == 1.0


def test_another_job_is_a_finding_with_both_values() -> None:
    other = make_record(label="ddp", initial_weights=make_weights("d" * 64))
    (found,) = Comparison([make_record(), other]).findings
    assert found.id == "initial-weights-differ"
    assert "initial weights" in found.message
    assert found.values == {"reference": "a" * 64, "given": "d" * 64}


def test_different_micro_batches_on_one_world_are_a_finding() -> None:
    ddp, zero = make_record(label="ddp"), make_record(label="zero1")
    world = zero.world.model_copy(update={"micro_batch_size": 2, "accumulation_steps": 2})
    backend = zero.backend.model_copy(update={"effective": make_effective(accumulation_steps=2)})
    other = zero.model_copy(update={"world": world, "backend": backend})
    (found,) = Comparison([make_record(), ddp, other]).findings
    assert found.id == "micro-batch-differs"
    assert found.values == {"4 x 1": ["ddp"], "2 x 2": ["zero1"]}
