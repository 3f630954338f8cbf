"""``medusa serve``: load a model, and answer over HTTP until a signal."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from medusa.cli.loading import load_model
from medusa.cli.option_types import ServeOptions
from medusa.console import log_console

KEY_VARIABLE = "MEDUSA_API_KEY"


def serve(options: ServeOptions) -> list[str]:
    """Serve until SIGINT or SIGTERM."""
    from medusa.serving.gate import is_loopback
    from medusa.serving.server import bound_socket, check_certificate, run_server
    from medusa.serving.service import Service

    address, keys = options.address, api_keys(options.access.api_key, os.environ)
    if not is_loopback(address.host) and not keys:
        log_console().print(
            f"warning: listening on {address.host} without --api-key: everyone who reaches this machine "
            "may use the model",
            style="bold red",
            soft_wrap=True,
        )
    access = replace(
        options.access,
        api_key=keys,
        cors_origin=tuple(map(str.lower, options.access.cors_origin)),
        allowed_host=(address.host, *options.access.allowed_host),
    )
    check_certificate(address)
    with bound_socket(address.host, address.port) as bound:
        model = load_model(options.model, template=options.template)
        service = Service(model, options.service, options.template.template_kwargs, num_owners=len(keys))
        run_server(service, access, bound, address)
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
