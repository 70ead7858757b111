"""Kernels by their names and their times; which process works on which device; whose rank a file is."""

import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.tell.traces import told_apart
from harness.traces.analysis import RankTrace, rank_of_path, read_trace, read_traces
from harness.traces.device import kind_of
from harness.traces.document import collective_rows, document
from harness.traces.strategy import likeness_of
from tests.harness.cli.command_line import harness
from tests.harness.traces.test_scanning import GPU, event, microseconds, one, written
from tests.harness.traces.unions import divided

COMMUNICATE = {
    "void dpsk::ep::internode::combine<false, 8, __nv_bfloat16, 8>(int4*, float*)": "combine",
    "void dpsk::ep::internode::dispatch<false, 8, true>(int4*, dpsk::ep::internode::SourceMeta*)": "dispatch",
    "void dpsk::ep::internode::notify_dispatch<false, 8>(int const*)": "dispatch",
    "void dpsk::ep::internode::cached_notify<false>(int, int)": "barrier",
    "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*, float*)": "dispatch",
    "void deep_ep::intranode::cached_notify_combine<8>(void**)": "combine",
    "_ZN7deep_ep9intranode8dispatchILi8ELi768ELi8192EEEvP4int4": "dispatch",
    "_ZN4dpsk2ep9internode7combineILb0ELi8EEEvP4int4Pf": "combine",
    "void hybrid_ep::device_sync_kernel<4>(unsigned int*)": "barrier",
    "dispatch_kernel_4(hybrid_ep::dispatch_kernel_param_t<unsigned char>)": "dispatch",
    "EpDispatchIntraNodeKernel_bf16": "dispatch",
    "void mori::moe::EpCombineInterNodeV1Kernel<float>(mori::moe::EpDispatchCombineArgs<float>)": "combine",
    "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int)": "reduce_scatter",
    "void userbuffers_fp16_sum_inplace_gpu_mc_ag<8>(int)": "all_gather",
    "void userbuffers_fp16_sum_inplace_gpu_rw<4>(int)": "all_reduce",
    "kuserbuffers_pushsend(int*, int*)": "send",
    "kuserbuffers_pullrecv(int, int)": "recv",
    "consumer_kernel(void*, int)": "barrier",
    "void moeA2ADispatchKernel<8>(int const*)": "dispatch",
    "void tensorrt_llm::kernels::moe_comm::moeA2APrepareCombineKernel<1>(unsigned char*)": "combine",
    "void tensorrt_llm::kernels::moeAllToAllKernel<8>(int)": "all_to_all",
    "void flashinfer::ulysses_a2a_kernel<8>(void*)": "all_to_all",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>()": "all_reduce",
    "void vllm::cross_device_reduce_1stage<__half, 8>(vllm::RankData*)": "all_reduce",
    "void quickreduce::allreduce_prototype_twoshot<quickreduce::CodecFP>(int)": "all_reduce",
    "void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>()": "reduce_scatter",
    "void aiter::allgather_lastdim<__half, 8>(int)": "all_gather",
    "void allreduceNvlsPacket<float>(float*)": "all_reduce",
    "mscclKernel_Sum_half_LL_false(ncclDevComm*)": None,
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(int)": "all_reduce",
    "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float>(int)": "all_reduce",
    "c10d::nvshmem_extension::allToAllV(void*)": "all_to_all",
    "(anonymous namespace)::barrier_kernel(unsigned int**)": "barrier",
    "nvshmemi_transfer_thread": None,
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": None,
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)": None,
}  # fmt: skip
"""What a name says a kernel does; None: NCCL's names are not believed, and some libraries' do not tell."""
COMPUTE = {
    "void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*, int*)": "other",
    "triton_poi_fused_all_gather_into_tensor_wait_tensor_0": "elementwise",
    "triton_red_fused_native_layer_norm_one_shot_all_reduce_1": "normalisation",
    "triton_per_fused_sum_2": "reduction",
    "void epilogue::impl::globalKernel<float, float>(int, cublasLtEpilogue_t)": "matrix product",
    "void MoeA2AGateKernel<64>(float*)": "other",
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x192x64": "matrix product",
    "nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT": "matrix product",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16>(P)": "matrix product",
    "void cutlass::device_kernel<flash::FlashAttnBwd<flash::CollectiveMainloopBwd<2> > >(P)": "attention",
    "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausal": "attention",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>(int)": "normalisation",
    "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float>(int)": "optimizer",
    "void multi_tensor_apply_kernel<TensorListMetadata<2>, FusedAdamMathFunctor<float> >()": "optimizer",
    "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float> >(int)": "elementwise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps<float> > >(R)": "reduction",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char>(int)": "indexing",
    "void fbgemm_gpu::permute_2D_data_kernel<true, int, int, float>(int, int, int, int const*)": "indexing",
    "void fbgemm_gpu::_block_bucketize_sparse_features_cuda_kernel1<int, int>(int, int)": "indexing",
    "void fbgemm_gpu::(anonymous namespace)::_compute_FP8_quantize_cuda_kernel<float>(F)": "elementwise",
    "void bounds_check_indices_kernel<long, false>(fbgemm_gpu::FixedDivisor)": "indexing",
    "void permute_pooled_embs_kernel<float>(float const*, long const*)": "indexing",
    "void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>(int)": "reduction",
    "void deep_gemm::transpose_fp32<512>(float*)": "elementwise",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u>(float*)": "matrix product",
    "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(P)": "matrix product",
    "ampere_sgemm_128x128_tn": "matrix product",
    "volta_igemm_int8_128x128_ldg4_nn": "matrix product",
    "igemm_fwd_gtcx3_nhwc_fp16_bx0": "convolution",
    "dtype_conversion_kernel": "elementwise",
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<1>(P)": "attention",
    "my_kernel": "other",
}  # fmt: skip


