"""Whole programs, on scikit-learn's handwritten digits. Each is also a check of what it shows."""
