"""Small patches: each file has the binding and the wrappers of one patch."""
