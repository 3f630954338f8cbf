"""How fast are these heads?

Another door to `medusa benchmark`, with the same flags:

    python inference/benchmark.py --heads HEADS --prompts FILE --limit 20
"""

import sys

from medusa.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["benchmark", *sys.argv[1:]]))
