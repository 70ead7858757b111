"""What failures are called where libraries do not say it."""

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.rank import failure_words
from harness.rank.failure_words import failure_message, note_parameters
from harness.safe_text import described

Usage = namedtuple("Usage", "free")
TORCH_SAVE = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0")


def test_a_quoted_traceback_shrinks_to_its_ends() -> None:
    error = RuntimeError(
        "CheckpointException ranks:dict_keys([0])\nTraceback (most recent call last): (RANK 0)\n"
        "  File \"a.py\", line 1, in f\n    g()\nPermissionError: [Errno 13] Permission denied: 'x'\n"
    )
    said = "CheckpointException ranks:dict_keys([0]) ... PermissionError: [Errno 13] Permission denied: 'x'"
    assert described(error) == said


def test_an_exception_without_arguments_is_told_by_its_name(tmp_path: Path) -> None:
    assert failure_message(KeyError(), tmp_path, "ddp") == described(KeyError())


@pytest.mark.parametrize(("free", "said"), [(0, True), (2**30, False)])
def test_a_file_cut_short_on_a_full_disk_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, said: bool
) -> None:
    monkeypatch.setattr(failure_words.shutil, "disk_usage", lambda _: Usage(free))
    text = failure_message(TORCH_SAVE, tmp_path, "ddp")
    assert ("No space left on device" in text) == said
    assert str(TORCH_SAVE) in text


@pytest.mark.parametrize(("backend", "said"), [("zero2", True), ("ddp", False)])
def test_a_call_of_nothing_under_deepspeed_may_be_of_its_evaluation_mode(
    tmp_path: Path, backend: str, said: bool
) -> None:
    text = failure_message(TypeError("'NoneType' object is not callable"), tmp_path, backend)
    assert ("call model.eval() on a line of its own" in text) == said


def test_gradients_that_a_loss_takes_under_zero_are_named(tmp_path: Path) -> None:
    hooks: dict[str, Any] = {}
    exec(compile("def hook(gradient): return [][0]", "/site-packages/deepspeed/zero.py", "exec"), hooks)
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(hooks["hook"])
    with pytest.raises(IndexError) as within:
        torch.autograd.grad(weight.sum(), weight)
    with pytest.raises(IndexError) as beside:
        weight.sum().backward()
    told = [failure_message(error.value, tmp_path, "zero2") for error in (within, beside)]
    assert ["the loss takes gradients itself" in text for text in told] == [True, False]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 1)
        self.scale = nn.Parameter(torch.ones(()))


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)
        self.none = nn.Parameter(torch.ones(0, 2))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.turns = nn.Linear(4, 4), nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))


class Shared(nn.Module):
    """One block in two places, one in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(4, 4))
        self.blocks = nn.ModuleList([block, block, nn.Linear(4, 4, dtype=torch.bfloat16)])
        self.blocks[0][0].bias.requires_grad_(False)


class Tied(nn.Module):
    """Two blocks that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self._no_split_modules = ["Linear"]
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.blocks[1].weight = self.blocks[0].weight


ACROSS = "parameter 'blocks.0.weight' is tied to 'blocks.1.weight' in another wrap unit, and FSDP gathers it"
LINEAR = "mat2 must be a matrix, got 1-D tensor"


