"""What makes an interpreter apply patches by itself: hooks, commands, waiting, applying, cost."""
