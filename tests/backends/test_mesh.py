import pytest
import torch

from harness.backends.mesh import Dimension, Mesh
from harness.backends.refusals import Unsupported

SIZES: list[dict[Dimension, int | None]] = [
    {"data": None}, {"data": None, "tensor": 2}, {"pipeline": 2, "data": None},
    {"pipeline": 2, "data": None, "sequence": 2}, {"data": 2, "shard": None, "tensor": 2},
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_are_numbered_as_in_a_device_mesh(sizes: dict[Dimension, int | None]) -> None:
    # `init_device_mesh` reshapes arange(world size).
    mesh = Mesh.of(8, sizes)

    numbers = torch.arange(8).reshape([size for _, size in mesh.sizes])
    for rank in range(8):
        place = (numbers == rank).nonzero()[0].tolist()
        assert list(mesh.coordinates(rank).values()) == place
    place = (numbers == 5).nonzero()[0].tolist()
    for index, (name, _) in enumerate(mesh.sizes):
        row = numbers[tuple(slice(None) if d == index else at for d, at in enumerate(place))]
        assert mesh.group(name, 5) == row.tolist()


@pytest.mark.parametrize("sizes", SIZES)
def test_groups_of_a_role_are_those_of_its_ranks(sizes: dict[Dimension, int | None]) -> None:
    mesh = Mesh.of(8, sizes)
    for role in (*(name for name, _ in mesh.sizes), "world"):
        groups = mesh.groups(role)
        assert sorted(rank for group in groups for rank in group) == list(range(8))
        assert all(mesh.group(role, rank) == group for group in groups for rank in group)


@pytest.mark.parametrize("sizes", SIZES)
def test_every_sample_and_every_loss_counts_once(sizes: dict[Dimension, int | None]) -> None:
    mesh = Mesh.of(8, sizes)

    groups = mesh.sample_groups(range(8))
    assert mesh.sample_groups([7, 0]) == ([[0], [7]] if len(groups) > 1 else [[0, 7]])
    assert sorted(rank for group in groups for rank in group) == list(range(8))
    assert len({len(group) for group in groups}) == 1
    for data_rank, group in enumerate(groups):
        assert {mesh.data_rank(rank) for rank in group} == {data_rank}
        assert sum(mesh.counts_samples(rank) for rank in group) == 1
        assert sum(mesh.counts_loss(rank) for rank in group) * mesh.size("tensor") == len(group)


@pytest.mark.parametrize(
    ("ranks", "role"),
    [
        ([0, 1], "tensor"), ([4, 5], "tensor"), ([1, 3, 5, 7], "data"), (list(range(8)), "world"),
        ([3], "alone"), ([0, 3], None), ([0, 2], None),
    ],
)  # fmt: skip
def test_a_group_is_named_for_the_dimensions_along_which_it_lies(ranks: list[int], role: str | None) -> None:
    mesh = Mesh.of(8, {"data": None, "tensor": 2})

    assert mesh.role(ranks) == role
    if role is not None:
        assert mesh.group(role, ranks[0]) == ranks
        assert mesh.group_size(role) == len(ranks)


def test_all_ranks_of_one_dimension_are_named_for_it() -> None:
    mesh = Mesh.of(4, {"data": None, "tensor": 4})
    assert mesh.role([0, 1, 2, 3]) == "tensor"
    assert mesh.canonical("world") == "tensor"


def test_several_dimensions_are_named_together() -> None:
    mesh = Mesh.of(8, {"pipeline": 2, "data": None, "sequence": 2})

    assert mesh.role([4, 5, 6, 7]) == "data+sequence"
    assert mesh.group("data+sequence", 6) == [4, 5, 6, 7]


@pytest.mark.parametrize("sizes", [{"data": None, "tensor": 3}, {"tensor": 4}, {"data": None, "tensor": 16}])
def test_sizes_that_do_not_fit_are_refused(sizes: dict[Dimension, int | None]) -> None:
    with pytest.raises(Unsupported, match="does not fit 8 ranks"):
        Mesh.of(8, sizes)
