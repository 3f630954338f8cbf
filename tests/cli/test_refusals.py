"""Command lines that no command can use: status 2 and the rule, before anything loads."""

import shlex

import pytest

from medusa.assets import DEFAULT_HEADS
from medusa.cli.main import main

REFUSED = [
    ("benchmark --systems nobody", "system 'nobody' is not one of"),
    ("benchmark --systems =heads", "LABEL=HEADS with a label of its own, got '=heads'"),
    ("benchmark --systems name=", "LABEL=HEADS with a label of its own, got 'name='"),
    ("benchmark --systems plain=heads", "LABEL=HEADS with a label of its own, got 'plain=heads'"),
    ("benchmark --acceptance lucky", "acceptance must be of exact, typical"),
    ("benchmark --systems suffix --exit-layer 1", "exit_layer goes with the drafter early-exit"),
    ("chat --max-new-tokens 0", "at least 1, got 0"),
    ("chat --limit x", "invalid"),
    ("chat --exit-layer 1", "exit_layer goes with the drafter early-exit"),
    ("chat --drafter heads+suffix --eagle3 x", "eagle3 goes with the drafter eagle3"),
    ("chat --plain --drafter suffix", "plain guesses nothing, and drafter suffix does"),
    ("chat --repetition-penalty 0", "repetition_penalty must be above 0, got 0.0"),
    ("generate --raw --system x y", "system goes with the chat template"),
    ("evaluate --prompts p --held-out", "held_out and prompts both say what to ask about"),
    ("evaluate --sizes 2 --also-at 1", "also_at goes with other questions than several sets of heads"),
    ("evaluate --fidelity --sizes 4", "sizes goes with other questions than --fidelity"),
    ("evaluate --heads h --tokens-per-pass 1", "tokens_per_pass goes with other questions"),
    ("evaluate --heads h other", "or one set with --heads, not both"),
    (f"evaluate --fidelity --heads {DEFAULT_HEADS} one", "fidelity is an engine's, and sets of heads are"),
    ("evaluate --tree-nodes 7", "tree_nodes and calibrate_on go together"),
    ("evaluate --fidelity --temperature 0.5", "temperature must be 0"),
    ("fetch smollm3", "name must be one of smollm2-135m-instruct, qwen2.5-coder-0.5b"),
    ("fetch qwen2.5-coder-15b", "got 'qwen2.5-coder-15b'; did you mean qwen2.5-coder-1.5b? Else models of"),
    ("serve --host ''", "host must be"),
    ("serve --host http://127.0.0.1", "host must be"),
    ("serve --allowed-host ''", "allowed_host must be"),
    ("serve --allowed-host chat.example:8000", "allowed_host must be"),
    ("serve --allowed-host *", "allowed_host must be"),
    ("serve --cors-origin ''", "cors_origin must be"),
    ("serve --cors-origin chat.example", "cors_origin must be"),
    ("serve --cors-origin https://chat.example/", "cors_origin must be"),
    ("serve --cors-origin null", "cors_origin must be"),
    ("serve --temperature 2.5", "temperature must be at most 2, got 2.5"),
    ("serve --repeat-penalty 0", "repeat_penalty must be above 0"),
    ("serve --port 99999", "port must be at most 65535, got 99999"),
    ("serve --tls-key key.pem", "tls_key goes with tls_certificate"),
    ("tune --heads owner/name", "heads must be a directory that is there"),
    ("train --base b --data d --output_dir o", "one of num_epochs, max_steps, max_minutes must"),
    ("train --base b --output_dir o --max_steps 1", "--data"),
]


@pytest.mark.parametrize(("words", "complaint"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_command_line_that_cannot_be_used_is_refused_with_its_rule(capsys, words, complaint):
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out
    assert complaint in " ".join(printed.err.replace("│", " ").split())
