"""Answers plain and with heads, the text once and all times.

Another door to `medusa side-by-side`, with the same flags:

    python inference/side_by_side.py --heads HEADS --limit 5
"""

import sys

from medusa.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["side-by-side", *sys.argv[1:]]))
