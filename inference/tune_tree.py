"""Choose the tree that is fastest on this machine.

Another door to `medusa tune`, with the same flags:

    python inference/tune_tree.py --heads HEADS --prompts FILE --limit 64
"""

import sys

from medusa.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
