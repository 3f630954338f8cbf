"""Let the base model answer the prompts that its heads are then trained on.

Another door to `medusa distill`, with the same flags:

    python train/distill_data.py --prompts prompts.jsonl --output runs/answers.jsonl
"""

import sys

from medusa.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["distill", *sys.argv[1:]]))
