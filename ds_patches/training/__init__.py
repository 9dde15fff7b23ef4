"""How an engine trains: a step and its backwards, what is attached to an engine, how ranks meet.

- `graph_task`: what a backward is, seen from inside it, and which outputs lead into its graph;
- `steps`: which backwards belong to a step, in what state it is, and what it asks of its gradients;
- `kept`: a patch's own state of an engine or optimizer, kept where it dies with its owner; the
  engines whose steps are kept, and who listens to them;
- `ranks`: what ranks tell each other.

It knows `core` and `upstream`, and no patch.
"""
