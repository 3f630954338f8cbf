"""Hidden states that a serving engine computed: read from the files that it wrote, or asked of it.

vLLM (0.18 and newer) writes them where its ``speculative_config`` has the method ``extract_hidden_states``: a
safetensors file for each request, with ``token_ids`` (n,) and ``hidden_states`` (n, layers, D), and a file
``.lock`` beside it that is held (flock) while it is written. Layer i of
``eagle_aux_hidden_state_layer_ids`` stands for the states after i layers, and those after the last are not
normed (https://docs.vllm.ai/en/latest/features/speculative_decoding/extract_hidden_states/).

No layer of the base is loaded here: its final norm, and its LM head to check the states with.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM, hidden_size, lm_head, place_of
from medusa.base.passes import logits_of_states
from medusa.training.config import DataOptions
from medusa.training.data.dataset import Documents
from medusa.training.endpoints import Endpoint, EndpointPool, Refusal

CONCURRENCY = 16
"""Requests under way at each server."""
TOLERANCE = 0.5
"""Natural logarithms between a server's log-probability of a token and that of its states, which are perhaps
in bfloat16."""
SECONDS_UNREADABLE = 30.0
"""For so long a file may be missing or cut short: it is being written."""
SECONDS_BETWEEN_LOOKS = 2.0
NUM_CHECKED = 8
"""Documents whose states are held against what the engine says of them: of each server, and of the files."""


class ServedHiddenStates:
    """States of documents from ``sources``: addresses of vLLM's servers, and directories of its files.

    A document whose states no file has is asked for where there are servers; else its file is waited for.

    Args:
        base: the base without its layers.
        sources: addresses, as ``http://localhost:8000/v1``, and directories.
        engine_layers: the layers in the engine's files, in their order; by default those that are read, in
            ascending order, which ends with the last.
        deletes_read: delete files of the directories once all states of a shard are stored.
        timeout_minutes: how long a new file is waited for.
        say: tells the user what happens to servers and files.

    Raises:
        ValueError: the base has no final norm that could be found.
        FileNotFoundError: a source is neither an address nor a directory.
    """

    def __init__(
        self,
        base: CausalLM,
        sources: Sequence[str],
        engine_layers: Sequence[int] | None = None,
        *,
        deletes_read: bool = False,
        timeout_minutes: float = 60.0,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.base = base
        self._norm = final_norm(base)
        self._engine_layers = engine_layers
        self._deletes_read = deletes_read
        self._seconds = 60 * timeout_minutes
        self._say = say
        urls = [each for each in dict.fromkeys(sources) if "://" in each]
        self._directories = [Path(each) for each in dict.fromkeys(sources) if "://" not in each]
        for directory in self._directories:
            if not directory.is_dir():
                raise FileNotFoundError(
                    "states_from must name directories of files that vLLM wrote, or addresses of its "
                    f"servers, as http://localhost:8000/v1; got {str(directory)!r}, no directory here"
                )
        self._pool: EndpointPool[StatesEndpoint, _Question, _Computed] | None = None
        if urls:
            servers = [StatesEndpoint(url, say=say) for url in urls]
            self._pool = EndpointPool(servers, CONCURRENCY, self._ask, say)
        self._files: _FilesOfDocuments | None = None
        self._used: list[Path] = []  # files of the shard that is being stored
        self._num_from_files = 0
        self._num_asked = 0
        self._num_judged = 0

    def of_documents(
        self, documents: Documents, wanted: range, layers: tuple[int, ...], options: DataOptions
    ) -> Iterator[tuple[int, Tensor]]:
        """See :class:`medusa.training.states.base.DocumentStates`; zeros where no state is needed.

        Raises:
            ValueError: states are of other layers, sizes or weights than the run's, or a server refuses a
                document.
            ConnectionError, PermissionError: no server answers any more.
            TimeoutError: no new file came.
        """
        self._delete_stored()
        order = self._order(layers)
        if self._files is None or self._files.documents is not documents:
            self._files = _FilesOfDocuments(self._directories, documents)
        left: list[int] = []
        for index in wanted:
            if not prompt_length(documents, index):
                yield index, self._padded(documents, index, torch.zeros(0, (1 + len(layers)) * self._size))
                continue
            left.append(index)
        for index in self._present(left):
            path = self._files.path_of[index]
            states = self._read(path, documents, index, order)
            self._judge(states, documents, index, path)
            yield index, self._padded(documents, index, states)
            self._num_from_files += 1
            self._files.num_left[path] -= 1
            self._used.append(path)
            left.remove(index)
        for index, states in self._answers(left, documents, order):
            self._num_asked += 1
            yield index, self._padded(documents, index, states)

    def finish(self) -> None:
        """Say whose states were stored; no process waits for another."""
        self._delete_stored()
        deleted = " (deleted)" if self._deletes_read else ""
        self._say(
            f"hidden states: {self._num_from_files} documents from files{deleted}, "
            f"{self._num_asked} asked of servers"
        )

    def _delete_stored(self) -> None:
        """Delete the files whose states are stored, where told, and which no other document needs."""
        for path in self._used if self._deletes_read else ():
            if self._files is not None and not self._files.num_left[path]:
                _delete(path)
        self._used.clear()

    @property
    def _size(self) -> int:
        return hidden_size(self.base)

    def _order(self, layers: tuple[int, ...]) -> _Layers:
        """Where the engine's states have the last layer's and those of ``layers``."""
        last = self.base.config.get_text_config(decoder=True).num_hidden_layers
        in_files = sorted({*layers, last}) if self._engine_layers is None else list(self._engine_layers)
        lacking = sorted({last, *layers} - set(in_files))
        if lacking:
            raise ValueError(
                f"states_layers must hold {sorted({last, *layers})}, the layers that this run reads, got "
                f"{in_files}; serve vLLM with them as eagle_aux_hidden_state_layer_ids"
            )
        return _Layers([in_files.index(layer) for layer in (last, *layers)], len(in_files))

    def _present(self, wanted: Sequence[int]) -> Iterator[int]:
        """Those of the ``wanted`` documents that files have; all, as they come, where there is no server."""
        files = self._files
        assert files is not None
        waiting = set(wanted) if self._directories else set()
        since = time.monotonic()
        was_told = False
        while waiting:
            num_files = files.look()
            present = sorted(waiting & files.path_of.keys())
            yield from present
            waiting -= set(present)
            if self._pool is not None or not waiting:
                return
            if present or num_files:
                since = time.monotonic()
            elif time.monotonic() - since > self._seconds:
                raise TimeoutError(
                    f"{len(waiting)} documents have no states in {', '.join(map(str, self._directories))}, "
                    f"and no file came for {self._seconds / 60:g} minutes (timeout_minutes). Their tokens "
                    "must be those that vLLM got; an address of a server in states_from has those computed "
                    "that no file has"
                )
            elif not was_told:
                self._say(
                    f"no file has the states of {len(waiting)} documents; waiting {self._seconds / 60:g} "
                    "minutes for the next file (timeout_minutes). An address of a server in states_from has "
                    "those computed that no file has"
                )
                was_told = True
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _answers(
        self, wanted: Sequence[int], documents: Documents, order: _Layers
    ) -> Iterator[tuple[int, Tensor]]:
        """The states of the ``wanted`` documents from the servers, by their indices."""
        if self._pool is None or not wanted:
            return
        questions = (
            _Question(index, documents[index].tokens[: prompt_length(documents, index)], order)
            for index in wanted
        )
        for question, outcome in self._pool.outcomes(lambda: next(questions, None)):
            computed = cast(_Computed, outcome)
            if computed.server.num_checked < NUM_CHECKED:
                computed.server.num_checked += 1
                self._check(computed)
            yield question.document, computed.states

    def _ask(self, server: StatesEndpoint, question: _Question) -> _Computed:
        try:
            answer = server.states_of(question.tokens.tolist())
        except Refusal as refusal:
            raise ValueError(
                f"a document of {len(question.tokens)} tokens was refused: {refusal}; a smaller max_length "
                "makes documents shorter, and vLLM's --max-model-len takes longer ones"
            ) from refusal
        states = self._normed(_read_file(answer.path, question.tokens, self._size, question.order))
        _delete(answer.path)
        return _Computed(server, answer, states)

    def _check(self, computed: _Computed) -> None:
        """Raise ValueError where the LM head makes of the last state something else than the server."""
        server, answer, states = computed
        logits = self._logits(states[-1:])[0]
        if answer.token >= len(logits):
            raise ValueError(
                f"{server.url} answered with token {answer.token}, and {self.base.name_or_path!r} has "
                f"{len(logits)}: it serves another model"
            )
        ours = float(logits[answer.token])
        if not abs(ours - answer.log_probability) <= TOLERANCE:
            raise ValueError(
                f"{server.url} gives token {answer.token} the log-probability {answer.log_probability:.2f}, "
                f"and the LM head of {self.base.name_or_path!r} makes {ours:.2f} of its states: it serves "
                "another model, or states of other layers. eagle_aux_hidden_state_layer_ids must be the "
                "layers of states_layers, in their order; by default fused_layers and the number of layers"
            )

    def _judge(self, states: Tensor, documents: Documents, index: int, path: Path) -> None:
        """Raise ValueError where ``states`` of one of the first documents foresee its text worse than a guess
        among all tokens would."""
        if self._num_judged >= NUM_CHECKED:
            return
        self._num_judged += 1
        tokens, is_label = documents[index]
        places = torch.from_numpy(is_label[1 : len(states) + 1].nonzero()[0])
        logits = self._logits(states[places, : self._size])
        following = torch.from_numpy(tokens[1:].astype(np.int64))[places].to(logits.device)
        loss = -float(logits.gather(1, following[:, None]).mean())
        if not loss < math.log(logits.shape[1]):
            raise ValueError(
                f"the states in {path} foresee their text with a loss of {loss:.1f}, worse than a guess "
                f"among all {logits.shape[1]} tokens: they are of another model than "
                f"{self.base.name_or_path!r}, or of other layers. states_layers names the layers of the "
                "files, in their order; by default fused_layers and the number of layers"
            )

    @torch.no_grad()
    def _logits(self, states: Tensor) -> Tensor:
        """Log-probabilities (n, V) after ``states`` (n, D) or more of a row."""
        head = lm_head(self.base)
        last = states[:, : self._size].to(place_of(head), self.base.dtype)
        return logits_of_states(self.base, last).float().log_softmax(-1)

    def _read(self, path: Path, documents: Documents, index: int, order: _Layers) -> Tensor:
        tokens = documents[index].tokens[: prompt_length(documents, index)]
        return self._normed(_read_file(path, tokens, self._size, order))

    @torch.no_grad()
    def _normed(self, states: Tensor) -> Tensor:
        """States (n, 1 + L, D), the last layer's first, as heads read them: (n, (1 + L) * D)."""
        place = next((each.device for each in self._norm.parameters()), self.base.device)
        last = states[:, 0].to(place, self.base.dtype)
        normed = self._norm(last).to(states.device)
        return torch.cat([normed, states[:, 1:].flatten(1).to(normed)], dim=1)

    def _padded(self, documents: Documents, index: int, states: Tensor) -> Tensor:
        """``states`` with zeros for the tokens after the last one that is needed."""
        length = int(documents.lengths[index])
        return nn.functional.pad(states, (0, 0, 0, length - len(states)))


