"""Hidden states of the base: live, or stored once."""
