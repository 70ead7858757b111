"""The traps that are planted: a defect each, the job in which it shows, and the finding that must name it
first, with nothing untrue beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.judge.findings.finding import Finding
from tests.sweep.table import own

from .matrix import ABOUT_TIME, Matrix, padded_documents, skip_without_fp16

UNCLIPPED = "training.gradient_clipping=null"
ACCUMULATED = "training.accumulation_steps=4"
BF16 = "training.precision=bf16-mixed"
TIED = (
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 2, max_position_embeddings: 16, tie_word_embeddings: true}"
)


@dataclass(frozen=True, kw_only=True)
class Trap:
    """A defect, the job in which it shows, and the finding that must name it."""

    name: str
    """Its number, or what it is; of 'unseen' ones no kind was known when the findings were written."""
    label: str
    finding: str
    says: str = ""
    """Words of the message."""
    also: tuple[str, ...] = ()
    """Further findings that are true of it; the one above comes first, and any other is an untrue cause."""
    settings: tuple[str, ...] = ()
    compared_with: tuple[str, ...] = ()
    world_size: int = 2
    diverges_in_bf16: bool = False
    """Whether bf16's rounding hides its cause, so that it is found to diverge only."""
    padded: bool = False
    """Whether samples have different numbers of target tokens."""
    what: str = ""
    """What was done wrong, for the gallery."""

    @property
    def shown(self) -> str:
        """Its label in records."""
        return self.label.replace("=true", "=True")


