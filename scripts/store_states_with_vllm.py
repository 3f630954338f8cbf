"""Fill a directory of hidden states with vLLM, which runs bases that no single device holds.

    medusa train --config run.yaml --cache_hidden_states true --stop_after plan   # here: what to store
    python scripts/store_states_with_vllm.py runs/8b/states                       # where vLLM is
    medusa train --config run.yaml --cache_hidden_states true --resume auto       # here: trains

Of this project only ``medusa.training.states.format`` is needed there: a checkout on PYTHONPATH is enough.
vLLM must have the speculative method ``extract_hidden_states``; this was run with 0.32.0. Shards are written
whole, so a run that was stopped goes on with the same command, and several may run at once, each with its
part: ``--part 0/4`` to ``--part 3/4``. Prefix the base's own parallelism with ``--tensor-parallel-size``.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(
            f"must be NUMBER/COUNT with NUMBER from 0, such as 0/4, got {text!r}"
        )
    return int(number), int(count)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("states", type=Path, help="directory of stored states, as --stop_after plan made it")
    parser.add_argument("--part", type=part, default=(0, 1), help="of several writers at once; e.g. 0/4")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices that share the base")
    parser.add_argument("--batch-size", type=int, default=64, help="documents under way at once")
    parser.add_argument("--vllm", default="{}", help="more arguments of vllm.LLM, as a JSON object")
    return parser.parse_args()


ARGUMENTS = parsed() if __name__ == "__main__" else None  # before vLLM is imported, which takes a while

os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # one token more than the longest document

import torch
import vllm
from transformers import AutoConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as connector
from vllm.platforms import current_platform

from medusa.training.states.format import StatesDirectory, digest_of_weights

BASE_CONNECTOR = connector.ExampleHiddenStatesConnector


class OnCPU(BASE_CONNECTOR):
    """vLLM's connector, which copies on a CUDA stream, where there is none."""

    def _submit_async_write(self, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        states = connector.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.clone(), "token_ids": pending.token_ids.clone()}
        self._write_tensors(tensors, Done(), pending.filename, self._lock_fds.pop(pending.req_id, None))
        self._req_copy_events[pending.req_id] = Done()


class Done:
    """The event of a copy that is over."""

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


def checked_source(header: dict[str, Any]) -> dict[str, Any]:
    """What vLLM is to load.

    Raises:
        ValueError: the weights here are not those that the states are of.
    """
    name, weights = header["base_model"], header["weights"]
    kind, _, digest = weights.partition(" ")
    if kind == "commit":
        return {"model": name, "revision": digest}
    found = digest_of_weights(Path(name)) if Path(name).is_dir() else None
    if found != weights:
        raise ValueError(
            f"the states are of the base in {name!r} with the weights {weights!r:.60}, and here are "
            f"{found!r:.60}; give this program the same directory as `medusa train`"
        )
    return {"model": name}


def check_arithmetic(header: dict[str, Any]) -> str:
    """The type that the base computes in, as vLLM calls it.

    Raises:
        ValueError: the run mixes two types, which vLLM does not.
    """
    if header["arithmetic"] != header["base_dtype"]:
        raise ValueError(
            f"the states are to be computed in {header['arithmetic']} from weights in "
            f"{header['base_dtype']}; vLLM computes in one type: make the plan with --base_dtype "
            f"{header['arithmetic'].removeprefix('torch.')}"
        )
    return header["base_dtype"].removeprefix("torch.")


def engine(
    header: dict[str, Any], longest: int, spool: Path, arguments: argparse.Namespace
) -> tuple[vllm.LLM, list[int]]:
    """vLLM with the base of a manifest, for documents of ``longest`` tokens, and the decoder layers whose
    states it gives, ascending."""
    source = checked_source(header)
    config = AutoConfig.from_pretrained(source["model"], revision=source.get("revision"))
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    layers = sorted({*header["layers"], num_layers})
    transfer: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(spool)},
    }
    if current_platform.is_cpu():
        transfer |= {"kv_connector": "OnCPU", "kv_connector_module_path": Path(__file__).stem}
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    loaded = vllm.LLM(
        **source,
        dtype=check_arithmetic(header),
        tensor_parallel_size=arguments.tensor_parallel_size,
        max_num_seqs=arguments.batch_size,
        max_model_len=longest + 1,
        enable_prefix_caching=False,
        enforce_eager=current_platform.is_cpu(),
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": draft,
        },
        kv_transfer_config=transfer,
        **json.loads(arguments.vllm),
    )
    return loaded, layers


def computed(
    llm: vllm.LLM, states: StatesDirectory, tokens: Any, shard: int, layers: list[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """The states (T, (1 + L) * D) of the documents of a shard, the last one before the final norm."""
    documents = states.documents_of(shard)
    prompts = [{"prompt_token_ids": tokens[states.span(index)].tolist()} for index in documents]
    once = vllm.SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    wanted = [len(layers) - 1, *(layers.index(layer) for layer in states.header["layers"])]
    for index, output in zip(documents, llm.generate(prompts, once, use_tqdm=False), strict=True):
        path = output.kv_transfer_params["hidden_states_path"]
        given = connector.load_hidden_states(path)["hidden_states"]  # (T, L', D)
        connector.cleanup_hidden_states(path)
        yield index, given[:, wanted].flatten(1)


def main() -> None:
    arguments = ARGUMENTS
    assert arguments is not None
    number, count = arguments.part
    plans = [path.parent for path in sorted(arguments.states.glob("**/manifest.json"))]
    if not plans:
        raise FileNotFoundError(
            f"{arguments.states} holds no manifest.json; make the plan with `medusa train ... "
            "--cache_hidden_states true --stop_after plan`"
        )
    opened = [StatesDirectory.read(directory) for directory in plans]
    header = opened[0][0].header
    if any(each.header[key] != header[key] for each, _ in opened for key in ("weights", "layers")):
        raise ValueError(f"{arguments.states} holds states of several bases or layers; name one of {plans}")
    missing = [states.missing()[number::count] for states, _ in opened]
    print(f"{sum(map(len, missing))} shards to write in {arguments.states}", flush=True)
    if not any(missing):
        return
    longest = max(int((states.starts[1:] - states.starts[:-1]).max()) for states, _ in opened)
    with tempfile.TemporaryDirectory(dir=arguments.states, prefix=".spool-") as spool:
        llm, layers = engine(header, longest, Path(spool), arguments)
        for (states, tokens), shards in zip(opened, missing, strict=True):
            for shard in shards:
                found = computed(llm, states, tokens, shard, layers)
                states.write(shard, found, f"vllm {vllm.__version__}", is_normed=False)
                print(f"{states.path(shard)} written", flush=True)


if __name__ == "__main__":
    main()
