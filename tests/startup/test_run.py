"""`python -m ds_patches run -- COMMAND`: the command itself, patched, and nothing around it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from ds_patches.startup import command
from tests.core import fake
from tests.startup.environment import BEFORE_AND_AFTER, LIVE, Environment


def variables_of(here: Environment, *path: Path, **variables: str) -> dict[str, str]:
    """Return the variables that a program gets that is run."""
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    done = here.ds_patches("run", "--", here.python, "-c", code, path=path, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_a_script_is_run_by_this_python(
    environment: Environment, tmp_path: Path, dashes: list[str]
) -> None:
    script = fake.write(tmp_path / "train.py", f"{BEFORE_AND_AFTER}import sys; print(*sys.argv)")
    done = environment.ds_patches("run", *dashes, script, "--lr", "1")
    assert (done.returncode, done.stdout) == (0, f"{LIVE}{script} --lr 1\n"), done.stderr


@pytest.mark.parametrize("place", ["on PATH", "beside the interpreter", "by its path"])
def test_any_other_program(own: Environment, tmp_path: Path, place: str) -> None:
    """Beside the interpreter lie the launchers of an environment that is not activated.

    They come first: a launcher of another one would start ranks that are left alone.
    """
    there = tmp_path / "programs"
    program = fake.write(there / "launch", f"#!{own.python}\n{BEFORE_AND_AFTER}")
    if place == "beside the interpreter":
        program = program.rename(own.root / "bin/launch")
        fake.write(there / "launch", "#!/bin/sh\necho another").chmod(0o755)
    program.chmod(0o755)
    name = program if place == "by its path" else program.name
    done = own.ds_patches("run", "--", name, PATH=f"{there}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (0, LIVE), done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "run needs a command: python -m ds_patches run -- torchrun train.py"),
        (["--"], "run needs a command"),
        (["--", "no-such-program"], "there is no command 'no-such-program'"),
        (["--", "./launch"], "cannot be run: Exec format error"),
    ],
)
def test_what_cannot_be_run(
    environment: Environment, tmp_path: Path, words: list[str], message: str
) -> None:
    fake.write(tmp_path / "launch", "\0").chmod(0o755)
    assert message in environment.refuses("run", *words, cwd=tmp_path)


@pytest.mark.parametrize("variable", ["DS_PATCHES", "DS_PATCHES_SKIP", "DS_PATCHES_SAMPEL"])
@pytest.mark.parametrize("words", ["run -- echo started", "env", "env --write some.env"])
def test_nothing_is_done_with_a_flag_that_means_nothing(
    environment: Environment, tmp_path: Path, words: str, variable: str
) -> None:
    told = environment.refuses(*words.split(), cwd=tmp_path, **{variable: "smaple"})
    assert told.startswith(f"ds_patches: {variable}")
    assert not list(tmp_path.iterdir())


def test_signals_are_the_programs(environment: Environment) -> None:
    """It takes the place of `run`: whom the caller started is whom a signal reaches."""
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    words = [environment.python, "-m", "ds_patches", "run", "--", environment.python, "-c", code]
    with subprocess.Popen(
        words, env=environment.variables(), stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert int(run.stdout.readline()) == run.pid
        run.send_signal(signal.SIGTERM)
        assert run.wait(20) == -signal.SIGTERM


def test_a_reader_that_goes_away_ends_the_program_as_without_run(environment: Environment) -> None:
    """Python ignores that signal, and what takes its place would too."""
    done = environment.ds_patches("run", "--", "sh", "-c", "kill -s PIPE $$; echo ignored")
    assert (done.returncode, done.stdout) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize("code", [0, 1, 255])
def test_arguments_and_the_exit_code_are_untouched(environment: Environment, code: int) -> None:
    given = ["a b", "--", "-x", "--y=1", "", "*", "$HOME", "run", '"q"', "\u00e9\n"]
    program = f"import json, sys; print(json.dumps(sys.argv[1:])); sys.exit({code})"
    done = environment.ds_patches("run", "--", environment.python, "-c", program, *given)
    assert json.loads(done.stdout) == given
    assert done.returncode == code


def test_the_path_is_kept_behind_the_hook(environment: Environment, tmp_path: Path) -> None:
    other = tmp_path / "another/ds_patches/startup/hook"
    path = (tmp_path / "a", environment.hook, other, tmp_path / "b")
    found = variables_of(environment, *path)
    expected = [environment.hook, tmp_path / "a", tmp_path / "b"]
    assert found["PYTHONPATH"] == os.pathsep.join(map(str, expected))
    assert found["DS_PATCHES_PREFIX"] == str(environment.root)
    assert variables_of(environment)["PYTHONPATH"] == str(environment.hook)


def test_an_enabled_environment_needs_no_path(enabled: Environment, tmp_path: Path) -> None:
    found = variables_of(enabled)
    assert found["DS_PATCHES"] == "all"
    assert not {"PYTHONPATH", "DS_PATCHES_PREFIX"} & found.keys()
    assert variables_of(enabled, tmp_path)["PYTHONPATH"] == str(tmp_path)
    done = enabled.ds_patches("run", "--", enabled.python, "-I", "-c", BEFORE_AND_AFTER)
    assert (done.returncode, done.stdout) == (0, LIVE)
    assert "no start-up hook" not in done.stderr


@pytest.mark.parametrize(("given", "expected"), [("", "all"), ("none", "none")])
def test_all_patches_unless_others_are_wanted(
    environment: Environment, given: str, expected: str
) -> None:
    mode = {"DS_PATCHES_SAMPLE_MODE": "hard"}
    found = variables_of(environment, DS_PATCHES=given, **mode)
    assert found.items() >= {"DS_PATCHES": expected, **mode}.items()


@pytest.mark.parametrize(
    ("words", "letters"),
    [
        (["-I", "x.py"], "I"),
        (["-uE", "x.py", "-S"], "uE"),
        (["-W", "ignore", "-I", "x.py"], "I"),
        (["-WIgnore", "-Xdev", "x.py"], ""),
        (["-X", "importtime", "-S", "-c", "pass"], "S"),
        (["-c", "pass", "-I"], ""),
        (["-mIPython"], ""),
        (["-um", "pdb", "-S"], "u"),
        (["--version"], ""),
        (["-", "-S"], ""),
        (["x.py", "-S"], ""),
        ([], ""),
    ],
)
def test_options_of_python_are_read_as_python_reads_them(words: list[str], letters: str) -> None:
    assert command._options(["/usr/bin/python3", *words]) == set(letters)
    assert command._options(["/usr/bin/env", *words]) == set()


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_a_program_that_runs_no_hook_is_doubted(environment: Environment, option: str) -> None:
    words = ("run", "--", environment.python, option, "-c", "print('ran')")
    done = environment.ds_patches(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "ran\n", 1)
    assert f"ds_patches: python {option} runs no start-up hook" in done.stderr
    assert ("ds_patches enable" in done.stderr) is (option != "-S")
    assert "(DS_PATCHES_STRICT)" in environment.refuses(*words, DS_PATCHES_STRICT="1")


def test_deepspeeds_launcher_beside_a_sitecustomize_is_doubted(
    own: Environment, tmp_path: Path
) -> None:
    fake.write(own.root / "bin/deepspeed", "#!/bin/sh\necho ran").chmod(0o755)
    fake.write(tmp_path / "sitecustomize.py", "")
    words = ("-m", "ds_patches", "run", "--", "deepspeed")
    for cwd, doubts in ((own.root, 0), (tmp_path, 1)):
        done = own.start(*words, cwd=cwd)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "ran\n", doubts)
    assert "where sitecustomize.py hides the start-up hook" in done.stderr
    assert own.start(*words, cwd=tmp_path, DS_PATCHES_STRICT="1").returncode == 2
    assert own.ds_patches("enable").returncode == 0
    assert own.start(*words, cwd=tmp_path).stderr == ""
