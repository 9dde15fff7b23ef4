"""`doctor` as a command: what it is given, what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_patches.__main__ import main
from ds_patches.diagnostics.report import SOUND, UNKNOWN, WRONG
from tests import shell
from tests.core import fake
from tests.diagnostics.doctor.asking import ask, write

CONFIG = '{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}'
ERROR = "RuntimeError: The size of tensor a (0) must match the size of tensor b (64)"


def test_a_configuration_and_a_log_are_of_one_training(tmp_path: Path) -> None:
    """The log has the release, the file the settings; the error comes first."""
    config = write(tmp_path / "ds.json", CONFIG)
    job = write(tmp_path / "job", f"DeepSpeed info: version=0.18.2, git-hash=x\n{ERROR}\n")
    answer = ask(config, job)
    assert answer.status == WRONG
    assert "no known defect in this log" in answer.text, "not at ZeRO 2"
    out = answer.out
    assert out.index("not known: RuntimeError") > out.index("only the last micro step counts")
    out = ask(write(config, CONFIG.replace("2}", "3}")), job).out
    assert out.index(f"error: {ERROR[:40]}") < out.index("may be: two backwards over one forward")
    assert "do:    ds-patches run -- torchrun train.py" in out
    assert ask(config, config).status == UNKNOWN


def test_a_line_a_file_and_a_dash_are_one(tmp_path: Path) -> None:
    done = shell.python("-m", "ds_patches", "doctor", "-", input=ERROR)
    outs = [done.stdout, ask(ERROR).out, ask(write(tmp_path / "job.log", ERROR)).out]
    assert done.returncode == WRONG
    assert len({" ".join(out.split()).partition(" error: ")[2] for out in outs}) == 1
    assert "two backwards over one forward" in ask("The size of tensor a (0) must match").out


def test_a_post_that_has_a_configuration_is_a_log(tmp_path: Path) -> None:
    config = "deepspeed_config:\n  zero_stage: 3\ndistributed_type: DEEPSPEED\n"
    for text in (f"With this file:\n{config}I get the following\n", f"{config}{ERROR}\n"):
        post = write(tmp_path / "post", f"{text}{ERROR}")
        assert "two backwards over one forward" in ask(post).text
    assert ask(write(tmp_path / "config", config), release="0.19.8").status == WRONG


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["none.log"], UNKNOWN, "none.log cannot be read"),
        (["none/of/it"], UNKNOWN, "none/of/it cannot be read"),
        (["ds_config.jsn"], UNKNOWN, "ds_config.jsn cannot be read"),
        (["size", "mismatch"], UNKNOWN, "quoted line of a log"),
        (["???"], UNKNOWN, "there is no word in '???'"),
        ([""], UNKNOWN, "there is no word in ''"),
        (["--release", "0.15.4"], UNKNOWN, "only 0.16.0 to 0.19.8 are known"),
        (["--release", "0.19.8"], SOUND, "no patch is refused"),
        (["--release", "0.20.0"], WRONG, "newer than 0.19.8, the newest that is known"),
        (["KeyError: 'labels'"], SOUND, "no known defect in this log not known: KeyError"),
        (["the loss is odd"], UNKNOWN, "nothing to judge here: no line of DeepSpeed's"),
        (["deepspeed is odd"], SOUND, "no known defect in this log"),
        (["wrong_dir"], UNKNOWN, "'wrong_dir': no file of that name"),
        (["object-has-no-attribute-ds_grads_remaining"], WRONG, "its error is known"),
        (["IndexError: pop from an empty deque", "--release", "0.19.2"], SOUND,
         "(known from 0.16.0 until 0.19.2)"),
    ],
)  # fmt: skip
def test_what_is_asked_is_answered(words: list[str], status: int, says: str) -> None:
    answer = ask(*words)
    assert (answer.status, says in answer.text + answer.err) == (status, True), answer
    assert ("refused: " in answer.out) == ("0.20.0" in words)
    assert ("not known: " in answer.out) == ("Error" in words[0])


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["doctr", "x"], UNKNOWN, "did you mean 'doctor'"),
        (["explain", "x"], UNKNOWN, "it is now doctor"),
        *(([command, "--help"], SOUND, "exit status: 0, ")
          for command in ("doctor", "prove", "status")),
        (["run", "--help"], SOUND, "exit status: the command's"),
    ],
)  # fmt: skip
def test_a_misspelt_command_and_help(
    words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    printed = "".join(capsys.readouterr())
    assert (int(ended.value.code or 0), printed.index("usage: ") < printed.index(says)) == (
        status,
        True,
    )
    assert status or len(printed.split("\n\n")[1]) > 20, "a description"


def test_the_exit_status_says_whether_something_is_left(tmp_path: Path) -> None:
    place = fake.Place(tmp_path, "sample")
    right = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
    file = write(tmp_path / "ds.json", right)
    only = {"DS_PATCHES": "sample"}  # the others are not for this DeepSpeed
    sound = place.command("doctor", "--json", str(file), **only)
    found = json.loads(sound.stdout)
    assert found["status"] == SOUND
    assert found["patches"]["sample"] == "would apply"
    assert all(row["depends"] for row in found["findings"])
    bad = place.command("doctor", "--json", str(tmp_path / "none.json"), status=UNKNOWN)
    assert json.loads(bad.stdout)["status"] == UNKNOWN
    place.path = [fake.dependencies(tmp_path / "lib")]
    place.command("doctor", bare=True, status=UNKNOWN)  # nobody can tell without DeepSpeed
    # what is not applied cures nothing
    args = ["doctor", "--release", "0.17.6", str(write(file, CONFIG))]
    said = place.command(*args, bare=True, status=WRONG)
    assert "accumulation fixes this; not applied" in " ".join(said.stdout.split())


def test_each_finding_has_its_do_line() -> None:
    """Also where two share one cure."""
    answer = ask("The size of tensor a (0) must match the size of tensor b (64)")
    assert answer.out.count("do: ") == answer.out.count("may be: ") > 1
