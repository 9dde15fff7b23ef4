"""What zero3_retain knows of DeepSpeed's private state, and how that differs by release."""
