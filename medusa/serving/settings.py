"""The options of a server: capacity, address and access.

These are options of ``medusa serve``, and are read without torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from medusa.options import check_above, check_at_least, check_at_most

HOST_NAME = r"[A-Za-z0-9_.-]+|[0-9a-fA-F:.]+(%\w+)?"
"""A name, or an address of either kind."""
ORIGIN = r"\*|[a-zA-Z][\w+.-]*://[^/\s]+"


@dataclass(frozen=True)
class ServiceOptions:
    """The served model and the capacity. Further requests wait, and beyond the queue get 503 with
    Retry-After."""

    served_model_name: tuple[str, ...] = ()
    """Names of the model for clients; may be given several times. None is the base's name, also its last
    part alone."""
    any_model_name: bool = True
    """Whatever clients call the model is this one, since many send a name of their own; answers have its real
    name. --no-any-model-name refuses other names (404)."""
    temperature: float | None = None
    """Sampling temperature of requests that name none, 0 to 2. None is what the base comes with, in its
    generation configuration or its GGUF file, else 1."""
    top_p: float | None = None
    """The same for top-p, 0 to 1; else 1, which leaves it out."""
    top_k: int | None = None
    """The same for top-k; else 0, which leaves it out."""
    min_p: float | None = None
    """The same for min-p, 0 to 1; else 0, which leaves it out."""
    repeat_penalty: float | None = None
    """The same for the repetition penalty, more than 0 to 10; else 1, which leaves it out."""
    plain: bool = False
    """Decode without heads: the same text, slower."""
    allow_plain: bool = False
    """Allow requests with medusa_plain (no drafting), for the race of the chat page. They get a second batch
    with a key-value cache of its own and up to half of the compute time."""
    suffix_cache_mib: int = 0
    """Memory for past questions and answers, in MiB, from which suffix matching drafts: repeated questions
    are answered sooner, with the same text. Each API key has an equal part of its own. 0: none."""
    learn: bool = False
    """Keep answers, each with the end of its prompt, on this machine, at most 32 MiB; and have heads learn
    from them while nothing is asked: better ones are used from the next request on. `medusa heads forget
    BASE` removes all of it."""
    learn_from_all: bool = False
    """The same where several API keys are given: heads that learned from one user's texts guess these for
    another, who can tell by the time that an answer takes."""
    embeddings: Literal["mean", "last"] | None = None
    """Answer /v1/embeddings where the base's files do not say that it is made for that: with the mean of its
    states, or the last one, at length 1. Of a chat model they tell less than those of an embedding model."""
    max_rows: int = 16
    """Answers that decode together."""
    max_waiting: int = 64
    """Requests that wait."""
    cache_mib: int | None = None
    """Key-value cache of the running answers, in MiB: every one takes as much as the longest. None is half of
    the memory that is left once the model is loaded, and with --models at most an eighth of --memory-mib."""
    prefix_mib: int | None = None
    """Key-value cache of texts that have ended, in MiB: a conversation's next turn does not read them again.
    None is an eighth of that memory, or 32,768 tokens where these take less; with --models at most a
    thirty-second of --memory-mib."""
    prefix_store_mib: int = 4096
    """The same on disk, in MiB, of all models: a prompt of 1,024 tokens and more that was read before is not
    read again after a restart. 0: nothing is written."""
    chunk: int | None = None
    """Prompt tokens that are read between two steps of the running answers; none: 64 on a CPU,
    fewer where they take longer because many others precede them, else 256."""
    max_new_tokens: int = 4096
    """Longest answer, also where a client names none."""
    timeout: float = 600.0
    """Longest time for an answer, waiting included, in seconds."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_rows", "cache_mib", "chunk", "max_new_tokens")
        check_at_least(self, 0, "suffix_cache_mib", "max_waiting", "prefix_mib", "prefix_store_mib")
        check_at_least(self, 0, "temperature", "top_p", "top_k", "min_p")
        check_at_most(self, 2, "temperature")
        check_at_most(self, 1, "top_p", "min_p")
        check_at_most(self, 10, "repeat_penalty")
        check_above(self, 0, "timeout", "repeat_penalty")
        if self.learn_from_all and not self.learn:
            raise ValueError("learn_from_all goes with learn; give both")
        if self.plain and self.suffix_cache_mib:
            raise ValueError("plain drafts nothing, and suffix_cache_mib is for drafting; give one of them")


@dataclass(frozen=True)
class PoolOptions:
    """Several models behind one server: the one that a request names is loaded when it is asked for."""

    models: tuple[str, ...] = ()
    """Models in place of --base: each a base as there, or NAME=BASE, or a directory whose GGUF files and
    model directories are all served. Requests choose by name, and the first answers those that name none."""
    memory_mib: int | None = None
    """Memory that loaded models may take together, caches included, in MiB. Where another one is asked for
    and there is no room, idle ones are put down; one that answers is not cut, and the other waits. None is
    seven eighths of what is free at the start."""
    idle_minutes: float | None = None
    """Minutes without a request after which a model is put down; 0 is at once. Clients of Ollama's protocol
    may say so themselves, by keep_alive. None is 15."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "memory_mib")
        check_at_least(self, 0, "idle_minutes")
        for name in ("memory_mib", "idle_minutes"):
            if getattr(self, name) is not None and not self.models:
                raise ValueError(f"{name} goes with models, which are loaded on demand; give --models")


@dataclass(frozen=True)
class AddressOptions:
    """Where to listen."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every network, and wants an API key."""
    port: int = 8000
    """0 takes any that is free, and says which."""
    tls_certificate: str | None = None
    """PEM file with the certificate chain. Serves HTTPS only."""
    tls_key: str | None = None
    """A file with its private key; none: it is in the same file."""
    grace: float = 30.0
    """Seconds that running answers get to end after Ctrl-C or SIGTERM."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "port", "grace")
        if self.port > 65535:
            raise ValueError(f"port must be at most 65535, got {self.port}")
        if self.tls_key is not None and self.tls_certificate is None:
            raise ValueError("tls_key goes with tls_certificate; name both")
        _check_names("host", (self.host,), HOST_NAME, "a name or an address without scheme and port")


@dataclass(frozen=True)
class AccessOptions:
    """To whom to listen."""

    api_key: tuple[str, ...] = ()
    """Clients must send one of these as Bearer key; may be given several times. Also from MEDUSA_API_KEY,
    with commas between."""
    allowed_host: tuple[str, ...] = ()
    """Names by which clients may reach the server, beside localhost, its addresses and --host."""
    cors_origin: tuple[str, ...] = ()
    """Origins whose web pages may call the server, as https://chat.example; * is all. None but its own page
    by default."""
    max_body_mib: int = 4
    """Largest body of a request."""
    log_prompts: bool = False
    """Write what users say into the log."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_body_mib")
        names = "names or addresses without scheme and port"
        _check_names("allowed_host", self.allowed_host, HOST_NAME, names)
        origins = "origins as https://chat.example, without a path, or *"
        _check_names("cors_origin", self.cors_origin, ORIGIN, origins)

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mib * 2**20


def _check_names(option: str, names: Sequence[str], form: str, rule: str) -> None:
    for name in names:
        if not re.fullmatch(form, name):
            raise ValueError(f"{option} must be {rule}, got {name!r}")
