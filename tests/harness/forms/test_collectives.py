"""Single terms, counted by hand on shapes that do not divide; rings, buckets, units, shared weights."""

import re
from dataclasses import replace
from typing import Any

import pytest

from harness.forms.families import collectives
from harness.forms.fsdp.fsdp2 import units_around_blocks
from harness.forms.layout import Layout, Tensor, Use
from harness.forms.terms import OPERATIONS, Collective, ring_formula, ring_sent_bytes
from harness.forms.workload import Workload
from harness.forms.zero0 import buckets_filled
from harness.forms.zero3 import SHARED_TERM, shared_gathers, uses_unknown
from tests.built_in import HYBRID, strategy
from tests.geometries import bloom_workload, small_workload, volume_of


def payload(backend: str, workload: Workload, phase: str, op: str, **wanted: str) -> int:
    return sum(c.payload_bytes for c in of_kind(backend, workload, phase, op, **wanted))


def of_kind(backend: str, workload: Workload, phase: str, op: str, **wanted: str) -> list[Collective]:
    volume = volume_of(backend, workload)
    return [
        c
        for c in volume.collectives
        if (c.phase, c.op) == (phase, op) and all(getattr(c, k) == v for k, v in wanted.items())
    ]


def test_what_fsdp2_pads_is_told_apart() -> None:
    workload = small_workload((5, 3), (7, 2), world_size=4)
    assert payload("fsdp", workload, "forward", "all_gather", term="padding") == (3 * 3 + 1 * 2) * 4


GATHER, SCATTER = "all_gather", "reduce_scatter"
SMALL, PERSISTING = ((6, 2), (4, 2)), ((6, 1), (20, 1))
THRESHOLD = {"options": {"stage3_param_persistence_threshold": 10}}
DEFAULTS: dict[str, Any] = {"preset": "library-defaults"}
NONE_KEPT = {**DEFAULTS, "options": {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}}
IN_BF16 = {"blocks": (), "precision": "bf16-mixed"}
ELEMENTS = [
    # FSDP2 pads the first dimension of every parameter: 5 rows and 7 become 8.
    ("fsdp", ((5, 3), (7, 2)), {"world_size": 4}, "forward", GATHER, 8 * 3 + 8 * 2),
    # FSDP1 aligns parameters to 16 bytes and the end to the ranks. In bf16 these are 8 elements, which
    # matters between two parameters of one unit.
    ("fsdp1", ((5, 1), (3, 1)), {"world_size": 4}, "forward", GATHER, 8 + 4),
    ("fsdp1", ((5, 1), (3, 1)), IN_BF16, "forward", GATHER, (8 + 4) / 2),
    # ZeRO-3 cuts every parameter into equal partitions.
    ("zero3", ((5, 1), (3, 1)), {"world_size": 4}, "forward", GATHER, 8 + 4),
    ("zero3", ((5, 1), (3, 1)), {"world_size": 4}, "backward", GATHER, 8 + 4),
    ("zero3", ((5, 1), (3, 1)), {"world_size": 4}, "backward", SCATTER, 8 + 4),
    # It gathers what persists after the update alone, as what is small does by default.
    ("zero3", PERSISTING, THRESHOLD, "forward", GATHER, 20),
    ("zero3", PERSISTING, THRESHOLD, "backward", GATHER, 20),
    ("zero3", PERSISTING, THRESHOLD, "step", GATHER, 6),
    ("zero3", ((1000, 200), (10, 10)), DEFAULTS, "forward", GATHER, 200_000),
    ("zero3", ((1000, 200), (10, 10)), DEFAULTS, "backward", GATHER, 0),
    ("zero3", ((1000, 200), (10, 10)), DEFAULTS, "step", GATHER, 100),
    # It gathers once where weights are kept, or the prefetcher holds them; an option goes before the preset.
    *(
        ("zero3", PERSISTING, {"options": {name: 52}}, phase, GATHER, elements)
        for name in ("stage3_max_reuse_distance", "stage3_max_live_parameters")
        for phase, elements in (("forward", 26), ("backward", 0))
    ),
    ("zero3", PERSISTING, NONE_KEPT, "backward", GATHER, 0),  # both persist
    ("zero3", ((600_000, 1), (20, 1)), NONE_KEPT, "backward", GATHER, 600_000),
    # The root stays gathered by default.
    ("fsdp", SMALL, DEFAULTS, "backward", GATHER, 8),
    ("fsdp1", SMALL, DEFAULTS, "backward", GATHER, 8),
    ("fsdp", SMALL, {}, "backward", GATHER, 20),
    # Weights that are kept: FSDP1 gathers them once per step, FSDP2 in every micro-step.
    ("fsdp1-grad-op", SMALL, {"accumulation_steps": 3}, "forward", GATHER, 20),
    ("fsdp-grad-op", SMALL, {"accumulation_steps": 3}, "forward", GATHER, 3 * 20),
    # An evaluation spares what it left gathered.
    ("fsdp-grad-op", SMALL, {"steps": (4,), "evaluation_every": 4}, "forward", GATHER, 0),
    ("fsdp", SMALL, {"steps": (4,), "evaluation_every": 4}, "forward", GATHER, 20),
    # Alone fully_shard gathers nothing.
    ("fsdp", SMALL, {"world_size": 1}, "forward", GATHER, 0),
    ("fsdp", SMALL, {"world_size": 1}, "backward", SCATTER, 0),
    # The norm in fp64, and no flag of an overflow, which DTensors reduce in groups of several.
    ("fsdp", SMALL, {"world_size": 1, "precision": "fp16-mixed"}, "step", "all_reduce", 2),
]  # fmt: skip
"""Elements of 4 bytes that a step sends of some shapes."""