@pytest.mark.parametrize(
    ("model", "backend", "words", "told"),
    [
        (Scaled, "fsdp", "fully_shard doesn't support scalar parameters. Change", "'scale' has no dimension"),
        (Scaled, "zero2", "self.dim() cannot be 0 to view Float as Byte", "'scale' has no dimension"),
        (
            Scaled, "zero3", "got [0] but expected shape compatible with [1, 32]",
            "reads parameter 'first.weight', of which",
        ),
        (
            Scaled, "fsdp", "aten.x got mixed torch.Tensor and DTensor, need",
            "reads parameter 'first.weight', 'first.bias', of which",
        ),
        (
            Scaled, "fsdp", "aten.pow_.Scalar: in-place operations that require placement changes are not",
            "changes a norm over ranks in place (aten.pow_), which torch does not support; write that",
        ),
        (Shared, "fsdp1", LINEAR, "module 'blocks.0' stands in the model 2 times (also as 'blocks.1'), and"),
        (Scaled, "accelerate-fsdp1", LINEAR, "a weight is read outside of the module that holds it"),
        (Tied, "fsdp1", LINEAR, ACROSS),
        (
            Tied, "fsdp",
            "Parameter 'blocks.1.weight' is shared with a parameter already managed by another FSDP group.",
            f"{ACROSS} with one of them; set model.block_class=Tied, which makes the model one unit",
        ),
        (
            Scaled, "zero2",
            "The parameter first.weight has already been reduced. Gradient computed twice for this",
            "parameter 'first.weight' takes part in several backward passes",
        ),
        (
            Scaled, "fsdp1", "This view is one or another view of its base has been modified inplace",
            "the forward pass writes to a weight",
        ),
        (Looked, "fsdp", "_chunk_cat expects non-empty tensor", "parameter 'none' has no element to cut"),
        (
            Scaled, "ddp", "'DistributedDataParallel' object has no attribute 'encode'",
            "asks DDP's wrapper for 'encode', which",
        ),
        (Scaled, "zero3", "'Tensor' object has no attribute 'ds_status'", "a tensor replaces a weight"),
        (Scaled, "zero3", "'weight' must be 2-D", "where ZeRO-3 has given it back and it is empty"),
        (
            Scaled, "zero3", "The size of tensor a (32) must match the size of tensor b (0) at non-singleton",
            "a weight (of that size: 'first.weight') is read outside of",
        ),
        (
            Scaled, "zero2", "mat1 and mat2 must have the same dtype, but got Float and BFloat16",
            "the forward pass gives a layer another dtype than its weights have",
        ),
        (
            Scaled, "fsdp",
            "setStorage: sizes [7, 13], strides [1, 7] are out of bounds for storage of size 0",
            "a weight is used after its unit has given its memory back: by a gradient of a gradient",
        ),
        (
            Shared, "fsdp1",
            "Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32",
            "parameter 'blocks.2.weight', 'blocks.2.bias' is bfloat16, the others float32, and",
        ),
        (
            Turned, "zero2", "self and mat2 must have the same dtype, but got Float and ComplexFloat",
            "parameter 'turns' is complex, which FSDP and ZeRO cannot hold together with real ones; keep",
        ),
        (
            Turned, "ddp",
            "\"_amp_foreach_non_finite_check_and_unscale_cpu\" not implemented for 'ComplexFloat'",
            "parameter 'turns' is complex, whose gradients torch's loss scaler cannot unscale on the CPU",
        ),
        (
            Turned, "fsdp",
            "FSDP expects uniform original parameter dtype but got {torch.float32, torch.complex64}",
            "parameter 'turns' is complex",
        ),
        (
            Shared, "ddp",
            "Expected to have finished reduction in the prior iteration before starting a new one. Parameter "
            "indices which did not receive grad for rank 1: 1 2",
            "no gradient reaches parameter 'blocks.2.weight', 'blocks.2.bias' in some step",
        ),
        (
            Shared, "ddp",
            "Expected to mark a variable ready only once. Parameter at index 0 with name "
            "blocks.0.0.weight has",
            "parameter 'blocks.0.0.weight' takes part in several backward passes",
        ),
    ],
)  # fmt: skip
def test_words_about_a_parameter_name_it_and_say_what_to_do(
    model: type[nn.Module], backend: str, words: str, told: str, tmp_path: Path
) -> None:
    note_parameters(model())
    message = failure_message(RuntimeError(words), tmp_path, backend)
    assert told in message
    assert message.endswith(f"({words})")
    assert ", or run " in message


class Added(nn.Module):
    """A layer by its formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, given, self.weight)


class By(Added):
    """A layer that multiplies by one vector."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return torch.addmv(self.bias, self.weight, given[0])


