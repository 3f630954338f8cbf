"""The server: an OpenAI-compatible HTTP application over one continuous batch; ``medusa serve`` starts it."""