@pytest.mark.parametrize(("backend", "shapes", "changes", "phase", "op", "elements"), ELEMENTS)
def test_a_step_gathers_and_scatters_these_elements(
    backend: str, shapes: tuple[tuple[int, int], ...], changes: dict[str, Any], phase: str, op: str,
    elements: float,
) -> None:  # fmt: skip
    assert payload(backend, small_workload(*shapes, **changes), phase, op) == 4 * elements


def test_zero_1_pads_each_group_of_the_optimizer_to_two_elements_per_rank() -> None:
    workload = small_workload((5, 1), (3,), world_size=4)  # one group decays, the other does not
    assert payload("zero1", workload, "step", "all_gather") == (8 + 8) * 4
    assert payload("zero1", workload, "step", "all_reduce", term="gradient norm") == 2 * 4


def test_zero_3_gathers_blocks_at_once_where_they_are_its_leaf_modules() -> None:
    """BLOOM: embedding, its norm and the last norm; six modules in each of 24 blocks."""
    for options, units in (({}, 3 + 24 * 6), ({"leaf_module": "blocks"}, 3 + 24)):
        (gathered,) = of_kind("zero3", bloom_workload(options=options), "forward", "all_gather")
        assert gathered.calls == units
        assert gathered.payload_bytes == 559_214_592 * 4


@pytest.mark.parametrize(
    ("shapes", "changes", "says"),
    [
        (
            ((6, 1), (20, 1)),
            {"options": {"stage3_max_reuse_distance": 51}},
            "under stage3_max_reuse_distance",
        ),
        (((30_000, 20_000), (4, 2)), {"preset": "library-defaults"}, "above 5e8 parameters"),
        (((4, 2), (4, 2)), {"preset": "library-defaults", "steps": (1, 2)}, "warmup_steps"),
        (((4, 2), (4, 2)), {"activation_checkpointing": True}, "recomputation"),
    ],
    ids=["some weights are kept", "beyond the reuse distance", "it records its trace", "where it recomputes"],
)
def test_zero_3_does_not_guess(shapes: tuple, changes: dict[str, Any], says: str) -> None:
    assert says in str(volume_of("zero3", small_workload(*shapes, **changes)).unknown)


def test_zero_3_gathers_a_tied_weight_at_each_use() -> None:
    tied = {"head.weight": "embedding.weight"}
    workload = small_workload((6, 2), (4, 2), tied=tied)
    assert payload("zero3", workload, "forward", "all_gather") == (2 * 12 + 8) * 4
    assert payload("zero3", workload, "backward", "reduce_scatter") == (12 + 8) * 4


@pytest.mark.parametrize(("steps", "accumulation", "checked"), [((1, 2), 1, True), ((1,), 2, False)])
def test_zero_3_like_for_like_has_a_closed_form_but_for_the_check_of_its_trace(
    steps: tuple[int, ...], accumulation: int, checked: bool
) -> None:
    workload = small_workload((6, 2), (4, 2), steps=steps, accumulation_steps=accumulation)
    volume = volume_of("zero3", workload)
    assert volume.unknown is None
    assert bool(volume.underived) is checked
    assert payload("zero3", workload, "forward", "all_gather") == len(steps) * accumulation * 20 * 4


def test_the_last_block_is_gathered_once_more_by_each_further_micro_step_that_no_root_follows() -> None:
    with_root = small_workload((2, 1), (6, 2), (4, 2), accumulation_steps=3)
    layout = replace(with_root.layout, parameters=with_root.layout.parameters[1:])
    without = replace(with_root, layout=layout)
    assert payload("fsdp", with_root, "backward", "all_gather") == 3 * (2 + 12 + 8) * 4
    assert payload("fsdp", without, "backward", "all_gather") == (3 * (12 + 8) + 2 * 8) * 4
    # The third micro-step finds it gathered.
    assert payload("fsdp", without, "forward", "all_gather") == (3 * 12 + 2 * 8) * 4
    assert payload("fsdp-grad-op", without, "backward", "all_gather") == 0


