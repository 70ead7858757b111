"""Settings of files and of `--set`: what is read, inherited, and refused with what was probably meant."""

import re
from itertools import groupby
from pathlib import Path

import pytest

from harness.backends import registry
from harness.cli.options import given_price
from harness.errors import HarnessError
from harness.job.config import load_experiment, other_tools
from harness.job.experiment import Experiment, MeasureSection, Price
from harness.launch.cells import plan
from tests.plugins import register

BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{name}: &{name} {{{key}: [{', '.join(['*' + before] * 10)}]}}\n"
    for before, name, key in zip("abcdefghi", "bcdefghij", ("<<", "!!merge k", "<<") * 3, strict=True)
)
WIDE = (
    "a: &a {" + ", ".join(f"k{n}: 1" for n in range(2000)) + "}\nb: {<<: [" + ", ".join(["*a"] * 2000) + "]}"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training:\n  steps: 5\n  seed: 1\n  steps: 6\n", 'line 4: found duplicate key "steps"'),
        ("training:\n  steps: [1, 2\n  seed: 0\n", "is not valid YAML, line"),
        (b"training: \xff\xfe\n", "is not UTF-8"),
        ("- 1\n- 2\n", "holds a list; it must be a mapping"),
        ("hello\n", "holds a str; it must be a mapping"),
        ("3\n", "holds a int; it must be a mapping"),
        ("zero_optimization:\n  stage: 2\n", "so it is one of DeepSpeed: give it with --from-deepspeed; "),
        ("distributed_type: FSDP\n", "so it is one of Accelerate: give it with --from-accelerate; "),
        ("optimizer:\n  learning_rates: 0.1\n",
         "'optimizer.learning_rates' is unknown. Did you mean 'learning_rate'?"),
        ("training: {steps: -1, precisions: fp32}\nlr: 3\noptimizer: {beta1: 2}\n",
         "4 problems: (1) 'optimizer.beta1' was given 2 ... (2) 'training.steps' was given -1 ... "
         "(3) 'training.precisions' is unknown ... (4) 'lr' is"),
        ("null: 1", "a key is null; give a name"),
        ("training: {[1]: 2}", "a key in training is (1,); give a name"),
        ("inherits: job.yaml", "inherits itself"),
        ("inherits: other.yaml", "other.yaml cannot be read"),
        ("inherits: '@no-such'", "'@no-such' is not shipped"),
        ("inherits: 3", "was given 3; give a file"),
        ('inherits: "a\\0b"', "was given 'a\\x00b'; give a file"),
        pytest.param(MERGES, "more than 20,000 values", id="merges"),
        pytest.param(WIDE, "more than 20,000 values", id="wide merge"),
        pytest.param(BOMB, "more than 20,000 values", id="bomb"),
        ("model: &m {config: *m}", "alias that contains itself"),
        pytest.param("training: {steps: " + "9" * 5000 + "}", "cannot be read", id="5000 digits"),
        pytest.param("training: {steps: " + "9" * 4000 + "}", "too large", id="4000 digits"),
        ("training: {seed: 1" + "0" * 30 + "}", "too large"),
        pytest.param("a: " + "[" * 5000, "nested too deeply", id="deep"),
    ],
)  # fmt: skip
def test_a_file_is_refused_in_one_line(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(HarnessError, match=".*".join(map(re.escape, said.split(" ... ")))) as caught:
        load_experiment(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    for name, said in (("none.yaml", "none.yaml cannot be read: No such file"),
                       (".", "cannot be read: Is a directory"), ("loop.yaml", "cannot be read")):  # fmt: skip
        with pytest.raises(HarnessError, match=said):
            load_experiment(tmp_path / name)


def test_an_empty_section_is_the_default_and_an_empty_file_is_refused(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("training:\n  # steps: 20\n")
    assert load_experiment(job) == Experiment()
    for nothing in ("# nothing yet\n", "", "{}"):
        job.write_text(nothing)
        with pytest.raises(HarnessError, match=r"job\.yaml is empty; `harness settings"):
            load_experiment(job)


def test_paths_of_a_file_count_from_its_folder_and_hub_names_stay_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "jobs" / "job.yaml"
    (tmp_path / "jobs" / "model").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("text")
    job.write_text(
        "model: {name: ./model}\ndata: {source: text, path: ../notes.txt, tokenizer: ../tokens/mine}\n"
    )
    read = load_experiment(job)
    assert read.model.name == str(tmp_path / "jobs" / "model")
    assert read.data.path == str(tmp_path / "notes.txt")
    assert read.data.tokenizer == str(tmp_path / "tokens" / "mine")
    job.write_text("model: {name: bigscience/bloom-560m}\ndata: {tokenizer: gpt2}\n")
    read = load_experiment(job)
    assert (read.model.name, read.data.tokenizer) == ("bigscience/bloom-560m", "gpt2")
    # What leads somewhere from the working directory alone stays.
    job.write_text("data: {source: text, path: ./notes.txt}\n")
    monkeypatch.chdir(tmp_path)
    assert load_experiment(Path("jobs/job.yaml")).data.path == "./notes.txt"


def test_no_file_and_no_assignment_is_the_default_job_and_a_home_folder_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load_experiment(None) == Experiment()
    assert Experiment().optimizer.implementation == "default"
    monkeypatch.setenv("HOME", "/somewhere")
    assert load_experiment(None, ["model.name=~/model"]).model.name == "/somewhere/model"


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("optimizer.learning_rate=1e-3", 1e-3),
        ("optimizer.learning_rate=1E-3", 1e-3),
        ("optimizer.learning_rate=0.002", 0.002),
        ("optimizer.learning_rate=1", 1.0),
        ("training.gradient_clipping=null", None),
        ("model.config={hidden_size: 32, num_hidden_layers: 2}", {"hidden_size": 32, "num_hidden_layers": 2}),
        ("model.config={rms_norm_eps: 1e-5}", {"rms_norm_eps": 1e-5}),
        ("compare.backends=[ddp, zero1]", ["ddp", "zero1"]),
        ("data.shuffle=false", False),
        ("runtime.memory_limit=2GB", 2 * 10**9),
        ("runtime.memory_limit=1.5GiB", 3 * 2**29),
        ("runtime.memory_limit=4096", 4096),
        ("runtime.memory_limit=2 kb", 2000),
        ("compare.turns=3", 3),
        ("compare.turns=auto", "auto"),
        ("compare.turns=null", None),
        *((f"optimizer.implementation={name}", name) for name in ("for-loop", "foreach", "fused", "default")),
        *((f"data.path={text}", text) for text in ("yes", "no", "on", "off", "12:30")),  # of YAML 1.1
    ],
)
def test_set_reads_values_as_a_person_writes_them(assignment: str, value: object) -> None:
    name, _, _ = assignment.partition("=")
    section, key = name.split(".")
    needed = ["data.source=text"] if name == "data.path" else []
    found = getattr(getattr(load_experiment(None, [assignment, *needed]), section), key)
    assert (found, type(found)) == (value, type(value))


def test_a_later_set_wins_and_set_wins_over_the_file_and_reaches_into_the_model(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("training:\n  steps: 7\n  seed: 5\nmodel: {config: {rms_norm_eps: 1e-5}}\n")
    experiment = load_experiment(
        path, ["training.steps=8", "training.steps=9", "model.config.hidden_size=64"]
    )
    assert (experiment.training.steps, experiment.training.seed) == (9, 5)
    # A number, as JSON writes it.
    assert experiment.model.config == {"rms_norm_eps": 1e-5, "hidden_size": 64}


def files(folder: Path, **texts: str) -> Path:
    """Files of these names; the first one's path."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(texts))}.yaml"


BASE = (
    "training: {steps: 3, seed: 5, gradient_clipping: 2.0}\ncompare: {backends: [ddp, fsdp]}\n"
    "model: {config: {model_type: gpt2, n_layer: 9, n_head: 4}}\n"
)


@pytest.mark.parametrize(
    ("job", "training", "model"),
    [
        (
            "training: {steps: 7}\nmodel: {config: {n_layer: 2}}", (7, 5, 2.0),
            {"model_type": "gpt2", "n_layer": 2, "n_head": 4},
        ),
        # Values of another model type do not mix.
        ("model: {config: {model_type: bloom}}", (3, 5, 2.0), {"model_type": "bloom"}),
        # A null takes an inherited value away.
        (
            "training: {gradient_clipping: null}", (3, 5, None),
            {"model_type": "gpt2", "n_layer": 9, "n_head": 4},
        ),
    ],
)  # fmt: skip
def test_a_file_inherits_key_by_key(
    tmp_path: Path, job: str, training: tuple[object, ...], model: dict[str, object]
) -> None:
    path = files(tmp_path, job=f"inherits: base.yaml\n{job}\n", base=BASE)
    found = load_experiment(path)
    assert (found.training.steps, found.training.seed, found.training.gradient_clipping) == training
    assert (found.model.config, found.compare.backends) == (model, ["ddp", "fsdp"])
    assert load_experiment(path, ["training.seed=6"]).training.seed == 6


def test_of_several_bases_the_later_one_goes_first_and_a_shipped_one_has_a_name(tmp_path: Path) -> None:
    path = files(
        tmp_path, job="inherits: [one.yaml, two.yaml]\n", one="training: {steps: 1, seed: 1}\n",
        two="inherits: deep/three.yaml\ntraining: {steps: 2}\n",
    )  # fmt: skip
    (tmp_path / "deep").mkdir()
    files(tmp_path / "deep", three="training: {seed: 3}\ndata: {source: text, path: ./corpus.txt}\n")
    (tmp_path / "deep" / "corpus.txt").write_text("text", encoding="utf-8")
    found = load_experiment(path)
    assert (found.training.steps, found.training.seed) == (2, 3)
    assert found.data.path == str(tmp_path / "deep" / "corpus.txt")
    found = load_experiment(files(tmp_path, job='inherits: "@bloom-geometry"\ntraining: {seed: 4}\n'))
    assert (found.model.config or {})["model_type"] == "bloom"
    assert found.training.seed == 4


NO_VALUE = ("training.gradient_clipping", "training.steps", "model.name", "data.path", "model.dropout")
SECTIONS = (
    "model", "data", "optimizer", "schedule", "training", "evaluation", "measure", "runtime", "compare",
)  # fmt: skip
QLORA = "Did you mean 'adapter.kind=lora, adapter.base_dtype=nf4'?"
ADAM = "Did you mean 'optimizer.kind=adamw-8bit' or 'optimizer.kind=adamw-8bit-bnb'?"
BF16 = "Did you mean 'training.precision=bf16-mixed' or 'training.precision=bf16'?"
TURNS = "give the steps of a turn, auto: the harness decides, or null: each cell runs whole"


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        # --set without key or value
        *((given, f"--set was given '{given}'; write SECTION.KEY=VALUE")
          for given in ("training.steps", "training.steps=", "training.steps= ", "=3", "training.=3",
                        ".steps=3")),
        # unknown names
        ("trainig.steps=3", "'trainig' is unknown. Did you mean 'training'?"),
        ("training.step=3", "'training.step' is unknown. Did you mean 'steps'?"),
        ("training.step=3", "global_batch_size"),
        *((f"{section}.no_such_key=1", f"'{section}.no_such_key' is unknown. Allowed in {section}:")
          for section in SECTIONS),
        ("precision=bf16", "'precision' is unknown. Did you mean 'training.precision'?"),
        ("training.learning_rate=1", "Did you mean 'optimizer.learning_rate'?"),
        ("steps=3", "Did you mean 'training.steps'?"),
        ("warmup_steps=3",
         "is unknown. Did you mean 'schedule.warmup_steps' or 'measure.warmup_steps'? Allowed: "),
        # names of other tools
        ("training.gradient_accumulation_steps=4", "Did you mean 'training.accumulation_steps'?"),
        ("training.max-grad-norm=1", "Did you mean 'training.gradient_clipping'?"),
        ("qlora=true", QLORA),
        ("adapter.kind=qlora", QLORA),
        ("optimizer.kind=adam8", ADAM),
        ("optimizer.name=adamw_8bit", ADAM),
        ("optimizer.name=AdamW", "Did you mean 'optimizer.kind=adamw'?"),
        ("optimizer.name=mine", "'optimizer.name' is unknown. Allowed in optimizer: kind, "),
        ("training.dtype=bf16", BF16),
        ("training.loss=chunked", "Did you mean 'loss.chunk_tokens'?"),
        ("training.bf16=true", BF16),
        ("training.precision=amp",
         "Did you mean 'training.precision=bf16-mixed' or 'training.precision=fp16"),
        ("model.attention=flash",
         "Did you mean 'model.attention=sdpa' or 'model.attention=flash_attention_2'"),
        ("training.grad-checkpoint=true", "Did you mean 'training.activation_checkpointing'?"),
        ("training.activation_checkpointing=op", "torchtitan keeps every second matrix product"),
        ("training.activation_checkpointing=reentrant", "is not reentrant"),
        ("training.use_reentrant=true", "Did you mean 'training.activation_checkpointing'?"),
        ("training.seq_len=8", "Did you mean 'data.sequence_length'?"),
        ("deepspeed=zero3", "Did you mean 'compare.backends'?"),
        # what is not offered
        ("optimizer.kind=adafactor", "Adafactor is not among the optimizers; give one of your own with"),
        ("optimizer.kind=lion_8bit", "Lion is not among"),
        ("optimizer.kind=paged_adamw_8bit", "adamw-8bit-bnb is bitsandbytes' without pages"),
        ("offload=cpu", "Did you mean 'compare.backends=[zero3:offload=cpu]' or"),
        ("data.sequence_length=32k", "was given '32k': write 32768, or 32000 if that is meant"),
        ("loss.chunk_tokens=1K", "write 1024, or 1000"),
        # values
        ("training.steps=3 training.steps.more=1", "'steps' is a value (3), not a section"),
        ("schedule=3", "'schedule' was given 3; it is a section with kind, warmup_steps, final_fraction"),
        ("optimizer.learning_rate=inf", "'optimizer.learning_rate' was given"),
        ("optimizer.learning_rate=inf", "finite"),
        ("model.config={hidden_size:32", "--set model.config is not valid YAML"),
        *((given, "is neither true nor false")
          for given in ("training.steps=true", "training.seed=false", "data.path=true")),
        *((f"runtime.memory_limit={text}", "runtime.memory_limit")
          for text in ("much", "0", "-3", "GB", "true")),
        *((f"{setting}={word}", f"'{setting}' was given '{word}': write null for no value")
          for setting in NO_VALUE for word in ("none", "None")),
        ("compare.turns=0", f"'compare.turns' was given 0: {TURNS}"),
        ("compare.turns=1.5", f"'compare.turns' was given 1.5: {TURNS}"),
        ("compare.turns=whole", f"'compare.turns' was given 'whole': {TURNS}"),
        *((f"compare.price_per_gpu_hour={text}", "price_per_gpu_hour")
          for text in ("2.5", "USD", "-1~USD", "0~USD", "1e9~USD", "2.5~$", "nan~USD", "2.5~usd")),
        ("data.sequence_length=1", "must be at least 2"),
        ("training.deterministic=maybe", "was given 'maybe': it must be true or false"),
        ("training.initial_loss_scale=3", "must be a power of two"),
        ("training.steps=0", "'training.steps' was given 0"),
        ("training.steps=many", "'training.steps' was given 'many': it must be a whole number"),
        ("training.precision=fp4", "'training.precision' was given 'fp4'"),
        ("schedule.final_fraction=2", "'schedule.final_fraction' was given 2"),
        ("compare.backends=[]", "'compare.backends' was given []"),
        ("compare.repeats=1000000", "less than or equal to 1000"),
        ("optimizer.implementation=fuse", "'optimizer.implementation' was given 'fuse'"),
        ("optimizer.implementation=fuse", "'for-loop', 'foreach' or 'fused'"),
        ("adapter.kind=lorra", "'lorra': it must be 'none' or 'lora'. Did you mean 'lora'?"),
        # together
        ("training.steps=3 training.epochs=1", "give either `steps` or `epochs`, not both"),
        ("model.name=gpt2 model.config={n_layer:~1}", "give either `name` or `config`, not both"),
        ("model.weights=pretrained", "need a `name`"),
        ("data.source=text", "source 'text' needs a `path`: --set data.path=FILE"),
        ("training.tokens=1B", "'training.steps' or '--tokens-per-step'?"),
        ("data.path=notes.txt", "would be ignored with source 'prose'"),
        ("data.prompt_field=question", "`prompt_field` needs source jsonl, json, csv, datasets"),
        ("data.source=squad data.path=a.json data.packed=true", "leave `packed` out"),
        ("measure.checkpoint=true measure.probed_steps=0", "`checkpoint` needs `probed_steps`"),
        ("measure.checkpoint=true measure.timed=false", "needs `measure.timed: true`"),
        ("measure.checkpoint=true training.steps=4", "is saved after 5 steps"),
        ("measure.keep_checkpoint=true", "`keep_checkpoint` needs `checkpoint` to be native"),
        ("measure.trace=true measure.traced_steps=0", "`trace` needs `traced_steps`"),
        ("runtime.memory_limit=2GB measure.probed_steps=0", "needs `measure.probed_steps` of at least 1"),
    ],
)  # fmt: skip
def test_what_settings_cannot_be_is_refused_with_what_was_meant(assignments: str, said: str) -> None:
    """A tilde stands for a blank within a value."""
    given = assignments.split(" ") if assignments.strip() == assignments else [assignments]
    with pytest.raises(HarnessError) as caught:
        load_experiment(None, [text.replace("~", " ") for text in given])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "kind"),
    [
        ("adamw_8bit", "adamw-8bit"), ("AdamW8bit", "adamw-8bit"), ("adamw_torch_8bit", "adamw-8bit"),
        ("adamw_bnb_8bit", "adamw-8bit-bnb"), ("adamw_torch", "adamw"), ("sgd", "sgd"),
    ],
)  # fmt: skip
def test_an_optimizer_by_the_name_that_other_tools_give_it(typed: str, kind: str) -> None:
    assert load_experiment(None, (f"optimizer.kind={typed}",)).optimizer.kind == kind


def test_names_of_other_tools_stand_for_settings_that_exist() -> None:
    experiment = load_experiment(None, ())
    sections = {name: set(getattr(type(section), "model_fields", ())) for name, section in experiment}
    for meant in other_tools().values():
        for settings in meant:
            for setting in settings.split(", "):
                if setting == "--tokens-per-step":
                    continue  # of plans
                name, value = setting.partition("=")[::2]
                section, key = name.split(".")[:2]
                assert key in sections[section], setting
                if value:
                    load_experiment(None, tuple(settings.split(", ")))


def test_a_price_is_an_amount_and_a_currency_also_as_the_option_of_report() -> None:
    price = load_experiment(None, ["compare.price_per_gpu_hour=2.5 USD"]).compare.price_per_gpu_hour
    assert price == given_price("2.5 USD") == Price(amount=2.5, currency="USD")
    assert str(price) == "2.5 USD"
    with pytest.raises(HarnessError, match="was given 2: give an amount and a currency"):
        load_experiment(None, ["compare.price_per_gpu_hour=2"])
    with pytest.raises(HarnessError, match=r"^--price-per-gpu-hour 'cheap' is not a price"):
        given_price("cheap")


def windows(steps: int, **settings: int) -> list[tuple[str, int]]:
    """The windows of a run in order, each with its number of steps."""
    measure = MeasureSection(**settings)
    return [(name, len(list(part))) for name, part in groupby(measure.window(n, steps) for n in range(steps))]


@pytest.mark.parametrize(
    ("steps", "settings", "last"),
    [
        (20, {}, [("warmup", 3), ("probed", 2), ("traced", 1), ("cooldown", 3), ("timed", 11)]),
        (17, {}, [("timed", 8)]),
        (16, {}, [("timed", 10)]),  # a short run times every step without a probe
        (8, {}, [("timed", 2)]),
        (20, {"probed_steps": 0, "traced_steps": 0}, [("warmup", 3), ("timed", 17)]),
        (20, {"cooldown_steps": 0}, [("timed", 14)]),
    ],
)
def test_cooldown_steps_follow_the_probes_before_any_is_timed(
    steps: int, settings: dict[str, int], last: list[tuple[str, int]]
) -> None:
    assert windows(steps, **settings)[-len(last) :] == last


def test_a_run_of_losses_alone_times_and_probes_nothing() -> None:
    alone = MeasureSection(checkpoint=True, trace=True, warmup_steps=5, weight_digests=False).losses_alone()
    assert {alone.window(step, 20) for step in range(20)} == {"warmup"}
    looked_at = (alone.probed_steps, alone.traced_steps, alone.trace)
    assert not any(looked_at)
    assert alone.checkpoint == "none"
    assert not alone.weight_digests


def test_a_traced_step_more_that_is_discarded_leaves_as_many_that_count() -> None:
    measure = MeasureSection()
    found = [measure.window(step, 20, discarded=1) for step in range(20)]
    assert (found.count("traced"), found.count("timed")) == (2, 10)
    untraced = MeasureSection(traced_steps=0)
    assert "traced" not in [untraced.window(step, 20, discarded=1) for step in range(20)]


def test_repeats_beyond_reason_are_refused_before_they_are_planned() -> None:
    with pytest.raises(HarnessError, match="at most 1000"):
        plan(load_experiment(None), ["ddp"], [2], 10**6, "cpu")


def test_plugin_that_exits_when_it_is_imported_only_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('good bye')\n")
    register(tmp_path, {"leaving": "leaving:Backend"})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(registry.UnknownBackend, match="SystemExit: good bye"):
        registry.parse("leaving")
