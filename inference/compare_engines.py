"""How far is a quantised engine from float32?

Another door to `medusa compare-engines`, with the same flags:

    python inference/compare_engines.py --engine int8
"""

import sys

from medusa.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compare-engines", *sys.argv[1:]]))
