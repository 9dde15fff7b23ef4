"""What people install: the wheel and the sdist."""
