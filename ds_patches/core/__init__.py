"""Gate, wrappers, states, flags and the check of ranks, which all patches share. Names no patch."""