@pytest.mark.parametrize(
    "layer",
    [
        Added, lambda: nn.Linear(4, 4), lambda: nn.Conv1d(2, 2, 1), lambda: nn.LayerNorm(4),
        lambda: nn.GRU(4, 4), lambda: nn.Bilinear(4, 4, 2), By,
    ],
    ids=["addmm", "linear", "conv", "norm", "gru", "bilinear", "addmv"],
)  # fmt: skip
def test_a_layer_that_is_given_another_dtype_is_named(layer: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity(), layer()).bfloat16()
    note_parameters(model)
    given = torch.ones(2, 4)
    with pytest.raises((RuntimeError, ValueError)) as error:
        model[1](given, given) if isinstance(model[1], nn.Bilinear) else model(given)
    told = "the forward pass gives module '1' another dtype than its weights have"
    assert failure_message(error.value, tmp_path, "zero2").startswith(told), error.value


def test_a_gradient_of_another_dtype_in_a_unit_of_fsdp_is_named(tmp_path: Path) -> None:
    def foreach_reduce(fsdp_params: list[Any], unsharded_grads: list[torch.Tensor]) -> None:
        raise AssertionError("FSDP reduce-scatter expects uniform gradient dtype but got {...}")

    note_parameters(Shared())
    names = ("blocks.0.l.weight", "_checkpoint_wrapped_module.blocks.0.extra.weight")
    with pytest.raises(AssertionError) as error:
        foreach_reduce(
            [SimpleNamespace(_param_fqn=name) for name in names],
            [torch.ones(2), torch.ones(2, dtype=torch.bfloat16)],
        )
    assert failure_message(error.value, tmp_path, "fsdp").startswith(
        "the gradient of parameter 'blocks.0.extra.weight' is bfloat16, as where the last micro-step is the "
    )


def test_what_no_backend_can_do_is_told_with_the_remedy(tmp_path: Path) -> None:
    model = Looked().eval()
    note_parameters(model)
    for words, told in (
        ("reshape is not implemented for sparse tensors", "parameter 'words.weight' is sparse"),
        ("index out of range in self", "a sample has a number beyond an embedding: 'words.weight' of"),
        ("Trying to backward through the graph a second time", "detach what is kept (.detach())"),
        (
            "A different number of tensors was saved during the original forward and recomputation",
            "a block computed something else",
        ),
        (
            "Found dtype Float but expected BFloat16",
            "cast the output in the loss (output.float()), or run ddp",
        ),
        (
            "could not create a primitive descriptor for the LSTM forward",
            "this processor has no kernel (oneDNN)",
        ),
        ("Expected more than 1 value per channel when training", "a rank's micro-batch is too small for it"),
        (
            "element 0 of tensors does not require grad and does not have a grad_fn",
            "in evaluation nothing has",
        ),
    ):
        assert told in failure_message(RuntimeError(words), tmp_path, "ddp")
    model.train()  # such as of a loss of frozen weights
    assert failure_message(RuntimeError(words), tmp_path, "ddp") == words


def test_a_parameter_that_zero3_does_not_count_is_named(tmp_path: Path) -> None:
    note_parameters(Looked())
    message = failure_message(KeyError(1), tmp_path, "zero3")
    assert message == "parameter 'none' has no element to cut; leave it out, or run ddp (KeyError: 1)"
    assert failure_message(KeyError("words"), tmp_path, "zero3") == "'words'"


def test_words_that_say_enough_are_left_as_they_are(tmp_path: Path) -> None:
    note_parameters(Scaled())
    assert failure_message(RuntimeError(LINEAR), tmp_path, "ddp") == LINEAR


def test_a_parameter_that_the_forward_pass_makes_is_named_whatever_the_library_says(tmp_path: Path) -> None:
    model = Scaled()
    note_parameters(model)
    model.late = nn.Parameter(torch.ones(1))
    message = failure_message(
        AttributeError("'Parameter' object has no attribute 'ds_id'"), tmp_path, "zero3"
    )
    assert message.startswith("parameter 'late' is made after the strategy took the model's parameters")
    assert message.endswith(
        "make it in the model's constructor ('Parameter' object has no attribute 'ds_id')"
    )
