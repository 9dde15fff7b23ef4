"""The wheel and the sdist that people install."""