@pytest.mark.parametrize("name", COMMUNICATE)
def test_kernels_of_every_library_communicate_and_say_what_they_do(name: str) -> None:
    kind = kind_of("kernel", name)
    assert (kind.what, kind.operation) == ("communication", COMMUNICATE[name])
    assert kind.library


@pytest.mark.parametrize(("name", "library"), [
    ("void tensorrt_llm::kernels::oneShotAllReduceKernel<half, 8>(Params)", "TensorRT-LLM, FlashInfer"),
    ("void aiter::allreduce_fusion_kernel_1stage<half, 8>(Params)", "vLLM, SGLang, AITER"),
    ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_twoshot_sync<half>(Params)",
     "TensorRT-LLM, FlashInfer"),
    ("one_shot_all_reduce_kernel", "torch symmetric memory"),
])  # fmt: skip
def test_of_equal_names_the_namespace_tells_the_library(name: str, library: str) -> None:
    assert kind_of("kernel", name) == ("communication", "all_reduce", library)


@pytest.mark.parametrize("name", COMPUTE)
def test_kernels_that_only_look_like_communication_compute(name: str) -> None:
    assert kind_of("kernel", name) == (COMPUTE[name], None, None)


def test_names_of_any_length_are_read_at_once() -> None:
    begin = time.process_time()
    for word in (
        "deep_ep",
        "dpsk::ep",
        "_ZN4dpsk2ep1",
        "moeA2A",
        "mixed_comm::",
        "tensorrt_llm::",
        "userbuffers_",
        "triton_red_",
    ):
        kind_of("kernel", word * 100_000)
    assert time.process_time() - begin < 5


