"""Small cures: a patch in one file each, with its page, its binding and its wrappers."""
