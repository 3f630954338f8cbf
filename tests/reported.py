"""A command that ends with a report, run in this process."""

import json

from medusa.cli.main import main


def reported(capsys, *words) -> tuple[dict, str, str]:
    """The report of a command that ended well, and all of standard output and of standard error."""
    status = main([*map(str, words)])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return json.loads(printed.out.splitlines()[-1]), printed.out, printed.err
