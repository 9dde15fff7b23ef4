"""Tests of what `doctor` is made of."""