TRAPS = [
    Trap(name="T01", label="zero1:default_clipping=true", finding="clipping-differs",
         says="differs: 1 against none", settings=(UNCLIPPED,), also=("update-differs",),
         what="DeepSpeed left to its default, which clips gradients at 1.0, in a job without clipping"),
    Trap(name="T02", label="fsdp:master_dtype=compute", finding="master-dtype-differs", says="bfloat16",
         settings=(BF16,), also=("lost-updates", "update-differs", "memory-differs"),
         what="no fp32 master weights: bf16 weights are updated in bf16"),
    Trap(name="T03", label="planted-Bf16Reduction", finding="reduce-dtype-differs",
         says="reduced in bfloat16", compared_with=("ddp",), also=("gradient-differs",),
         what="gradients reduced over the ranks in bf16"),
    Trap(name="T04", label="planted-GradientsSummed", finding="gradient-scale",
         says="x 2: summed over 2 ranks",
         what="gradients summed over the ranks, not averaged"),
    Trap(name="T05", label="planted-DividedTwice", finding="gradient-scale",
         says="x 0.25: divided by the 4 accumulation steps again", settings=(ACCUMULATED,),
         what="the loss divided by the accumulation steps twice"),
    Trap(name="T06", label="planted-StepsAtEveryMicroBatch", finding="optimizer-steps-differ",
         says="24 against 6", settings=(ACCUMULATED,), also=("replicas-differ",),
         what="the optimizer steps after every micro-batch"),
    Trap(name="T07", label="planted-MeanPerRank", finding="loss-normalisation", says="per-rank means",
         padded=True,
         what="the mean of each rank's own mean loss, where ranks hold different numbers of target tokens"),
    Trap(name="T08", label="planted-SameBatchOnEveryRank", finding="samples-repeated",
         what="every rank trains on the batch of rank 0"),
    Trap(name="T09", label="planted-ShardedTwice", finding="samples-missing",
         what="the samples are divided over the ranks twice, so that some are never seen"),
    Trap(name="T10", label="planted-SeedPerRank", finding="initial-weights-differ",
         what="the initial weights are drawn with a seed of the rank's own"),
    Trap(name="T11", label="planted-ScheduleOncePerProcess", finding="learning-rate-differs",
         what="another learning rate than the schedule's: it is divided by the number of ranks"),
    Trap(name="T13", label="planted-Untied", finding="parameters-differ", says="tied parameters",
         settings=(TIED,),
         what="the tied embedding is untied"),
    Trap(name="T14", label="fsdp1", finding="strategy-differs", says="runs NO_SHARD, although", world_size=1,
         what="FSDP1 FULL_SHARD on one rank, where it quietly takes NO_SHARD"),
    Trap(name="T12", label="planted-WholeModelInOneUnit", finding="one-wrap-unit", says="of 2 blocks",
         what="the complete model wrapped as one unit of FSDP"),
    Trap(name="T15", label="planted-ReplicasNeverReduced:shard_size=2", finding="replicas-differ",
         says="ranks 0, 1 against ranks 2, 3", world_size=4,
         what="hybrid sharding whose replicas are never reduced over"),
    Trap(name="T17 never", label="planted-NeverReduced", finding="replicas-differ",
         says="ranks 0 against ranks 1", settings=(ACCUMULATED,),
         what="gradients never synchronised under accumulation"),
    Trap(name="T17 a block", label="planted-BlockNeverReduced", finding="replicas-differ",
         says="against ranks 1, most of all in block model.layers.1", also=("gradient-differs",),
         what="the gradients of one block never synchronised"),
    Trap(name="T17 always", label="planted-SynchronisedAtEveryMicroStep", finding="synchronised-early",
         says="in every micro-step", settings=(ACCUMULATED,),
         what="gradients synchronised at every micro-step of an accumulation"),
    Trap(name="T16", label="planted-NormOfTheShard", finding="norm-of-shard",
         what="clipping by the norm of a rank's shard"),
    Trap(name="T18", label="planted-DecayOnEverything", finding="optimizer-differs", says="constants",
         also=("update-differs",),
         what="weight decay on biases and norms too"),
    Trap(name="T18 swapped groups", label="planted-SwappedDecayGroups", finding="optimizer-differs",
         says="weight_decay 0.0", also=("update-differs",),
         what="weight decay on biases and norms instead of on the matrices"),
    Trap(name="T18 rate of a group", label="planted-LearningRateOfOneGroup",
         finding="learning-rate-differs",
         what="another learning rate for one group of parameters"),
    Trap(name="T21 checkpointing", label="planted-Checkpointed", finding="step-environment-differs",
         says="activation checkpointing",
         what="activation checkpointing in one backend only"),
    Trap(name="T21 attention", label="planted-EagerAttention", finding="step-environment-differs",
         says="attention kernel",
         what="another attention kernel in one backend"),
    Trap(name="T21 compile", label="planted-Compiled", finding="step-environment-differs", says="compiled",
         what="torch.compile in one backend only"),
    Trap(name="T21 TF32", label="planted-Tf32", finding="step-environment-differs", says="TF32",
         what="TF32 allowed in one backend only"),
    Trap(name="T22", label="planted-LiveDropout", finding="not-deterministic",
         what="dropout is live in one backend"),
    Trap(name="T24", label="planted-HoardingRank", finding="memory-imbalance",
         what="one rank holds far more memory than the others"),
    Trap(name="unseen clipping", label="planted-OwnClipping", finding="clipping-differs",
         says="0.25 against 1", also=("update-differs",),
         what="the update clips once more, at 0.25"),
    Trap(name="unseen gradient cut", label="planted-NoGradientOfOneParameter", finding="gradient-differs",
         says="no gradient reaches model.layers.1.post_attention_layernorm.weight",
         what="no gradient reaches one parameter"),
    Trap(name="unseen optimizer by hand", label="planted-HandWrittenOptimizer", finding="update-differs",
         what="Adam written by hand with another beta2, of which no constant can be read"),
    Trap(name="unseen update put off", label="planted-UpdatePutOff", finding="work-outside-clock",
         says="ran in the next forward pass",
         what="each update put off into the next forward pass, so that the phase step lacks it"),
    Trap(name="unseen computing in fp32", label="planted-ComputesInFp32", finding="compute-dtype-differs",
         says="float32 against bfloat16", settings=(BF16,),
         what="autocast turned off within the model, whose backend still says bf16"),
    Trap(name="late gradients of a rank dropped", label="planted-LateGradientsOfOneRankDropped",
         finding="gradient-differs", says="of step 3",
         what="from the fourth step on the gradients of rank 1 are dropped"),
    Trap(name="late same batch", label="planted-LateSameBatchOnEveryRank", finding="samples-repeated",
         says="of step 3",
         what="from the fourth step on every rank trains on the batch of rank 0"),
    Trap(name="late loss of rank 0", label="planted-LateLossOfRankZero", finding="loss-of-one-rank",
         says="from step 3 on",
         what="from the fourth step on only the loss of rank 0 is reported"),
    Trap(name="late decay on everything", label="planted-LateDecayOnEverything",
         finding="optimizer-differs", says="weight_decay 10.0", also=("update-differs",),
         what="from the fourth step on weight decay of 10 on every parameter"),
]  # fmt: skip
UNSEEN = [
    Trap(name="beta2", label="planted-WrongBeta2", finding="optimizer-differs", says="0.999",
         also=("update-differs",),
         what="an optimizer of its own with beta2 0.999"),
    Trap(name="epsilon", label="planted-WrongEpsilon", finding="optimizer-differs", says="eps 1e-05",
         also=("update-differs",),
         what="an optimizer of its own with epsilon 1e-5"),
    Trap(name="parameter left out", label="planted-ParameterLeftOut", finding="optimizer-differs",
         says="model.layers.1.mlp.up_proj.weight", also=("parameters-not-updated",),
         what="an optimizer of its own that lacks one parameter"),
    Trap(name="decay on everything", label="planted-OwnDecayOnEverything", finding="optimizer-differs",
         says="constants", also=("update-differs",),
         what="an optimizer of its own with weight decay on every parameter"),
    Trap(name="micro-step skipped", label="planted-LastMicroStepSkipped", finding="gradient-differs",
         says="gradients of ranks 0, 1 have a factor in some micro-step", settings=(ACCUMULATED,),
         what="the last micro-step of an accumulation adds no gradient"),
    Trap(name="gradients of a rank dropped", label="planted-GradientsOfOneRankDropped",
         finding="gradient-differs", says="gradients of rank 1 have a factor, first in step 0",
         what="the gradients of rank 1 are dropped"),
    Trap(name="stale weights", label="planted-StaleWeightsOnOneRank", finding="replicas-differ",
         also=("update-altered",),
         what="rank 1 keeps the weights of before each update"),
    Trap(name="loss of rank 0", label="planted-LossOfRankZero", finding="loss-of-one-rank",
         what="only rank 0 reports its loss"),
    Trap(name="loss of rank 0 on all", label="planted-LossOfRankZeroForAll", finding="loss-of-one-rank",
         what="every rank reports the loss of rank 0"),
]  # fmt: skip


