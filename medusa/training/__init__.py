"""Training heads on a frozen base model: what the programs in ``train/`` compose.

Data, for ``train/train_heads.py``:
    reading.py         files and hub data sets -> conversations
    rendering.py       conversations -> documents: tokens, and which of them the model wrote
    filtering.py       drops loops and duplicates; chooses the held-out documents
    documents.py       many documents in flat arrays
    batching.py        documents -> micro-batches, padded by length or packed
    inspection.py      documents in colour: which tokens are trained on

Loss:
    alignment.py       which hidden state predicts which token at which depth
    depth_weights.py   what a target counts at each depth: decay, D-PACE
    objectives.py      cross-entropy, KL to the base, their blend, overlap: on one block of logits
    loss.py            the loss of all heads, head by head and block by block
    loss_cost.py       what a step of the loss costs: bytes and seconds, fused and plain
    eagle_loss.py      the loss of an EAGLE-style head
    base_loss.py       the loss of an adapted base's own row: KL to itself without the adapter
    joint_loss.py      heads and adapter together, in two stages
    teacher.py         the base's own logits for given hidden states
    hidden_source.py   hidden states of a micro-batch, from the base
    stored_states.py   the same from a file that the base filled once

The run:
    options.py         every option, documented
    configuration.py   options from YAML and the command line
    preparation.py     base, documents and new heads
    failures.py        what a run says when it cannot go on
    lora.py            the adapter of a base while it is trained
    schedule.py        how long a run lasts and its learning rate
    processes.py       how the processes of a launch share the run: DDP, ZeRO, FSDP2
    trainer.py         the loop
    joint_trainer.py   the loop of joint training: two learning rates, two stages, what became of the base
    saved_sums.py      loss sums as a checkpoint has them
    metrics.py         loss sums as the numbers that people read
    progress.py        a bar with the time left
    run_directory.py   what a run leaves on disk: checkpoints, metrics, configuration
    result.py          tree, provenance and the heads directory at the end

Self-distillation, for ``train/distill_data.py``:
    distill.py, answering.py, continuous_batch.py, endpoint.py, answer_file.py
"""
