"""How good are these heads?

Another door to `medusa evaluate`, with the same flags:

    python inference/evaluate_heads.py --heads HEADS --prompts FILE --max-new-tokens 256
"""

import sys

from medusa.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
