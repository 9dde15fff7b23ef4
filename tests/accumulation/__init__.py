"""What a step's gradient is: the ledger of what releases get wrong, and what is dropped."""
