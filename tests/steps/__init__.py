"""What a step is made of, as plain PyTorch sees it: the graph task, and what is attached."""
