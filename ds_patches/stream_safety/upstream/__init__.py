"""What stream_safety knows of DeepSpeed's private state, and how that differs by release."""
