"""Which drafter, and which acceptance rule, is fastest here?

Another door to `medusa compare-drafters`, with the same flags:

    python inference/compare_drafters.py --base MODEL --drafters heads suffix heads+suffix
"""

import sys

from medusa.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compare-drafters", *sys.argv[1:]]))
