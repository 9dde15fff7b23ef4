"""What zero3_hooks knows of DeepSpeed's private state, and how that differs by release."""
