"""The shapes of the sweep: a job each, the backends that run it, and one fault that is planted in it."""

from dataclasses import dataclass

MODULE = "tests.sweep.models"
BF16, ACCUMULATED = "training.precision=bf16-mixed", "training.accumulation_steps=2"
COMMON = ("ddp", "zero2", "zero3", "fsdp", "fsdp1")
UNUSED = ("ddp:find_unused_parameters=True", *COMMON[1:])
SIMPLE = ("ddp", "zero1", "zero2", "fsdp")
"""Of jobs whose blocks ZeRO-3 and FSDP1 cannot take."""
FAULTS = {
    "GradientsSummed": ("gradient-scale", "gradient-differs", "update-differs"),
    "DividedTwice": ("gradient-scale", "gradient-differs", "update-differs"),
    "SameBatchOnEveryRank": ("samples-repeated",),
    "SeedPerRank": ("initial-weights-differ",),
    "ScheduleOncePerProcess": ("learning-rate-differs",),
    "NeverReduced": ("replicas-differ", "gradient-differs"),
    "StepsAtEveryMicroBatch": ("optimizer-steps-differ",),
    "GradientsOfOneRankDropped": ("gradient-differs", "gradient-scale"),
    "StaleWeightsOnOneRank": ("replicas-differ",),
    "LossOfRankZero": ("loss-of-one-rank",),
    "LossOfRankZeroForAll": ("loss-of-one-rank",),
    "NothingUpdated": ("parameters-not-updated",),
    "OwnClipping": ("clipping-differs", "update-differs"),
    "LateGradientsOfOneRankDropped": ("gradient-differs",),
    "LateSameBatchOnEveryRank": ("samples-repeated",),
    "LateLossOfRankZero": ("loss-of-one-rank",),
    "LateDecayOnEverything": ("optimizer-differs",),
    "LastMicroStepSkipped": ("gradient-differs", "gradient-scale"),
    "Bf16Reduction": ("reduce-dtype-differs", "gradient-differs"),
    "DecayOnEverything": ("optimizer-differs",),
    "LastHeldOutSampleDropped": ("held-out-loss-differs",),
    "ForwardTwice": ("passes-differ",),
    "EvaluatesInTrainingMode": ("mode-differs",),
    "DecayOfOneRank": ("ranks-differ",),
    "RateOfOneRank": ("ranks-differ",),
}
"""Defects of `tests/traps` that any model can have, and the findings that name each."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A job and what is done with it."""

    name: str
    fault: str
    """A key of FAULTS."""
    settings: tuple[str, ...]
    labels: tuple[str, ...] = COMMON
    world_size: int = 2
    true: tuple[str, ...] = ()
    """Findings that are true of a sound run of it: 'batch-norm', or 'frozen-weights-reduced of fsdp1'."""


def own(kind: str, loss: str = "of_classes", data: str = "points", **arguments: object) -> tuple[str, ...]:
    """A job of the factories of `models.py`, with arguments: of the model, or `loss_...` and `data_...`."""
    sections = {"model": {"kind": kind}, "loss": {}, "data": {}}
    for name, value in arguments.items():
        section, _, rest = name.partition("_")
        place = section if rest and section in sections else "model"
        sections[place][rest if place == section else name] = value
    targets = ("sum", "labels") if loss == "of_words" else ("mean", "samples")
    return (
        "task=custom", f"model.factory={MODULE}:model", f"loss.factory={MODULE}:{loss}",
        f"data.factory={MODULE}:{data}", f"loss.reduction={targets[0]}", f"loss.targets={targets[1]}",
        *(f"{section}.arguments.{name}={str(value).lower() if isinstance(value, bool) else value}"
          for section, given in sections.items() for name, value in given.items()),
    )  # fmt: skip


