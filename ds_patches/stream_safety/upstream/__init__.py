"""What stream_safety knows about DeepSpeed's private state, one module per owner.

Every private name of DeepSpeed that the patch touches is named here or in `binding`, so a release
that moves one breaks a file of this package and nothing else.
"""
