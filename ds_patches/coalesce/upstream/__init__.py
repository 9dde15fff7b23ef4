"""What coalesce knows about DeepSpeed's private state, one module per owner.

Every private name of DeepSpeed that the patch touches is named here or in `binding`, or, where
other patches touch it too, in `ds_patches.runtime.engines`: a release that moves one breaks no
other file. Releases are told apart by what they have, never by their number.
"""