TRAPS += [replace(trap, name=f"unseen {trap.name}") for trap in UNSEEN]
TRAPS += [
    replace(trap, name=f"unseen {trap.name} in bf16", settings=(*trap.settings, BF16)) for trap in UNSEEN
]
DIVIDED = [
    Trap(name="T28 stage 1", label="ulysses-zero1", finding="gradient-scale",
         says="x 2: added up 2 times over the 2 ranks along 'sequence'",
         what="DeepSpeed's Ulysses at stage 1 as it is: gradients times the ranks that share samples"),
    Trap(name="T28 stage 2", label="ulysses-zero2", finding="gradient-scale",
         says="x 2: added up 2 times over the 2 ranks along 'sequence'",
         what="DeepSpeed's Ulysses at stage 2 as it is: gradients times the ranks that share samples"),
    Trap(name="T33 stages", label="planted-TiedApart", finding="tied-weight-apart",
         says="different copies of", settings=(TIED,),
         also=("replicas-differ", "gradient-differs", "update-differs"),
         what="the tied weight on the first and the last stage of a pipeline, its gradients not added up"),
    Trap(name="T40", label="planted-ScaledByMicroBatches:micro_batches=4", finding="gradient-scale",
         says="divided by the 4 micro-batches of the pipeline (scale_grads)",
         what="torch's schedule left to its default, which divides gradients by the micro-batches"),
    Trap(name="T35", label="planted-RingAroundEagerAttention", finding="attention-within-part",
         says="attention 'eager' is not divided among the 2 ranks", settings=("model.attention=eager",),
         what="eager attention under context_parallel: each rank attends to its own part of a sample"),
    Trap(name="T33 tensor", label="planted-TiedWeightsCutApart", finding="parameters-differ",
         settings=(TIED,),
         what="tensor parallelism that unties the embedding from the output layer"),
    Trap(name="T34", label="planted-OtherSamplesOnEachTensorRank", finding="peers-fed-differently",
         says="ranks that share samples", also=("replicas-differ",),
         what="tensor-parallel ranks that are fed different samples"),
    Trap(name="AutoTP, selective", label="planted-KeptWhatIsAddedUpInPlace", finding="gradient-differs",
         settings=("training.activation_checkpointing=selective",), diverges_in_bf16=True,
         what="recomputation that keeps outputs of matrix products which DeepSpeed adds up in place"),
    Trap(name="T34, AutoTP", label="planted-OtherSamplesUnderAutoTp", finding="peers-fed-differently",
         says="ranks that share samples", also=("replicas-differ",),
         what="tensor-parallel ranks of DeepSpeed that are fed different samples"),
]  # fmt: skip
"""Of backends whose ranks share samples: not in the published gallery."""
LIBRARIES = [
    Trap(name="T26", label="planted-TransposedBytes", finding="initial-weights-differ",
         what="matrices that hold their transpose's bytes, as ZenFlow leaves them at stage 2"),
    Trap(name="T27", label="planted-DecayOfTheFirstGroup", finding="optimizer-differs",
         says="weight_decay", also=("update-differs",),
         what="the first group's weight decay in every group, as a universal checkpoint leaves it at ZeRO-3"),
    Trap(name="T29", label="planted-PlainUnderZeroInit", finding="initial-weights-differ",
         what="the model's class called plainly under zero.Init, which leaves out its own initialisation"),
    Trap(name="T31", label="planted-WeightsInUseLeftStale", finding="weights-in-use-stale",
         says="before the first step",
         what="master weights set by safe_set_full_fp32_param without update_lp_params"),
    Trap(name="T31 at stage 3", label="planted-PiecesInUseLeftStale", finding="weights-in-use-stale",
         says="before the first step",
         what="the same at stage 3, which has no such method"),
    Trap(name="T32", label="planted-TrainerFsdpOnTheCpu", finding="strategy-differs",
         says="although FSDP2 FULL_SHARD was requested",
         what="Trainer asked for FSDP2 on the CPU, where it runs DDP"),
]  # fmt: skip
"""What DeepSpeed and Trainer do on their own account: not in the published gallery."""
RATE = "late learning rate of one rank"
MOVED = own("mlp", survival=0.8)
EXECUTION = [
    Trap(name="forward twice", label="planted-ForwardTwice", finding="passes-differ",
         says="forward passes in step 0: 2, due: 1 (ranks: 0, 1", settings=own("mlp"),
         what="each micro-batch run once more without gradients under ZeRO-2"),
    Trap(name="backward in halves", label="planted-BackwardInHalves", finding="passes-differ",
         says="backward passes in step 0: 2, due: 1 (ranks: 0, 1", settings=own("mlp"),
         what="each backward pass of FSDP made twice, of half the loss"),
    Trap(name="training in evaluation mode", label="planted-TrainsInEvaluationMode", finding="mode-differs",
         says="in evaluation mode in training passes: the model itself",
         settings=(*MOVED, "evaluation.every_steps=2", "evaluation.samples=8"),
         also=("gradient-differs", "gradient-scale", "held-out-loss-differs", "update-differs"),
         what="ZeRO-2 left in evaluation mode after the first evaluation"),
    Trap(name="evaluating in training mode", label="planted-EvaluatesInTrainingMode", finding="mode-differs",
         says="in training mode in evaluation passes: the model itself",
         settings=(*MOVED, "evaluation.every_steps=2", "evaluation.samples=8"),
         also=("held-out-loss-differs",),
         what="FSDP left in training mode while it evaluates"),
    Trap(name="weight decay of one rank", label="planted-DecayOfOneRank", finding="ranks-differ",
         says="differs from rank 0 (ranks: 1): weight_decay of optimizer group 0 1 against 0.1",
         settings=own("mlp"), also=("update-differs",),
         what="ten times the weight decay on rank 1 of FSDP1"),
    Trap(name="clipping of one rank", label="planted-ClippedOnOneRank", finding="ranks-differ",
         says="differs from rank 0 (ranks: 1): norm of the clipped gradient of step 0 0.1 against 0.",
         settings=(*own("mlp"), "training.gradient_clipping=0.5"), also=("replicas-differ",),
         what="the gradients of rank 1 of DDP clipped once more, at 0.1"),
    Trap(name="buffer cast", label="planted-RotaryInBf16", finding="update-differs",
         says="although losses and gradient norms agree in all 6 steps; buffer model.rotary_emb.inv_freq "
         "differs before the first step",
         what="a buffer of FSDP that was cast to bf16 and back"),
    Trap(name="updates rounded", label="planted-WeightsRounded", finding="update-altered",
         says="weights are rounded to bfloat16", also=("parameters-not-updated",),
         what="fp32 weights of FSDP1 rounded to bf16 after each update"),
    Trap(name="learning rate of one rank", label="planted-RateOfOneRank", finding="learning-rate-differs",
         settings=own("mlp"), also=("ranks-differ", "update-differs"),
         what="half the learning rate on rank 1 of ZeRO-1"),
]  # fmt: skip
EXECUTION += [
    replace(trap, name=f"{trap.name}, {where}", label=f"{trap.label}{suffix}{options}", world_size=ranks,
            says=trap.says.replace("ranks: 0, 1", "ranks: 0, 1, 2, 3") if ranks == 4 else trap.says,
            also=(*trap.also, *also.get(trap.name, ())))
    for suffix, options, ranks, where, names, also in (
        ("AtStage3", "", 2, "ZeRO-3",
         ("forward twice", "training in evaluation mode", "evaluating in training mode",
          "weight decay of one rank"), {}),
        ("OfHybrid", ":shard_size=2", 4, "hybrid",
         ("forward twice", "backward in halves", "training in evaluation mode", "weight decay of one rank"),
         {"weight decay of one rank": ("replicas-differ",)}),
    )
    for trap in EXECUTION
    if trap.name in names
]  # fmt: skip
"""How ranks ran the model, of each family: not in the published gallery."""
LATE_SETTINGS = [
    Trap(name=f"{name}, {where}", label=f"planted-{label}{suffix}", finding=finding, says=says,
         settings=own("mlp"), what=what,
         also=(*also, *(("replicas-differ",) if name == RATE and where == "DDP" else ())))
    for suffix, where in (("OfDdp", "DDP"), ("AtStage3", "ZeRO-3"), ("OfFsdp", "FSDP"))
    for name, label, finding, says, also, what in (
        ("late beta2", "LateBeta", "optimizer-differs",
         "betas [0.9, 0.5] against betas [0.9, 0.95] in the reference, changed in step 2",
         ("update-differs",),
         "another beta2 from the fourth step on"),
        ("late clipping", "LateClipping", "clipping-differs",
         "0.01 against 1 in the reference, after the training; 1 before it", ("update-differs",),
         "clipping at another norm from the fourth step on"),
        (RATE, "RateKeptOnOneRank", "learning-rate-differs", "of step 3",
         ("ranks-differ", "update-differs"), "a schedule that stops on rank 1 after three steps"),
        ("weight decay for a step", "DecayForAStep", "optimizer-differs",
         "changed in step 2 and back in step 4", ("update-differs",),
         "weight decay of 10 in the fourth step alone"),
    )
]  # fmt: skip
"""Settings that change while a run trains: not in the published gallery."""
CLIPPED = [
    Trap(name=f"decay added to clipped gradients, {where}", label=f"planted-DecayAdded{suffix}",
         finding="update-differs",
         says=": something changes them in between, as adding weight decay x weights",
         what="weight decay added to gradients after they were clipped")
    for suffix, where in (("OfDdp", "DDP"), ("OfFsdp", "FSDP"), ("OfFsdp1", "FSDP1"), ("AtStage1", "ZeRO-1"),
                          ("AtStage3", "ZeRO-3"))
] + [
    Trap(name=f"clipped each micro-step, {where}", label=f"planted-ClippedEachMicroStep{suffix}",
         finding="gradient-differs", settings=(ACCUMULATED,),
         says="it is 0.3 in every step: gradients are clipped before their norm is taken",
         what="gradients clipped after each micro-step of an accumulation")
    for suffix, where in (("OfDdp", "DDP"), ("OfFsdp", "FSDP"))
] + [
    Trap(name=f"embedding scaled, {where}", label=f"planted-EmbeddingScaled{suffix}",
         finding="gradient-differs",
         says="gradients of model.embed_tokens.weight have a factor, relative to all others",
         what="gradients of the embedding divided by how often a batch holds each token")
    for suffix, where in (("OfDdp", "DDP"), ("OfFsdp", "FSDP"), ("AtStage1", "ZeRO-1"),
                          ("AtStage3", "ZeRO-3"))
] + [
    Trap(name=f"norm of the shard, {where}", label=f"planted-NormOfTheShard{suffix}", world_size=ranks,
         finding="norm-of-shard", says=says, what="clipping by the norm of a rank's shard",
         settings=settings)
    for suffix, where, ranks, says, settings in (
        ("OfFsdp1", "FSDP1", 2, "ranks see different gradient norms: each clips", ()),
        ("OfHybrid:shard_size=2", "hybrid", 4, "ranks see different gradient norms: each clips", ()),
        ("AtStage1", "ZeRO-1", 2, "as 2 parts of norm 1 have: each rank clips", ()),
        ("AtStage3", "ZeRO-3", 2, "as 4 parts of norm 0.01 have: each rank clips",
         ("training.gradient_clipping=0.01",)),
    )
] + [
    Trap(name=f"statistics kept, {where}", label=f"planted-StatisticsKept{suffix}",
         finding="buffers-not-updated", also=("batch-norm",), settings=own("mlp", statistics=True),
         says="in the reference: blocks.0.norm.running_mean, blocks.0.norm.running_var, blocks",
         what="running statistics of BatchNorm that are never updated")
    for suffix, where in (("OfDdp", "DDP"), ("OfFsdp", "FSDP"), ("AtStage2", "ZeRO-2"))
] + [
    Trap(name=f"each parameter clipped by itself, {where}", label=f"planted-ClippedByParameter{suffix}",
         finding="update-differs", says="clipping leaves 1: something changes them in between",
         what="each parameter's gradient clipped once more by its own norm")
    for suffix, where in (("OfDdp", "DDP"), ("OfFsdp", "FSDP"))
] + [
    Trap(name=f"loss not unscaled, {where}", label=f"planted-NotUnscaled{suffix}", finding="gradient-differs",
         says="is 128 times the reference's although the loss agrees; final weights agree: the norm is",
         what="gradients of a loss that was scaled by 128 and never unscaled")
    for suffix, where in (("OfDdp", "DDP"), ("AtStage2", "ZeRO-2"), ("OfFsdp1", "FSDP1"))
] + [
    Trap(name="loss scale left in gradients", label="planted-LossScaleLeftOfDdp", finding="gradient-scale",
         settings=("training.precision=fp16-mixed",), says="not divided by the loss scale of 65536",
         what="gradients of a scaled loss that are never unscaled"),
    Trap(name="loss scale doubled", label="zero3", finding="gradient-differs",
         says="all gradients are halved in step 3, as DeepSpeed divides by the loss scale that this step has",
         settings=("training.precision=fp16-mixed", "training.initial_loss_scale=1024",
                   "training.loss_scale_growth_interval=3"),
         what="DeepSpeed's stage 3 as it is when the loss scale grows: a gradient of half its size"),
] + [
    Trap(name=f"unscaled by the old loss scale, {where}", label=f"planted-OldScale{suffix}",
         finding="gradient-differs",
         says="all gradients are doubled in step 3, where the loss scale has just grown: they are",
         settings=("training.precision=fp16-mixed", "training.initial_loss_scale=1024",
                   "training.loss_scale_growth_interval=3"),
         what="gradients divided by the loss scale of the step before")
    for suffix, where in (("OfDdp", "DDP"), ("OfFsdp", "FSDP"))
] + [
    Trap(name="clipped before they are added up", label="planted-ClippedBeforeTheSumOfDdp",
         finding="gradient-differs",
         says="gradients clipped before they are added up, as no norm exceeds 1",
         what="each rank clips its own gradients before they are reduced"),
    Trap(name="ranks begin apart", label="planted-BeginsLargerOfDdp", finding="replicas-differ",
         says="ranks begin with unlike weights, and end so: final weights of ranks 0 against ranks 1",
         what="weights of rank 1 that are 1 % larger at first"),
    Trap(name="weights one step behind", label="planted-WeightsOneStepBehind", finding="gradient-differs",
         says=": gradients differ, or passes use other weights than updates leave",
         what="passes that use a copy of the weights which is renewed before each update"),
    Trap(name="statistics kept on a rank", label="planted-StatisticsKeptOnOneRank",
         finding="ranks-differ", also=("batch-norm",), settings=own("mlp", statistics=True),
         says="differs from rank 0 (ranks: 1): still buffers blocks.0.norm.running_mean, blocks.0.norm",
         what="running statistics of BatchNorm that rank 1 never updates"),
]  # fmt: skip
"""Gradients that change between backward pass and update, buffers that stay: not in the published gallery."""
UPDATED = [
    Trap(name=f"{name}, {where}", label=f"planted-{label}{suffix}", finding="update-altered", says=says,
         also=("update-differs", *also), what=what)
    for name, label, says, what, also, families in (
        ("moments lost", "MomentsLost", "of its gradient: the moments of before are lost",
         "Adam's moments set to zero after the third step", (),
         (("OfDdp", "DDP"), ("AtStage2", "ZeRO-2"), ("OfFsdp1", "FSDP1"))),
        ("states begin anew", "StatesAnew", "its states begin anew, with update 1 where update 4 is due",
         "Adam's states removed after the third step", ("memory-differs",),
         (("AtStage1", "ZeRO-1"), ("OfFsdp", "FSDP"))),
        ("moments rounded", "MomentsRounded", "moments are rounded to bfloat16",
         "Adam's moments rounded to bf16 after each step, in tensors of fp32", (),
         (("OfDdp", "DDP"), ("AtStage3", "ZeRO-3"), ("OfFsdp", "FSDP"))),
        ("epsilon in the root", "EpsInRoot", "epsilon stands within the root, not beside it",
         "AdamW by hand, with epsilon within the root", (),
         (("OfDdp", "DDP"), ("AtStage1", "ZeRO-1"), ("AtStage3", "ZeRO-3"), ("OfFsdp", "FSDP"))),
        ("bias uncorrected", "BiasUncorrected", "moments are not corrected for the bias of their beginning",
         "AdamW by hand, without correction of the moments' bias", (),
         (("AtStage2", "ZeRO-2"), ("OfFsdp1", "FSDP1"))),
        ("part of a rank left", "PartLeft", "(ranks: 1) is not what Adam makes of its gradient: weights stay",
         "a rank that leaves its part of the weights as it was", ("parameters-not-updated",),
         (("AtStage1", "ZeRO-1"), ("AtStage2", "ZeRO-2"), ("AtStage3", "ZeRO-3"), ("OfFsdp", "FSDP"),
          ("OfFsdp1", "FSDP1"))),
        ("decay undone on a rank", "DecayUndone", "of step 1 (ranks: 1) is not what Adam makes of its "
         "gradient: weights decay by", "a rank that takes weight decay back", (),
         (("AtStage3", "ZeRO-3"), ("OfFsdp", "FSDP"))),
        ("rate doubled once", "RateDoubledOnce", "of its gradient: weights move 2 times as far",
         "an update twice as large, whose learning rate is back when it is over", (),
         (("AtStage1", "ZeRO-1"), ("OfFsdp1", "FSDP1"))),
        ("pulled back", "PulledBack", "something else than moments and constants moves weights",
         "weights averaged with those of the beginning after each update", (),
         (("OfDdp", "DDP"), ("OfFsdp", "FSDP"))),
    )
    for suffix, where in families
]  # fmt: skip
"""Updates that are not Adam's, of each family: not in the published gallery."""
EVALUATED = ("evaluation.every_steps=3", "evaluation.samples=10")
SPLITS = {
    "contrastive loss": own("towers", "of_pairs"), "batch statistics": own("mlp", statistics=True),
    "mixup": own("mlp", "of_mixed"), "weighted mean": own("mlp", "of_weighted"),
}  # fmt: skip
"""Jobs whose loss depends on how the batch is split."""
OWN_JOBS = [
    Trap(name=f"one rank dropped, {name}", label="planted-GradientsOfOneRankDropped",
         finding="gradient-differs", says="the first gradient norm is", also=("batch-norm",),
         settings=settings, what=f"the gradients of rank 1 are dropped in a job with {name}")
    for name, settings in SPLITS.items()
] + [
    Trap(name="block skipped on a rank", label="planted-BlockSkippedOnOneRank:find_unused_parameters=true",
         finding="gradient-differs",
         says="no gradient reaches block blocks.0, block blocks.1, first.bias and 1 more (ranks: 1)",
         settings=own("mlp"), also=("idle-on-some-ranks",),
         what="rank 1 leaves a block out of its backward pass"),
    Trap(name="late block skipped on a rank",
         label="planted-LateBlockSkippedOnOneRank:find_unused_parameters=true",
         finding="gradient-differs", says="first.bias and 1 more (ranks: 1)",
         settings=own("mlp"), also=("idle-on-some-ranks",),
         what="from the fourth step on rank 1 leaves a block out of its backward pass"),
    Trap(name="decay without gradient", label="zero2", finding="decay-without-gradient",
         says="no gradient reaches pooler.weight: zeros with weight decay here, skipped in the reference; it "
         "shrinks by", settings=own("mlp", unused=True),
         what="a layer that the loss does not use, which DeepSpeed gives a gradient of zeros"),
    Trap(name="frozen weights trained", label="planted-FrozenWeightsTrained", finding="frozen-weights-moved",
         says="first.bias, first.weight moved, although the job freezes that",
         settings=own("mlp", frozen="first"), also=("optimizer-differs",),
         what="frozen weights that are made trainable again and given to the optimizer"),
    Trap(name="held-out samples dropped", label="planted-LastHeldOutSampleDropped",
         finding="held-out-loss-differs", says="the held-out loss after 3 steps is", settings=EVALUATED,
         what="the last sample of each evaluation batch left out of the sum and not of the count"),
    Trap(name="gradients of a rank x 0.99, bf16", label="planted-GradientsOfOneRankShrunk",
         finding="gradient-differs", says="begins with 0.99 times what it has elsewhere", settings=(BF16,),
         what="the gradients of rank 1 multiplied by 0.99, which changes no norm by more than rounding does"),
    Trap(name="gradients of a rank x 1.01, bf16", label="planted-GradientsOfOneRankGrown",
         finding="gradient-differs", says="begins with 1.01 times what it has elsewhere", settings=(BF16,),
         what="the gradients of rank 1 multiplied by 1.01"),
    Trap(name="nothing updated", label="planted-NothingUpdated", finding="parameters-not-updated",
         says="no parameter moved: the optimizer updates nothing", settings=own("mlp"),
         what="an update that is never made"),
]  # fmt: skip
"""In jobs of the user's own: not in the published gallery."""


