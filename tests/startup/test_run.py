"""`python -m ds_patches run -- COMMAND`: the command itself, patched, and nothing around it."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.core import fake
from tests.startup.environment import BEFORE_AND_AFTER, LIVE, Environment, variables


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_a_script_is_run_by_this_python(
    environment: Environment, tmp_path: Path, dashes: list[str]
) -> None:
    script = fake.write(tmp_path / "train.py", f"{BEFORE_AND_AFTER}import sys; print(*sys.argv)")
    printed = environment.run(*dashes, script, "--lr", "1").stdout
    assert printed == f"{LIVE}{script} --lr 1\n"


@pytest.mark.parametrize("place", ["on PATH", "beside the interpreter", "by its path"])
def test_any_other_program(own: Environment, tmp_path: Path, place: str) -> None:
    """Beside the interpreter lie the launchers of an environment that is not activated.

    They come first: a launcher of another one would start ranks that are left alone.
    """
    programs = tmp_path / "programs"
    program = fake.write(programs / "launch", f"#!{own.python}\n{BEFORE_AND_AFTER}")
    if place == "beside the interpreter":
        program = program.rename(own.root / "bin/launch")
        fake.write(programs / "launch", "#!/bin/sh\necho another").chmod(0o755)
    program.chmod(0o755)
    name = program if place == "by its path" else program.name
    assert own.run("--", name, PATH=f"{programs}:{os.environ['PATH']}").stdout == LIVE


@pytest.mark.parametrize(
    ("words", "flag", "message"),
    [
        ("", "", "run needs a command"),
        ("--", "", "run needs a command"),
        ("-- no-such-program", "", "'no-such-program'"),
        ("-- ./launch", "", "cannot be run: Exec format error"),
        *(
            ("-- echo started", f"DS_PATCHES{s}", f"DS_PATCHES{s}")
            for s in ("", "_SKIP", "_SAMPEL")
        ),
    ],
)
def test_what_cannot_be_run_or_means_nothing(
    environment: Environment, tmp_path: Path, words: str, flag: str, message: str
) -> None:
    fake.write(tmp_path / "launch", "\0").chmod(0o755)
    flags = {flag: "smaple"} if flag else {}
    assert message in environment.refuses(*words.split(), cwd=tmp_path, **flags)
    assert os.listdir(tmp_path) == ["launch"]


def test_signals_are_the_programs(environment: Environment) -> None:
    """The program takes the place of `run`, and what Python ignores is not ignored."""
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    words = [environment.python, "-m", "ds_patches", "run", "--", environment.python, "-c", code]
    with subprocess.Popen(words, env=variables(), stdout=subprocess.PIPE, text=True) as run:
        assert int(run.stdout.readline()) == run.pid
        run.send_signal(signal.SIGTERM)
        assert run.wait(20) == -signal.SIGTERM
    for name in ("PIPE", "XFSZ"):
        ends = -signal.Signals[f"SIG{name}"]
        code = f"kill -s {name} $$; echo ignored"
        assert environment.run("--", "sh", "-c", code, status=ends).stdout == ""


def test_arguments_variables_and_the_exit_code_are_untouched(environment: Environment) -> None:
    given_words = ["a b", "--", "-x", "--y=1", "", "*", "$HOME", "run", '"q"', "\u00e9\n"]
    program = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]));"
    words = ("--", environment.python, "-c", f"{program} sys.exit(255)", *given_words)
    own = {"DS_PATCHES": "none", "DS_PATCHES_STRICT": "1"}
    arguments, variables_of_child = json.loads(environment.run(*words, status=255, **own).stdout)
    assert arguments == given_words
    assert variables_of_child.items() >= {**own, "PYTHONPATH": str(environment.hook)}.items()


@pytest.mark.parametrize("path", [None, "", ":src", "src:", "src::lib", ":"])
def test_the_environment_is_handed_on(
    environment: Environment, tmp_path: Path, path: str | None
) -> None:
    """Also what an empty entry of PYTHONPATH means, and what Python itself would add."""
    shell_variables = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    shell_variables |= {} if path is None else {"PYTHONPATH": path}
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    program = ["sh", "-c", 'env >env; "$@"', "sh", str(environment.python), "-c", code]
    ours = [str(environment.python), "-m", "ds_patches", "run", "--"]
    results = []
    for words in (program, ours + program):
        how = {"env": shell_variables, "cwd": tmp_path, "capture_output": True, "text": True}
        modules = json.loads(subprocess.run(words, check=True, **how).stdout)
        lines = {*(tmp_path / "env").read_text().splitlines()}
        results.append(([name for name in modules if name != str(environment.hook)], lines))
    (bare, before), (patched, after) = results
    assert patched == bare
    assert {line.partition("=")[0] for line in after - before} == {"DS_PATCHES", "PYTHONPATH"}
    assert {line.partition("=")[0] for line in before - after} <= {"PYTHONPATH"}


def test_a_program_that_runs_no_hook_is_doubted(environment: Environment) -> None:
    words = ("--", environment.python, "-u", "-S", "-c", "print('ran')")
    done = environment.run(*words)
    assert (done.stdout, done.stderr.count("\n")) == ("ran\n", 1)
    assert "python -S runs no start-up hook" in done.stderr
    assert "(DS_PATCHES_STRICT)" in environment.refuses(*words, DS_PATCHES_STRICT="1")
