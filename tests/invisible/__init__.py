"""Scripts keep, hook, copy, pickle and look at objects: patched, with the same answers."""
