"""What a base learns on this machine: texts that it wrote, heads that came of them, learning while idle."""
