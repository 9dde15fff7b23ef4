"""Parts of a step: graph tasks, the order in which ranks reduce, and ranks that wait."""