def prompt_length(documents: Documents, index: int) -> int:
    """How many tokens of a document come before its last label: all whose states predict something."""
    labels = documents[index].is_label.nonzero()[0]
    return int(labels[-1]) if len(labels) else 0


class _Layers(NamedTuple):
    """The layers in the files of an engine."""

    places: Sequence[int]
    """Where the last one is, and then those of the run, in its order."""
    num_layers: int
    """How many there are in all."""


class _Question(NamedTuple):
    """A document that a server is asked for."""

    document: int
    """Its index."""
    tokens: np.ndarray  # (n,) int32
    order: _Layers


class _Answer(NamedTuple):
    """Where a server put the states, and what it would write next."""

    path: Path
    token: int
    log_probability: float


class _Computed(NamedTuple):
    """The states of a document as heads read them, and whose they are."""

    server: StatesEndpoint
    answer: _Answer
    states: Tensor  # (n, (1 + L) * D)


class StatesEndpoint(Endpoint):
    """A server of vLLM that extracts hidden states."""

    def __init__(self, url: str, *, say: Callable[[str], None] = lambda text: None):
        """``url`` as for :class:`medusa.training.endpoints.Endpoint`."""
        super().__init__(url, "/completions", "", say=say)
        self.num_checked = 0
        """Documents whose states were held against its own log-probabilities."""

    def states_of(self, tokens: Sequence[int]) -> _Answer:
        """The file with the states of ``tokens``.

        Raises:
            Refusal, PermissionError, ConnectionError: see :meth:`medusa.training.endpoints.Endpoint.post`.
        """
        if not self.model:
            self.model = self._served_model()
        request = {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "return_token_ids": True,
        }
        return self.post(request, "a server of vLLM that extracts hidden states", _answer)

    def _served_model(self) -> str:
        address = self.url.removesuffix("/completions") + "/models"
        try:
            response = self._client.get(address).raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ConnectionError(
                f"{address} names no model ({type(error).__name__}: {error}); is a server of vLLM running "
                "there? The same command goes on where it stopped"
            ) from error


