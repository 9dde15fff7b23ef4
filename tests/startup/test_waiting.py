"""Waiting for the import of DeepSpeed: nothing of the wait is left, and it ends with a success."""

import zipfile
from pathlib import Path

from tests.core import fake
from tests.startup.environment import WANTED, Environment

#: Counts how often the end of an import was seen.
COUNT = """
import importlib, importlib.util, inspect, os, sys
from importlib.machinery import SourceFileLoader

ends = 0

def imported():
    global ends
    ends += 1
    wait(waiting)

(waiting,) = (finder for finder in sys.meta_path if hasattr(finder, "ds_patches"))
wait, waiting.imported = type(waiting).imported, imported
"""

#: Programs, in a folder with a DeepSpeed of one line, and with another module.
PROGRAMS = {
    # Of the patches, too: see `test_autoapply`.
    "after a failure of the import it is awaited on": """
sys.path[0] = "failing"
for _ in range(2):
    try:
        import deepspeed
    except ZeroDivisionError:
        assert "deepspeed" not in sys.modules
    else:
        raise AssertionError
assert not ends
sys.path[0] = ""
import deepspeed
assert ends == 1
""",
    "the loader is Python's own": """
import deepspeed, other
loader = deepspeed.__spec__.loader
assert type(loader) is SourceFileLoader is type(other.__loader__)
assert deepspeed.__loader__ is loader
assert vars(loader).keys() == vars(other.__loader__).keys()
assert inspect.getsource(deepspeed) == "answer = 42\\n"
assert importlib.reload(deepspeed) is deepspeed
assert ends == 1, "a reload is no first import"
""",
    # As those of a zip file do. Programs look to learn whether DeepSpeed is installed.
    "looking for it is no import, also where modules share a loader": """
sys.path.insert(0, os.path.abspath("some.zip"))
for _ in range(2):
    assert importlib.util.find_spec("deepspeed").origin.startswith(sys.path[0])
import other
assert not ends
import deepspeed
assert ends == 1
assert "exec_module" not in vars(other.__loader__)
""",
    # Such as a checkout's, beside the script.
    "a bare folder of that name is not it": """
sys.path[:] = ["bare", *(folder for folder in sys.path[1:] if "site-packages" not in folder)]
import deepspeed
assert not ends and deepspeed.__file__ is None
del sys.modules["deepspeed"]
sys.path[0] = ""
import deepspeed
assert ends == 1
""",
    # Tracing libraries use them; they put a proxy around the loader.
    "beside wrapt's import hooks": """
import wrapt
calls = []
wrapt.register_post_import_hook(lambda _: calls.append("theirs"), "deepspeed")
import deepspeed
assert (calls, ends) == (["theirs"], 1)
assert "exec_module" not in vars(deepspeed.__loader__)
""",
}


def test_the_wait(installed: Environment, tmp_path: Path) -> None:
    fake.write(tmp_path / "deepspeed/__init__.py", "answer = 42\n")
    fake.write(tmp_path / "other.py", "answer = 42\n")
    fake.write(tmp_path / "failing/deepspeed/__init__.py", "1 / 0\n")
    (tmp_path / "bare/deepspeed").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        for name in ("deepspeed", "other"):
            archive.writestr(f"{name}.py", "answer = 42")
    for program in PROGRAMS.values():
        installed.start("-c", COUNT + program, cwd=tmp_path, **WANTED)
