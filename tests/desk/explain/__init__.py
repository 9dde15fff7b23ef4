"""`ds-patches explain`: every text that people meet leads to its answer.

`said/` has what real scripts printed on stock: `<anchor of the answer>/<release>.txt`, as it was
printed but for the folders of the machine.
"""
