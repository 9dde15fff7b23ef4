"""Parts of a step, as plain PyTorch sees it: the graph task, and what is attached."""
