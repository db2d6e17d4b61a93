"""``python -m netsum.cli``, where the script ``netsum`` is not on the path."""

from netsum.cli.main import main

main()