def where(*labels: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """These findings of these backends."""
    return tuple(f"{kind} of {label}" for kind in kinds for label in labels)


def known(model_type: str, **values: object) -> tuple[str, ...]:
    """A tiny model of transformers."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = ", ".join(f"{key}: {str(value).lower()}" for key, value in (sizes | values).items())
    return (f"model.config={{model_type: {model_type}, {text}}}",)


LLAMA = known("llama", intermediate_size=48, num_key_value_heads=2, max_position_embeddings=16)
MIXTRAL = known(
    "mixtral", intermediate_size=48, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    max_position_embeddings=16,
)  # fmt: skip
QWEN = known(
    "qwen3_moe", moe_intermediate_size=24, intermediate_size=48, num_key_value_heads=2, num_experts=4,
    num_experts_per_tok=2, max_position_embeddings=16,
)  # fmt: skip
WORDS = ("of_words", "sentences")
SHAPES = [
    Shape(name="plain layers of odd sizes", fault="GradientsSummed", settings=own("mlp")),
    Shape(name="odd sizes on 3 ranks", fault="NeverReduced", world_size=3,
          settings=(*own("mlp", width=11), "training.global_batch_size=12")),
    Shape(name="4 ranks, bf16, accumulation", fault="LastMicroStepSkipped", world_size=4,
          settings=(*own("mlp", width=17), BF16, ACCUMULATED, "training.global_batch_size=16")),
    Shape(name="sgd without momentum", fault="ScheduleOncePerProcess",
          settings=(*own("mlp"), "optimizer.kind=sgd", "optimizer.momentum=0",
                    "optimizer.learning_rate=0.1")),
    Shape(name="sgd with momentum, bf16", fault="GradientsOfOneRankDropped",
          settings=(*own("unet"), "optimizer.kind=sgd", "optimizer.learning_rate=0.05", BF16)),
    Shape(name="adam, decay in the gradient", fault="StaleWeightsOnOneRank",
          settings=(*own("unet"), "optimizer.kind=adam")),
    Shape(name="an optimizer of one's own", fault="LateGradientsOfOneRankDropped",
          settings=(*own("mlp"), f"optimizer.factory={MODULE}:lion")),
    Shape(name="an optimizer that looks at rows and columns", fault="GradientsOfOneRankDropped",
          settings=(*own("mlp"), f"optimizer.factory={MODULE}:adafactor"),
          labels=("ddp", "zero2", "zero3", "fsdp1"),
          true=where("zero2", "zero3", "fsdp1", kinds=("diverged", "update-of-parts"))),
    Shape(name="groups with rates of their own", fault="ScheduleOncePerProcess",
          settings=(*own("mlp"), "optimizer.groups=[{parameters: 'heads.*', learning_rate: 1.0e-2}, "
                    "{parameters: '*norm*', weight_decay: 0.5}]")),
    Shape(name="biases alone are trained", fault="GradientsSummed",
          settings=(*own("mlp"), "optimizer.groups=[{parameters: '*weight', frozen: true}]"),
          labels=("ddp", "zero1", "zero2", "zero3", "fsdp")),
    Shape(name="a frozen encoder", fault="LossOfRankZero", settings=own("mlp", frozen="first"),
          true=("frozen-weights-reduced of fsdp1",)),
    Shape(name="frozen blocks", fault="SameBatchOnEveryRank", settings=own("mlp", frozen="blocks.0")),
    Shape(name="a frozen head, bf16", fault="GradientsOfOneRankDropped",
          settings=(*own("mlp", frozen="heads"), BF16), true=("frozen-weights-reduced of fsdp1",)),
    Shape(name="an unused layer", fault="GradientsSummed", settings=own("mlp", unused=True), labels=UNUSED,
          true=where("zero2", "zero3", "fsdp1", kinds=("decay-without-gradient", "diverged"))),
    Shape(name="an unused layer, nothing decays", fault="NothingUpdated", labels=UNUSED,
          settings=(*own("mlp", unused=True), "optimizer.weight_decay=0")),
    Shape(name="a block used three times", fault="NeverReduced", settings=own("mlp", shared=3)),
    Shape(name="a block used three times, accumulated, bf16", fault="StepsAtEveryMicroBatch",
          settings=(*own("mlp", shared=3), BF16, ACCUMULATED)),
    Shape(name="a tied decoder, read outside of its module", fault="GradientsSummed", labels=SIMPLE,
          settings=own("autoencoder", "of_points")),
    Shape(name="ParameterDict and ParameterList", fault="DecayOnEverything", labels=SIMPLE,
          settings=own("named")),
    Shape(name="weight norm", fault="LateDecayOnEverything", labels=SIMPLE, settings=own("normalised")),
    Shape(name="a single layer", fault="SeedPerRank", settings=own("linear"),
          true=where("fsdp", "fsdp1", kinds=("one-wrap-unit",))),
    Shape(name="layers in a Sequential, PReLU", fault="OwnClipping", settings=own("prelu")),
    Shape(name="a parameter of one element", fault="LossOfRankZeroForAll",
          settings=own("mlp", scalar=True)),
    Shape(name="two heads added up", fault="LateLossOfRankZero", settings=own("mlp", sides=2)),
    Shape(name="the model twice a step", fault="GradientsOfOneRankDropped", settings=own("mlp", "twice")),
    Shape(name="a penalty on gradients", fault="GradientsOfOneRankDropped",
          settings=own("mlp", "of_slopes"), labels=SIMPLE[:-1]),
    Shape(name="label smoothing and a term of its own", fault="GradientsSummed",
          settings=own("mlp", loss_smoothing=0.1, loss_auxiliary=0.01)),
    Shape(name="regression by Huber's loss", fault="DecayOnEverything",
          settings=(*own("autoencoder", "of_points", loss_kind="huber_loss"),
                    "training.gradient_clipping=0.1"), labels=SIMPLE),
    Shape(name="no clipping", fault="OwnClipping",
          settings=(*own("mlp"), "training.gradient_clipping=null")),
    Shape(name="a buffer that follows the data", fault="LateSameBatchOnEveryRank", settings=own("counting")),
    Shape(name="blocks recomputed by the model", fault="Bf16Reduction", settings=own("checkpointed")),
    Shape(name="blocks recomputed by reentrant checkpoints", fault="NeverReduced",
          settings=own("checkpointed", reentrant=True)),
    Shape(name="blocks in lists of a list", fault="LateGradientsOfOneRankDropped", settings=own("stages")),
    Shape(name="complex numbers in a buffer", fault="GradientsSummed", settings=own("rotary", *WORDS)),
    Shape(name="a complex parameter", fault="GradientsSummed", settings=own("turning"), labels=("ddp",)),
    Shape(name="complex parameters in blocks of their own", fault="GradientsOfOneRankDropped",
          settings=own("turned"), labels=("ddp", "fsdp", "fsdp-grad-op")),
    Shape(name="complex parameters on 4 ranks in two groups", fault="NeverReduced", world_size=4,
          settings=own("turned"), labels=("fsdp-hybrid:shard_size=2",)),
    Shape(name="pairs of a batch compared", fault="GradientsOfOneRankDropped",
          settings=own("towers", "of_pairs"), true=("loss-depends-on-split",)),
    Shape(name="BatchNorm with fixed statistics", fault="GradientsSummed",
          settings=own("convolutions", fixed=True)),
    Shape(name="a graph of nodes", fault="SeedPerRank", settings=own("graph")),
    Shape(name="convolutions and GroupNorm", fault="StaleWeightsOnOneRank",
          settings=own("convolutions", groups=2)),
    Shape(name="convolutions and BatchNorm", fault="GradientsOfOneRankDropped",
          settings=own("convolutions"), true=("batch-norm",)),
    Shape(name="LSTM over padded sentences", fault="SameBatchOnEveryRank",
          settings=own("recurrent", *WORDS, data_padded=True)),
    Shape(name="GRU, 3 ranks", fault="GradientsSummed", world_size=3,
          settings=(*own("recurrent", *WORDS, model_kind="recurrent"), "training.global_batch_size=9")),
    Shape(name="torch's transformer, tied, positions at the root", fault="LateGradientsOfOneRankDropped",
          settings=own("encoder", *WORDS)),
    Shape(name="torch's transformer, padded, bf16", fault="ScheduleOncePerProcess",
          settings=(*own("encoder", *WORDS, tied=False, data_padded=True), BF16)),
    Shape(name="a frozen reference and four passes", fault="GradientsOfOneRankDropped",
          settings=own("preferences", "of_preferences", "sentences"),
          true=("frozen-weights-reduced of fsdp1",)),
    Shape(name="experts chosen by data", fault="GradientsSummed", labels=UNUSED, settings=own("experts")),
    Shape(name="experts that run on no sample", fault="GradientsOfOneRankDropped",
          settings=own("experts", always=True)),
    # Sharded ranks that run other blocks join other gathers, and ZeRO updates what no gradient reached.
    Shape(name="one of two branches", fault="GradientsOfOneRankDropped", labels=UNUSED,
          settings=own("toggled"),
          true=(*where("zero2", "fsdp", "fsdp1", kinds=("diverged", "idle-on-some-ranks")),
                *where("fsdp", "fsdp1", kinds=("update-differs", "gradient-differs")),
                "decay-without-gradient of zero2", "loss-depends-on-split")),
    Shape(name="a value is read, of no matter", fault="GradientsOfOneRankDropped",
          settings=own("exiting", limit=1e9)),
    Shape(name="a value is read, 3 ranks, bf16", fault="NeverReduced", world_size=3,
          settings=(*own("exiting", limit=1e9), BF16, "training.global_batch_size=9")),
    # Where ranks exit elsewhere, those that share gradients or weights wait for each other in vain.
    Shape(name="an early exit", fault="GradientsOfOneRankDropped", labels=UNUSED[:1],
          settings=own("exiting", limit=2.5), true=("loss-depends-on-split",)),
    Shape(name="a block that always runs twice where values could decide", fault="GradientsSummed",
          settings=own("repeating", always=True)),
    Shape(name="a block that runs as often as a value says", fault="GradientsOfOneRankDropped",
          labels=("ddp", "zero1", "zero2"), settings=own("repeating"), true=("loss-depends-on-split",)),
    Shape(name="a gate that lets some samples through", fault="GradientsSummed", labels=UNUSED[:1],
          settings=own("gated", least=0.5)),
    Shape(name="a gate that is always open", fault="GradientsOfOneRankDropped", settings=own("gated")),
    Shape(name="a head that evaluations alone run", fault="GradientsSummed", labels=UNUSED,
          settings=(*own("evaluated"), "evaluation.every_steps=2", "evaluation.samples=10",
                    "optimizer.weight_decay=0")),
    Shape(name="a module of buffers alone", fault="NeverReduced", settings=own("scaled")),
    Shape(name="a frozen teacher beside", fault="GradientsSummed", settings=own("taught"),
          true=("frozen-weights-reduced of fsdp1",)),
    Shape(name="a parameter without dimension", fault="GradientsOfOneRankDropped", labels=("ddp", "zero1"),
          settings=own("odd", whole=True)),
    Shape(name="a parameter without element", fault="GradientsOfOneRankDropped", labels=UNUSED[:1],
          settings=own("odd", none=True)),
    Shape(name="blocks that share a weight", fault="GradientsOfOneRankDropped",
          labels=("ddp", "zero1", "zero2", "zero3"), settings=own("tied")),
    Shape(name="fewer elements than ranks", fault="NeverReduced", world_size=4,
          settings=(*own("mlp", width=3), "training.global_batch_size=8")),
    Shape(name="a normalisation kept in evaluation mode", fault="DecayOfOneRank", settings=own("settled")),
    Shape(name="the model twice in each of two micro-steps", fault="ForwardTwice",
          settings=(*own("mlp", "twice"), ACCUMULATED)),
    Shape(name="a head that evaluations alone run, bf16", fault="EvaluatesInTrainingMode", labels=COMMON[1:],
          settings=(*own("evaluated"), "evaluation.every_steps=2", "evaluation.samples=10",
                    "optimizer.weight_decay=0", BF16)),
    Shape(name="blocks recomputed by the model, accumulated, 3 ranks", fault="RateOfOneRank", world_size=3,
          settings=(*own("checkpointed"), ACCUMULATED, "training.global_batch_size=12")),
    Shape(name="Qwen3-MoE", fault="GradientsOfOneRankDropped", settings=QWEN, labels=UNUSED),
    Shape(name="4 ranks in two groups", fault="StaleWeightsOnOneRank", world_size=4, settings=own("mlp"),
          labels=("fsdp-hybrid:shard_size=2", "fsdp1-hybrid:shard_size=2", "fsdp:reshard=2", "zero3:hpz=2")),
    Shape(name="one rank", fault="NothingUpdated", world_size=1, settings=own("mlp"),
          labels=("ddp", "zero1", "zero2", "zero3", "fsdp")),
    Shape(name="held-out samples", fault="GradientsSummed",
          settings=(*own("mlp"), "evaluation.every_steps=3", "evaluation.samples=10")),
    Shape(name="a large learning rate", fault="GradientsSummed",
          settings=(*own("mlp"), "optimizer.learning_rate=0.3", "training.steps=12")),
    Shape(name="LoRA", fault="GradientsOfOneRankDropped", settings=(*LLAMA, "adapter.kind=lora"),
          labels=("ddp", "zero2", "zero3", "fsdp")),
    Shape(name="LoRA, bf16, accumulated", fault="StepsAtEveryMicroBatch",
          settings=(*LLAMA, "adapter.kind=lora", "adapter.targets=[q_proj, v_proj]", BF16, ACCUMULATED),
          labels=("ddp", "zero2", "zero3", "fsdp")),
    Shape(name="LoRA on every layer, 3 ranks", fault="NeverReduced", world_size=3,
          settings=(*LLAMA, "adapter.kind=lora", "adapter.targets=[all-linear]",
                    "training.global_batch_size=9"), labels=("ddp", "zero2", "zero3", "fsdp")),
    Shape(name="Mixtral", fault="GradientsSummed", settings=MIXTRAL, labels=UNUSED),
    Shape(name="Mixtral, bf16", fault="LateDecayOnEverything", settings=(*MIXTRAL, BF16), labels=UNUSED),
    Shape(name="GPT-2, tied, clipping bites", fault="OwnClipping",
          settings=(*known("gpt2", n_positions=16), "training.gradient_clipping=0.3")),
    Shape(name="BLOOM on 4 ranks", fault="LossOfRankZero", world_size=4,
          settings=known("bloom"), labels=("zero1", "zero2", "zero3", "fsdp-grad-op", "fsdp1-grad-op")),
    Shape(name="Qwen2 with a tied head", fault="SameBatchOnEveryRank",
          settings=known("qwen2", intermediate_size=40, num_key_value_heads=1, max_position_embeddings=16,
                         tie_word_embeddings=True), labels=("accelerate-ddp", "accelerate-fsdp", "fsdp")),
    Shape(name="recomputed blocks, bf16", fault="GradientsSummed",
          settings=(*LLAMA, "training.activation_checkpointing=true", BF16)),
    Shape(name="weight norm of hooks", fault="GradientsSummed", settings=own("oldnorm"), labels=SIMPLE),
    Shape(name="spectral norm", fault="GradientsOfOneRankDropped", settings=own("spectral"),
          labels=SIMPLE),
    # ZeRO and FSDP cast its weights and not its vectors, which torch then refuses to multiply.
    Shape(name="spectral norm, bf16, accumulated", fault="GradientsSummed", labels=SIMPLE[:1],
          settings=(*own("spectral"), BF16, ACCUMULATED)),
    Shape(name="tied in a ModuleDict", fault="SameBatchOnEveryRank", settings=own("dictionary", *WORDS)),
    Shape(name="convolution and GRU", fault="GradientsSummed", settings=own("convolvedgru", *WORDS)),
    Shape(name="packed sequences", fault="LossOfRankZero",
          settings=own("packed", *WORDS, data_padded=True)),
    Shape(name="attention of torch, bias as a key", fault="NeverReduced",
          settings=own("attending", *WORDS)),
    Shape(name="complex numbers as pairs", fault="GradientsSummed", settings=own("fourier")),
    Shape(name="a teacher whose dropout rests", fault="GradientsOfOneRankDropped",
          settings=(*own("resting"), "model.dropout=null"), true=("frozen-weights-reduced of fsdp1",)),
    Shape(name="experts that run masked on all samples", fault="OwnClipping", settings=own("switch")),
    Shape(name="stochastic depth by sample, evaluated", fault="EvaluatesInTrainingMode",
          settings=(*own("depth"), "evaluation.every_steps=2", "evaluation.samples=10")),
    Shape(name="adapters of one's own, accumulated", fault="LastMicroStepSkipped",
          settings=(*own("adapters"), ACCUMULATED), true=("frozen-weights-reduced of fsdp1",),
          labels=("ddp", "zero2", "zero3", "fsdp", "fsdp1")),
    Shape(name="two tasks that weigh themselves", fault="ScheduleOncePerProcess",
          settings=own("tasks", "of_tasks"), labels=("ddp", "zero1", "zero2", "zero3")),
    # ZeRO and FSDP pass through copies of the weights: what passes do to these no update sees.
    Shape(name="weights that passes clamp", fault="GradientsSummed", settings=own("clamped"),
          labels=("ddp", "zero2", "fsdp"),
          true=where("zero2", "fsdp", kinds=("diverged", "weights-changed-in-passes"))),
    # Each rank shortens the rows that it reads.
    Shape(name="an embedding whose rows passes shorten", fault="GradientsOfOneRankDropped",
          settings=own("renormed", *WORDS), labels=("ddp", "zero2"),
          true=(*where("ddp", kinds=("diverged", "replicas-differ")),
                *where("zero2", kinds=("diverged", "weights-changed-in-passes")))),
    Shape(name="triplets, the hardest of a batch", fault="GradientsOfOneRankDropped",
          settings=own("mlp", "of_triplets"), true=("loss-depends-on-split",)),
    Shape(name="a mean without the hardest sample", fault="StaleWeightsOnOneRank",
          settings=own("mlp", "of_most"), true=("loss-depends-on-split",)),
    Shape(name="the gradient of the score", fault="GradientsSummed", labels=SIMPLE[:1],
          settings=own("mlp", "of_scores_slopes")),
]  # fmt: skip
