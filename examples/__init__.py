"""Training scripts that use the patches, each run by one command."""
