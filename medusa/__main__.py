"""``python -m medusa`` is ``medusa``, and launchers take this form: ``accelerate launch -m medusa train``."""

import sys

from medusa.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
