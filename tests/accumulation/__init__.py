"""The gradient of a step: the ledger of what releases get wrong, and what is dropped."""
