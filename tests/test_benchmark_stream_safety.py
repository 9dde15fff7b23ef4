"""benchmarks.stream_safety without a GPU: a small run on CPU, and what it makes of a trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.stream_safety import page
from benchmarks.stream_safety.agreement import Agreement
from benchmarks.stream_safety.bars import bars
from benchmarks.stream_safety.measure import Reference
from benchmarks.stream_safety.plot import draw
from benchmarks.stream_safety.results import Result, failures, find, ratios, stock_of
from benchmarks.stream_safety.rows import MODES, PATCHED, STOCK
from benchmarks.stream_safety.table import section
from benchmarks.stream_safety.trace import Shares, kernels, shares
from tests.outcome import ROOT, Outcome, outcome_of

PATCH = "stream_safety"  # any will do on CPU, where there are no streams
ROWS = [
    [name, mode]
    for name in ("Z1", "Z1 overlap", "Z2", "Z2 overlap")
    for mode in ("stock", "patched")
]
WHERE = "batch 4, bucket 2,500"
NAME = "AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    kept = tmp_path_factory.mktemp("stream_safety") / "stream-safety.json"
    # A bucket of two small layers and less than a wide one, and one that is smaller than any.
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.stream_safety"
        f" --device cpu --patch {PATCH} --layers 6 --width 32 --batches 4"
        " --reduce-bucket-sizes 2500 500 --micro-steps 2"
        " --warmup 1 --steps 2 --rounds 2 --commit abc --json"
    )
    return outcome_of(command, kept, OMP_NUM_THREADS="1")


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["bucket 2,500", "bucket 500"])
def test_every_row_runs_with_the_numbers_of_overlap_off(small: Outcome, where: str) -> None:
    table = small.table("row", below=f"#### Batch 4, {where}, 2 micro steps\n")
    assert [cells[:2] for cells in table] == ROWS
    for cells in table:
        assert float(cells[2 if cells[1] == STOCK else 3]) > 0
        assert (cells[3] == "-") == (cells[1] == STOCK)
        assert float(cells[7]) < 2e-2
        reference = cells[0] in ("Z1", "Z2") and cells[1] == STOCK
        assert cells[8:] == (["-"] * 2 if reference else ["equal"] * 2)


@pytest.mark.exhaustive
def test_what_was_compared_are_all_gradients_and_all_parameters(small: Outcome) -> None:
    size = (4 + 4 + 4) * 32 * 32 + 2 * 32  # of six Linear layers and two norms
    for row in small.kept["rows"]:
        if row["overlap"]:
            assert row["gradients"] == {"differing": 0, "of": 3 * size, "error": 0.0}
            assert row["end"]["of"] == 2 * size, "parameters and AdamW's averages"


@pytest.mark.exhaustive
def test_a_run_keeps_what_it_measured(small: Outcome) -> None:
    assert small.kept["provenance"]["commit"] == "abc"
    assert small.kept["options"]["reduce_bucket_sizes"] == [2500, 500]
    assert len(small.kept["rows"]) == 2 * len(ROWS)
    for row in small.kept["rows"]:
        assert row["error"] is None
        assert [len(block) for block in row["ms"]] == [2, 2]
        assert list(row["ms_by_phase"][0]) == ["forward", "backward", "step"]
        assert row["trace"] is None
        assert Result.read(row).plain() == row


@pytest.mark.exhaustive
def test_a_run_prints_its_bars(small: Outcome) -> None:
    table = small.table("against stock, against overlap off")
    assert len(table) == 2 * 4
    assert [cells[2] for cells in table[:4]] == ["-", "-", "<= 0", "<= 0"], "gloo: as with P2P"
    assert [cells[1] for cells in table[2:4]] == ["0", "0"]
    assert [cells[3] for cells in table[2:4]] == ["yes", "yes"]


@pytest.mark.exhaustive
def test_a_patch_that_is_not_there_is_said_at_once() -> None:
    command = [sys.executable, "-m", "benchmarks.stream_safety", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--patch", "nothing"],
        cwd=ROOT,
        env={"LOCAL_RANK": "0"},
        stderr=subprocess.PIPE,
    )
    assert done.returncode == 2
    assert b"there is no patch nothing; without it there is --modes stock" in done.stderr


def on_device(name: str, stream: int, begin: float, ms: float, kind: str = "kernel") -> Any:
    """As a trace has it, in microseconds."""
    args = {"device": 0, "stream": stream}
    times = {"ts": 1e9 + 1e3 * begin, "dur": 1e3 * ms}
    return {"ph": "X", "cat": kind, "name": name, "args": args} | times


def mark(begin: float) -> Any:
    return on_device("void at::cuda::(anonymous namespace)::spin_kernel(long)", 7, begin, 0.5)


def step_of(begin: float, late: float) -> list[Any]:
    """10 ms forward, 20 ms backward, 10 ms step; `late`: how long NCCL works on after computing."""
    backward = begin + 10.5
    return [
        *(mark(begin + at) for at in (-0.5, 10, 30.5, 41)),
        on_device("gemm", 7, begin, 9),
        on_device("gemm", 7, backward, 8),
        on_device("Memcpy DtoD", 7, backward + 8, 2, "gpu_memcpy"),
        on_device("gemm", 7, backward + 13, 7 - late),
        on_device(f"ncclDevKernel_{NAME}", 20, backward + 5, 15),
        on_device("div_kernel", 20, backward + 10, 3),  # on the reduction's stream: not computing
        on_device(f"ncclDevKernel_{NAME}", 7, begin + 31, 4),
        on_device("adam", 7, begin + 35, 6),
        on_device("nccl:all_reduce", 20, backward, 20, "gpu_user_annotation"),
        on_device("Optimizer.step#AdamW.step", 7, begin + 31, 10, "gpu_user_annotation"),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 1.0},
    ]


def trace_of(*late: float) -> dict[str, Any]:
    events = [event for number, ms in enumerate(late) for event in step_of(100 * number, ms)]
    return {"traceEvents": list(reversed(events))}


def test_a_trace_says_what_was_hidden() -> None:
    found = shares(kernels(trace_of(7, 1, 3)))  # the first is not counted
    assert list(found) == ["forward", "backward", "step"]
    expected = {
        "forward": Shares(ms=10, nccl=0, hidden=0, idle=1),
        "backward": Shares(ms=20, nccl=15, hidden=10, idle=5),
        "step": Shares(ms=10, nccl=4, hidden=0, idle=4),
    }
    for name, one in expected.items():
        assert vars(found[name]) == pytest.approx(vars(one)), name
    assert found["backward"].exposed == pytest.approx(5)
    assert Shares.total(list(found.values())).nccl == pytest.approx(19)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_trace_without_all_marks_is_an_error(lost: int) -> None:
    ran = kernels(trace_of(1, 1))
    marks = [kernel for kernel in ran if kernel.is_mark]
    with pytest.raises(RuntimeError, match="marks in a trace"):
        shares([kernel for kernel in ran if kernel not in marks[: 4 if lost == 0 else lost]])


def test_one_bit_is_a_difference() -> None:
    ones = torch.ones(8)
    assert Agreement.between([ones, ones], [ones, ones]) == Agreement(0, 16, 0.0)
    other = torch.ones(8)
    other[3] = torch.nextafter(ones[3], torch.tensor(2.0))
    found = Agreement.between([ones, other], [ones, ones])
    assert (found.differing, found.of) == (1, 16)
    assert 0 < found.error < 1e-6
    other[3] = float("nan")
    assert Agreement.between([other], [ones]).error != Agreement.between([other], [ones]).error


def test_overlap_is_held_against_the_first_row_without_of_its_stage() -> None:
    reference = Reference()

    def row(stage: int, overlap: bool, value: float) -> Agreement | None:
        result = Result(stage, overlap, STOCK, 4, 2500)
        return reference.against(result, [torch.full((2,), value)])

    assert row(1, True, 1.0) is None, "nothing to be held against"
    assert row(1, False, 1.0) is None
    assert row(2, False, 2.0) is None
    for stage, value, differing in ((1, 1.0, 0), (1, 2.0, 2), (2, 2.0, 0)):
        found = row(stage, True, value)
        assert found is not None
        assert found.differing == differing
    again = row(1, False, 1.0)
    assert again is not None
    assert again.differing == 0


def measured(stage: int, overlap: bool, mode: str) -> Result:
    """Two rounds, the second on a machine that had become slower by a fifth."""
    ms = 16.0 if overlap and mode == PATCHED else 20.0
    result = Result(stage, overlap, mode, 4, 2500, gradient_error=1e-3, peak_mib=1000.0)
    result.ms = [[ms], [1.2 * ms]]
    result.ms_by_phase = [{"forward": 4.0, "backward": ms - 6, "step": 2.0}] * 2
    if overlap:
        result.gradients = Agreement(0, 12, 0.0)
        result.end = Agreement(3 if mode == STOCK else 0, 8, 2e-5 if mode == STOCK else 0.0)
    result.trace = shares(kernels(trace_of(0, 5)))
    return result


def recorded() -> list[Result]:
    return [
        measured(stage, overlap, mode)
        for stage in (1, 2)
        for overlap in (False, True)
        for mode in MODES
    ]


def run_of(results: list[Result], **settings: str) -> dict[str, Any]:
    origin = {"date": "2026-11-22T10:00:00", "ranks": "2", "backend": "nccl", "device": "GPU"}
    document = {
        "provenance": origin | {"deepspeed": "0.19.8"} | settings,
        "options": {"layers": 36, "width": 2048, "warmup": 2, "steps": 1, "rounds": 2},
        "rows": [result.plain() for result in results],
    }
    return json.loads(json.dumps(document))


def test_what_is_kept_is_read_back() -> None:
    results = recorded()
    assert [Result.read(row) for row in run_of(results)["rows"]] == results


def test_ratios_are_of_the_rounds() -> None:
    results = recorded()
    patched = find(results, WHERE, 2, True, PATCHED)
    assert patched is not None
    assert ratios(patched, stock_of(results, patched)) == pytest.approx([0.8, 0.8])
    assert ratios(patched, None) == []


@pytest.mark.parametrize("p2p", [True, False])
def test_the_step_has_a_bar_where_the_gpus_have_no_peer_to_peer(p2p: bool) -> None:
    step = f"step, Z2 overlap, {WHERE}: patched / stock"
    found = {bar.name: bar for bar in bars(recorded(), p2p)}
    assert found[step].measured == pytest.approx(0.8)
    assert found[step].held is (None if p2p else True)
    assert found[step.replace("Z2", "Z1")].bar is None


def test_numbers_that_overlap_changes_do_not_hold_the_bar() -> None:
    results = recorded()
    patched = find(results, WHERE, 2, True, PATCHED)
    assert patched is not None
    name = f"elements unlike overlap off, Z2 overlap patched, {WHERE}"
    for agreement, held in ((Agreement(1, 8, 1e-9), False), (None, None)):
        patched.end = agreement
        assert {bar.name: bar.held for bar in bars(results, True)}[name] is held


def test_rows_that_raise_or_have_wrong_gradients_fail() -> None:
    results = recorded()
    assert list(failures(results)) == []
    results[0].fail(RuntimeError("lost"))
    results[0].fail(RuntimeError("later"))
    results[1].gradient_error = float("nan")
    results[2].gradient_error = 0.5
    assert list(failures(results)) == [
        f"Z1 stock, {WHERE}: RuntimeError: lost",
        f"Z1 patched, {WHERE}: gradients are off by nan",
        f"Z1 overlap stock, {WHERE}: gradients are off by 0.5",
    ]


def test_the_tables_say_what_is_hidden_and_what_differs() -> None:
    text = section(run_of(recorded(), NCCL_P2P_DISABLE="1"))
    assert "| Z2 overlap | patched | - | 0.800 |" in text
    assert "| equal | NO: 3 of 8, off by 2.0e-05 |" in text
    backward = "20.00 | 15.00 | 7.00 | 8.00 | 8.00 |"
    assert f"| Z2 overlap | stock | 40.00 | 19.00 | 7.00 | 12.00 | 37 % | {backward}" in text
    assert "| <= 0.9 | yes |" in text


def test_a_run_is_put_into_the_page_and_drawn_beside_it(tmp_path: Path) -> None:
    written = tmp_path / "benchmarks.md"
    written.write_text((ROOT / "docs/benchmarks-stream-safety.md").read_text())
    raised = recorded()
    raised[0] = Result(1, False, STOCK, 4, 2500, error="RuntimeError: lost | here")
    runs = {"on.json": run_of(recorded()), "off.json": run_of(raised, NCCL_P2P_DISABLE="1")}
    for name, run in runs.items():
        (tmp_path / name).write_text(json.dumps(run))
    command = [sys.executable, "-m", "benchmarks.stream_safety.page"]
    subprocess.run(
        [*command, *(str(tmp_path / name) for name in runs), str(written)], cwd=ROOT, check=True
    )
    first = written.read_text()
    for name, run in runs.items():
        assert section(run) in first
        assert f"[{name}]({name})" in first
    assert "## Correct on GPUs" in first
    drawn = (tmp_path / "stream-safety.svg").read_text()
    for text in (
        f"2 GPUs, P2P on, {WHERE}",
        f"2 GPUs, P2P off, {WHERE}",
        "Z2 overlap",
        "17.6",
        "stock: raises",
        "NCCL, exposed",
        "NCCL, hidden",
    ):
        assert f">{text}<" in drawn, text
    assert page.filled(first, runs) == first, "it stands in the place of what was there"


def test_runs_on_one_machine_share_a_column(tmp_path: Path) -> None:
    other = [Result.read(row | {"batch": 8}) for row in run_of(recorded())["rows"]]
    elsewhere = run_of(recorded(), NCCL_P2P_DISABLE="1")
    draw([run_of(recorded()), run_of(other), elsewhere], tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    titles = [f"P2P on, {WHERE}", f"P2P on, {WHERE.replace('4', '8')}", f"P2P off, {WHERE}"]
    assert [drawn.count(f">2 GPUs, {title}<") for title in titles] == [1, 1, 1]
    assert drawn.count(">ms per step<") == len(titles)
    with pytest.raises(ValueError, match="no row was timed"):
        draw([run_of([Result(1, False, STOCK, 4, 2500)])], tmp_path / "empty.svg")
