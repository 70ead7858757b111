import ast
from pathlib import Path

import pytest

from benchmarks import findings_page
from harness.backends.libraries.facts import fact
from harness.judge import wording
from harness.judge.agreement.causes import HYPOTHESES
from harness.judge.comparison import Comparison
from harness.judge.effective import SETTINGS
from harness.judge.findings.finding import ROLES, kinds, role_of
from harness.judge.wording import entries
from tests.records import LOSSES, NORMS, make_effective, make_record, make_steps, make_weights

JUDGE = Path(__file__).resolve().parents[4] / "harness" / "judge"


def test_the_page_is_written_from_the_catalogue(update_golden: bool) -> None:
    if update_golden:
        findings_page.write()
    assert findings_page.PAGE.read_text(encoding="utf-8") == findings_page.page()
    assert findings_page.LIST.read_text(encoding="utf-8") == findings_page.hypotheses()


def test_the_catalogue_has_what_the_modules_find_and_nothing_else() -> None:
    nodes = [node for path in JUDGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    made = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "found"]
    ids = {call.args[0].value for call in made if isinstance(call.args[0], ast.Constant)}
    assert len(ids) > 40
    words |= {setting.finding for setting in SETTINGS if setting.finding} | {one.kind for one in HYPOTHESES}
    assert ids <= kinds().keys() <= words


@pytest.mark.parametrize("kind", entries())
def test_every_kind_has_a_role_a_sentence_and_says_cause_confirmation_and_remedy(kind: str) -> None:
    told, entry = kinds()[kind], entries()[kind]
    assert all((told.title, told.cause, told.confirm, told.fix))
    assert not told.title.endswith(".")
    assert role_of(kind) in ROLES
    texts = entry["text"] if isinstance(entry["text"], dict) else {"": entry["text"]}
    for case in texts:
        wording._environment().get_template(f"{kind}/{case}")


def test_the_version_that_clips_is_that_of_the_table() -> None:
    assert f"DeepSpeed {fact('zero-clips-by-default').first} and later" in kinds()["clipping-differs"].cause


def test_agreement_gives_no_finding() -> None:
    assert Comparison([make_record(), make_record(label="ddp")]).findings == []


def test_divergence_is_a_finding_with_its_size() -> None:
    steps = make_steps(LOSSES, [norm * 2 for norm in NORMS])
    other = make_record(label="zero1", steps=steps, final_weights=make_weights("c" * 64))
    found, cause = sorted(Comparison([make_record(), other]).findings, key=lambda one: one.id)
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
