"""Heads between those that training began and ended with."""

from __future__ import annotations

import pytest
import torch
from conftest import program as load_program
from tiny_training import chat_tokenizer, conversation, write_rows

from medusa import HeadsConfig, MedusaHeads, load_heads, save_heads
from medusa.heads.checkpoint import HeadsCheckpoint

program = load_program("scripts/average_heads.py")


def saved(path, seed, token_map, **options):
    config = HeadsConfig(
        16, 300, 2, unembedding="token_map", token_map_size=len(token_map), reads_path=True, **options
    )
    heads = MedusaHeads(config, token_map)
    torch.manual_seed(seed)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight)
    save_heads(HeadsCheckpoint(heads, "base", provenance={"seed": seed}), path)
    return str(path)


def test_the_average_lies_between_both_and_has_the_later_token_map(tmp_path, capsys):
    before, after = saved(tmp_path / "a", 1, range(8)), saved(tmp_path / "b", 2, range(20))
    output = tmp_path / "average"
    asked = ["--before", before, "--after", after, "--share", "0.25", "--output", str(output)]
    assert program.main(asked) == 0
    old, new, made = (load_heads(path) for path in (before, after, str(output)))
    ours = dict(made.heads.named_parameters())
    for (name, first), second in zip(old.heads.named_parameters(), new.heads.parameters(), strict=True):
        torch.testing.assert_close(ours[name], 0.75 * first + 0.25 * second)
    assert made.heads.token_map.tolist() == list(range(20))
    assert made.provenance["seed"] == 2
    assert made.provenance["average"]["share"] == 0.25
    assert "0.25 of" in capsys.readouterr().out

    assert program.main(asked) != 0
    assert "average" in capsys.readouterr().err


def test_a_token_map_is_of_the_tokens_that_the_answers_have_most(tmp_path):
    before, after = saved(tmp_path / "a", 1, range(8)), saved(tmp_path / "b", 2, range(20))
    tokenizer = chat_tokenizer()
    rows = write_rows(tmp_path / "rows.jsonl", [conversation("why", "aaaa bb"), conversation("zzzzzz", "b")])
    tokenizer.save_pretrained(tmp_path / "base")
    output = tmp_path / "average"
    asked = ["--before", before, "--after", after, "--output", str(output), "--base", str(tmp_path / "base")]
    assert program.main([*asked, "--token-map-size", "3", "--answers", str(rows)]) == 0
    made, new = load_heads(str(output)), load_heads(after)
    wanted = tokenizer("ab<|im_end|>", add_special_tokens=False).input_ids
    assert made.heads.token_map.tolist() == sorted(wanted)
    assert made.heads.config.token_map_size == 3
    assert made.heads.blocks[0][0].linear.weight.shape == new.heads.blocks[0][0].linear.weight.shape


def test_heads_of_other_options_and_shares_beyond_one_are_refused(tmp_path, capsys):
    before = saved(tmp_path / "a", 1, range(8))
    after = saved(tmp_path / "b", 2, range(8), num_layers=2)
    asked = ["--before", before, "--after", after, "--output", str(tmp_path / "c")]
    assert program.main(asked) != 0
    assert "these differ in num_layers" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program.main([*asked, "--share", "1.5"])
    assert "share must be from 0 to 1, got 1.5" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
