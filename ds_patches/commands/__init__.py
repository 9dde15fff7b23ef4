"""What the commands print. Plain aligned text; colour only on a terminal."""
