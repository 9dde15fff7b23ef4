"""Change one line of ds_patches at a time, and print the changes that no quick test notices.

    .venv/bin/python tools/mutants.py --seed 1 --count 20
    .venv/bin/python tools/mutants.py --at ds_patches/steps/step.py:84 -- tests/steps

Works in a copy of the checkout, whose quick tests have to pass. Runs the tests after ``--``, or
those of the changed file's folder and then of every folder that imports it. A test that fails kills
a mutant, and so does the time limit. Exits with 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAIRS = [(ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.LtE)]
OTHER: dict[type[ast.cmpop], type[ast.cmpop]] = dict([*PAIRS, (ast.Gt, ast.GtE)])
OTHER |= {new: old for old, new in OTHER.items()}
IMPORT = re.compile(r"^ *(?:from|import) (?:[^\n(]*\([^)]*\)|.*)", re.MULTILINE)
VARIABLES = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "TEST_RANKS_FORK": "1"}


class Mutant(NamedTuple):
    """Other text for some columns, in bytes, of a line of a file."""

    file: str
    line: int
    begin: int
    end: int
    text: str

    def written(self, folder: Path) -> tuple[Path, bytes, str]:
        """Change the line; return the path, the file as it was, and the new line."""
        path = folder / self.file
        before = path.read_bytes()
        lines = before.splitlines(keepends=True)
        old = lines[self.line - 1]
        lines[self.line - 1] = new = old[: self.begin] + self.text.encode() + old[self.end :]
        path.write_bytes(b"".join(lines))
        return path, before, new.decode().strip()


def sources() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "ds_patches").rglob("*.py"))


def mutants(file: str) -> Iterator[Mutant]:
    """Yield every change of a file within a line of a function."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    parts = {id(node): node for body in bodies for part in body for node in ast.walk(part)}
    for node in parts.values():
        for part, text in _changes(node):
            if part.lineno == part.end_lineno:
                yield Mutant(file, part.lineno, part.col_offset, part.end_col_offset or 0, text)


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield parts of a node, each with the text to write in its place."""
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield test, f"not ({ast.unparse(test)})"
        case ast.comprehension(ifs=tests):
            yield from ((test, f"not ({ast.unparse(test)})") for test in tests)
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield node, f"({word.join(f'({ast.unparse(value)})' for value in values)})"
            yield from ((value, str(isinstance(op, ast.And))) for value in values)
        case ast.Compare(left=left, ops=[op], comparators=right):
            yield node, f"({ast.unparse(ast.Compare(left, [OTHER[type(op)]()], right))})"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield value, "None"
        case ast.Expr(value=ast.Constant()):
            pass  # a docstring
        case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield node, "pass"


def tests_of(file: str) -> list[str]:
    """Return the folders of tests of a file of the package, and of all that imports it."""
    lines = {name: IMPORT.findall((ROOT / name).read_text("utf-8")) for name in sources()}
    words = {name: set(re.findall(r"\w+", " ".join(lines[name]))) for name in lines}
    files = [file]
    for name in files:  # it grows
        module = Path(name).stem if Path(name).stem != "__init__" else Path(name).parent.name
        files += [other for other in words if module in words[other] and other not in files]
    parts = [Path(name).with_suffix("").parts[1:] for name in files]
    folders = ["/".join(("tests", *(its if its[0] == "cures" else its[:-1]))) for its in parts]
    return [name for name in dict.fromkeys(folders) if name != "tests" and (ROOT / name).is_dir()]


def killer(folder: Path, tests: Sequence[str], limit: float) -> str:
    """Run quick tests in a folder; return the one that fails, "" if all pass."""
    variables = {**VARIABLES, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not exhaustive", *tests]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | variables,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"no end within {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failed or lines[-1:] or ["no output"])[0] if status else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--at", action="append", default=[], metavar="FILE:LINE")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a mutant")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args()
    every = [mutant for file in sources() for mutant in mutants(file)]
    chosen = [mutant for mutant in every if f"{mutant.file}:{mutant.line}" in options.at]
    chosen = chosen if options.at else random.Random(options.seed).sample(every, options.count)
    survivors = 0
    with tempfile.TemporaryDirectory() as made:
        folder, tracked = Path(made), subprocess.check_output(["git", "ls-files"], cwd=ROOT)
        for name in tracked.decode().splitlines():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        for mutant in chosen:
            path, before, line = mutant.written(folder)
            killed_by = killer(folder, options.tests or tests_of(mutant.file), options.limit)
            path.write_bytes(before)
            survivors += not killed_by
            print(f"{mutant.file}:{mutant.line}: {line}\n    {killed_by or 'SURVIVES'}", flush=True)
    print(f"{survivors} of {len(chosen)} survive")
    return int(survivors > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
