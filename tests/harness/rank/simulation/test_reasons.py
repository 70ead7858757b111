"""What a simulated library raises, in one line that says what to do."""

from harness.rank.simulation.simulated_rank import in_words


def test_experts_in_another_dtype_than_their_kernel_s_say_which_to_set() -> None:
    raised = RuntimeError("Expected inputs of BF16 type but got mat_a.dtype=torch.float32 and more.")
    assert in_words(raised).endswith("takes bf16 alone; set training.precision=bf16-mixed")
    assert in_words(ValueError("two\n  lines")) == "ValueError: two lines"
