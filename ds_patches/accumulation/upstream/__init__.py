"""Every private name of DeepSpeed that this patch touches, and how it differs by release.

The rest of the patch speaks of gathering, buckets and partitions; where those live in
0.16.0 ... 0.19.8 is said here and nowhere else. Differences are told by structure, not by version
number: source builds carry any number they like.
"""