def test_kinds_of_experts_kernels_are_figures(tmp_path: Path) -> None:
    """Case of five libraries: 0.10 ms of computing, 0.18 ms of communication, 0.12 ms of it exposed."""
    events = [event("kernel", "void cutlass::device_kernel<gemm>(Params)", 0, 100)]
    spans = [(20, 60), (120, 30), (160, 30), (200, 30), (240, 30)]
    words = ("dpsk::ep::internode::combine", "rr_rs_oop", "IntraNodeKernel_bf16", "moeA2AD", "pushsend")
    names = [next(name for name in COMMUNICATE if word in name) for word in words]
    events += [event("kernel", name, *span, tid=27) for name, span in zip(names, spans, strict=True)]
    path = written(tmp_path, events, distributedInfo={"backend": "nccl", "rank": 0, "world_size": 8})
    rank = one(path)
    assert microseconds(rank) == [270, 100, 180, 0, 50]
    assert rank.remarks == []
    assert {(row["operation"], row["kind"], row["calls"]) for row in collective_rows(rank)} == {
        (None, kind, 1) for kind in ("combine", "reduce_scatter", "dispatch", "send")
    }  # fmt: skip


UNKNOWN = [event("kernel", "void vendor::exchange<4>(int*)", 0, 50), event("kernel", "gemm", 60, 10)]
STYLED = event("user_annotation", "DistributedDataParallel.forward", 0, 9, tid=1, pid=9)
SILENT: dict[str, tuple[list[Any], dict[str, Any], str | None]] = {
    "its own section": (UNKNOWN, {"rank": 0, "world_size": 8}, "8 ranks, yet no kernel"),
    "annotations": ([*UNKNOWN, STYLED], {}, "several ranks, yet no kernel"),
    "one rank": ([*UNKNOWN, STYLED], {"rank": 0, "world_size": 1}, None),
    "no sign of others": (UNKNOWN, {}, None),
    "NCCL": ([*UNKNOWN, event("kernel", "ncclDevKernel", 90, 1)], {"rank": 0, "world_size": 8}, None),
}


@pytest.mark.parametrize("case", SILENT)
def test_several_ranks_without_communication_are_told_with_the_longest_unknown_kernels(
    case: str, tmp_path: Path
) -> None:
    events, distributed, words = SILENT[case]
    rank = one(written(tmp_path, events, distributedInfo=distributed))
    found = [remark for remark in rank.remarks if "yet no kernel" in remark]
    assert len(found) == (words is not None)
    if words is not None:
        assert found[0].startswith(words)
        assert found[0].endswith("longest unknown kernels: vendor::exchange")


