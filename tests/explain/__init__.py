"""`ds-patches explain`: every text that people meet leads to its answer.

`said/` has what real scripts printed: `<release>-<script>.txt`, of the scripts in `crashes.py`.
"""

from pathlib import Path

SAID = Path(__file__).with_name("said")