def of_the_trap(trap: Trap, every: Sequence[Finding]) -> list[Finding]:
    """What is found of its backend: first what must name it, and nothing untrue."""
    found = [f for f in every if trap.shown in f.backends]
    found = [f for f in found if f.id not in (*ABOUT_TIME, "loss-depends-on-split")]
    causes = [f for f in found if f.id != "diverged" or trap.finding == "diverged"]
    said = [(f.id, f.message) for f in found]
    assert causes, trap
    assert causes[0].id == trap.finding, said
    assert any(f.id == trap.finding and trap.says in f.message for f in causes), said
    assert {f.id for f in causes} <= {trap.finding, *trap.also}, said
    assert all(len(f.backends) == 1 for f in found), found
    return causes


def assert_named(trap: Trap, matrix: Matrix, tally: dict[str, list[int]]) -> None:
    """Run it; the finding must be of its kind, about its backend, and no other cause be named, save that the
    job's loss depends on the split."""
    tally["planted"][1] += 1
    settings = trap.settings
    if trap.padded:
        path = matrix.store.root.parent / "documents.jsonl"
        settings += ("data.source=jsonl", f"data.path={padded_documents(path)}")
    skip_without_fp16(matrix.record(trap.label, trap.world_size, settings))
    every = matrix.findings([*trap.compared_with, trap.label], trap.world_size, settings)
    label = of_the_trap(trap, every)[0].backends
    assert all(f.backends == label for f in every if f.id != "loss-depends-on-split"), every
    tally["planted"][0] += 1
