"""Answers prompts with vLLM and exported heads; ``test_vllm.py`` runs it with the Python that has vLLM.

    VLLM_PYTHON answer_with_vllm.py < request.json > answer.json

The request: model, heads, method and num_heads (heads is null where the model's directory names the rest),
prompts (lists of token ids), max_new_tokens. The answer: the tokens of each prompt, greedily, and what vLLM
counted.
"""

import json
import os
import sys

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import vllm

COUNTS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}


def main() -> None:
    request = json.load(sys.stdin)
    written = os.dup(1)
    os.dup2(2, 1)  # vLLM logs to standard output, from other processes too
    speculative = None
    if request["heads"] is not None:
        speculative = {
            "method": request["method"],
            "model": request["heads"],
            "num_speculative_tokens": request["num_heads"],
        }
    llm = vllm.LLM(
        model=request["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=request["max_new_tokens"])
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in request["prompts"]], sampling)
    metrics = {each.name: each for each in llm.get_metrics()}
    counts = {
        short: metrics[name].values if hasattr(metrics[name], "values") else metrics[name].value
        for name, short in COUNTS.items()
    }
    answer = {
        "version": vllm.__version__,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        **counts,
    }
    with os.fdopen(written, "w") as stream:
        json.dump(answer, stream)


if __name__ == "__main__":
    main()
