"""Train heads on a frozen base model.

Another door to `medusa train`, with the same flags:

    accelerate launch train/train_heads.py --config configs/smollm2_demo.yaml
    accelerate launch --config_file configs/accelerate_ddp.yaml --num_processes 2 \\
        train/train_heads.py --config configs/smollm2.yaml
"""

import sys

from medusa.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