def _answer(response: httpx.Response) -> _Answer | None:
    """A server's answer; None where it says nothing of states."""
    try:
        body: dict[str, Any] = response.json()
        choice = body["choices"][0]
        return _Answer(
            Path(body["kv_transfer_params"]["hidden_states_path"]),
            int(choice["token_ids"][0]),
            float(choice["logprobs"]["token_logprobs"][0]),
        )
    except (ValueError, KeyError, IndexError, TypeError):
        return None


@dataclass
class _FilesOfDocuments:
    """The files in ``directories`` whose texts begin as ``documents`` do, up to their last label."""

    directories: Sequence[Path]
    documents: Documents

    def __post_init__(self) -> None:
        self.path_of: dict[int, Path] = {}
        """By the index of a document."""
        self.num_left: Counter[Path] = Counter()
        """Documents that each file has and that were not read."""
        self._seen: set[Path] = set()
        self._indices: dict[bytes, list[int]] = {}
        for index in range(len(self.documents)) if self.directories else ():
            length = prompt_length(self.documents, index)
            if length:
                (digest,) = list(_digests(self.documents[index].tokens[:length]))[-1:]
                self._indices.setdefault(digest, []).append(index)

    def look(self) -> int:
        """Take in the files that are new, and say how many they are."""
        count = 0
        for directory in self.directories:
            for path in sorted(directory.glob("*.safetensors")):
                if path in self._seen:
                    continue
                try:
                    with safe_open(path, "pt") as file:
                        tokens = file.get_tensor("token_ids").numpy()
                except (SafetensorError, OSError) as error:
                    self._check_new(path, error)
                    continue
                count += 1
                self._seen.add(path)
                for digest in _digests(tokens):
                    for index in self._indices.pop(digest, ()):
                        self.path_of[index] = path
                        self.num_left[path] += 1
        return count

    def _check_new(self, path: Path, error: Exception) -> None:
        """Raise ValueError for a file that cannot be read and is not being written."""
        with suppress(FileNotFoundError):  # it was deleted meanwhile
            if time.time() - path.stat().st_mtime > SECONDS_UNREADABLE:
                raise ValueError(
                    f"{path} has no token_ids, or is cut short ({error}); states_from must name files of "
                    "vLLM's hidden states alone. Delete it, and its document is asked for again"
                ) from error


