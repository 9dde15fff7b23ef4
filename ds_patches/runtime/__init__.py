"""What several patches ask of DeepSpeed's live objects, each thing once.

- `engines`: what an engine is and does, told apart by what it has and not by its release;
- `device`: streams and waiting, on whichever accelerator;
- `attached`: a patch's own state of an engine or optimizer, kept where it dies with its owner;
- `attributes`: attributes of those objects that read otherwise for a while, and functions around a
  method at one object;
- `graph_task`: what a backward is, seen from inside it.

It knows no patch, and core knows nothing of it.
"""
