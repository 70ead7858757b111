"""Dumps of flight recorders: hangs planted in jobs of NCCL on the CUDA stub, and others by the format.

flight_recorder/CASE_rank_N: three ranks of torch 2.13; rank 1 does otherwise than the others. The stub
notes that collectives end at once, and lets different sizes pass.
"""

import json
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.snapshots.flight_recorder import Hang, dump_of, explain, read_dumps
from harness.snapshots.reading import where
from tests.harness.cli.command_line import harness

FOLDER = Path(__file__).parent / "flight_recorder"
PLACE = "at scripts/train.py:20 reduced"
IN_THREE = f"rank 0, 2 wait in nccl all_reduce number 3 of group 0, default_pg (8 Float) {PLACE}"
LAST = f"after nccl all_reduce number 1 of group 1, other [0, 1, 2] (8 Float) {PLACE}"
PLANTED = {
    "absent": f"rank 1 is in no collective, {LAST}; {IN_THREE}",
    "other": "rank 1 is in another collective, in nccl broadcast number 3 of group 0, default_pg (8 Float) "
    "at scripts/train.py:32 main; rank 0, 2 in nccl all_reduce",
    "size": "rank 1 has another size, in nccl all_reduce number 3 of group 0, default_pg (16 Float)",
    "group": "rank 1 is in another group, nccl all_reduce number 2 of group 1, other [0, 1, 2] (8 Float) "
    f"{PLACE}; {IN_THREE}",
    "slow": "rank 1 is slow: last in 14 of 14 collectives, 1.0 s late at the median; rank 1 is in no",
    "fine": "no rank waits: every collective recorded has ended",
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_hang_is_told_by_its_rank_and_collective(case: str, tmp_path: Path) -> None:
    files = [FOLDER / f"{case}_rank_{rank}" for rank in range(3)]
    found = explain(read_dumps(files))
    assert found.verdict.startswith(PLANTED[case])
    assert found.culprits == (() if case == "fine" else (1,))
    for version, gone in FORMATS.items():
        documents = [pickle.loads(file.read_bytes()) for file in files]
        for rank, document in enumerate(documents):
            document |= {"version": version, "nccl_version": document["comm_lib_version"]}
            for of in (document, *document["entries"]):
                for key in gone & of.keys():
                    del of[key]
            # The memo keeps what recurs alone, as torch's pickler does.
            data = pickletools.optimize(pickle.dumps(document, 2))
            (tmp_path / f"{version}_rank_{rank}").write_bytes(data)
        assert explain(read_dumps(sorted(tmp_path.glob(f"{version}_rank_*")))) == found
        if version == "2.1":
            continue
        for rank, document in enumerate(documents):
            (tmp_path / f"{version}-{rank}.json").write_text(json.dumps(without_stacks(document)))
        told = explain(read_dumps(sorted(tmp_path.glob(f"{version}-*.json"))))
        assert (told.verdict, told.culprits) == (
            re.sub(r" at \S+py:\d+ \w+", "", found.verdict),
            found.culprits,
        )


FORMATS = {
    "2.1": {"pg_status", "timeout_ms", "thread_id", "thread_name", "comm_lib_version", "nccl_version"},
    "2.4": {"thread_id", "thread_name", "comm_lib_version", "nccl_version"},
    "2.9": {"comm_lib_version"},
    "2.10": {"nccl_version"},
}
"""What dumps of each format have not: of torch 2.4.0 (c10d/TraceUtils.h), which wrote no JSON; 2.5.0
(NCCLUtils.hpp) to 2.7.0 (FlightRecorder.hpp); 2.8.0; 2.9.0 to 2.13.0 (FlightRecorderDetail.hpp)."""


def without_stacks(document: dict[str, Any]) -> dict[str, Any]:
    """As `dump_json` of torch 2.5.0 to 2.13.0 writes it: 0 for no time, no list of no entries."""
    entries = [
        {key: 0 if value is None else value for key, value in entry.items() if key != "frames"}
        for entry in document.pop("entries")
    ]
    return document | ({"entries": entries} if entries else {})


def test_the_command_says_it_in_the_first_line_then_by_rank(tmp_path: Path) -> None:
    done = harness("hang", *(FOLDER / f"absent_rank_{rank}" for rank in range(2)), cwd=tmp_path)
    first, *rest = done.stdout.splitlines()
    assert first.startswith("rank 1 is in no collective")
    assert any(line.split()[:5] == ["0", "nccl", "all_reduce", "3", "0,"] for line in rest)
    assert "no dump of rank 2" in done.stdout
    assert "train.py:20 reduced <- " in done.stdout
    told = harness("hang", *(FOLDER / f"absent_rank_{rank}" for rank in range(3)), "--json", cwd=tmp_path)
    assert json.loads(told.stdout)["culprits"] == [1]


EVERYONE = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}


