"""The ``medusa`` command, and what all programs share: options, loading, reports."""
