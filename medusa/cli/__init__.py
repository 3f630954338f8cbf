"""The ``medusa`` command, and what the programs share: flags, loading, progress, reports."""
