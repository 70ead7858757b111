"""Ranks of one machine are reached from nowhere else; which kernels and devices they use."""

import os
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from socket import create_server, socket
from typing import Any

import psutil
import pytest
import torch
import transformers

from harness.rank.process.environment import is_deterministic, pin_determinism, shared_device
from harness.run_directory.request import LOCAL_RENDEZVOUS
from tests.forkserver import context
from tests.patience import SECONDS

pytestmark = pytest.mark.long(seconds=10)
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_embd": 32, "n_layer": 2,
    "n_head": 2, "is_decoder": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def listening(store: socket, parent: Connection) -> None:
    """A lone rank: which addresses it listens on."""
    from harness.backends.base import World
    from harness.rank.process.environment import join_process_group

    address, port = store.getsockname()
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ[LOCAL_RENDEZVOUS] = str(store.detach())
    join_process_group(World(rank=0, world_size=1, local_rank=0, ranks_per_node=1, device="cpu"), 30.0)
    found = psutil.Process().net_connections("tcp")
    parent.send([(part.laddr.ip, part.laddr.port) for part in found if part.status == psutil.CONN_LISTEN])


def test_store_and_gloo_of_a_local_run_listen_on_loopback_only() -> None:
    processes: Any = context()
    ours, theirs = processes.Pipe(duplex=False)
    with create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        process = processes.Process(target=listening, args=(store, theirs))
        process.start()
        assert ours.poll(SECONDS)
        found = ours.recv()
        process.join(SECONDS)
    assert port in [number for _, number in found]
    assert {address for address, _ in found} == {"127.0.0.1"}


@pytest.fixture
def own_determinism(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")  # restored whatever sets it
        monkeypatch.delenv(name)
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warns)


@pytest.mark.usefixtures("own_determinism")
@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_record_calls_deterministic_what_is(device: str, wanted: bool) -> None:
    pin_determinism(device, wanted=wanted)
    assert is_deterministic(device) is wanted


@pytest.mark.usefixtures("own_determinism")
def test_an_operator_without_a_deterministic_kernel_fails_on_cuda() -> None:
    """Torch's attention adds up in any order as long as it may only warn."""
    pin_determinism("cuda", wanted=True)
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)  # as a library may
    assert not is_deterministic("cuda")


@pytest.mark.usefixtures("own_determinism")
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "mixtral"])
def test_on_the_cpu_deterministic_kernels_are_those_that_jobs_use(model_type: str) -> None:
    """So one run shows parity and is timed: the same operators, and every loss and gradient to the bit."""
    pin_determinism("cpu", wanted=True)
    wanted = operators_and_sums(model_type)
    pin_determinism("cpu", wanted=False)
    assert operators_and_sums(model_type) == wanted


def operators_and_sums(model_type: str) -> tuple[Counter[str], list[float]]:
    """How often a training step calls each operator, those within operators too; its loss and gradients."""
    config = transformers.AutoConfig.for_model(model_type, **TINY)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(0, TINY["vocab_size"], (2, 16))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    gradients = [p.grad.double().sum().item() for p in model.parameters() if p.grad is not None]
    return Counter(event.name for event in profiler.events()), [loss.item(), *gradients]


def test_ranks_on_one_device_are_named_with_it() -> None:
    assert shared_device(["a@one", "b@one", "a@two", "b@two"]) is None
    refusal = shared_device(["a@one", "b@one", "b@one"])
    assert refusal.startswith("ranks 1, 2 would share GPU b of one; give each its own")
