"""From files to micro-batches of tokens and labels."""