def _digests(tokens: np.ndarray) -> Iterator[bytes]:
    """A digest of each beginning of ``tokens`` (n,), from one token on."""
    content = hashlib.blake2b(digest_size=16)
    for token in tokens.astype(np.int64):
        content.update(token)
        yield content.digest()


def _read_file(path: Path, tokens: np.ndarray, size: int, order: _Layers) -> Tensor:
    """States (n, 1 + L, D) of ``tokens`` (n,), with which the file's begin, waiting for what is still being
    written.

    Raises:
        ValueError: the file has other tokens, or states of other layers or sizes.
        ConnectionError: it does not come.
    """
    tensors = _tensors(path)
    length = len(tensors.get("token_ids", ()))
    states = tensors.get("hidden_states", torch.empty(0))
    if states.shape != (length, order.num_layers, size):
        raise ValueError(
            f"hidden_states in {path} must be ({length}, {order.num_layers}, {size}), tokens by layers by "
            f"the base's hidden size, got {tuple(states.shape)}; fused_layers says which layers the run "
            "reads below the last, states_layers those of the files, and the engine must serve this base"
        )
    if not np.array_equal(tensors["token_ids"][: len(tokens)].numpy(), tokens):
        raise ValueError(f"{path} has the states of other tokens than those that were sent to be read")
    states = states[: len(tokens)]
    scales = tensors.get("hidden_states_scales")  # (n, 1, 1), of speculators' states in FP8
    if scales is not None:
        states = states.float() * scales[: len(tokens)]
    return states[:, order.places]


