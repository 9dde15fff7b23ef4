"""`ds-patches explain`: every text that people meet leads to its answer.

`said/` has what real scripts printed on stock, `<release>-<script>.txt`, as it was printed but for
the folders of the machine.
"""

from pathlib import Path

SAID = Path(__file__).with_name("said")
