"""The contract every patch meets: gate, journal, states, flags. Knows no patch by name."""
