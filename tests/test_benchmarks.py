"""The benchmarks' small versions on CPU: every row runs, with the right gradients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.coalesce.bars import bars
from tests.outcome import ROOT, Outcome, outcome_of

ROWS = [str(number) for number in range(1, 11)]
TIMED = [number for number in ROWS if number != "3"]
PATCHED = ["2", "4", "5", "6", "7"]
WAYS = {
    "1": ["multi", "native", "no_sync", "ours"],
    "2": ["multi", "native", "ours"],
    "3": ["multi", "native", "ours", "ours, gather_once"],
}
HOOKED = {
    "PYTHONPATH, DS_PATCHES unset": "< 2",
    "PYTHONPATH, DS_PATCHES=all": "< 10",
    ".pth, DS_PATCHES unset": "< 2",
    ".pth, DS_PATCHES=all": "< 10",
}
CALLS = ["apply_all", "unapply_all", "apply_all"]


@pytest.fixture(scope="module")
def retain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node 2"
        " -m benchmarks.retain --device cpu --layers 2 --width 32 --batch 4"
        " --steps 1 --warmup 3 --rounds 2 --commit abc --json"
    )
    kept = tmp_path_factory.mktemp("retain") / "retain.json"
    return outcome_of(command, kept, OMP_NUM_THREADS="1")


@pytest.mark.exhaustive
def test_retain_prints_every_row_and_bar(retain: Outcome) -> None:
    rows = {cells[0]: cells for cells in retain.table("#")}
    assert list(rows) == ROWS
    for number in TIMED:  # a reference has milliseconds, the others are ratios to it
        assert float(rows[number][2 if number in ("1", "9") else 3]) > 0
    assert "The size of tensor a (0) must match" in rows["3"][2]
    bars = retain.table("against row 1")
    assert [cells[2] for cells in bars] == ["<= 1.02", "<= 1.02", "<= 1.01", "<= 1.2", "-"]
    # Nobody counts a CPU's memory; what was not measured must not look held.
    assert [cells[3] for cells in bars[:2]] == ["not measured"] * 2


@pytest.mark.exhaustive
def test_retain_keeps_what_it_measured(retain: Outcome) -> None:
    kept = retain.kept
    assert kept["provenance"]["commit"] == "abc"
    assert {"torch", "deepspeed", "ds_patches", "device", "date"} <= kept["provenance"].keys()
    assert sorted(kept["rows"], key=int) == ROWS
    assert len(kept["idle_ratio_by_round"]) == 2
    for number in TIMED:
        row = kept["rows"][number]
        assert row["error"] is None
        assert row["ms"]["count"] == 2
        assert row["ms"]["median"] == pytest.approx(sum(row["ms_of_steps"]) / 2)
        backwards = [name for name in row["ms_by_phase"] if name.startswith("backward")]
        assert [held["after"] for held in row["held"]] == backwards
        assert len(backwards) == (1 if number in ("1", "2", "9") else 2)
        if number in PATCHED:
            assert [held["available"] for held in row["held"]] == [0] * len(backwards)


@pytest.mark.exhaustive
def test_retain_times_steps_with_the_right_gradients(retain: Outcome) -> None:
    for number in TIMED:
        row = retain.kept["rows"][number]
        assert row["gradient_error"] < 2e-2, number
    for number in "78":  # the sums: had a loss been lost, the same check would see it
        assert retain.kept["rows"][number]["gradient_error_last_alone"] > 0.5


@pytest.fixture(scope="module")
def coalesce(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node 2"
        " -m benchmarks.coalesce --device cpu --layers 2 --width 32 --batches 4 --backwards 4"
        " --steps 1 --warmup 1 --rounds 2 --commit abc --json"
    )
    kept = tmp_path_factory.mktemp("coalesce") / "coalesce.json"
    return outcome_of(command, kept, OMP_NUM_THREADS="1")


@pytest.mark.exhaustive
def test_coalesce_prints_every_row(coalesce: Outcome) -> None:
    expected = [["-", "floor"], *([f"Z{stage}", way] for stage in WAYS for way in WAYS[stage])]
    for title in ("N=4, batch 4", "N=4, batch 4: wire and memory"):
        assert [cells[:2] for cells in coalesce.table(title)] == expected
    for cells in coalesce.table("N=4, batch 4"):
        if cells[1] == "no_sync":  # what stock says with overlap_comm
            assert "has already been reduced" in cells[2]
            continue
        assert float(cells[2 if cells[1] in ("floor", "native") else 3]) > 0
        if cells[1] != "floor":
            assert (cells[3] == "-") == (cells[1] == "native")
            assert max(map(float, cells[6:])) < 2e-2


@pytest.mark.exhaustive
def test_coalesce_prints_its_bars(coalesce: Outcome) -> None:
    table = coalesce.table("against native, N=4")
    bound = [f"<= {most}" for most in (0.5, 0.5, 0.75, 1.0, 1.0, 1.0)]
    assert [cells[2] for cells in table] == bound
    assert all(cells[1][0].isdigit() for cells in table[:4])
    # Nobody counts a CPU's memory; what was not measured must not look held.
    assert [cells[3] for cells in table[4:]] == ["not measured"] * 2


def test_coalesce_without_peer_to_peer_has_bars_of_its_own() -> None:
    bound = {bar.name: bar.bar for bar in bars([], [256], p2p=False)}
    assert bound["step, Z3 ours, gather_once, batch 256"] == 0.65


@pytest.mark.exhaustive
def test_coalesce_counts_the_bytes_of_a_reduction(coalesce: Outcome) -> None:
    whole = 2 * 32 * 32 * 2 / 2**20  # 2 layers in bf16, in MiB
    for row in coalesce.kept["rows"]:
        if row["mode"] in ("native", "ours", "floor"):
            # Of 2 ranks each sends half of what is reduce-scattered, and all of an all-reduce.
            scattered = row["mode"] != "native" or row["stage"] == 3
            if scattered and "reduce_scatter" not in row["collectives"]:
                continue  # an older gloo has none
            sent = whole * (0.5 if scattered else 1)
            assert row["sent_mib_in_reductions"] == pytest.approx(sent, rel=0.1), row["mode"]


@pytest.mark.exhaustive
def test_coalesce_keeps_what_it_measured(coalesce: Outcome) -> None:
    kept = coalesce.kept
    assert kept["provenance"]["commit"] == "abc"
    timed = [row for row in kept["rows"] if row["error"] is None]
    assert len(timed) == len(kept["rows"]) - 1
    for row in timed:
        assert row["ms"]["count"] == 2
        assert {"backwards"} < row["host_ms_by_phase"].keys()
        if row["stage"] is not None:
            assert row["ratio_to_native"]["count"] == 2


@pytest.mark.exhaustive
def test_the_plot_is_a_picture_of_the_ratios(coalesce: Outcome, tmp_path: Path) -> None:
    run, picture = tmp_path / "run.json", tmp_path / "picture.svg"
    run.write_text(json.dumps(coalesce.kept))
    command = [sys.executable, "-m", "benchmarks.plot", str(run), str(run), str(picture)]
    subprocess.run(command, cwd=ROOT, check=True)
    drawn = picture.read_text()
    assert drawn.count(">ZeRO-3<") == 2
    assert drawn.count("2 ranks, gloo, batch 4") == 2
    for row in coalesce.kept["rows"]:
        if row["mode"] != "native" and "ratio_to_native" in row:
            assert f">{row['ratio_to_native']['median']:.2f}<" in drawn


@pytest.fixture(scope="module")
def startup(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    command = "-m benchmarks.startup --rounds 3 --imports 1 --commit abc --json"
    return outcome_of(command, tmp_path_factory.mktemp("startup") / "startup.json")


@pytest.mark.exhaustive
def test_startup_prints_every_start_and_bar(startup: Outcome) -> None:
    bare = startup.table("python -c pass")
    assert [cells[0] for cells in bare] == ["no hook", *HOOKED]
    assert all(float(number) > 0 for cells in bare for number in cells[1:3])
    assert [cells[3] == "-" for cells in bare] == [True, False, False, False, False]
    bars = startup.table("added CPU ms")
    assert [(cells[0], cells[2]) for cells in bars] == list(HOOKED.items())
    imports = startup.table("python -c 'import deepspeed'")
    assert [cells[0] for cells in imports][:2] == ["DS_PATCHES unset", "DS_PATCHES=all"]
    assert float(imports[0][1]) > 10 * float(bare[0][1]), "DeepSpeed was imported"
    calls = startup.table("import deepspeed, then")
    assert [cells[0].partition("()")[0] for cells in calls] == CALLS
    assert [cells[5] for cells in calls] == ["< 350", "-", "< 150"]
    assert all(float(cells[column]) > 0 for cells in calls for column in (1, 3))


@pytest.mark.exhaustive
def test_startup_keeps_what_it_measured(startup: Outcome) -> None:
    assert startup.kept["provenance"]["commit"] == "abc"
    starts = startup.kept["starts"]
    assert [len(start["taken"]) for start in starts] == [3] * 5 + [1] * 3
    assert all(taken["cpu"] > 0 for start in starts for taken in start["taken"])
    calls = startup.kept["calls"]
    assert [len(taken) for taken in calls.values()] == [1] * 3
    first, _, second = (taken[0]["cpu"] for taken in calls.values())
    assert first > second, "the shapes are known, and nothing is imported"
