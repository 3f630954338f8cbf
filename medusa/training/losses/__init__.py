"""The losses: of Medusa heads, of an EAGLE-style head, and of an adapted base."""