def test_hybrid_reduces_its_shard_across_replicas() -> None:
    workload = small_workload((6, 2), (4, 2), world_size=4, shard_size=2)
    for backend in HYBRID:
        assert payload(backend, workload, "backward", "reduce_scatter", role="shard") == 20 * 4
        assert payload(backend, workload, "backward", "all_reduce", role="replica") == 10 * 4


def test_ddp_broadcasts_the_bucket_order_once() -> None:
    at = {step: small_workload((6, 2), (4, 2), steps=(step,)) for step in (0, 1, 2)}
    # Two parameters, the number of buckets, and one bucket's size, as int32.
    sizes = [payload("ddp", at[step], "forward", "broadcast", dtype="int32") for step in (0, 1, 2)]
    assert sizes == [0, 4 * 4, 0]


@pytest.mark.parametrize(
    ("sizes", "limit", "buckets"),
    [
        ((10, 10, 10), 30, 1),
        ((10, 10, 10), 20, 2),
        ((10, 1000, 10), 20, 3),  # the large one is reduced alone, and in one piece
        ((1000, 1000), 20, 2),
        ((5, 20, 5, 15), 20, 3),  # from the last: 15 + 5, then 20, then 5
    ],
)
def test_a_gradient_is_never_split_over_buckets(sizes: tuple[int, ...], limit: int, buckets: int) -> None:
    parameters = tuple(Tensor(f"p{index}", (size,), "float32") for index, size in enumerate(sizes))
    workload = Workload(
        layout=Layout(parameters=parameters, decaying=frozenset()), strategy=strategy("zero3"), world_size=2,
        options={"reduce_bucket_size": limit},
    )  # fmt: skip
    assert buckets_filled(workload) == buckets


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("all_to_all", 0.875),
        ("broadcast", 0.875), ("reduce", 0.875), ("gather", 0.875), ("scatter", 0.875), ("send", 1),
        ("recv", 0),
    ],
)  # fmt: skip
def test_ring_factors_of_eight_ranks_and_alone(op: str, factor: float) -> None:
    assert ring_sent_bytes(op, 8000, 8) == 8000 * factor
    assert ring_sent_bytes(op, 8000, 1) == 0 or op == "send"


@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_the_formula_evaluates_to_the_bytes(op: str) -> None:
    terms = re.findall(r"[\d,]+|\bx\b|[/()-]", ring_formula(op, 8000, 8))
    expression = "".join(terms).replace(",", "").replace("x", "*")
    assert eval(expression) == pytest.approx(ring_sent_bytes(op, 8000, 8))


LLAMA = ("model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.norm.weight", "lm_head.weight")
GPT2 = ("transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.weight",
        "transformer.ln_f.weight", "transformer.ln_f.bias")  # fmt: skip
BLOOM = ("transformer.word_embeddings.weight", "transformer.word_embeddings_layernorm.weight",
         "transformer.h.0.mlp.weight", "transformer.ln_f.weight")  # fmt: skip


def layout(names: tuple[str, ...], block: str, tied: dict[str, str]) -> Layout:
    shapes = {name: (4,) if "norm" in name or "ln_f" in name else (8, 4) for name in names}
    tensors = tuple(Tensor(name, shape, "float32") for name, shape in shapes.items())
    return Layout(parameters=tensors, decaying=frozenset(), blocks=(block,), tied=tied)


@pytest.mark.parametrize(
    ("names", "block", "tied", "units"),
    [
        (LLAMA, "model.layers.0", {}, [(["embed_tokens"], False), (["norm", "lm_head"], True)]),
        (
            LLAMA[:3], "model.layers.0", {"lm_head.weight": LLAMA[0]}, [(["norm", "embed_tokens"], True)],
        ),
        (
            GPT2, "transformer.h.0", {"lm_head.weight": GPT2[0]},
            [(["ln_f", "ln_f", "wte"], True), (["wpe"], True)],
        ),
        (
            BLOOM, "transformer.h.0", {"lm_head.weight": BLOOM[0]},
            [(["ln_f", "word_embeddings"], True), (["word_embeddings_layernorm"], True)],
        ),
    ],
)  # fmt: skip
def test_embedding_and_tail_are_units_of_their_own(
    names: tuple[str, ...], block: str, tied: dict[str, str], units: list[tuple[list[str], bool]]
) -> None:
    found = units_around_blocks(layout(names, block, tied))
    assert [([t.name.split(".")[-2] for t in tensors], kept) for tensors, kept, _ in found] == units


