"""GPUs that a test pretends to have."""

from harness.gpus.found import Gpu, Gpus, Wheel


def gpus_of(*memory_bytes: int) -> Gpus:
    """One device for each size."""
    return Gpus(
        devices=tuple(
            Gpu(name="NVIDIA A100-SXM4-80GB", uuid=f"GPU-{index}", memory_bytes=size, capability=(8, 0))
            for index, size in enumerate(memory_bytes)
        ),
        wheel=Wheel(version="2.13.0+cu130", cuda="13.0"),
        architectures=("sm_75", "sm_80", "sm_90"),
    )
