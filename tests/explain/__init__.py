"""`ds-patches explain`: every text that people meet leads to its answer.

`said/` has what real scripts printed, on two ranks: `<release>-<script>.txt`, of the scripts in
`crashes.py`. `python -m tests.explain RELEASE SCRIPT` writes one anew.
"""

from pathlib import Path

SAID = Path(__file__).with_name("said")
