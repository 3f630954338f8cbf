"""Hidden states of the base: computed in every step, or stored once; here, or by a serving engine."""
