"""Whole programs, on scikit-learn's handwritten digits. Each also checks its results."""
