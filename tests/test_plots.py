from medusa.measurement.evaluation import plot_evaluation
from medusa.measurement.tuning import plot_tuning
from medusa.plots import short_name

PNG = b"\x89PNG"


def test_heads_tuned_to_plain_decoding_can_be_drawn_too(tmp_path):
    report = {
        "tokens_per_step": 1.0,
        "acceptance_rate": [],
        "conditional_acceptance_rate": [],
        "head_accuracy": {"top1": [0.1, None], "top5": [0.3, None]},
        "by_category": {"a": {"tokens_per_step": 1.0}, "b": {"tokens_per_step": 1.0}},
    }
    plot_evaluation(report, tmp_path / "new" / "plain.png", "plain")
    assert (tmp_path / "new" / "plain.png").read_bytes().startswith(PNG)


def test_a_single_tree_size_can_be_drawn(tmp_path):
    row = {"num_nodes": 1, "tokens_per_step": 1.0, "step_seconds": 0.1, "tokens_per_second": 10.0}
    plot_tuning({"1": {"chosen": 1, "by_num_nodes": [row]}}, tmp_path / "one.png", "one")
    assert (tmp_path / "one.png").read_bytes().startswith(PNG)


def test_titles_hold_no_paths():
    assert short_name("/a/long/path/to/smollm2-135m") == "smollm2-135m"
    assert short_name("runs/demo/heads") == "demo"
    assert short_name("owner/name") == "name"
