"""What every patch meets: gate, layers, states, flags, the ranks' comparison. Names no patch."""