def test_kernels_are_listed_by_time_in_every_format(tmp_path: Path) -> None:
    add, mul = (
        f"void at::native::vectorized_elementwise_kernel<4, BinaryFunctor<float, {name}> >(int)"
        for name in ("AddFunctor", "MulFunctor")
    )
    events = [event("kernel", "gemm", 100 * n, n + 1) for n in range(4)]
    events += [
        event("kernel", add, 500, 20),
        event("kernel", mul, 600, 20),
        event("gpu_memcpy", "Memcpy HtoD", 700, 10),
    ]
    path = written(tmp_path, events)
    (rank,) = read_traces([path])
    rows = document([rank], None, [likeness_of(rank)])["kernels"]
    assert [(row["name"], row["what"], row["calls"]) for row in rows] == [
        (add, "elementwise", 1), (mul, "elementwise", 1), ("Memcpy HtoD", "copy", 1),
        ("gemm", "matrix product", 4),
    ]  # fmt: skip
    assert (rows[3]["seconds"], rows[3]["median_seconds"]) == (10e-6, 2.5e-6)
    assert [row["share"] for row in rows] == pytest.approx([20 / 60, 20 / 60, 10 / 60, 10 / 60])
    for form in ("md", "html"):
        done = harness("trace", path, "-o", f"out.{form}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        for text in (done.stdout, (tmp_path / f"out.{form}").read_text("utf-8")):
            assert all(words in text for words in ("AddFunctor", "MulFunctor", "matrix product", "copy"))


def test_names_that_differ_do_not_share_a_short_one() -> None:
    long = "void at::native::kernel<" + "int, " * 40
    names = [
        long + "A>(int)", long + "B>(int)", long + "A>(long)", "gemm", "ge mm", "ge  mm",
        long + "A" * 99 + "1" + "B" * 99,
    ]  # fmt: skip
    told = told_apart(names, 40)
    assert len({*told}) == len(names)
    assert max(len(name) for name in told) <= 44
    assert told_apart(["gemm", "gemm"], 40) == ["gemm", "gemm"]


@pytest.mark.parametrize("path", sorted(GPU.glob("*.json.gz")), ids=lambda path: path.name.split(".")[0])
def test_time_divides_to_the_nanosecond_as_a_sweep_counts_it(path: Path) -> None:
    rank = one(path)
    counted = divided(path, lambda name: "nccl" in name)
    found = {name: getattr(rank.division, f"{name}_seconds") for name in counted if name != "span"}
    assert {name: round(seconds * 1e9) for name, seconds in found.items()} | {
        "span": round(rank.division.seconds * 1e9)
    } == counted
    assert sum(one.calls for one in rank.kernels) > 0


def merged(owners: dict[int, int], same_ids: bool = False) -> list[Any]:
    """A step of each process and a kernel on each device; the kernel on device n takes 10 (n + 1) us."""
    events: list[Any] = []
    for number, (device, pid) in enumerate(owners.items()):
        correlation, at = 1 if same_ids else number + 1, 1000 * number if same_ids else 0
        events += [
            event("user_annotation", "ProfilerStep#1", at, 20 * (pid + 1), tid=1, pid=pid),
            event("cpu_op", "aten::mm", at + 1, 2, tid=1, pid=pid),
            event("cuda_runtime", "cudaLaunchKernel", at + 2, 1, tid=1, pid=pid, correlation=correlation),
            event("kernel", "gemm", at + 10, 10 * (device + 1), pid=device, correlation=correlation),
        ]
    return events


def pairs(ranks: list[RankTrace]) -> list[tuple[int | None, int, int | None]]:
    """Rank; microseconds of computing; of its step."""
    spans = [
        next((round(s.division.seconds * 1e6) for s in rank.steps if s.division), None) for rank in ranks
    ]
    return [(rank.rank, microseconds(rank)[1], span) for rank, span in zip(ranks, spans, strict=True)]


OWNERS = {
    "crossed": ({0: 99, 1: 123}, False),
    "the same ids in both": ({0: 123, 1: 99}, True),
    "twelve devices": ({n: 200 - n for n in range(12)}, False),
}


@pytest.mark.parametrize("case", OWNERS)
def test_a_device_belongs_to_the_process_that_launched_on_it(case: str, tmp_path: Path) -> None:
    owners, same_ids = OWNERS[case]
    ranks = read_traces([written(tmp_path, merged(owners, same_ids))])
    assert pairs(ranks) == [(d, 10 * (d + 1), 20 * (pid + 1)) for d, pid in owners.items()]


def test_a_process_with_two_devices_is_one_rank_with_two(tmp_path: Path) -> None:
    owners = {0: 50, 1: 50}
    (rank,) = read_trace(written(tmp_path, merged(owners)))
    assert microseconds(rank)[:2] == [20, 20]
    ranks = read_trace(written(tmp_path, merged({0: 50, 1: 50, 2: 7, 3: 7})))
    assert [(rank.rank, microseconds(rank)[1]) for rank in ranks] == [(0, 20), (1, 40)]


def test_ranks_of_merged_devices_that_are_not_numbered_from_0_are_unknown(tmp_path: Path) -> None:
    ranks = read_trace(written(tmp_path, merged({4: 99, 12: 123})))
    assert [rank.rank for rank in ranks] == [None, None]
    assert [rank.label.rpartition(", ")[2] for rank in ranks] == ["device 4", "device 12"]


RANKS = {
    "node-r12_4711.1694.pt.trace.json": None,
    "rank3-host_4711.1694.5.pt.trace.json.gz": 3,
    "host-rank3.cluster.local_4711.1694.pt.trace.json": None,
    "rank_7.1694.pt.trace.json": 7,
    "rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz": 0,
    "trainer_rank12.json": 12,
    "local_rank3.json": None,
    "dp_rank_0_tp_rank_1.json": None,
    "node_rank_1/trace.json": None,
    "node_rank_1/rank_9.json": 9,
    "r5.json": 5,
    "trace-r5.json": 5,
    "frank3.json": None,
    "trace.json": None,
    "rank_0/trace.json": 0,
    "rank12/steps/trace.json.gz": 12,
    "rank_1/node-r12_4711.1694.pt.trace.json": 1,
    "rank_1/worker_rank7.json": 1,
}


@pytest.mark.parametrize("name", RANKS)
def test_folders_then_names_of_files_tell_the_rank_and_hosts_do_not(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    assert rank_of_path(path) == RANKS[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"traceEvents": [event("kernel", "gemm", 0, 5)], "distributedInfo": {"rank": 9}})
    )
    assert one(path).rank == 9