def test_only_the_untied_last_unit_is_taken_for_the_next_micro_step() -> None:
    untied = units_around_blocks(layout(LLAMA, "model.layers.0", {}))
    assert [astray for _, _, astray in untied] == [False, True]
    tied = units_around_blocks(layout(GPT2, "transformer.h.0", {"lm_head.weight": GPT2[0]}))
    assert [astray for _, _, astray in tied] == [False, False]


SEEN: Use = "inputs with gradient"
IDS: Use = "inputs without gradient"
FROZEN: Use = "forward only"
TABLE = Tensor("shared.weight", (10, 3), "float32")
LAYER = (Tensor("layer.weight", (3, 3), "float32"), Tensor("layer.bias", (3,), "float32"))
LAYOUT = Layout(
    parameters=(TABLE, *LAYER), decaying=frozenset(),
    tied={"encoder.weight": TABLE.name, "decoder.weight": TABLE.name, "head.weight": TABLE.name},
)  # fmt: skip


def shared(**values: Any) -> Workload:
    layout = replace(LAYOUT, **values.pop("layout"))
    return Workload(layout=layout, strategy=strategy("zero3"), world_size=4, **values)


@pytest.mark.parametrize(
    ("uses", "forward", "backward"),
    [
        ((IDS, IDS, SEEN), 3, 2),  # T5: the output's gather goes, the decoder's stays for the encoder
        ((IDS, IDS), 2, 1),
        ((SEEN, SEEN), 2, 2),
        ((SEEN, IDS), 2, 1),
        ((FROZEN, FROZEN, SEEN), 3, 1),
        ((), 0, 0),
    ],
)
def test_a_weight_is_gathered_for_each_use_that_finds_it_released(uses, forward: int, backward: int) -> None:
    asked = shared(layout={"uses": {TABLE.name: uses}})
    for phase, times in (("forward", forward), ("backward", backward)):
        found = shared_gathers(asked, phase, LAYOUT.parameters, 2)
        # 30 elements are padded to 32 for four ranks.
        assert sum(one.payload_bytes for one in found) == 2 * times * 4 * 32
        assert sum(one.calls or 0 for one in found) == 2 * times


def test_a_module_that_runs_twice_gathers_all_that_it_has_in_one_call() -> None:
    asked = shared(layout={"uses": {t.name: (SEEN, SEEN) for t in LAYER}})
    found = shared_gathers(asked, "forward", LAYOUT.parameters, 1)
    assert sum(one.calls or 0 for one in found) == 2
    assert sum(one.payload_bytes for one in found) == 2 * 4 * (12 + 4)


KEPT: Use = "returned by its module"


@pytest.mark.parametrize("preset", ["like-for-like", "library-defaults"])
def test_a_weight_that_its_module_returns_is_gathered_once_until_the_update(preset: str) -> None:
    large = replace(TABLE, shape=(200_000, 3))  # above the threshold of the defaults
    layout = {"parameters": (large, *LAYER), "uses": {TABLE.name: (KEPT,)}, "tied": {}}
    asked = shared(layout=layout, preset=preset, accumulation_steps=3)
    kept = gathered_bytes(asked) - gathered_bytes(
        replace(asked, layout=replace(asked.layout, parameters=LAYER))
    )
    assert kept == 4 * 600_000


def gathered_bytes(asked: Workload) -> int:
    volume = collectives(asked)
    assert volume.unknown is None
    return sum(
        one.payload_bytes
        for one in volume.collectives
        if one.op == "all_gather" and one.phase in ("forward", "backward")
    )


def test_uses_replace_what_names_say() -> None:
    uses = {TABLE.name: (IDS, IDS, SEEN)}
    volume = collectives(shared(layout={"uses": uses}))
    assert volume.unknown is None
    terms = {c.term for c in volume.collectives if c.phase == "forward"}
    assert SHARED_TERM in terms
    assert not any("tied" in term for term in terms)


def test_what_is_not_known_is_said() -> None:
    assert "more than two modules" in str(collectives(shared(layout={})).unknown)
    assert "could not be determined" in str(collectives(shared(layout={"uses": None})).unknown)
    inside = {"uses": {"layer.weight": (SEEN, SEEN)}, "blocks": ("layer",), "tied": {}}
    assert uses_unknown(shared(layout=inside)) is None
    assert "recompute" in str(uses_unknown(shared(layout=inside, activation_checkpointing=True)))
    # What the first pass gathers before a weight is returned.
    returned = {"uses": {TABLE.name: (IDS, KEPT)}, "tied": {}}
    assert uses_unknown(shared(layout=returned)) is None
    assert "first forward pass" in str(uses_unknown(shared(layout=returned, steps=(0, 2))))
