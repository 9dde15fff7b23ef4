"""The core's tests: no patch of the package is named in them."""