def calls(*seconds: float) -> list[Any]:
    """All-reduces of 4 MB on two ranks, which take as long; without a kernel: 0."""
    told = {
        "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 10**6, "Out msg nelems": 10**6,
        "Group size": 2,
    }  # fmt: skip
    events: list[Any] = [event("kernel", "gemm", 0, 1)]
    for number, taken in enumerate(seconds, 1):
        at = 10**5 * number
        events += [
            event("cpu_op", "record_param_comms", at, 9, tid=9, pid=9, **told),
            event("cuda_runtime", "cudaLaunchKernel", at + 1, 1, tid=9, pid=9, correlation=number),
        ]
        if taken:
            events.append(event("kernel", "ncclDevKernel_AllReduce", at + 5, taken * 1e6, correlation=number))
    return events


@pytest.mark.parametrize(
    ("seconds", "rate", "timed"),
    [
        ((1e-3, 4e-3), 2.5e9, 2), ((1e-3, 2e-3, 4e-3), 2e9, 3), ((1e-3, 2e-3, 4e-3, 8e-3), 1.5e9, 4),
        ((4e-3,), 1e9, 1), ((1e-3, 4e-3, 0), 2.5e9, 2), ((0, 0), None, 0),
    ],
)  # fmt: skip
def test_bus_bandwidth_is_the_median_of_the_calls_that_were_timed(
    seconds: tuple[float, ...], rate: float | None, timed: int, tmp_path: Path
) -> None:
    (row,) = collective_rows(one(written(tmp_path, calls(*seconds))))
    assert (row["calls"], row["bus_calls"]) == (len(seconds), timed)
    assert row["bus_bytes_per_second"] == (rate and pytest.approx(rate))


def launched(
    name: str, begin: int, end: int, at: int | None, number: int, category: str = "kernel"
) -> list[Any]:
    """What runs on a device from `begin` to `end`, and its launch, if it was recorded."""
    found = [event(category, name, begin, end - begin, tid=20 if "nccl" in name else 7, correlation=number)]
    if at is not None:
        call = "cudaMemcpyAsync" if category == "gpu_memcpy" else "cudaLaunchKernel"
        found.append(event("cuda_runtime", call, at, 1, tid=1, pid=9, correlation=number))
    return found