def call(
    number: int, name: str = "all_reduce", shape: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    """An entry that has not ended; `ended`: one that has, `at`: seconds."""
    at, ended = int(more.pop("at", number) * 10**9), more.pop("ended", False)
    sizes = [[8] if shape is None else shape]
    return {
        "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "profiling_name": f"nccl:{name}",
        "process_group": ["0", "default_pg"], "input_sizes": sizes, "output_sizes": sizes,
        "input_dtypes": ["Float"], "output_dtypes": ["Float"], "time_created_ns": at, "retired": ended,
        "state": "completed" if ended else "started",
        "time_discovered_completed_ns": at + 1 if ended else None,
    } | more  # fmt: skip


def told(*ranks: list[dict[str, Any]] | None, groups: Any = EVERYONE, version: str = "2.10") -> Hang:
    """What dumps by the documented format say; None: the rank wrote none."""
    documents = [of and {"version": version, "pg_config": groups, "entries": of} for of in ranks]
    return explain([dump_of(of, rank) for rank, of in enumerate(documents) if of])


def queued(group: str, number: int, at: float) -> dict[str, Any]:
    return call(number, process_group=[group, ""], at=at)


def message(name: str, **more: Any) -> dict[str, Any]:
    return call(0, name, is_p2p=True, p2p_seq_id=4, **more)


UNEVEN = {"input_sizes": [[3]], "output_sizes": [[5]]}
HANGS: dict[str, tuple[Hang, str, tuple[int, ...]]] = {
    "another data type": (
        told(*3 * [[call(1)]], [call(1, input_dtypes=["Half"], output_dtypes=["Half"])]),
        "rank 3 has another data type, in nccl all_reduce number 1 of group 0, default_pg (8 Half)", (3,),
    ),
    "as many have another size": (
        told(*2 * [[call(1)]], *2 * [[call(1, shape=[4])]]),
        "rank 0, 1, 2, 3 differ in size: rank 0, 1 in nccl all_reduce number 1 of group 0, default_pg "
        "(8 Float); rank 2, 3 in nccl all_reduce number 1 of group 0, default_pg (4 Float)", (),
    ),
    "each has another size": (
        told([call(1)], [call(1, shape=[4])], [call(1, shape=[2])], None),
        "rank 0, 1, 2 differ in size: rank 0 in nccl all_reduce number 1 of group 0, default_pg (8 Float); "
        "rank 1 in nccl all_reduce number 1 of group 0, default_pg (4 Float); rank 2 in", (),
    ),
    "a dump is missing": (
        told([call(1)], [call(1)], None, [call(1)]), "rank 2 has not come, or its dump is missing", (),
    ),
    "all wait in the same": (
        told(*4 * [[call(1, ended=True), call(2)]]), "no rank is behind and sizes agree", (),
    ),
    "one is two collectives behind in a queue": (
        told(*3 * [[call(n) for n in (1, 2, 3)]], [call(1)]), "no rank is behind and sizes agree", (),
    ),
    "one is behind": (
        told(*3 * [[call(1, ended=True), call(2)]], [call(1, ended=True)]),
        "rank 3 is in no collective, after", (3,),
    ),
    "two queues in crossed order": (
        told([queued("a", 1, 1), queued("b", 1, 2)], [queued("b", 1, 1), queued("a", 1, 2)], groups={
            name: {"name": name, "desc": "", "ranks": "[0, 1]"} for name in "ab"
        }),
        "rank 1 is in another group, nccl all_reduce number 1 of group b [0, 1]", (),
    ),
    "gathers and exchanges of uneven sizes": (
        told(*3 * [[call(1, "all_to_all", ended=True), call(2, "gather", ended=True)]],
             [call(1, "all_to_all", ended=True, **UNEVEN),
              call(2, "gather", ended=True, output_sizes=[[32]])]),
        "no rank waits", (),
    ),
    "one shape and another of as many elements": (
        told(*3 * [[call(1, ended=True)]], [call(1, shape=[2, 4], ended=True)]), "no rank waits", (),
    ),
    "a timed out collective is not one that has ended": (
        told(*3 * [[call(1, ended=True), call(2, retired=True)]], [call(1, ended=True)]),
        "rank 3 is in no collective", (3,),
    ),
    "the receiver of a message never comes": (
        told([message("send 0->1")], *3 * [[call(1, at=0)]]),
        "rank 0 is in another collective, nccl send 0->1 number 4 of group 0, default_pg", (0,),
    ),
    "nobody receives": (
        told([message("send 0->1")], *3 * [[call(1, ended=True)]]),
        "rank 1 is in no collective", (1,),
    ),
    "both ends of a message": (
        told([message("send 0->1")], [message("recv 1<-0")]), "every rank has come to where the others", (),
    ),
    "both ends of a message of two sizes": (
        told([message("send 0->1")], [message("recv 1<-0", shape=[4])]),
        "rank 0 and 1 differ in size: nccl send 0->1 number 4 of group 0, default_pg (8 Float); ", (),
    ),
    "a circle of messages": (
        told(*[[message(f"send {n}->{(n + 1) % 4}")] for n in range(4)]),
        "rank 0, 1, 2, 3 wait for one another: rank 0 in nccl send 0->1 number 4", (),
    ),
    "two dumps are missing": (
        told([call(1)], None, None, [call(1)]), "rank 1, 2 have not come, or their dumps are missing", (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HANGS)
def test_what_dumps_of_the_format_say(case: str) -> None:
    found, verdict, culprits = HANGS[case]
    assert (found.verdict[: len(verdict)], found.culprits) == (verdict, culprits)


def test_a_place_is_in_the_script_where_the_harness_counts_its_collectives() -> None:
    """`harness observe` stands between torch's call and the script."""
    files = "torch/_ops.py", "harness/rank/probes/communication.py", "harness/rank/observing/x.py", "eval.py"
    frames = [{"filename": f"/x/{name}", "line": 3, "name": "f"} for name in files]
    assert where(frames) == "x/eval.py:3 f"
    assert where(frames[:3]) == "torch/_ops.py:3 f"


def test_groups_of_one_name_and_different_ranks_are_different_groups() -> None:
    """Meshes name the groups of a dimension alike."""
    parts = [{"mesh": {"name": "mesh", "desc": "dp", "ranks": ranks}} for ranks in ("[0, 1]", "[2, 3]")]
    of = [
        {"entries": [call(n, process_group=["mesh", "dp"], ended=True) for n in range(1, last)]}
        for last in (3, 9)
    ]
    dumps = [dump_of(of[rank // 2] | {"pg_config": parts[rank // 2]}, rank) for rank in range(4)]
    assert explain(dumps).verdict == "no rank waits: every collective recorded has ended"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"[]", "has no list 'entries'"),
        (b'{"entries": [1]}', "no list of mappings"),
        (pickle.dumps({"entries": [Path()]}, 2), "not a pickle of plain values"),
        (b"\x80\x02X\x01\0\0\0aq\0" + b"h\0\x86" * 10**5 + b".", "not a pickle of plain values"),
        (b"\x80\x02}X\x01\0\0\0aq\0h\0h\0\x86q\1h\1h\1\x86q\1s.", "not a pickle of plain values"),
        (b"\x80\x02}X\x01\0\0\0aq\0h\0h\0\x86(eq\1h\1h\1\x86s.", "not a pickle of plain values"),
    ],
)
def test_what_is_no_dump_is_refused_with_its_reason(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "dump_rank_0").write_bytes(content)
    with pytest.raises(HarnessError, match=why):
        read_dumps([tmp_path / "dump_rank_0"])


def test_odd_values_of_a_dump_are_shown_harmless_and_end_nothing(tmp_path: Path) -> None:
    odd = call(1, f"send {'9' * 5000}->1", process_group=[{}, "\x1b[31m"], is_p2p=True, p2p_seq_id="x")
    groups = {"0": {"desc": [], "ranks": "[" * 10**5}, "1": 3, "2": {"desc": "", "ranks": "[Infinity]"}}
    entries = [
        odd | {"input_sizes": "x", "frames": 3, "time_created_ns": None},
        call(1, shape=[2**62] * 10**5),
    ]
    (tmp_path / "rank0.json").write_text(json.dumps({"entries": entries, "pg_config": groups}))
    done = harness("hang", tmp_path / "rank0.json", cwd=tmp_path)
    assert (done.returncode, "\x1b" in done.stdout) == (0, False), done.stderr
    assert "give the dumps of the other ranks" in done.stdout


def test_a_dump_needs_a_rank_of_its_own_and_of_its_job(tmp_path: Path) -> None:
    for name in ("trace", "a_rank_1", "b1.json"):
        (tmp_path / name).write_text('{"entries": []}')
    two = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    for name, groups in (("a_rank_0", EVERYONE), ("c_rank_1", two), ("c_rank_7", two)):
        (tmp_path / name).write_text(json.dumps({"entries": [], "pg_config": groups}))
    with pytest.raises(HarnessError, match=r"a_rank_0' is of a job with 4 ranks, '.*c_rank_1' of one with 2"):
        read_dumps([tmp_path / "a_rank_0", tmp_path / "c_rank_1"])
    with pytest.raises(HarnessError, match="is named for rank 7, which its job has not"):
        read_dumps([tmp_path / "c_rank_1", tmp_path / "c_rank_7"])
    with pytest.raises(HarnessError, match="names no rank"):
        read_dumps([tmp_path / "trace"])
    with pytest.raises(HarnessError, match="none' cannot be read"):
        read_dumps([tmp_path / "none"])
    with pytest.raises(HarnessError, match="are both of rank 1"):
        read_dumps([tmp_path / "a_rank_1", tmp_path / "b1.json"])
