"""dc_fallback, measured: DeepCompile under ZeRO-3, and the frames that Dynamo skips."""