A, NCCL = launched("gemm", 0, 100, -10, 1), launched("ncclDevKernel_AllReduce", 0, 100, -10, 1)
COPIED = launched("Memcpy HtoD", 0, 100, -10, 1, "gpu_memcpy")
GLOO = [event("cpu_op", "gloo:all_reduce", 110, 70, tid=5, pid=9)]
IDLE: dict[str, tuple[list[Any], dict[str, int]]] = {
    "the host launches late": ([*A, *launched("gemm", 160, 200, 150, 2)], {"host_late": 60}),
    "launched as the device becomes free": (
        [*A, *launched("gemm", 160, 200, 100, 2)],
        {"between_kernels": 60},
    ),
    "waits for communication": ([*NCCL, *launched("gemm", 130, 200, 50, 2)], {"waits_for_communication": 30}),
    "late after communication": ([*NCCL, *launched("gemm", 130, 200, 120, 2)], {"host_late": 30}),
    "waits for a copy": ([*COPIED, *launched("gemm", 110, 200, 50, 2)], {"waits_for_copy": 10}),
    "a copy is late": ([*A, *launched("Memcpy DtoH", 140, 200, 130, 2, "gpu_memcpy")], {"host_late": 40}),
    "between kernels": ([*A, *launched("gemm", 105, 200, 50, 2)], {"between_kernels": 5}),
    "no launch was recorded": ([*A, *launched("gemm", 105, 200, None, 2)], {"unknown": 5}),
    "what it waited for was not recorded": (
        [*NCCL, *launched("gemm", 1101, 1200, 50, 2)],
        {"unknown": 1001},
    ),
    "the host launches very late": ([*NCCL, *launched("gemm", 1101, 1200, 1100, 2)], {"host_late": 1001}),
    "the longer of two streams ends it": (
        [*A, *launched("ncclDevKernel", 50, 120, 10, 2), *launched("gemm", 130, 200, 60, 3)],
        {"waits_for_communication": 10},
    ),
    "another stream hides it": (
        [*A, *launched("ncclDevKernel", 50, 180, 10, 2), *launched("gemm", 160, 200, 150, 3)],
        {},
    ),
    "the host communicates": (
        [*A, *GLOO, *launched("gemm", 200, 300, 190, 2)],
        {"waits_for_communication": 70, "host_late": 30},
    ),
    "a graph launches all at once": (
        [*launched("gemm", 0, 100, -10, 1), event("kernel", "gemm", 102, 98, correlation=1)],
        {"between_kernels": 2},
    ),
}


@pytest.mark.parametrize("case", IDLE)
def test_idle_time_has_the_reason_that_the_events_give(case: str, tmp_path: Path) -> None:
    events, expected = IDLE[case]
    division = one(written(tmp_path, events)).division
    found = {name: round(of * 1e6) for name, of in (division.idle_reasons or {}).items() if of}
    assert found == expected
    assert sum(expected.values()) == round((division.idle_seconds or 0) * 1e6)


def test_a_step_idles_before_the_first_event_and_after_the_last(tmp_path: Path) -> None:
    step = event("user_annotation", "ProfilerStep#0", -50, 400, tid=1, pid=9)
    path = written(tmp_path, [*A, *launched("gemm", 160, 200, 150, 2), step])
    rows = document([one(path)], None, [likeness_of(one(path))])["idle"]
    found = [{name: round(of * 1e6) for name, of in row.items() if "seconds" in name and of} for row in rows]
    assert [row["step"] for row in rows] == [None, 0]
    assert found[0] == {"host_late_seconds": 60}
    assert found[1] == {"host_late_seconds": 60, "before_first_seconds": 50, "after_last_seconds": 150}
    assert "Host late:" in harness("trace", path, cwd=tmp_path).stdout


@pytest.mark.parametrize("seed", range(20))
def test_reasons_of_random_events_are_those_counted_microsecond_by_microsecond(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    kinds = {"gemm": "kernel", "ncclDevKernel": "kernel", "Memcpy HtoD": "gpu_memcpy"}
    events, ran = [], []
    begins = draw.sample(range(400), 12)
    for number, begin in enumerate(begins):
        name, end = draw.choice([*kinds]), begin + draw.randrange(1, 30)
        at = None if draw.random() < 0.2 else begin - draw.randrange(0, 60)
        events += launched(name, begin, end, at, number, kinds[name])
        ran.append((begin, end, at, name))
    expected: Counter[str] = Counter()
    for point in range(min(begins), max(end for _, end, _, _ in ran)):
        if any(begin <= point < end for begin, end, _, _ in ran):
            continue
        free = max(end for _, end, _, _ in ran if end <= point)
        before = max(one for one in ran if one[1] == free)[3]
        _, _, at, _ = min(one for one in ran if one[0] > point)
        after = {"gemm": "between_kernels", "ncclDevKernel": "waits_for_communication"}.get(
            before, "waits_for_copy"
        )
        expected["unknown" if at is None else "host_late" if at > free else after] += 1
    division = one(written(tmp_path, events)).division
    found = {name: round(of * 1e6) for name, of in (division.idle_reasons or {}).items() if of}
    assert found == expected
