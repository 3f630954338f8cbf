"""Chat with a base model and its heads.

Another door to `medusa chat`, with the same flags:

    python inference/chat.py --temperature 0.7 --color-depth
"""

import sys

from medusa.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["chat", *sys.argv[1:]]))
