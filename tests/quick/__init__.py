"""Which cases `make test` runs."""
