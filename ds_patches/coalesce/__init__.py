"""N backwards, one gradient reduction.
"""
