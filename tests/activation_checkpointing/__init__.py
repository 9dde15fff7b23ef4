"""deepspeed.checkpointing: what several backwards over one forward come to."""
