"""What the commands print. Plain aligned text."""
