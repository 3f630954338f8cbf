"""``medusa serve``: load a model, and answer over HTTP until a signal."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from medusa.cli.options import ModelOptions
from medusa.console import log_console
from medusa.options import TemplateOptions
from medusa.serving.settings import AccessOptions, AddressOptions, PoolOptions, ServiceOptions

if TYPE_CHECKING:
    from medusa.serving.service import Service

KEY_VARIABLE = "MEDUSA_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Answer over HTTP as OpenAI's servers do: /v1/chat/completions, /v1/responses, /v1/completions,
    /v1/models, /tokenize, /detokenize, /version, /health, /metrics; as Anthropic's: /v1/messages; and as
    Ollama's: /api/chat, /api/generate. Requests are decoded together, and each gets the same text as in a
    batch of its own. /v1/embeddings is for models that are made for it.

        medusa serve
        medusa serve --engine int8 --max-rows 8
        medusa serve --host 0.0.0.0 --api-key SECRET
        medusa serve --models small=qwen2.5-coder-0.5b large=qwen2.5-coder-1.5b

        curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
            -d '{"messages": [{"role": "user", "content": "Hello!"}], "stream": true}'
    """

    model: ModelOptions = ModelOptions()
    template: TemplateOptions = TemplateOptions()
    pool: PoolOptions = PoolOptions()
    service: ServiceOptions = ServiceOptions()
    address: AddressOptions = AddressOptions()
    access: AccessOptions = AccessOptions()


def serve(options: ServeOptions) -> list[str]:
    """Serve until SIGINT or SIGTERM."""
    from medusa.cli.served_models import model_pool  # which imports torch, as all of these do
    from medusa.serving.gate import is_loopback
    from medusa.serving.model_pool import ModelPool
    from medusa.serving.server import bound_socket, check_certificate, run_server

    address = options.address
    keys = api_keys(options.access.api_key, os.environ)
    learns = options.service.learn
    if learns and len(keys) > 1 and not options.service.learn_from_all:
        raise ValueError(
            f"learn with {len(keys)} API keys lets heads that learned from one user's texts guess for the "
            "others; add --learn-from-all, or leave --learn out"
        )
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
        if options.pool.models:
            pool = model_pool(options.pool, options.model, options.template, options.service, len(keys))
        else:
            pool = ModelPool.of(_service(options, len(keys)))
        run_server(pool, access, bound, address)
    return []  # its first line said where it answers


def _service(options: ServeOptions, num_keys: int) -> Service:
    """The service of the one base that was named."""
    from medusa.cli.loading import learn_from_use, load_model
    from medusa.cli.served_models import model_names
    from medusa.serving.service import Service

    model = load_model(options.model, template=options.template)
    names = options.service.served_model_name or model_names(options.model.base, model.base.name_or_path)
    served = replace(options.service, served_model_name=names)
    if options.service.learn:
        learn_from_use(model, options.model, options.service.plain)
    return Service(model, served, options.template.template_kwargs, num_keys)


def api_keys(flags: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of ``--api-key`` and of ``environment``, each once, without the blanks around them."""
    variable = environment.get(KEY_VARIABLE)
    keys = [("--api-key", key) for key in flags]
    keys += [] if variable is None else [(KEY_VARIABLE, key) for key in variable.split(",")]
    for source, key in keys:
        if not re.fullmatch("[!-~]+", key.strip()):
            got = "a key with others in it" if key.strip() else "an empty key"
            advice = "name a key, or leave it out to want none"
            raise ValueError(f"{source} must hold keys of visible ASCII characters, got {got}; {advice}")
    return tuple(dict.fromkeys(key.strip() for _, key in keys))
