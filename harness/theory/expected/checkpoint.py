"""What saving a checkpoint communicates, as `Engine.save` of each built-in backend does it."""

from __future__ import annotations

from dataclasses import replace

from harness.theory.expected.fsdp1 import Fsdp1
from harness.theory.expected.setting import Collective, Setting, Underived, Volume, gathered

PHASE = "checkpoint"
TAG_DIGEST_BYTES = 20
"""SHA-1."""
OBJECTS = Underived(
    phase=PHASE,
    dtypes=("uint8", "int64"),
    reason="torch.distributed.checkpoint plans what each rank writes by pickled objects (uint8, and their "
    "lengths as int64); what a pickle takes depends on names, paths and the version of Python and torch",
)


def with_checkpoint(backend: str, setting: Setting, volume: Volume) -> Volume:
    """The volume of a run that saved a checkpoint after its counted steps."""
    if "zero" in backend:
        return replace(volume, collectives=(*volume.collectives, _tag_compared()))
    gathers = "fsdp1" in backend and setting.shard_size > 1 and not backend.endswith("no-shard")
    found = _fsdp1_gathered(setting) if gathers else []
    return replace(volume, collectives=(*volume.collectives, *found), underived=(*volume.underived, OBJECTS))


def _tag_compared() -> Collective:
    """`_checkpoint_tag_validation` (DeepSpeed 0.19.8, engine.py) compares digests of the tag by their
    largest and smallest bytes. Each rank writes the partitions it holds; nothing is gathered."""
    return Collective(
        phase=PHASE, op="all_reduce", dtype="uint8", term="checkpoint's tag compared",
        payload_bytes=2 * TAG_DIGEST_BYTES, calls=2,
    )  # fmt: skip


def _fsdp1_gathered(setting: Setting) -> list[Collective]:
    """FSDP1 makes whole tensors of every unit before it cuts them into the pieces that are written.

    torch 2.13: `_sharded_pre_state_dict_hook` (_state_dict_utils.py) unshards the weights, and
    `_allgather_orig_param_states` (_optim_utils.py) each of Adam's two moments. FSDP2 and DDP gather nothing.
    """
    strategy = Fsdp1(setting=setting, reshard=True)
    dtype, sizes = setting.master_dtype, strategy.sizes()
    return [
        *gathered(PHASE, "weights gathered for a checkpoint", sizes, dtype, role=strategy.role),
        *gathered(
            PHASE, "Adam's moments gathered for a checkpoint", sizes, dtype, role=strategy.role, passes=2
        ),
    ]
