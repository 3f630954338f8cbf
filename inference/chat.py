"""Chat with a base model and its heads: the same session as `medusa chat`.

Answers appear as their tokens are accepted. Questions come from the keyboard, from a pipe (one a
line) or from a prompts file. Ends standard output with one line of JSON: what the session cost.

    python inference/chat.py
    python inference/chat.py --base BASE --heads HEADS --temperature 0.7 --color-depth
    python inference/chat.py --prompts FILE --limit 3 --json session.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from medusa.cli.chat_terminal import chat
from medusa.cli.flags import ChatOptions, add_chat_flags, add_reply_flags, program_parser
from medusa.cli.program import exit_status, report_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    parser = program_parser(__doc__ or "", max_new_tokens=512)
    add_reply_flags(parser)
    add_chat_flags(parser)
    options = parser.parse_args(arguments, namespace=ChatOptions())
    return exit_status(lambda: report_json(chat(options), options), options.traceback)


if __name__ == "__main__":
    sys.exit(main())
