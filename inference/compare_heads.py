"""Which heads guess best?

Another door to `medusa compare-heads`, with the same flags:

    python inference/compare_heads.py --heads one=runs/a/heads two=runs/b/heads --held-out
"""

import sys

from medusa.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compare-heads", *sys.argv[1:]]))
