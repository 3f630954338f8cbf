"""``medusa serve``: load a model, and answer over HTTP until told to stop."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from medusa.cli.commands import ServeOptions
from medusa.cli.loading import load_model
from medusa.decoding.batch import BatchLimits
from medusa.progress import log_console

KEY_VARIABLE = "MEDUSA_API_KEY"
CPU_CHUNK = 64
"""Prompt tokens at a time on a CPU: there a token costs no more in a short chunk than in a long one, and
running answers wait for the whole of it."""


def serve(options: ServeOptions) -> list[str]:
    """Serve until SIGINT or SIGTERM."""
    from medusa.serving.gate import AccessSettings, is_loopback
    from medusa.serving.server import TlsFiles, bound_socket, bound_unix_socket, run_server
    from medusa.serving.service import Service, ServiceSettings

    address = options.address
    keys = api_keys(address.api_key, os.environ)
    if address.unix_socket is None and not is_loopback(address.host) and not keys:
        log_console().print(
            f"warning: listening on {address.host} without --api-key: whoever reaches this machine "
            "may use the model",
            style="bold red",
            soft_wrap=True,
        )
    access = AccessSettings(
        api_keys=keys,
        max_body_bytes=address.max_body_mib * 2**20,
        cors_origins=tuple(origin.lower() for origin in address.cors_origin),
        allowed_hosts=(address.host, *address.allowed_host),
        logs_prompts=address.log_prompts,
    )
    tls = None if address.tls_certificate is None else TlsFiles(address.tls_certificate, address.tls_key)
    path = address.unix_socket
    with bound_socket(address.host, address.port) if path is None else bound_unix_socket(path) as bound:
        model, load = load_model(options.model, template=options.template), options.load
        names = options.served_model_name or (PurePath(model.base.name_or_path or "model").name,)
        limits = BatchLimits(
            max_rows=load.max_rows,
            max_slots=load.max_slots,
            max_waiting=load.max_waiting,
            chunk=load.chunk or (CPU_CHUNK if model.device.type == "cpu" else BatchLimits.chunk),
            prefix_bytes=load.prefix_mib * 2**20,
        )
        settings = ServiceSettings(
            names,
            limits,
            load.max_new_tokens,
            load.timeout,
            options.plain,
            options.race,
            takes_any_name=options.any_model_name,
            remember_bytes=options.remember * 2**20,
            num_owners=len(keys),
            remembers_together=options.remember_together,
            template_options=options.template.told,
        )
        run_server(Service(model, settings), access, bound, address.grace, tls)
    return []  # its first line said where it answers


def api_keys(flags: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of ``--api-key`` and of ``environment``, each once, without the blanks around them."""
    variable = environment.get(KEY_VARIABLE)
    given = [("--api-key", key) for key in flags]
    given += [] if variable is None else [(KEY_VARIABLE, key) for key in variable.split(",")]
    for source, key in given:
        if not re.fullmatch("[!-~]+", key.strip()):
            got = "a key with others in it" if key.strip() else "an empty key"
            advice = "name a key, or leave it out to want none"
            raise ValueError(f"{source} must hold keys of visible ASCII characters, got {got}; {advice}")
    return tuple(dict.fromkeys(key.strip() for _, key in given))