def _tensors(path: Path) -> dict[str, Tensor]:
    """What is in a file of vLLM, once it is written."""
    until = time.monotonic() + SECONDS_UNREADABLE
    while True:
        try:
            with path.with_name(path.name + ".lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)  # sleeps until the writer is done
        except FileNotFoundError:
            pass  # not every server locks
        try:
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            if time.monotonic() > until:
                raise ConnectionError(
                    f"vLLM says that it wrote {path}, and {type(error).__name__}: {error}; its "
                    "shared_storage_path must be a directory that is seen here by the same name, with room "
                    "on the disk"
                ) from error
            time.sleep(SECONDS_UNREADABLE / 100)


def _delete(path: Path) -> None:
    """Take away a file of vLLM with its lock."""
    path.unlink(missing_ok=True)
    path.with_name(path.name + ".lock").unlink(missing_ok=True)


@torch.no_grad()
def final_norm(base: CausalLM) -> nn.Module:
    """The module of a ``base`` without layers whose output its LM head reads.

    Raises:
        ValueError: something else comes between them.
    """
    outputs: list[tuple[nn.Module, Tensor]] = []
    inputs: list[Tensor] = []

    def note(module: nn.Module, _args: tuple, output: Any) -> None:
        if torch.is_tensor(output) and module is not base.get_input_embeddings():
            outputs.append((module, output))

    parts = [module for module in base.get_decoder().modules() if not list(module.children())]
    hooks = [module.register_forward_hook(note) for module in parts]
    hooks.append(lm_head(base).register_forward_pre_hook(lambda _module, args: inputs.append(args[0])))
    try:
        base(input_ids=torch.zeros(1, 2, dtype=torch.long, device=base.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for module, output in reversed(outputs):
        if inputs and output.shape == inputs[-1].shape and torch.equal(output.to(inputs[-1]), inputs[-1]):
            return module
    raise ValueError(
        f"states_from needs a base whose LM head reads the output of its final norm, and in "
        f"{type(base).__name__} something else comes between them; leave states_from out, and the base's "
        "layers are run here"
    )
