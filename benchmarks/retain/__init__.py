"""zero3_retain, measured: several backwards over one ZeRO-3 forward."""
