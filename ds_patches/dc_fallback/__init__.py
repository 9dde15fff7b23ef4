"""DeepCompile ZeRO-3 with frames that Dynamo skips."""
