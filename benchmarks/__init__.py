"""Benchmarks that anyone with the hardware can start; see README.md beside this file."""
